"""A new run: what was typed over a configuration to start from, what that configuration is, and its plan."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, reduce
from pathlib import Path
from typing import Any

from trainer import families
from trainer.config import environment
from trainer.config.reading import layers, presets, strict_yaml
from trainer.config.reading.layers import Layer
from trainer.config.reading.load import Loaded, from_layers
from trainer.config.schema import RunConfig
from trainer.config.tree import Node, at, from_plain, without
from trainer.config.writing.dump import written
from trainer.config.writing.schema_json import json_schema
from trainer.errors import ConfigError, HardwareError, Problem, TrainerError
from trainer.files.component_shapes import stamp_of
from trainer.machine.facts import Facts, facts_from_json
from trainer.modeling.base.base import is_repository, local_folder
from trainer.planning.planning import machine_facts, requested_profile
from trainer.planning.shapes.set_look import stamp
from trainer.planning.whole import whole_plan
from trainer.queue.adding import request
from trainer.queue.local import Local
from trainer.ui import forms
from trainer.ui.studio import Studio
from trainer.ui.views.paths import MODEL, folders, outside, placed, root_name, takes_folder
from trainer.ui.views.planned import Planned, of_error, of_plan

OWN = "own"
"""Name of the configuration to start from that the user brought."""
STUDIO = "the studio"
"""Source of the run's folder where nobody wrote one."""
_FACTS_SECONDS = 10
"""Age at which this machine is looked at again: free memory changes."""
_KEPT_PLANS = 256
_BREATH_SECONDS = 0.05
"""Pause between plans that nobody asked for: pages come first."""


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


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A field with everything that stands beside it."""

    field: forms.Field
    typed: str
    below: str
    """The value that it has while nothing is typed."""
    origin: str
    """The place that its value comes from."""
    decided: str
    """The value that the plan chose for `auto`, and its reason; empty for others."""
    reason: str
    problems: tuple[Problem, ...]
    places: tuple[str, ...]
    """Folders that may be meant, by their names below the field's root."""


@dataclass(frozen=True, kw_only=True)
class ShownSection:
    """A section with its fields, those of each data set apart."""

    section: forms.Section
    fields: tuple[Shown, ...]

    @property
    def depths(self) -> str:
        """Depths of its fields, with a space between them."""
        return " ".join(sorted({one.field.depth for one in self.fields}))

    @property
    def groups(self) -> list[tuple[str, list[Shown]]]:
        """Fields by the item of a list that they belong to, in their order."""
        return [
            (key, list(some)) for key, some in itertools.groupby(self.fields, lambda one: one.field.group)
        ]


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """The page."""

    asked: Asked
    loaded: Loaded | None
    """The configuration; None where it is wrong."""
    sections: tuple[ShownSection, ...]
    sets: int
    """Data sets that there are; the form has one more."""
    planned: Planned
    notes: tuple[str, ...]
    yaml: str
    """The configuration as a file; empty where it is wrong."""
    difference: tuple[str, ...]
    """Lines of a unified diff from the configuration to start from, with its presets, to `yaml`."""
    name: str
    """Name of the run's folder; empty where the configuration is wrong."""

    @property
    def fields(self) -> Iterator[Shown]:
        """All fields, in the order of the form."""
        return (one for section in self.sections for one in section.fields)


def new_run(studio: Studio, asked: Asked) -> NewRun:
    """The page for a form; a configuration that is wrong, or does not fit, is shown as well."""
    below, start_text, wrong = _below(studio, asked)
    loaded, problems = _loaded(studio, asked)
    final, planned = loaded, of_error(ConfigError(problems)) if problems else None
    if loaded is not None:
        final, planned = _planned(loaded, asked.facts)
        problems = planned.problems if planned.is_of_fields else ()
    assert planned is not None
    count = _count(below, asked)
    form = form_of(count)
    sources = {} if below is None else dict(below.sources)
    keys = [one.key for section in form for one in section.fields]
    wrong_by_key: dict[str, list[Problem]] = {}
    for problem in problems or wrong:
        wrong_by_key.setdefault(forms.key_of(problem, keys, sources), []).append(problem)
    names = folders(studio)

    def shown(one: forms.Field) -> Shown:
        bad = tuple(wrong_by_key.get(one.key, ()))
        return _shown(
            one, asked, below, final, planned, bad, names[root_name(one.key)] if takes_folder(one) else ()
        )

    sections = tuple(ShownSection(section=one, fields=tuple(map(shown, one.fields))) for one in form)
    yaml = written(loaded.config, loaded.sources) if loaded is not None else ""
    return NewRun(
        asked=asked,
        loaded=loaded,
        sections=sections,
        sets=count - 1,
        planned=planned,
        notes=() if loaded is None else (*loaded.warnings, *loaded.notes),
        yaml=yaml,
        difference=_difference(start_text, yaml),
        name="" if loaded is None else loaded.config.output_dir.name,
    )


