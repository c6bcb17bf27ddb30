"""One RunConfig from all layers, with the source of every value, or every mistake at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any

from trainer.config import elsewhere, environment, fields
from trainer.config.hosts import ONE, Hosts
from trainer.config.judging.rule import Context, check
from trainer.config.judging.rules import RULES, unused_keys
from trainer.config.judging.set_rules import KINDS
from trainer.config.reading import layers, presets
from trainer.config.reading.layers import Layer
from trainer.config.reading.paths import taken_from
from trainer.config.reading.validate import validate
from trainer.config.schema import RunConfig, changed
from trainer.config.tree import Node, from_plain, leaves, merge
from trainer.errors import ConfigError, Problem
from trainer.words.near import closest, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A configuration and the source of each value by dotted key.

    Sources: `FILE:LINE`, `family NAME`, `preset NAME`, `default`, a variable's name, `--set KEY`,
    `--dataset`, `--output`, `--budget`, `--gpus`.
    """

    config: RunConfig
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """Notes for people: values of files that presets replaced, and values of presets without effect."""
    warnings: tuple[str, ...] = ()
    """Variables of the environment that do nothing here, or harm."""
    goes_on: bool = False
    """Whether the run has begun: `config` then holds the decisions that were made at its start."""
    hosts: Hosts = ONE
    """The machines that train together."""


def load(
    paths: Sequence[Path],
    *,
    overrides: Sequence[str] = (),
    dataset: Path | None = None,
    output: Path | None = None,
    budget: str | None = None,
    gpus: str | None = None,
    chosen_presets: Sequence[str] = (),
    family_defaults: Mapping[str, Mapping[str, Any]],
    lora_presets: Mapping[str, tuple[str, ...]] | None = None,
    environ: Mapping[str, str] | None = None,
    working_folder: Path | None = None,
) -> Loaded:
    """Merge schema, family, `paths` in order, presets, TRAINER__*, `overrides` (a.b=c), then `dataset`,
    `output`, `budget` and `gpus`.

    family_defaults: the layer of each known family. lora_presets: each family's words for
    `lora.target_modules`, not checked without. environ: the process environment if not given.
    working_folder: the folder that relative paths in `paths` begin at; this process's if not given.
    Raises ConfigError with every problem found.
    """
    environ = environment.snapshot() if environ is None else environ
    single = layers.from_variables(environ) + layers.from_overrides(overrides)
    return from_layers(
        [taken_from(layers.from_file(path), working_folder) for path in paths],
        presets.layers(chosen_presets),
        single + layers.from_options(dataset, output, budget, gpus),
        name=", ".join(map(str, paths)) or "configuration",
        others_data=dataset is not None,
        family_defaults=family_defaults,
        lora_presets=lora_presets,
        environ=environ,
    )


def from_layers(
    files: Sequence[Layer],
    chosen: Sequence[Layer],
    single: Sequence[Layer],
    *,
    name: str,
    others_data: bool = False,
    family_defaults: Mapping[str, Mapping[str, Any]],
    lora_presets: Mapping[str, tuple[str, ...]] | None = None,
    environ: Mapping[str, str],
) -> Loaded:
    """Merge layers that were read before: schema and family below, then `files`, presets and `single` values.

    `name` is the source of what is missing. With `others_data` the layers replace the files' data sets by
    other data, and held-out samples that stay are told. Raises ConfigError with every problem found.
    """
    problems = [problem for _, found in (*files, *chosen, *single) for problem in found]
    warnings, harmful = _foreign(environ)
    problems += environment.misspelt(environ, fields.dotted_keys()) + harmful
    if any(tree is None and found for tree, found in (*files, *chosen, *single)):
        raise ConfigError(_sorted(problems))  # with a layer missing, what else is wrong cannot be told

    empty = Node(value={}, source=name)
    from_files, given = reduce(layers.merged, _trees(files), empty), _trees(chosen)
    user = reduce(layers.merged, [*given, *_trees(single)], from_files)
    family, unknown = _family(user, tuple(family_defaults))
    defaults = from_plain(family_defaults[family] if family else {}, f"family {family}")
    tree = Node(value=merge(defaults, user).value, source=empty.source)

    config, bad, wrong = validate(tree, [defaults, *_trees([*files, *chosen, *single])])
    problems, sources, shortened = [*problems, *unknown, *wrong], _sources(tree, config), list[str]()
    if config is not None:
        above = [*([one] for one in _trees([*files, *chosen])), _trees(single)]
        config, sources, shortened = _short_of_warm_up(config, sources, above)
        context = Context(config=config, sources=sources, environ=environ, lora_presets=lora_presets or {})
        problems += check(RULES, context, bad)
    if problems:
        raise ConfigError(_sorted(problems))
    assert config is not None
    notes = presets.told(given, from_files, sources, unused_keys(config))
    notes += shortened
    notes += _replaced_length(_trees([*files, *chosen, *single]), config, sources)
    if others_data:
        notes += _note_of_others_data(config, sources)
    return Loaded(config=config, sources=sources, notes=tuple(notes), warnings=warnings)


def with_settings(loaded: Loaded, values: Mapping[str, Any], source: str = "") -> Loaded:
    """`loaded` with other values by dotted key, as `--set` of each would load them, or as from `source`.

    What is suggested to the user goes through here. Raises ConfigError where the configuration is refused.
    """
    config = RunConfig.model_validate(changed(loaded.config, values).model_dump())
    sources = {**loaded.sources, **{key: source or f"--set {key}" for key in values}}
    environ = environment.snapshot()
    problems = check(RULES, Context(config=config, sources=sources, environ=environ, lora_presets={}))
    if problems:
        raise ConfigError(problems)
    return replace(loaded, config=config, sources=sources)


