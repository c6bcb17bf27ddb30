"""One file per model family, found by name. Importing this package imports neither a family nor
torch.
"""

from __future__ import annotations

import importlib

from trainer.families.family import Family

_TABLE: dict[str, str] = {
    "flux1_dev": "trainer.families.flux1_dev:FLUX1_DEV",
    "flux1_kontext": "trainer.families.flux1_kontext:FLUX1_KONTEXT",
    "flux2_dev": "trainer.families.flux2_dev:FLUX2_DEV",
    "kandinsky5": "trainer.families.kandinsky5:KANDINSKY5",
    "llama": "trainer.families.llama:LLAMA",
    "qwen_image": "trainer.families.qwen_image:QWEN_IMAGE",
    "qwen_image_edit": "trainer.families.qwen_image_edit:QWEN_IMAGE_EDIT",
}


def names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(_TABLE))


def components(family: Family) -> tuple[str, ...]:
    """Folders of the base model that a run reads, the trained one first."""
    encoders = (name for names in family.encoder_components.values() for name in names)
    return tuple(dict.fromkeys((family.trained_component, *encoders, *family.support_components)))


def get(name: str) -> Family:
    """The family called `name`; a KeyError is our bug, because configurations are checked against `names`."""
    module, _, attribute = _TABLE[name].partition(":")
    family: Family = vars(importlib.import_module(module))[attribute]
    return family
