"""The nearest configuration that fits, suggested where nothing does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import TrainerError
from trainer.planning.choose.fastest_fit import DoesNotFitError, Nearest
from trainer.planning.choose.optimizers import STOCHASTIC
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.ways.storages import WAYS, multiplied_in

Change = tuple[str, Any]
"""Dotted key and the value to write."""
Changes = Mapping[str, Any]
"""Values to write together, by dotted key."""
PeakOf = Callable[[Changes], str]
"""Plans the configuration with other values by dotted key and returns its peak in words. Raises
DoesNotFitError where that does not fit either, another TrainerError where configuration or machine refuse it.
"""
_RESOLUTIONS = (1024, 768, 512)
_LENGTHS = (2048, 1024, 512)
_BUDGET = "features.memory_budget"
_CHECKPOINTING, _KEPT = "features.activation_checkpointing", "features.activation_budget"
_DTYPE, _WEIGHTS, _COMPUTE = "model.dtype", "features.weights", "features.compute"
_MODULATION, _GRADIENT, _OPTIMIZER = "features.modulation", "features.weight_gradient", "train.optimizer"
ALLOWED_ON_RESUME = frozenset(
    {
        "features.activation_checkpointing", "features.activation_budget", "features.block_swap",
        "features.cuda_graphs", "features.memory_budget", "features.vae_tiling",
        "data.cache_in_memory", "parallel.gpus", "parallel.shard",
    }
)  # fmt: skip
"""Keys of suggestions with which a run may go on; its checkpoint refuses every other one of them (FREE, TOLD
and REFUSED of engine/records/fingerprint.py)."""
START_AFRESH = "free memory, or start afresh in another output_dir"
"""Advice to a run that goes on and does not fit with what it began with."""


def sentence(fits: Sequence[Nearest], *, goes_on: bool = False) -> str:
    """The changes that make the run fit, in one sentence, or that none of those tried does."""
    if fits:
        return "fits with " + ", or ".join(f"{changes_text(fit.changes)} ({fit.peak})" for fit in fits)
    if goes_on:
        return f"the run goes on, and its checkpoint refuses other weights, batches and sizes: {START_AFRESH}"
    return "no resolution or storage that was tried fits: use a machine with more memory"


def nearest_fits(
    config: RunConfig,
    peak_of: PeakOf,
    budget: str = "",
    *,
    elsewhere: Sequence[Changes] = (),
    larger_steps: Sequence[Changes] = (),
    goes_on: bool = False,
) -> tuple[Nearest, ...]:
    """The changes that make the run fit, each of them by itself; none where none of those tried does.

    `budget` is the least one that would do, where one was imposed. `elsewhere` are changes that let the run
    take other GPUs of the machine, and `larger_steps` those of a step that more of them share. For a run that
    goes on, nothing is changed that its checkpoint refuses. Changes of one setting come first; where none is
    enough, the same ones added up, without those that turn out not to be needed. What is refused for another
    reason is in no sum, but may be where an earlier change of the sum takes the reason away.
    """
    groups = [
        [changes for changes in group if not goes_on or ALLOWED_ON_RESUME.issuperset(changes)]
        for group in (elsewhere, *_of_features(config, budget), larger_steps, *_of_the_run(config))
    ]
    fitting: list[Nearest] = []
    for group in groups:
        for changes in group:
            if any(set(one.changes) <= set(changes.items()) for one in fitting):
                continue  # more than is needed
            with contextlib.suppress(TrainerError):
                fitting.append(Nearest(changes=tuple(changes.items()), peak=peak_of(changes)))
                break
    if fitting:
        return tuple(fitting)
    together: dict[str, Any] = {}
    for changes in (changes for group in groups for changes in group):
        # one change a key: the last
        trial = {**together, **changes}
        try:
            return (_least(trial, peak_of(trial), peak_of),)
        except DoesNotFitError:
            together = trial
        except TrainerError:
            continue
    return ()


def _least(together: Changes, peak: str, peak_of: PeakOf) -> Nearest:
    """The changes that fit together, with a peak in words, without those that are not needed."""
    for key in together:
        fewer = {other: value for other, value in together.items() if other != key}
        try:
            peak = peak_of(fewer)
        except TrainerError:
            continue
        together = fewer
    return Nearest(changes=tuple(together.items()), peak=peak)


def _of_features(config: RunConfig, budget: str) -> Iterator[Sequence[Changes]]:
    """Changes of how the run is computed, from the least to the most painful.

    Of a sequence the first that fits is enough. A change has beside it those without which it is refused.
    """
    features, asked = config.features, config.features.activation_checkpointing
    kept = {_KEPT: "auto"} if features.activation_budget not in ("auto", 1.0) else {}
    if kept:
        yield (kept,)
    if asked != "auto" and asked is not True:  # 1 is not true
        yield ({_CHECKPOINTING: True, **kept},)
    if features.block_swap != "auto":
        yield ({"features.block_swap": "auto"},)
    if features.memory_budget != "auto":
        yield [{_BUDGET: size} for size in (budget, "auto") if size]
    if features.modulation == "kept":
        yield ({_MODULATION: "auto"},)
    if needs_whole_base(config):
        yield ({"lora.type": "lora"},)
    if "fp32" in (config.model.dtype, features.weights):
        types = {_DTYPE: config.model.dtype, _WEIGHTS: features.weights}
        yield ({key: "auto" for key, word in types.items() if word == "fp32"},)
    if multiplied_in(features.compute) and (config.method == "full" or features.weights == "auto"):
        yield (_without_products(config),)
    if config.method == "lora" and features.weights != "auto":
        smaller = WAYS[features.weights].smaller
        yield from ((_stored(config, word),) for word in sorted(smaller, key=lambda word: WAYS[word].tier))
    if features.vae_tiling is False:
        yield ({"features.vae_tiling": True},)


def _of_the_run(config: RunConfig) -> Iterator[Sequence[Changes]]:
    """The same of what is trained, and on what."""
    if any(data_set.has_conversations for data_set in config.data.sets):
        lengths = (length for length in _LENGTHS if length < config.data.max_sequence_length)
        yield from (({"data.max_sequence_length": length},) for length in lengths)
    else:
        sides = (side for side in _RESOLUTIONS if side < config.data.resolution)
        yield from (({"data.resolution": side},) for side in sides)
    if config.method == "full":
        lora: dict[str, Any] = {"method": "lora"}
        # words for trained weights alone are refused to an adapter
        if config.train.optimizer == STOCHASTIC:
            lora[_OPTIMIZER] = "adamw"
        if config.features.weight_gradient != "auto":
            lora[_GRADIENT] = "auto"
        products = multiplied_in(config.features.compute)
        yield (lora, {**lora, **_without_products(config)}) if products else (lora,)


def _stored(config: RunConfig, word: str) -> Changes:
    """A frozen base in this storage, without the words that only another one takes."""
    ways = [way for way in WAYS.values() if way.weights == word]
    products, modulation = config.features.compute, config.features.modulation
    others: dict[str, Any] = {}
    if multiplied_in(products) and products not in {way.compute for way in ways}:
        others[_COMPUTE] = "auto"
    if modulation != "auto" and not any(way.modulation for way in ways):
        others[_MODULATION] = "auto"
    return {_WEIGHTS: word, **others}


def _without_products(config: RunConfig) -> Changes:
    """Products in the run's type, without the words that only those in another one take."""
    words = {_MODULATION: config.features.modulation, _GRADIENT: config.features.weight_gradient}
    return {_COMPUTE: "auto", **{key: "auto" for key, word in words.items() if word != "auto"}}


def setting(key: str, value: object) -> str:
    """A value by dotted key, as it may be written."""
    return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"


def changes_text(changes: Sequence[Change]) -> str:
    """Changes by dotted key, as they may be written."""
    return " and ".join(setting(*change) for change in changes)
