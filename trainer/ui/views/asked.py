"""A form as it was sent: a configuration to start from, presets, and what was typed over them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial, reduce
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config import environment
from trainer.config.reading import layers, presets
from trainer.config.reading.layers import Layer
from trainer.config.reading.load import Loaded, from_layers
from trainer.config.reading.paths import MODEL, taken_from
from trainer.config.tree import Node, at, from_plain, without
from trainer.config.writing.dump import written
from trainer.config.writing.schema_json import json_schema
from trainer.errors import ConfigError, Problem
from trainer.queue.database import read_jobs
from trainer.ui import forms
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.kept import Kept, kept_settings
from trainer.ui.views.paths import outside, root_of
from trainer.ui.views.runs import run_folder

OWN = "own"
"""Name of the configuration to start from that the user brought."""
RUN = "run:"
"""Beginning of the name of a configuration to start from that is a run's; the run's id follows."""
OWN_FILE = "your file"
"""Name of that one in sources and messages."""
STUDIO = "the studio"
"""Source of the run's folder where nobody wrote one."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A form as it was sent."""

    start: str = "quickstart"
    """A shipped configuration by the stem of its file, OWN, or RUN with the id of a run."""
    own: str = ""
    """YAML of OWN."""
    presets: tuple[str, ...] = ()
    depth: str = "needed"
    """Depth of the fields that are shown."""
    facts: str = ""
    """Another machine, as `trainer probe --json` wrote it; empty for this one."""
    goes_on: str = ""
    """The folder for which it is ticked to go on with the run there."""
    typed: Mapping[str, str] = field(default_factory=dict)
    """Texts of fields by key; blank ones write nothing."""


@cache
def starts() -> Mapping[str, str]:
    """Shipped configurations to start from: the stem of the file, and its family in words."""
    found = {}
    for path in sorted(
        presets.shipped_folder().glob("*.yaml"), key=lambda one: (one.stem != "quickstart", one.stem)
    ):
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
    start = _start(studio, asked)
    folder = free_folder(studio, start.run) if start.run else None
    place = (variables, folder, start.kept)
    return _remembered_below(studio, (asked.start, asked.own, asked.presets, typed), place)


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


@dataclass(frozen=True, kw_only=True)
class Start:
    """The configuration that a run begins with."""

    name: str
    """Name of its file in sources and messages."""
    layer: Layer
    run: str = ""
    """Name for the run's folder; empty where the file's own counts."""
    trusted: bool = True
    """Whether its paths may lie outside of the studio's roots."""
    kept: Kept | None = None
    """The settings of the run that it is."""


def _start(studio: Studio, asked: Asked) -> Start:
    """The configuration to start from; a problem in place of a run's that was removed meanwhile."""
    if asked.start == OWN:
        return Start(name=OWN_FILE, layer=_of_text(asked.own, OWN_FILE), trusted=False)
    if asked.start.startswith(RUN):
        try:
            folder, kept = settings_of(studio, asked.start.removeprefix(RUN))
        except UnknownIdError:
            remedy = "begin with another configuration: what is typed stays"
            problem = Problem(what="the run that this begins with was removed", where="start", remedy=remedy)
            return Start(name=asked.start, layer=(None, [problem]))
        layer = taken_from(_of_text(kept.text, folder.name), kept.working_folder)
        return Start(name=folder.name, layer=layer, run=folder.name, kept=kept)
    if asked.start not in starts():
        remedy = f"known: {', '.join(starts())}"
        problem = Problem(what=f'no configuration "{asked.start}"', where="start", remedy=remedy)
        return Start(name=asked.start, layer=(None, [problem]))
    return Start(name=f"{asked.start}.yaml", layer=_shipped(asked.start), run=asked.start.replace("_", "-"))


def settings_of(studio: Studio, run: str) -> tuple[Path, Kept]:
    """The folder of the run with that id, and its settings. Raises UnknownIdError where one is missing."""
    folder = run_folder(studio, run)
    kept = kept_settings(studio, folder)
    if kept is None:
        raise UnknownIdError(run)
    return folder, kept


@lru_cache(maxsize=8)
def _of_text(text: str, name: str) -> Layer:
    return layers.from_text(text, name)


@cache
def _shipped(stem: str) -> Layer:
    path = presets.shipped_folder() / f"{stem}.yaml"
    # the quickstart names folders beside `train_configs`, and the studio may have been started elsewhere
    layer = layers.from_text(path.read_text(encoding="utf-8"), path.name)
    return taken_from(layer, presets.shipped_folder().parent)


@lru_cache(maxsize=64)
def _presets(names: tuple[str, ...]) -> tuple[Layer, ...]:
    return tuple(presets.layers(names))


def loaded_of(studio: Studio, asked: Asked) -> tuple[Loaded | None, tuple[Problem, ...]]:
    """The configuration of a form, or everything that is wrong with it."""
    start, chosen = _start(studio, asked), _presets(asked.presets)
    name, (tree, problems) = start.name, start.layer
    if asked.typed.get("method") == "full" and tree is not None:
        tree = without(tree, ("lora",))  # a start's LoRA is none that somebody typed
    files: list[Layer] = [(tree, problems)]
    if start.run:  # a new folder below the runs, in place of the one that the file names
        folder = from_plain(str(free_folder(studio, start.run)), STUDIO)
        files.append((at(("output_dir",), folder), []))
    trees = [tree for tree, _ in (*files, *chosen) if tree is not None]
    low = reduce(layers.merged, trees, Node(value={}, source=name)).get(("data", "sets"))
    form = form_of(count_of(None, asked))
    own = forms.layer(form, asked.typed, low, partial(root_of, studio))
    defaults, lora_presets = _known()
    # what such variables say of a run is in its file, over which they would lie again
    of_run = asked.start.startswith(RUN)
    environ = environment.without_settings() if of_run else environment.snapshot()
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
    wrong = tuple(outside(studio, loaded, f"{name}:" if start.trusted else ""))
    return (None, wrong) if wrong else (loaded, ())


def free_folder(studio: Studio, name: str) -> Path:
    """The first of NAME, NAME-2, ... below the runs that is not there, and no job's of the queue."""
    taken = {job.run for job in read_jobs(environment.queue_dir().absolute())}
    numbered = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    folders = (studio.runs / one for one in numbered)
    return next(folder for folder in folders if folder not in taken and not folder.exists())
