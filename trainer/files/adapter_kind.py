"""The kind of an adapter, by the names of its tensors."""

from __future__ import annotations

from collections.abc import Iterable


def adapter_kind(names: Iterable[str]) -> str:
    """`lora`, `dora` or `lokr`, by the names of a file's tensors."""
    parts = {part for name in names for part in name.split(".")}
    if any(part.startswith("lokr_") for part in parts):
        return "lokr"
    return "dora" if parts & {"lora_magnitude_vector", "dora_scale"} else "lora"
