"""Floor 5: one file per model family, found by name. Importing this package imports neither a family nor
torch.
"""

from __future__ import annotations

import importlib

from trainer.families.protocol import Family

_TABLE: dict[str, str] = {
    "flux1_dev": "trainer.families.flux1_dev:FLUX1_DEV",
}


def names() -> tuple[str, ...]:
    """Names of all families, sorted."""
    return tuple(sorted(_TABLE))


def components(family: Family) -> tuple[str, ...]:
    """Folders of the base model that a run reads, the trained one first."""
    encoders = (name for names in family.encoder_components.values() for name in names)
    return (family.trained_component, *encoders, *family.support_components)


def get(name: str) -> Family:
    """The family called `name`; a KeyError is our bug, because configurations are checked against `names`."""
    module, _, attribute = _TABLE[name].partition(":")
    family: Family = vars(importlib.import_module(module))[attribute]
    return family
