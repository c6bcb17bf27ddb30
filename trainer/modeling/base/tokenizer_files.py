"""A language model's tokenizer judged by its files alone, before its library is imported. Imports no torch.

Only what is certain is told: `families.conversations` opens the tokenizer and judges the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.modeling.base.base import read_config
from trainer.ways import chat_templates

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_MORE = ("added_tokens.json", "special_tokens_map.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates")


def lacks_template(folder: Path) -> bool:
    """True where the tokenizer of a base model in `folder` surely brings no chat template."""
    config = folder / _CONFIG
    if not config.is_file() or any((folder / name).exists() for name in _TEMPLATES):
        return False
    return not read_config(config).get("chat_template")


def split_marks(folder: Path, name: str) -> list[str]:
    """Marks of a shipped chat template that the tokenizer in `folder` surely splits into several tokens.

    Empty where its words are in no tokenizer.json.
    """
    if not (folder / _TOKENIZER).is_file():
        return []
    known = frozenset(_words(folder))
    return [mark for mark in chat_templates.marks(name) if mark not in known]


def fitting_templates(folder: Path) -> list[str]:
    """Shipped chat templates of which no mark is surely split."""
    return [name for name in chat_templates.names() if not split_marks(folder, name)]


def _words(folder: Path) -> Iterator[str]:
    """Every text that may be one token: the vocabulary's, added ones, and names that the configs give."""
    tokenizer = read_config(folder / _TOKENIZER)
    yield from _texts(tokenizer.get("added_tokens"))
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary
    elif isinstance(vocabulary, list):  # pieces of a unigram model with their scores
        yield from (str(entry[0]) for entry in vocabulary if isinstance(entry, list) and entry)
    for name in (_CONFIG, *_MORE):
        if (folder / name).is_file():
            yield from _texts(read_config(folder / name))


def _texts(value: Any) -> Iterator[str]:
    """Every key and text of a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield str(key)
            yield from _texts(one)
