"""Types of the schema's values: paths, texts, sizes, and words of the tables. A text in `Annotated` is what
messages say the key takes, where its type says too little.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from trainer.errors import one_line
from trainer.ways.storages import WAYS
from trainer.words.sizes import size_bytes


def _expand_home(value: object) -> object:
    """`~` and `~user` at the start of a text become the home folder."""
    if not isinstance(value, str) or not value.startswith("~"):
        return value
    try:
        return str(Path(value).expanduser())
    except RuntimeError:
        mine = value.startswith("~/") or value == "~"
        what = "this user has no home folder, and HOME is not set" if mine else "there is no such user"
        raise ValueError(what) from None


def _reject_variables(value: object) -> object:
    if isinstance(value, str) and re.search(r"\$\{[A-Za-z_]|(^|/)\$[A-Za-z_]", value):
        raise ValueError(NO_VARIABLES)
    return value


def _reject_empty(value: object) -> object:
    # pathlib reads an empty text as the current folder, which nobody means
    if isinstance(value, str) and not value.strip():
        raise ValueError("empty path")
    # escape sequences and line breaks would go to terminals and logs with it, and no system takes NUL
    if isinstance(value, str) and one_line(value) != value:
        raise ValueError("a path with control characters")
    return value


def _require_size(value: object) -> object:
    if isinstance(value, str):
        size_bytes(value)
    return value


NO_VARIABLES = "variables are not read here"
"""Words on `$NAME` or `${NAME}` in a path."""
Positive = Annotated[int, Field(ge=1)]
Toggle = Literal["auto"] | bool
if TYPE_CHECKING:
    Weights = str
    Compute = str
    Modulation = str
else:
    # the words of the table's rows; fp16 is for `model.dtype`
    Weights = Literal["auto", *(way.weights for way in WAYS.values() if way.weights != "fp16")]
    Compute = Literal["auto", "bf16", *filter(None, (way.compute for way in WAYS.values()))]
    Modulation = Literal["auto", "kept", *filter(None, (way.modulation for way in WAYS.values()))]


def number_first(value: object) -> object:
    """A number as text is a number: `1` would be taken for true."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if not isinstance(value, bool) and value == 0:
        raise ValueError("write false for none")
    return value


Text = Annotated[str, Field(pattern=r"\S")]
"""Text with at least one character that is not white space."""
Size = Annotated[Text, BeforeValidator(_require_size), "a size such as 24GiB or 24 GB"]
ModelName = Annotated[Text, BeforeValidator(_expand_home)]
ChatTemplate = Annotated[Text, BeforeValidator(_expand_home), "auto, a template's name or a FILE.jinja"]
UserPath = Annotated[
    Path,
    BeforeValidator(_expand_home),
    BeforeValidator(_reject_variables),
    BeforeValidator(_reject_empty),
]
"""Relative paths start at the current directory, not at the file that names them."""


KID_LEAST, FID_LEAST = 50, 10_000
"""The fewest pictures, of each kind, that KID and FID are measured on."""
RANKS = "a mapping of layers to whole numbers from 1 to 1024, such as {to_q: 8}"
ALPHAS = "a mapping of layers to numbers above 0, such as {to_q: 8}"
