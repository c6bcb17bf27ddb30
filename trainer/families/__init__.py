"""One file per model family, found by name. Importing this package imports neither a family nor
torch.
"""

from __future__ import annotations

import importlib

from trainer.families.family import Family

_NAMES = (
    "flux1_dev",
    "flux1_kontext",
    "flux2_dev",
    "kandinsky5",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen_image",
    "qwen_image_edit",
)
"""Each is a module here, and in capitals the name of the value in it."""


def names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(_NAMES))


def components(family: Family) -> tuple[str, ...]:
    """Folders of the base model that a run reads, the trained one first."""
    encoders = (name for names in family.encoder_components.values() for name in names)
    return tuple(dict.fromkeys((family.trained_component, *encoders, *family.support_components)))


def get(name: str) -> Family:
    """The family called `name`; no such module is our bug: configurations are checked against `names`."""
    return vars(importlib.import_module(f"trainer.families.{name}"))[name.upper()]
