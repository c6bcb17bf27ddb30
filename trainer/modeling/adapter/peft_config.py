"""PEFT's configuration of an adapter, as it lies beside a file or inside it. Imports no torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import AccessError, DataError

CONFIG_BESIDE, CONFIG_INSIDE = "adapter_config.json", "lora_adapter_metadata"
PEFT_PREFIX = "base_model.model."
"""Prefix of a layer's name in a file whose configuration lies beside it."""
_PATTERNS = ("rank_pattern", "alpha_pattern")
_KINDS = ("LORA", "LOKR")
_REMEDY = "copy the file beside the adapter again, or name a LoRA that this trainer saved"


def config_beside(path: Path) -> dict[str, Any]:
    """The configuration beside the adapter at `path`, without keys that say nothing.

    Raises AccessError where it is missing, DataError where it is damaged or of another kind of adapter.
    """
    beside = path.with_name(CONFIG_BESIDE)
    if not beside.is_file():
        what = f"{CONFIG_BESIDE} is not beside the adapter, which cannot be read without it"
        raise AccessError(what, where=str(path), remedy="copy both files into one folder")
    try:
        text = beside.read_text(errors="replace")
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", where=str(beside)) from error
    config = parsed(text, CONFIG_BESIDE, beside)
    kind = config.get("peft_type", "missing")
    if kind not in _KINDS:
        what = f"its peft_type is {kind}; {' and '.join(_KINDS)} are read"
        raise DataError(what, where=str(beside), remedy=_REMEDY)
    require_rank_and_alpha(config, beside)
    return config


def config_inside(text: str, path: Path) -> dict[str, Any]:
    """The configuration that diffusers writes into a file's metadata, by peft's keys; raises as `parsed`."""
    said = parsed(text, CONFIG_INSIDE, path)
    return {key.removeprefix("transformer."): value for key, value in said.items()}


def parsed(text: str, name: str, path: Path) -> dict[str, Any]:
    """A configuration, without keys that are null; DataError for a text that is none."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise DataError(f"{name} is damaged ({error})", where=str(path), remedy=_REMEDY) from error
    if not isinstance(config, dict):
        raise DataError(f"{name} is not one of PEFT's", where=str(path), remedy=_REMEDY)
    return {key: value for key, value in config.items() if value is not None}


def require_rank_and_alpha(config: Mapping[str, Any], path: Path) -> None:
    """Raise DataError unless a configuration says rank and alpha as numbers, its patterns too."""
    ranks, alphas = (config.get(name, {}) for name in _PATTERNS)
    if not (isinstance(ranks, dict) and isinstance(alphas, dict)):
        what = f"PEFT's configuration has {' or '.join(_PATTERNS)} that maps no layers to numbers"
        raise DataError(what, where=str(path), remedy=_REMEDY)
    alpha = config.get("lora_alpha", config.get("alpha"))
    is_rank = all(type(one) is int and one > 0 for one in (config.get("r"), *ranks.values()))
    if not is_rank or not all(type(one) in (int, float) for one in (alpha, *alphas.values())):
        what = "PEFT's configuration says not both rank and alpha as numbers"
        raise DataError(what, where=str(path), remedy=_REMEDY)
    for name in (*ranks, *alphas):
        try:
            re.compile(rf"(.*\.)?({name})")  # as peft puts it together
        except re.error as error:
            what = f"PEFT's configuration has {name!r} among its patterns, which is no regular expression"
            raise DataError(f"{what} ({error})", where=str(path), remedy=_REMEDY) from error