@cache
def starts() -> Mapping[str, str]:
    """Shipped configurations to start from: the stem of the file, and its family in words."""
    found = {}
    for path in sorted(presets.shipped_folder().glob("*.yaml"), key=lambda one: one.stem != "quickstart"):
        tree, _ = layers.from_file(path)
        assert tree is not None, path
        family = tree.get(("family",))
        assert family is not None, path
        found[path.stem] = families.get(str(family.value)).title
    return found


def start_with(model: str) -> str:
    """The first shipped configuration for a base model, by its name; empty where there is none."""
    for stem in sorted(starts(), key=lambda one: not one.endswith("_lora")):
        tree, _ = layers.from_file(presets.shipped_folder() / f"{stem}.yaml")
        node = None if tree is None else tree.get(tuple(MODEL.split(".")))
        if node is not None and node.value == model:
            return stem
    return ""


def problems_of(studio: Studio, asked: Asked) -> tuple[Problem, ...]:
    """Everything that is wrong with the configuration of a form; its plan is not asked."""
    return _loaded(studio, asked)[1]


def add_to_queue(view: NewRun) -> str:
    """Add the run behind all others of the queue; the number of its job.

    Raises ConfigError for a form that is wrong, and the errors of `trainer queue add`.
    """
    if view.loaded is None or view.asked.facts.strip():
        remedy = "correct what is marked, and leave the field of another machine empty"
        raise ConfigError("this is no plan of a run on this machine", where="the form", remedy=remedy)
    queue = Local(folder=environment.queue_dir().absolute())
    (job,) = queue.submit([request(view.loaded, _this_machine(_tick()), queue.gpus())])
    return job


def warm(studio: Studio) -> None:
    """Plan each shipped configuration once: a family's first plan takes ten times as long as its others."""
    with contextlib.suppress(TrainerError):  # what is wrong with this place the page says
        for name in starts():
            new_run(studio, Asked(start=name))
            time.sleep(_BREATH_SECONDS)


Below = tuple[Loaded | None, str, tuple[Problem, ...]]
"""A configuration, its YAML, and what is wrong with it."""


def _below(studio: Studio, asked: Asked) -> Below:
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
    loaded, problems = _loaded(studio, Asked(start=start, own=own, presets=chosen, typed=dict(typed)))
    return loaded, "" if loaded is None else written(loaded.config, loaded.sources), problems


def _count(below: Loaded | None, asked: Asked) -> int:
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


@lru_cache(maxsize=64)
def _start(name: str, own: str) -> tuple[str, Layer]:
    """The configuration to start from, and its name for messages."""
    if name == OWN:
        tree, problems = strict_yaml.parse(own, lambda line: f"your file:{line}")
        return "your file", (None if tree is None else layers.emptied(tree), problems)
    if name not in starts():
        remedy = f"known: {', '.join(starts())}"
        problem = Problem(what=f'no configuration "{name}"', where="start", remedy=remedy)
        return name, (None, [problem])
    return name, layers.from_file(presets.shipped_folder() / f"{name}.yaml")


@lru_cache(maxsize=64)
def _presets(names: tuple[str, ...]) -> tuple[Layer, ...]:
    return tuple(presets.layers(names))


def _loaded(studio: Studio, asked: Asked) -> tuple[Loaded | None, tuple[Problem, ...]]:
    """The configuration of a form, or everything that is wrong with it."""
    name, start = _start(asked.start, asked.own)
    if asked.typed.get("method") == "full" and start[0] is not None:
        start = (without(start[0], ("lora",)), start[1])  # a start's LoRA is none that somebody typed
    files, chosen = [start, *_run_folder(studio, asked, name)], _presets(asked.presets)
    trees = [tree for tree, _ in (*files, *chosen) if tree is not None]
    low = reduce(layers.merged, trees, Node(value={}, source=name)).get(("data", "sets"))
    form = form_of(_count(None, asked))
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
    wrong = tuple(outside(studio, form, loaded))
    return (None, wrong) if wrong else (loaded, ())


