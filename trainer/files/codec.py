"""This floor's frozen values as JSON text and back; unknown keys and wrong types are refused."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from trainer.errors import HardwareError, Problem

Value = TypeVar("Value")
# marks the class itself, so that nested dataclasses refuse unknown keys too
_strict = with_config(ConfigDict(extra="forbid"))


_adapters: dict[type, TypeAdapter[Any]] = {}


def _adapter(kind: type) -> TypeAdapter[Any]:
    """Reader and writer of the dataclass `kind`, made once: making it takes longer than its use."""
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(_strict(kind))
    return _adapters[kind]


def to_json(value: object) -> str:
    """Indented JSON with sorted keys of a dataclass made of plain values, ending in a newline."""
    plain = _adapter(type(value)).dump_python(value, mode="json")
    text = json.dumps(plain, indent=2, sort_keys=True)
    return text + "\n"


def from_json(kind: type[Value], text: str, where: str) -> Value:
    """The dataclass `kind` from JSON text; raises HardwareError with every problem found, at `where`."""
    try:
        value: Value = _adapter(kind).validate_json(text, strict=True)
    except ValidationError as error:
        problems = [
            Problem(what=f"{'.'.join(map(str, one['loc'])) or 'file'}: {one['msg']}", where=where)
            for one in error.errors(include_url=False)
        ]
        raise HardwareError(problems) from error
    return value
