"""`--preset`: small overlays over the user's files, and where the shipped files are."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from trainer.config.reading.layers import Layer, emptied, from_file
from trainer.config.tree import Node, describe, from_plain, leaves
from trainer.errors import ConfigError, Problem
from trainer.words.near import did_you_mean


def shipped_folder() -> Path:
    """`train_configs` of this checkout, or of the image, where it lies beside the virtual environment.

    Raises ConfigError where there is neither: a package that was installed by itself has none.
    """
    places = (Path(__file__).resolve().parents[3], Path(sys.prefix).parent)
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
    found: list[Layer] = []
    for name in (name.strip() for one in requested for name in one.split(",")):
        if name in (known := names()):
            tree, problems = from_file(shipped_folder() / "presets" / f"{name}.yaml")
            tree = None if tree is None else emptied(from_plain(tree.plain(), f"preset {name}"))
        else:
            remedy = f"{did_you_mean(name, known)}known: {', '.join(known)}"
            problem = Problem(what=f'unknown preset "{name}"', where=f"--preset {name}", remedy=remedy)
            tree, problems = None, [problem]
        found.append((tree, problems))
    return found


def told(
    presets: Sequence[Node], files: Node, sources: Mapping[str, str], without_effect: Collection[str]
) -> list[str]:
    """For each preset a line of what it replaced in the user's files, and one of its values not in effect.

    `without_effect` are keys that this configuration does not use at all.
    """
    lines = []
    for preset in presets:
        replaced, lost = [], []
        for key in leaves(preset):
            path = tuple(key.split("."))
            ours, theirs = preset.get(path), files.get(path)
            if key not in sources:
                continue  # of a list that a higher layer replaced: the list's own row says so
            if key in without_effect:
                lost.append(f"{key} (without effect here)")
            elif sources[key] != preset.source:
                lost.append(f"{key} ({sources[key]})")
            elif ours is not None and theirs is not None and theirs.plain() != ours.plain():
                replaced.append(f"{key} {_shown(ours)}, not {_shown(theirs)} ({theirs.source})")
        lines += [f"{preset.source}: {'; '.join(replaced)}"] if replaced else []
        lines += [f"{preset.source}: not used: {', '.join(lost)}"] if lost else []
    return lines


def _shown(node: Node) -> str:
    return describe(node) if isinstance(node.value, dict | list) else str(node.plain())
