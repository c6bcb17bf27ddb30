"""Floor 2: a step's samples in micro-batches: smaller ones, and more of them, where that is better."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import RunConfig
from trainer.hardware.plan import Decision


def micro_batches(config: RunConfig) -> int:
    """Forward passes of the whole run where all samples of a step have one shape; else more, smaller ones."""
    return config.train.max_train_steps * config.train.gradient_accumulation_steps


def smaller(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with each smaller divisor as batch size, and as many samples a step as before."""
    train = config.train
    for size in range(train.train_batch_size - 1, 0, -1):
        if train.train_batch_size % size == 0:
            accumulation = train.gradient_accumulation_steps * (train.train_batch_size // size)
            changes = {"train_batch_size": size, "gradient_accumulation_steps": accumulation}
            yield config.model_copy(update={"train": train.model_copy(update=changes)})


def row(config: RunConfig, asked: RunConfig, how: str) -> Decision:
    """How a step's samples are parted, other than `asked`, the configuration that was written.

    `how` says by what setting the written micro-batches would fit; empty where they do not.
    """
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    written = asked.train.train_batch_size
    why = f"fit only in {how}" if how else "do not fit"
    reason = f"{written} samples at once {why}; a step still has {size * steps}"
    return Decision(feature="micro_batch", value=f"{size} x {steps}", source="auto", reason=reason)


_MIX = "with captions of 1 to 300 tokens, as many short as long by their logarithm; "


def time_row(milliseconds: float, config: RunConfig, gpu: str, *, captions_vary: bool) -> Decision:
    """The predicted time of one micro-batch; where captions are not of one length, of a usual mix of them."""
    source = "prediction"
    if not milliseconds:
        reason = f"the rates of {gpu} are not known"
        return Decision(feature="step_time", value="unknown", source=source, reason=reason)
    size = config.train.train_batch_size
    unequal = ", more where shapes differ" if size > 1 else ""
    whole = micro_batches(config) * milliseconds / 3.6e6
    mix = _MIX if captions_vary else ""
    hours = f"{whole:.1f} h for all {micro_batches(config)}{unequal}"
    reason = f"predicted, not measured: one micro-batch; {mix}{hours}"
    return Decision(feature="step_time", value=f"{milliseconds:.0f} ms", source=source, reason=reason)
