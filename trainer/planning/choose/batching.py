"""A step's samples in micro-batches: smaller ones, and more of them, where that is better."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.schema import RunConfig, changed
from trainer.planning.choose.situation import Situation
from trainer.planning.cost import states
from trainer.planning.cost.storage import Storage, counted, parameters
from trainer.planning.plan import Decision


def micro_batches(config: RunConfig) -> int:
    """Batches of the whole run: each is one forward pass where its samples are of one shape, else several."""
    return config.train.max_train_steps * config.train.gradient_accumulation_steps


def smaller(config: RunConfig) -> Iterator[RunConfig]:
    """The configuration with each smaller divisor as batch size, and as many samples a step as before."""
    train = config.train
    for size in range(train.train_batch_size - 1, 0, -1):
        if train.train_batch_size % size == 0:
            steps = train.gradient_accumulation_steps * (train.train_batch_size // size)
            values = {"train.train_batch_size": size, "train.gradient_accumulation_steps": steps}
            yield changed(config, values)


def row(config: RunConfig, asked: RunConfig, why: str) -> Decision:
    """Row on the micro-batches of a step, and why they differ from `asked`, the user's configuration."""
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    reason = f"{asked.train.train_batch_size} samples at once {why}; a step still has {size * steps}"
    return Decision("micro_batch", f"{size} x {steps}", "auto", reason)


_SEVERAL = 1.05
_MIX = "with captions of 1 to 300 tokens, as many short as long by their logarithm; "


def time_row(situation: Situation, milliseconds: float, parts: float, beside: str = "") -> Decision:
    """The predicted time of a batch, which makes so many `parts`; where captions are not of one length, of a
    usual mix of them. `beside` says how the time of weights on their way is counted. 0 milliseconds are those
    of a machine whose rates are not known. Also told is why control images count as larger than targets.
    """
    config, geometry = situation.config, situation.geometry
    value, reason = "unknown", f"the rates of {situation.gpu} are not known"
    if milliseconds:
        of, every = "one micro-batch", f"for all {micro_batches(config)}"
        of += " with its share of the optimizer's step" if config.method == "full" else ""
        if parts > _SEVERAL:
            every += " batches"
            shapes = "of the shapes of this set" if geometry.pictures_known else "of six shapes"
            size = config.train.train_batch_size
            of = f"{size} samples, {parts:.1f} micro-batches where pictures are {shapes}"
        whole = f"{micro_batches(config) * milliseconds / situation.ranks / 3.6e6:.1f} h {every}"
        mix = _MIX if geometry.captions_vary else ""
        value, reason = f"{milliseconds:.0f} ms", f"predicted, not measured: {of}; {mix}{whole}"
        reason += f"; {beside}" if beside else ""
    reason += f"; {geometry.larger_controls}" if geometry.larger_controls else ""
    return Decision("step_time", value, "prediction", reason)


def optimizer_rows(situation: Situation, milliseconds: float, storage: Storage) -> Iterator[Decision]:
    """The row of the predicted time of the optimizer's step; none where it is not known, or an adapter's."""
    if not milliseconds:
        return
    count = -(-parameters(situation.geometry, "trained") // storage.ranks)
    size, _ = states.passed(storage.optimizer, averaged=storage.averaged)
    reason = f"predicted, not measured: once a step, {size:g} bytes of each of {counted(count)}"
    if storage.way.compute:
        reason += f", and their {storage.way.compute} bytes"
    yield Decision("optimizer_time", f"{milliseconds:.0f} ms", "prediction", reason)
