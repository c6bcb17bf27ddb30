"""Floor 1: what must not be in anything that is printed or written: tokens, keys, credentials in addresses.

Cheap to import: error messages go through it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from trainer.config import environment

HIDDEN = "<redacted>"
"""Stands in a secret's place; plain text in YAML and JSON."""
_NAMES = re.compile(r".*(TOKEN|_KEY|APIKEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)", re.IGNORECASE)
"""Variables whose values are secret. Names that end in _FILE or _PATH say where one is."""
_FILES = ("WANDB_API_KEY_FILE", "HF_TOKEN_FILE", "HF_TOKEN_PATH")
"""Variables that name a file whose text is secret."""
_SHORTEST = 8
"""A shorter value is a word or a number that stands in harmless texts too."""
_IN_ADDRESS = re.compile(r"(?<=://)[^\s/\"']+(?=@)")
"""Up to the last @: one may be in a password."""
_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")
"""Forms of tokens that are known wherever they come from."""


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with HIDDEN in place of every secret; `environ` is the process environment if not given."""
    for value in _values(environment.snapshot() if environ is None else environ):
        text = text.replace(value, HIDDEN)
    return _KNOWN.sub(HIDDEN, _IN_ADDRESS.sub(HIDDEN, text))


@functools.cache
def _text(path: str) -> str:
    """Of a secret's file; empty where it cannot be read, which whoever needs it tells."""
    try:
        return Path(path).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _values(environ: Mapping[str, str]) -> list[str]:
    """Secret values, also as JSON writes them; longer ones first, which may hold others."""
    found = {value.strip() for name, value in environ.items() if _NAMES.fullmatch(name)}
    found |= {_text(environ[name]) for name in _FILES if environ.get(name)}
    long = {value for value in found if len(value) >= _SHORTEST}
    return sorted(long | {json.dumps(value)[1:-1] for value in long}, key=len, reverse=True)