def _run_folder(studio: Studio, asked: Asked, name: str) -> list[Layer]:
    """The layer of a new folder below the runs, in place of the one that a shipped file names."""
    if asked.start == OWN:
        return []
    return [(at(("output_dir",), from_plain(str(free_folder(studio, name)), STUDIO)), [])]


def free_folder(studio: Studio, name: str) -> Path:
    """The first of NAME, NAME-2, ... below the runs that is not there; `.yaml` files beside them count."""
    plain, number = name.replace("_", "-"), 1
    while True:
        folder = studio.runs / (plain if number == 1 else f"{plain}-{number}")
        if not folder.exists() and not folder.with_name(f"{folder.name}.yaml").exists():
            return folder
        number += 1


_ROW_OF = {"model.dtype": "dtype", "parallel.gpus": "gpus", "parallel.shard": "shard"}


def _shown(
    one: forms.Field,
    asked: Asked,
    below: Loaded | None,
    final: Loaded | None,
    planned: Planned,
    problems: tuple[Problem, ...],
    places: tuple[str, ...],
) -> Shown:
    """A field beside the configuration under what was typed, the one that is planned, and its plan."""
    typed, decided = asked.typed.get(one.key, ""), None
    loaded = final or below
    source = "default" if loaded is None else loaded.sources.get(one.key, "default")
    value = None if loaded is None else forms.value_at(loaded.config, one.key)
    if value == "auto":
        decided = planned.decision(_ROW_OF.get(one.key, one.key.rpartition(".")[2]))
    return Shown(
        field=one,
        typed=typed,
        below="" if below is None else forms.value_text(forms.value_at(below.config, one.key)),
        origin="studio" if source == STUDIO else "you" if typed.strip() else forms.origin(source),
        decided="" if decided is None else decided.value,
        reason="" if decided is None else decided.reason,
        problems=problems,
        places=places,
    )


def _difference(old: str, new: str) -> tuple[str, ...]:
    lines = (text.splitlines() for text in (old, new))
    return (
        tuple(difflib.unified_diff(*lines, "the start", "this run", lineterm="", n=2)) if old and new else ()
    )


class _Plans:
    """The latest plans: a value that is taken back is not planned again. Safe in threads."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, tuple[Loaded, Planned]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: object) -> tuple[Loaded, Planned] | None:
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
            return found

    def put(self, key: object, value: tuple[Loaded, Planned]) -> None:
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > _KEPT_PLANS:
                self._kept.popitem(last=False)


_PLANS = _Plans()


def _planned(loaded: Loaded, recorded: str) -> tuple[Loaded, Planned]:
    """The configuration as it is planned, and its plan on this machine, or on one that was `recorded`."""
    try:
        tick = _tick()
        facts = _recorded(recorded) if recorded.strip() else _this_machine(tick)
        where = recorded.strip() or tick
        key = (
            loaded.config.model_dump_json(),
            tuple(sorted(loaded.sources.items())),
            where,
            _stamps(loaded.config),
        )
        if (found := _PLANS.get(key)) is not None:
            return found
        final, plan = whole_plan(loaded, facts, requested_profile())
        answer = final, of_plan(plan, final.config, facts)
        _PLANS.put(key, answer)
        return answer
    except TrainerError as error:
        return loaded, of_error(error, model=_model_page(loaded.config))


def _stamps(config: RunConfig) -> tuple[object, ...]:
    """Everything on the disk that a plan is made from, as it is now."""
    folder, checkpoints = local_folder(config), config.output_dir / "checkpoints"
    here = [path for path in (folder, checkpoints) if path is not None and path.exists()]
    return stamp_of(here), stamp(config.data.sets)


def _tick() -> int:
    return int(time.monotonic() / _FACTS_SECONDS)


@lru_cache(maxsize=1)
def _this_machine(tick: int) -> Facts:
    """Facts of this machine; `tick` is the time in which they count as new."""
    return machine_facts()


@lru_cache(maxsize=8)
def _recorded(text: str) -> Facts:
    """Facts that were recorded on another machine. Raises ConfigError."""
    try:
        return facts_from_json(text, "another machine")
    except HardwareError as error:
        remedy = "paste what `trainer probe --json` wrote there, or nothing for this machine"
        raise ConfigError([replace(one, remedy=remedy) for one in error.problems]) from error


def _model_page(config: RunConfig) -> str:
    """Address of the base model's page on the hub; empty for a folder."""
    name = config.model.pretrained_model_name_or_path
    return f"https://huggingface.co/{name}" if is_repository(config) else ""
