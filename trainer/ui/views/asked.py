"""A form as it was sent: a configuration to start from, presets, and what was typed over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config import environment
from trainer.config.reading import layers, presets
from trainer.config.reading.layers import Layer
from trainer.config.reading.load import Loaded, from_layers
from trainer.config.tree import Node, at, from_plain, without
from trainer.config.writing.dump import written
from trainer.config.writing.schema_json import json_schema
from trainer.errors import ConfigError, Problem
from trainer.ui import forms
from trainer.ui.studio import Studio
from trainer.ui.views.paths import MODEL, outside, placed

OWN = "own"
"""Name of the configuration to start from that the user brought."""
OWN_FILE = "your file"
"""Name of that one in sources and messages."""
STUDIO = "the studio"
"""Source of the run's folder where nobody wrote one."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A form as it was sent."""

    start: str = "quickstart"
    """A shipped configuration by the stem of its file, or OWN."""
    own: str = ""
    """YAML of OWN."""
    presets: tuple[str, ...] = ()
    depth: str = "needed"
    """Depth of the fields that are shown."""
    facts: str = ""
    """Another machine, as `trainer probe --json` wrote it; empty for this one."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """Texts of fields by key; blank ones write nothing."""


@cache
def starts() -> Mapping[str, str]:
    """Shipped configurations to start from: the stem of the file, and its family in words."""
    found = {}
    for path in sorted(presets.shipped_folder().glob("*.yaml"), key=lambda one: one.stem != "quickstart"):
        tree, _ = _shipped(path.stem)
        family = None if tree is None else tree.get(("family",))
        assert family is not None, path
        found[path.stem] = families.get(str(family.value)).title
    return found


def start_with(model: str) -> str:
    """The first shipped configuration for a base model, by its name; empty where there is none."""
    for stem in sorted(starts(), key=lambda one: not one.endswith("_lora")):
        tree, _ = _shipped(stem)
        node = None if tree is None else tree.get(tuple(MODEL.split(".")))
        if node is not None and node.value == model:
            return stem
    return ""


def problems_of(studio: Studio, asked: Asked) -> tuple[Problem, ...]:
    """Everything that is wrong with the configuration of a form; its plan is not asked."""
    return loaded_of(studio, asked)[1]


Below = tuple[Loaded | None, str, tuple[Problem, ...]]
"""A configuration, its YAML, and what is wrong with it."""


def below_of(studio: Studio, asked: Asked) -> Below:
    """The configuration under what was typed: only a family and a method that were chosen count."""
    typed = tuple((key, asked.typed[key]) for key in ("family", "method") if key in asked.typed)
    environ = environment.snapshot().items()
    variables = tuple(sorted(one for one in environ if one[0].startswith(environment.CONFIG_PREFIX)))
    folder = free_folder(studio, asked.start)
    return _remembered_below(studio, (asked.start, asked.own, asked.presets, typed), (variables, folder))


@lru_cache(maxsize=16)
def _remembered_below(
    studio: Studio, base: tuple[str, str, tuple[str, ...], tuple[tuple[str, str], ...]], place: object
) -> Below:
    """The configuration of a form without most fields; `place` is all else that it depends on."""
    start, own, chosen, typed = base
    loaded, problems = loaded_of(studio, Asked(start=start, own=own, presets=chosen, typed=dict(typed)))
    return loaded, "" if loaded is None else written(loaded.config, loaded.sources), problems


def count_of(below: Loaded | None, asked: Asked) -> int:
    """Data sets that the form shows: those that there are, and one more."""
    typed = [int(key.split(".")[2]) for key, text in asked.typed.items() if _is_of_set(key) and text.strip()]
    return 1 + max([1 if below is None else len(below.config.data.sets), *(number + 1 for number in typed)])


def is_key(name: str) -> bool:
    """True for the key of a field; of a data set's, up to the hundredth set."""
    if name.startswith(f"{forms.SETS}."):
        return _is_of_set(name) and forms.without_positions(name) in _plain_keys()
    return name in _plain_keys()


