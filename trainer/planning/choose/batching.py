"""A step's samples in micro-batches: smaller ones, and more of them, where that is better."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import RunConfig
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import Geometry


def micro_batches(config: RunConfig) -> int:
    """Batches of the whole run: each is one forward pass where its samples are of one shape, else several."""
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


def one_by_one(config: RunConfig, asked: RunConfig, parts: float, *, graphs: bool) -> Decision:
    """How a step's samples are taken, of which a batch of `asked` would be `parts` of other shapes."""
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    less = "less memory and fewer CUDA graphs" if graphs else "less memory"
    reason = (
        f"{asked.train.train_batch_size} samples at once are pictures of {parts:.1f} shapes on average: one"
        f" by one takes about as long, in {less}; a step still has {size * steps}"
    )
    return Decision(feature="micro_batch", value=f"{size} x {steps}", source="auto", reason=reason)


_SEVERAL = 1.05
_MIX = "with captions of 1 to 300 tokens, as many short as long by their logarithm; "


def time_row(
    milliseconds: float, config: RunConfig, gpu: str, *, geometry: Geometry, parts: float
) -> Decision:
    """The predicted time of a batch; where captions are not of one length, of a usual mix of them.

    `parts` are the micro-batches that its samples make.
    """
    source = "prediction"
    if not milliseconds:
        reason = f"the rates of {gpu} are not known"
        return Decision(feature="step_time", value="unknown", source=source, reason=reason)
    size = config.train.train_batch_size
    of, every = "one micro-batch", f"for all {micro_batches(config)}"
    if parts > _SEVERAL:
        every += " batches"
        shapes = "of the shapes of this set" if geometry.pictures_known else "of six shapes"
        of = f"{size} samples, {parts:.1f} micro-batches where pictures are {shapes}"
    whole = micro_batches(config) * milliseconds / 3.6e6
    mix = _MIX if geometry.captions_vary else ""
    reason = f"predicted, not measured: {of}; {mix}{whole:.1f} h {every}"
    return Decision(feature="step_time", value=f"{milliseconds:.0f} ms", source=source, reason=reason)