def _replaced_length(trees: Sequence[Node], config: RunConfig, sources: Mapping[str, str]) -> Iterator[str]:
    """A note of every value that another layer's length of the run, by the other key, takes the place of."""
    steps, epochs = layers.LENGTHS
    kept, other = (steps, epochs) if config.train.num_train_epochs is None else (epochs, steps)
    name, replaced = ".".join(kept), ".".join(other)
    for node in filter(None, (tree.get(other) for tree in trees)):
        if node.value is not None:
            yield f"{name} ({sources[name]}) takes the place of {replaced}: {node.value} ({node.source})"


def _note_of_others_data(config: RunConfig, sources: Mapping[str, str]) -> list[str]:
    """A note of the held-out samples and prompts that --dataset leaves of a file for other data."""
    validation = config.validation
    kind = next((key for key in KINDS if vars(validation)[key] is not None), None)
    if kind is None or (source := sources[f"validation.{kind}"]).startswith("--set"):
        return []
    none = " ".join(
        f"--set validation.{key}=null"
        for key in (kind, "name", "columns", "control_dir")
        if vars(validation)[key] is not None
    )
    verb = "draw" if kind == "img_dir" else "answer"
    return [
        "--dataset replaces data.sets alone: the held-out loss, which also chooses best/, is that of"
        f" {vars(validation)[kind]} (validation.{kind}, {source}); {none} --set validation.held_out=4"
        f" takes some of your own, and validation.prompts are what previews {verb}"
    ]


def _short_of_warm_up(
    config: RunConfig, sources: dict[str, str], above: Sequence[Sequence[Node]]
) -> tuple[RunConfig, dict[str, str], list[str]]:
    """Both with a tenth of the steps as warm-up, and a note of it, where a run is made no longer than the
    warm-up by a layer above the one that has that: `above` are the layers over the family's, lowest first.

    A warm-up that was written beside the length, or over it, stays, and is refused.
    """
    train, warm_up, length = config.train, "train.lr_warmup_steps", "train.max_train_steps"
    places = [_highest(above, name) for name in (warm_up, length)]
    if train.num_train_epochs is not None or train.lr_warmup_steps < train.max_train_steps:
        return config, sources, []
    if places[0] >= places[1]:
        return config, sources, []
    steps, old = train.max_train_steps // 10, sources[warm_up]
    note = (
        f"{length}: {train.max_train_steps} ({sources[length]}) makes {warm_up} {steps} in place of"
        f" {train.lr_warmup_steps} ({old})"
    )
    return changed(config, {warm_up: steps}), {**sources, warm_up: f"a tenth of {length}"}, [note]


def _highest(above: Sequence[Sequence[Node]], name: str) -> int:
    """Place of the highest layer that has a value by this dotted name; -1 for none."""
    path = tuple(name.split("."))
    return max(
        (number for number, trees in enumerate(above) if any(one.get(path) for one in trees)), default=-1
    )


def _trees(written: Sequence[layers.Layer]) -> list[Node]:
    return [tree for tree, _ in written if tree is not None]


def _foreign(environ: Mapping[str, str]) -> tuple[tuple[str, ...], list[Problem]]:
    """Variables that do nothing here, in words, and those with which no run can do what it should."""
    words, problems = _foreign_among(tuple(sorted(environ.items())))
    return words, list(problems)


@lru_cache(maxsize=4)
def _foreign_among(environ: tuple[tuple[str, str], ...]) -> tuple[tuple[str, ...], tuple[Problem, ...]]:
    """`_foreign`, which takes as long as all the rest of a load: a page loads again at every key."""
    problems, words = [], []
    for name, row in elsewhere.variables(dict(environ)):
        words.append(f"{name}: {row.says}; {row.remedy}")
        problems += [Problem(what=row.says, where=name, remedy=row.remedy)] if row.is_error else []
    return tuple(words), tuple(problems)


def _family(user: Node, known: tuple[str, ...]) -> tuple[str | None, list[Problem]]:
    """The family that the user named; the most similar one stands in for it if unknown, to check the rest."""
    node = user.get(("family",))
    if node is None or not isinstance(node.value, str) or not node.value.strip():
        return None, []  # validation says so
    if node.value in known:
        return node.value, []
    what = f'unknown family "{node.value}"'
    remedy = f"{did_you_mean(node.value, known)}known: {', '.join(known)}"
    return closest(node.value, known), [Problem(what=what, where=node.source, remedy=remedy)]


def _sources(tree: Node, config: RunConfig | None) -> dict[str, str]:
    """Dotted key -> source for every value, those inside lists too."""
    sources = dict.fromkeys(fields.dotted_keys(), "default")
    for index, one in enumerate(config.data.sets if config is not None else ()):
        sources |= dict.fromkeys((f"data.sets.{index}.{key}" for key in type(one).model_fields), "default")
    for key in fields.dotted_keys():
        node = tree.get(tuple(key.split(".")))
        sources |= {} if node is None else {key: node.source}
    return sources | leaves(tree)


def _sorted(problems: Sequence[Problem]) -> list[Problem]:
    """By file and line; what has no line comes in the order in which it was found."""

    def key(problem: Problem) -> tuple[str, int]:
        name, _, line = problem.where.rpartition(":")
        return (name, int(line)) if re.fullmatch(r"[0-9]+", line) else ("", 0)

    return sorted(problems, key=key)
