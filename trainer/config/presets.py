"""Floor 1: `--preset`: small overlays below the user's own files, and where the shipped files are."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trainer.config import fields
from trainer.config.layers import Layer, from_file
from trainer.config.tree import Node, leaves, relabelled
from trainer.errors import ConfigError, Problem


def shipped_folder() -> Path:
    """`train_configs` of this checkout, or of the image, where it lies beside the virtual environment.

    Raises ConfigError where there is neither: a package that was installed by itself has none.
    """
    places = (Path(__file__).resolve().parents[2], Path(sys.prefix).parent)
    for place in places:
        if (place / "train_configs" / "presets").is_dir():
            return place / "train_configs"
    raise ConfigError(
        f"there is no train_configs/presets in {' or '.join(map(str, places))}",
        where="--preset",
        remedy="use a checkout of the project or its container image, or name the preset's file as a CONFIG",
    )


def names() -> tuple[str, ...]:
    """Presets that `--preset` takes."""
    return tuple(sorted(path.stem for path in (shipped_folder() / "presets").glob("*.yaml")))


def layers(requested: Sequence[str]) -> list[Layer]:
    """One layer for each preset, low to high; every value's source is `preset NAME`.

    A name may hold several, with commas. Unknown ones are problems at `--preset NAME`.
    """
    wanted = [name.strip() for one in requested for name in one.split(",")]
    return [_layer(name, names()) for name in wanted]


def _layer(name: str, known: Sequence[str]) -> Layer:
    if name not in known:
        near = fields.closest(name, known)
        hint = f"did you mean `{near}`? " if near else ""
        what, remedy = f'unknown preset "{name}"', f"{hint}known: {', '.join(known)}"
        return None, [Problem(what=what, where=f"--preset {name}", remedy=remedy)]
    tree, problems = from_file(shipped_folder() / "presets" / f"{name}.yaml")
    return None if tree is None else relabelled(tree, f"preset {name}"), problems


def unused(presets: Sequence[Node], sources: Mapping[str, str], without_effect: Collection[str]) -> list[str]:
    """A line for each preset whose values are not all in effect: which they are, and who wrote another.

    `without_effect` are keys that this configuration does not use at all.
    """
    lines = []
    for preset in presets:
        keys = leaves(preset)
        lost = [f"{key} ({sources[key]})" for key in keys if sources[key] != preset.source]
        lost += [f"{key} (without effect here)" for key in keys if key in without_effect]
        if lost:
            told = ", ".join(dict.fromkeys(lost))
            lines.append(f"{preset.source}: not used: {told}")
    return lines