@cache
def _plain_keys() -> frozenset[str]:
    return frozenset(forms.without_positions(one.key) for section in form_of(1) for one in section.fields)


def _is_of_set(key: str) -> bool:
    parts = key.split(".")
    return (
        key.startswith(f"{forms.SETS}.") and len(parts) > 3 and parts[2].isdecimal() and int(parts[2]) < 100
    )


@lru_cache(maxsize=16)
def form_of(sets: int) -> tuple[forms.Section, ...]:
    """The form with so many data sets."""
    return forms.sections(json_schema(families.names()), sets)


@cache
def _known() -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, tuple[str, ...]]]:
    """Layers, and words for `lora.target_modules`, of each family."""
    known = {name: families.get(name) for name in families.names()}
    return (
        {name: one.defaults for name, one in known.items()},
        {name: tuple(one.lora_targets) for name, one in known.items()},
    )


@lru_cache(maxsize=8)
def _start(name: str, own: str) -> tuple[str, Layer]:
    """The configuration to start from, and its name for messages."""
    if name == OWN:
        return OWN_FILE, layers.from_text(own, OWN_FILE)
    if name not in starts():
        remedy = f"known: {', '.join(starts())}"
        problem = Problem(what=f'no configuration "{name}"', where="start", remedy=remedy)
        return name, (None, [problem])
    return f"{name}.yaml", _shipped(name)


@cache
def _shipped(stem: str) -> Layer:
    path = presets.shipped_folder() / f"{stem}.yaml"
    return layers.from_text(path.read_text(encoding="utf-8"), path.name)


@lru_cache(maxsize=64)
def _presets(names: tuple[str, ...]) -> tuple[Layer, ...]:
    return tuple(presets.layers(names))


def loaded_of(studio: Studio, asked: Asked) -> tuple[Loaded | None, tuple[Problem, ...]]:
    """The configuration of a form, or everything that is wrong with it."""
    name, start = _start(asked.start, asked.own)
    if asked.typed.get("method") == "full" and start[0] is not None:
        start = (without(start[0], ("lora",)), start[1])  # a start's LoRA is none that somebody typed
    files, chosen = [start, *_run_folder(studio, asked)], _presets(asked.presets)
    trees = [tree for tree, _ in (*files, *chosen) if tree is not None]
    low = reduce(layers.merged, trees, Node(value={}, source=name)).get(("data", "sets"))
    form = form_of(count_of(None, asked))
    own = forms.layer(form, placed(studio, form, asked.typed), low)
    defaults, lora_presets = _known()
    environ = environment.snapshot()
    try:
        loaded = from_layers(
            files,
            chosen,
            [*layers.from_variables(environ), own],
            name=name,
            family_defaults=defaults,
            lora_presets=lora_presets,
            environ=environ,
        )
    except ConfigError as error:
        return None, error.problems
    trusted = f"{asked.start}.yaml:"  # of OWN no source begins so
    wrong = tuple(outside(studio, form, loaded, trusted))
    return (None, wrong) if wrong else (loaded, ())


def _run_folder(studio: Studio, asked: Asked) -> list[Layer]:
    """The layer of a new folder below the runs, in place of the one that a shipped file names."""
    if asked.start == OWN:
        return []
    return [(at(("output_dir",), from_plain(str(free_folder(studio, asked.start)), STUDIO)), [])]


def free_folder(studio: Studio, name: str) -> Path:
    """The first of NAME, NAME-2, ... below the runs that is not there; `.yaml` files beside them count."""
    plain, number = name.replace("_", "-"), 1
    while True:
        folder = studio.runs / (plain if number == 1 else f"{plain}-{number}")
        if not folder.exists() and not folder.with_name(f"{folder.name}.yaml").exists():
            return folder
        number += 1
