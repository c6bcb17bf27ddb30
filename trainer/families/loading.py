"""A configuration loaded against all known families."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import families
from trainer.config.reading.load import Loaded, load


def load_config(
    paths: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    dataset: Path | None = None,
    output: Path | None = None,
    budget: str | None = None,
    gpus: str | None = None,
    presets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
) -> Loaded:
    """Load files and the values over them, as `reading.load.load` does; nothing is printed.

    `Loaded.notes` and `Loaded.warnings` are for people. Raises ConfigError with every problem.
    """
    known = {name: families.get(name) for name in families.names()}
    return load(
        paths,
        overrides=overrides,
        dataset=dataset,
        output=output,
        budget=budget,
        gpus=gpus,
        chosen_presets=presets,
        family_defaults={name: family.defaults for name, family in known.items()},
        lora_presets={name: tuple(family.lora_targets) for name, family in known.items()},
        environ=environ,
        working_folder=working_folder,
    )
