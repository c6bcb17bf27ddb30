"""A new run: what was typed over a configuration to start from, what that configuration is, and its plan."""

from __future__ import annotations

import difflib
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
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
from trainer.config.tree import Node, at, from_plain
from trainer.config.writing.dump import written
from trainer.config.writing.schema_json import json_schema
from trainer.errors import ConfigError, HardwareError, Problem, TrainerError
from trainer.files.component_shapes import stamp_of
from trainer.machine.facts import Facts, facts_from_json
from trainer.modeling.base.base import is_repository, local_folder
from trainer.planning.planning import machine_facts, requested_profile
from trainer.planning.shapes.set_look import stamp
from trainer.planning.whole import whole_plan
from trainer.ui import forms
from trainer.ui.studio import Studio
from trainer.ui.views.planned import Planned, of_error, of_plan

OWN = "own"
"""Name of the configuration to start from that the user brought."""
STUDIO = "the studio"
"""Source of the run's folder where nobody wrote one."""
_FACTS_SECONDS = 10
"""Age at which this machine is looked at again: free memory changes."""
_KEPT_PLANS = 256


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A form as it was sent."""

    start: str = "quickstart"
    """A shipped configuration by the stem of its file, or OWN."""
    own: str = ""
    """YAML of OWN."""
    presets: tuple[str, ...] = ()
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


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """The page."""

    asked: Asked
    sections: tuple[tuple[forms.Section, tuple[Shown, ...]], ...]
    planned: Planned
    notes: tuple[str, ...]
    problems: tuple[Problem, ...]
    """Problems that belong to no field."""
    yaml: str
    """The configuration as a file; empty where it is wrong."""
    difference: tuple[str, ...]
    """Lines of a unified diff from the configuration to start from, with its presets, to `yaml`."""
    name: str
    """Name of the run's folder; empty where the configuration is wrong."""

    @property
    def fields(self) -> Iterator[Shown]:
        """All fields, in the order of the form."""
        return (one for _, shown in self.sections for one in shown)


