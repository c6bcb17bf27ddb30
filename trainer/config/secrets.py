"""Secrets, which are hidden in all that is printed or written: tokens, keys, credentials in addresses.

Cheap to import: error messages go through it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path

from trainer.config import environment
from trainer.errors import printable

HIDDEN = "<redacted>"
"""Stands in a secret's place; plain text in YAML and JSON."""
_NAMES = re.compile(r".*(TOKEN|_KEY|APIKEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)", re.IGNORECASE)
"""Variables whose values are secret. Names that end in _FILE or _PATH say where one is."""
_FILES = ("HF_TOKEN_FILE", "HF_TOKEN_PATH", "WANDB_API_KEY_FILE", "TRAINER_WEBHOOK_FILE")
"""Variables that name the file of a secret which is used here."""
_MOST_BYTES = 4096
_SHORTEST = 8
"""A shorter value is a word or a number that stands in harmless texts too."""
_IN_ADDRESS = re.compile(
    r"(://|\b(?:https?|ftps?|sftp|ssh|git|s3|gs|hf|smb|davs?|webdavs?):/)[^\s/\"']+(?=@)", re.IGNORECASE
)
"""Up to the last @: one may be in a password. With one slash it is an address that was taken for a path."""
_KNOWN = re.compile(r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,})")
"""Forms of tokens that are known wherever they come from."""


def redacted(text: str, environ: Mapping[str, str] | None = None) -> str:
    """`text` with HIDDEN in place of every secret; `environ` is the process environment if not given."""
    environ = environment.snapshot() if environ is None else environ
    values = {value.strip() for name, value in environ.items() if _NAMES.fullmatch(name)}
    values |= {_text_of(environ[name]) for name in _FILES if environ.get(name)}
    forms: set[str] = set()
    for value in values:
        if len(value) >= _SHORTEST:
            # as JSON and YAML write them, too
            quoted = (json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1])
            forms |= {value, *quoted, value.replace("'", "''")}
    for form in sorted(forms, key=len, reverse=True):  # a longer one may hold others
        text = text.replace(form, HIDDEN)
    return _KNOWN.sub(HIDDEN, _IN_ADDRESS.sub(rf"\1{HIDDEN}", text))


def names_secret(name: str) -> bool:
    """True for the name of a key or variable whose value is never shown."""
    return _NAMES.fullmatch(name.replace("-", "_")) is not None


def is_known_form(text: str) -> bool:
    """True for a text that is a token by its form alone."""
    return _KNOWN.fullmatch(text) is not None


def shown(text: str) -> str:
    """`text` for a terminal or a log: without secrets, and with control characters spelled out."""
    return printable(redacted(text))


@functools.lru_cache(maxsize=8)
def _text_of(file: str) -> str:
    """The secret in a file; empty where none can be read."""
    try:
        path = Path(file).expanduser()
        # a pipe gives its text once, to whom it is meant for, and keeps others waiting
        if not path.is_file():
            return ""
        with path.open("rb") as opened:
            return opened.read(_MOST_BYTES).decode().strip()
    except (OSError, ValueError, RuntimeError):
        return ""
