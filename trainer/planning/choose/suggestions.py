"""The nearest configuration that fits, suggested where nothing does."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import TrainerError
from trainer.planning.choose.fastest_fit import DoesNotFitError, Nearest
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.ways.storages import WAYS

Change = tuple[str, Any]
"""Dotted key and the value to write."""
PeakOf = Callable[[Mapping[str, Any]], str]
"""Plans the configuration with other values by dotted key and returns its peak in words. Raises
DoesNotFitError where that does not fit either, another TrainerError where configuration or machine refuse it.
"""
_RESOLUTIONS = (1024, 768, 512)
_LENGTHS = (2048, 1024, 512)
_BUDGET = "features.memory_budget"
ALLOWED_ON_RESUME = frozenset(
    {
        "features.activation_checkpointing", "features.activation_budget", "features.block_swap",
        "features.cuda_graphs", "features.memory_budget", "features.vae_tiling",
        "data.cache_in_memory", "parallel.gpus",
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
    config: RunConfig, peak_of: PeakOf, budget: str = "", *, goes_on: bool = False
) -> tuple[Nearest, ...]:
    """The changes that make the run fit, each of them by itself; none where none of those tried does.

    `budget` is the least one that would do, where one was imposed. For a run that goes on, nothing is changed
    that its checkpoint refuses. Single changes come first; where none is enough, the same ones added up,
    without those that turn out not to be needed. What is refused for another reason is in no sum, but may be
    where an earlier change of the sum takes the reason away.
    """
    changes = tuple(
        (key, value) for key, value in _changes(config, budget) if key in ALLOWED_ON_RESUME or not goes_on
    )
    fitting: dict[Change, Nearest] = {}
    for change in changes:
        if change == (_BUDGET, "auto") and (_BUDGET, budget) in fitting:
            continue  # more than is needed
        with contextlib.suppress(TrainerError):
            fitting[change] = Nearest(changes=(change,), peak=peak_of(dict((change,))))
    if fitting:
        return tuple(fitting.values())
    together: tuple[Change, ...] = ()
    for change in changes:
        # one change a key: the last
        trial = tuple(dict((*together, change)).items())
        try:
            return (_least(trial, peak_of(dict(trial)), peak_of),)
        except DoesNotFitError:
            together = trial
        except TrainerError:
            continue
    return ()


def _least(together: tuple[Change, ...], peak: str, peak_of: PeakOf) -> Nearest:
    """The changes that fit together, with a peak in words, without those that are not needed."""
    for change in together:
        fewer = tuple(other for other in together if other != change)
        try:
            peak = peak_of(dict(fewer))
        except TrainerError:
            continue
        together = fewer
    return Nearest(changes=together, peak=peak)


def _changes(config: RunConfig, budget: str) -> Iterator[Change]:
    """Changes to try, from the least to the most painful."""
    asked = config.features.activation_checkpointing
    if asked != "auto" and asked is not True:  # 1 is not true
        yield "features.activation_checkpointing", True
    if config.features.activation_budget not in ("auto", 1.0):
        yield "features.activation_budget", "auto"
    if config.features.block_swap != "auto":
        yield "features.block_swap", "auto"
    if config.features.memory_budget != "auto":
        yield from ((_BUDGET, size) for size in (budget, "auto") if size)
    if config.features.modulation == "kept":
        yield "features.modulation", "auto"
    if needs_whole_base(config):
        yield "lora.type", "lora"
    if config.method == "lora" and config.features.weights != "auto":
        smaller = WAYS[config.features.weights].smaller
        yield from (("features.weights", word) for word in sorted(smaller, key=lambda word: WAYS[word].tier))
    if config.features.vae_tiling is False:
        yield "features.vae_tiling", True
    if any(data_set.has_conversations for data_set in config.data.sets):
        lengths = (length for length in _LENGTHS if length < config.data.max_sequence_length)
        yield from (("data.max_sequence_length", length) for length in lengths)
    else:
        yield from (("data.resolution", side) for side in _RESOLUTIONS if side < config.data.resolution)
    if config.method == "full":
        yield "method", "lora"


def setting(key: str, value: object) -> str:
    """A value by dotted key, as it may be written."""
    return f"{key}: {str(value).lower() if isinstance(value, bool) else value}"


def changes_text(changes: Sequence[Change]) -> str:
    """Changes by dotted key, as they may be written."""
    return " and ".join(setting(*change) for change in changes)
