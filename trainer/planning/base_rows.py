"""The plan's row on a base model that is not, or not all, on this disk. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from trainer import families
from trainer.config.schema import RunConfig
from trainer.families.family import Family
from trainer.files.weight_files import weight_files
from trainer.modeling.base.base import base_at
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import table_component
from trainer.planning.shapes.run_shapes import roles
from trainer.words.sizes import GB

# bytes of a value in the files of a base that is not here: the hub's bases are in bf16
_STORED_BYTES = 2


def base_rows(family: Family, config: RunConfig, folder: Path | None) -> Iterator[Decision]:
    """One row on a repository: the commit that is here, or the files that are missing and their size."""
    components, trained = families.components(family), family.trained_component
    missing = base_at(folder, config, components, trained=trained).missing_line
    name = config.model.pretrained_model_name_or_path
    if not missing:
        assert folder is not None
        pin = "" if config.model.revision == folder.name else f"; `model.revision: {folder.name}` pins it"
        yield Decision(
            feature="base",
            value=folder.name[:12],
            source="facts",
            reason=f"the commit of {name} that is here{pin}",
        )
        return
    size = f"about {missing_bytes(family, folder) / GB:.1f} GB"
    if config.model.weights == "random":
        size = "some configs"
    yield Decision(
        feature="download",
        value=size,
        source="facts",
        reason=f"{name}: {missing}",
    )


def missing_bytes(family: Family, folder: Path | None) -> int:
    """Bytes of the weight files that are not below `folder`, as their index or the committed table says."""
    total = 0
    for name, role in roles(family).items():
        found = weight_files(folder / name) if folder is not None else None
        if found is not None and found.state == "complete":
            continue
        here = sum(file.stat().st_size for file in found.files) if found is not None else 0
        if found is not None and found.total_bytes is not None:
            whole = found.total_bytes
        else:
            whole = _STORED_BYTES * table_component(family.name, name, role).parameters
        total += max(0, whole - here)
    return total
