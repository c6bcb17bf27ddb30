"""Chat templates by name: the files in `templates/` beside this one, and the marks that each of them needs.

A template writes a conversation as text (transformers' Jinja). Marks are the tokens that it needs besides
`bos_token` and `eos_token`, as its first line lists them: a tokenizer without them would split them, and
answers would end with nothing that ends generation.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from trainer.errors import ConfigError

AUTO = "auto"
"""The template that the base's tokenizer has."""
SUFFIX = ".jinja"
BESIDE = "chat_template.jinja"
"""File beside a model or a LoRA with its template, as transformers names it."""
KEY = "data.chat_template"
_FOLDER = Path(__file__).parent / "templates"
_MARKS = re.compile(r"\{#- marks: (.*?) ?#\}")


@functools.cache
def names() -> tuple[str, ...]:
    """Templates that are shipped."""
    return tuple(sorted(path.stem for path in _FOLDER.glob(f"*{SUFFIX}")))


def marks(name: str) -> tuple[str, ...]:
    """The marks of a shipped template."""
    found = _MARKS.match((_FOLDER / f"{name}{SUFFIX}").read_text(encoding="utf-8"))
    return () if found is None else tuple(found[1].split())


def text_of(value: str) -> str | None:
    """The text of a template by its name or file; None for `auto`. Raises ConfigError."""
    if value == AUTO:
        return None
    path = _FOLDER / f"{value}{SUFFIX}" if value in names() else Path(value)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no file, no UTF-8, or no name of a file
        what = f"{path} cannot be read ({error})"
        raise ConfigError(what, where=KEY, remedy=f"name a file, or one of {', '.join(names())}") from error


def name_of(text: str) -> str | None:
    """The name of the shipped template with this text; None for another one."""
    return next((name for name in names() if text_of(name) == text), None)