def new_run(studio: Studio, asked: Asked) -> NewRun:
    """The page for a form; a configuration that is wrong, or does not fit, is shown as well."""
    below, wrong = _loaded(studio, replace(asked, typed=_kept(asked.typed, ("family", "method"))))
    loaded, problems = _loaded(studio, asked)
    final, planned = loaded, of_error(ConfigError(problems)) if problems else None
    if loaded is not None:
        final, planned = _planned(loaded, asked.facts)
        problems = planned.problems if planned.is_of_fields else ()
    assert planned is not None
    form = _form(_count(below, asked))
    keys = [one.key for section in form for one in section.fields]
    sources = {} if below is None else dict(below.sources)
    placed: dict[str, list[Problem]] = {}
    for problem in problems or wrong:
        placed.setdefault(forms.key_of(problem, keys, sources), []).append(problem)
    loose = tuple(placed.pop("", ()))
    sections = tuple(
        (one, tuple(_shown(field, asked, below, final, planned, placed) for field in one.fields))
        for one in form
    )
    yaml = written(loaded.config, loaded.sources) if loaded is not None else ""
    return NewRun(
        asked=asked,
        sections=sections,
        planned=planned,
        notes=() if loaded is None else (*loaded.warnings, *loaded.notes),
        problems=loose,
        yaml=yaml,
        difference=_difference(below, yaml),
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


def warm(studio: Studio) -> None:
    """Plan each shipped configuration once: a family's first plan takes ten times as long as its others."""
    for name in starts():
        new_run(studio, Asked(start=name))


def _kept(typed: Mapping[str, str], keys: Sequence[str]) -> Mapping[str, str]:
    return {key: typed[key] for key in keys if key in typed}


def _count(below: Loaded | None, asked: Asked) -> int:
    """Data sets that the form shows: those that there are, and one more."""
    typed = [int(key.split(".")[2]) for key, text in asked.typed.items() if _is_of_set(key) and text.strip()]
    return 1 + max([1 if below is None else len(below.config.data.sets), *(number + 1 for number in typed)])


def _is_of_set(key: str) -> bool:
    parts = key.split(".")
    return (
        key.startswith(f"{forms.SETS}.") and len(parts) > 3 and parts[2].isdecimal() and int(parts[2]) < 100
    )


@lru_cache(maxsize=16)
def _form(sets: int) -> tuple[forms.Section, ...]:
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
    files, chosen = [start, *_run_folder(studio, asked, name)], _presets(asked.presets)
    trees = [tree for tree, _ in (*files, *chosen) if tree is not None]
    low = reduce(layers.merged, trees, Node(value={}, source=name)).get(("data", "sets"))
    form = _form(_count(None, asked))
    own = forms.layer(form, _placed(studio, form, asked.typed), low)
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
        outside = tuple(_outside(studio, form, loaded))
    except ConfigError as error:
        return None, error.problems
    return (None, outside) if outside else (loaded, ())


def _run_folder(studio: Studio, asked: Asked, name: str) -> list[Layer]:
    """The layer of a new folder below the runs; shipped files name one of their own, which is none of ours."""
    if asked.start == OWN:
        return []
    plain, number = name.replace("_", "-"), 1
    while (folder := studio.runs / (plain if number == 1 else f"{plain}-{number}")).exists():
        number += 1
    return [(at(("output_dir",), from_plain(str(folder), STUDIO)), [])]


_ROOTS: Mapping[str, str] = {
    "output_dir": "runs",
    "lora.init_from": "runs",
    "checkpoint": "runs",
    "model": "models",
}
"""Keys and sections whose paths lie below another root than that of data sets."""


def _root(studio: Studio, key: str) -> Path:
    name = _ROOTS.get(key) or _ROOTS.get(key.partition(".")[0], "data")
    return {"runs": studio.runs, "models": studio.models, "data": studio.data}[name]


def _placed(studio: Studio, form: Sequence[forms.Section], typed: Mapping[str, str]) -> Mapping[str, str]:
    """Texts of fields, with relative paths put below their root; a base model's only where it is there."""
    found = dict(typed)
    for one in (field for section in form for field in section.fields):
        text = typed.get(one.key, "").strip()
        if not text or text in (*one.words, "~", "null") or text.startswith(("/", "~", "[")):
            continue
        path = _root(studio, one.key) / text
        if one.kind == "path" or (one.key == "model.pretrained_model_name_or_path" and path.is_dir()):
            found[one.key] = str(path)
    return found


def _outside(studio: Studio, form: Sequence[forms.Section], loaded: Loaded) -> Iterator[Problem]:
    """A problem for each path that somebody else than a shipped file wrote, and that leaves the roots."""
    shipped = str(presets.shipped_folder())
    roots = [root.resolve() for root in (studio.runs, studio.data, studio.models)]
    for key in (one.key for section in form for one in section.fields):
        source = loaded.sources.get(key, "default")
        if source == "default" or source.startswith((shipped, "family ", "preset ")):
            continue
        for path in _paths(forms.value_at(loaded.config, key), key):
            resolved = path.expanduser().resolve()
            allowed = roots[:1] if key == "output_dir" else roots
            if not any(resolved.is_relative_to(root) and resolved != root for root in allowed):
                what = f"`{key}`: {path} is outside of the studio's folders"
                remedy = f"name a place below {_root(studio, key)}"
                yield Problem(what=what, where=source, remedy=remedy)


_NAMES_OF_MODELS = ("model.pretrained_model_name_or_path", "validation.clip_model", "validation.dinov2_model")


def _paths(value: Any, key: str) -> Iterator[Path]:
    """Paths in a value; a text is one where it begins like one, or is that of a template's file."""
    if isinstance(value, Path):
        yield value
    elif isinstance(value, tuple):
        for one in value:
            yield from _paths(one, key)
    elif isinstance(value, str) and (key in _NAMES_OF_MODELS or key == "data.chat_template"):
        if value.startswith(("/", "~", ".")) or value.endswith(".jinja") or "/../" in value:
            yield Path(value)


_ROW_OF = {"model.dtype": "dtype", "parallel.gpus": "gpus", "parallel.shard": "shard"}


def _shown(
    one: forms.Field,
    asked: Asked,
    below: Loaded | None,
    final: Loaded | None,
    planned: Planned,
    placed: Mapping[str, Sequence[Problem]],
) -> Shown:
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
        problems=tuple(placed.get(one.key, ())),
    )


def _difference(below: Loaded | None, yaml: str) -> tuple[str, ...]:
    if below is None or not yaml:
        return ()
    old, new = (text.splitlines() for text in (written(below.config, below.sources), yaml))
    return tuple(difflib.unified_diff(old, new, "the start", "this run", lineterm="", n=2))


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
        tick = int(time.monotonic() / _FACTS_SECONDS)
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
