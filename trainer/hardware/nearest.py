"""Floor 2: when nothing fits, the nearest configuration that does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from trainer.config.schema import RunConfig, changed
from trainer.errors import HardwareError
from trainer.hardware.fit import DoesNotFitError
from trainer.hardware.memory import QUANTIZED

Change = tuple[str, Any]
"""Dotted key and the value to write."""
_RESOLUTIONS = (1024, 768, 512)
_LENGTHS = (2048, 1024, 512)
_SMALLER = {"fp32": QUANTIZED, "bf16": ("fp8", *QUANTIZED), "int8": ("nf4",), "fp8": ("nf4",)}


def nearest_fit(config: RunConfig, peak_of: Callable[[RunConfig], str]) -> str:
    """One sentence: the changes that make the run fit, or that none of those tried does.

    `peak_of` plans a changed configuration, returns its peak in words, and raises DoesNotFitError where it
    does not fit either. Single changes come first, then the same ones added up, without those that turn out
    not to be needed; one that this machine refuses for another reason is in no sum.
    """
    changes, fitting = [], []
    for change in _changes(config):
        try:
            fitting.append(f"{_text((change,))} ({peak_of(changed(config, dict((change,))))})")
        except DoesNotFitError:
            changes.append(change)
        except HardwareError:
            continue
    if fitting:
        return "fits with " + ", or ".join(fitting)
    for count in range(2, len(changes) + 1):
        together = _latest(changes[:count])
        try:
            peak = peak_of(changed(config, dict(together)))
        except HardwareError:
            continue
        return _least(config, together, peak, peak_of)
    return "no resolution or storage that was tried fits: use a machine with more memory"


def _least(
    config: RunConfig, together: tuple[Change, ...], peak: str, peak_of: Callable[[RunConfig], str]
) -> str:
    """The sentence for changes that fit together, with a peak in words, without those that are not needed."""
    for change in together:
        fewer = tuple(other for other in together if other != change)
        try:
            peak = peak_of(changed(config, dict(fewer)))
        except HardwareError:
            continue
        together = fewer
    return f"fits with {_text(together)} ({peak})"


def _changes(config: RunConfig) -> Iterator[Change]:
    """Changes to try, from the least to the most painful."""
    asked = config.features.activation_checkpointing
    if asked != "auto" and asked is not True:  # 1 is not true
        yield "features.activation_checkpointing", True
    if config.features.activation_budget not in ("auto", 1.0):
        yield "features.activation_budget", "auto"
    if config.features.block_swap != "auto":
        yield "features.block_swap", "auto"
    if config.features.memory_budget != "auto":
        yield "features.memory_budget", "auto"
    if config.features.modulation == "kept":
        yield "features.modulation", "auto"
    if config.method == "lora":
        for storage in _SMALLER.get(config.features.weights, ()):
            yield "features.weights", storage
    if config.features.vae_tiling is False:
        yield "features.vae_tiling", True
    if any(data_set.chat_file for data_set in config.data.sets):
        for length in _LENGTHS:
            if length < config.data.max_sequence_length:
                yield "data.max_sequence_length", length
    else:
        for side in _RESOLUTIONS:
            if side < config.data.resolution:
                yield "data.resolution", side
    if config.method == "full":
        yield "method", "lora"


def _latest(changes: list[Change]) -> tuple[Change, ...]:
    """One change a key: the last."""
    return tuple(dict(changes).items())


def _text(changes: tuple[Change, ...]) -> str:
    return " and ".join(
        f"{key}: {str(value).lower() if isinstance(value, bool) else value}" for key, value in changes
    )
