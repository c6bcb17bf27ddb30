"""How many processes train a run: those that are asked for, where they share a step evenly.

Their number is a property of the machine: batch, accumulation, learning rate and steps are the whole run's,
whatever it is, and nothing is multiplied by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainer.config.schema import RunConfig
from trainer.errors import ConfigError
from trainer.planning.choose import batching
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision

KEY = "parallel.gpus"


def spread(situation: Situation) -> tuple[Situation, Decision | None, Decision | None]:
    """The situation with the number of processes, and micro-batches that they share evenly; the rows of the
    number, and of a step's samples where they are parted for it.

    `auto` is the largest number of GPUs of one kind that share a step evenly, and one on a CPU. There is no
    row where there is no choice. Raises HardwareError for more GPUs than there are, ConfigError where a step
    cannot be shared by so many.
    """
    config, asked = situation.config, situation.config.parallel.gpus
    parted = [config, *(() if situation.goes_on else batching.smaller(config))]
    devices = _alike(situation)
    if asked == "auto":
        most = max(1, len(devices)) if config.method == "lora" else 1
        count, chosen = next(found for number in range(most, 0, -1) if (found := _shared(parted, number)))
    else:
        count, chosen = _as_written(situation, asked, devices, parted)
    row = _row(situation, count, chosen) if len(situation.facts.gpus) > 1 or count > 1 else None
    why = f"cannot be shared by {count} processes"
    split = None if chosen is config else batching.row(chosen, config, why)
    return replace(situation, config=chosen, ranks=count, devices=devices[:count]), row, split


def _alike(situation: Situation) -> tuple[int, ...]:
    """Places of the visible GPUs of the kind that the run trains on; empty on a CPU."""
    if not situation.on_gpu:
        return ()
    facts = situation.facts
    return tuple(number for number, gpu in enumerate(facts.gpus) if gpu == facts.gpu)


def _shared(parted: Sequence[RunConfig], count: int) -> tuple[int, RunConfig] | None:
    """The number, and the first of these configurations whose steps so many processes share evenly."""
    found = next((one for one in parted if one.train.gradient_accumulation_steps % count == 0), None)
    return None if found is None else (count, found)


def _as_written(
    situation: Situation, count: int, devices: Sequence[int], parted: Sequence[RunConfig]
) -> tuple[int, RunConfig]:
    """The written number, with a configuration whose steps it shares."""
    if situation.on_gpu and count > len(devices):
        have = f"{len(devices)} of the kind of {situation.facts.gpu.name} are visible"
        raise situation.refuse(
            KEY, f"{count} GPUs are asked for, {have}", f"write {len(devices)} or less, or auto"
        )
    if situation.config.method == "full" and count > 1:
        raise _refused(situation, "a full fine-tune trains in one process in this version", f"write {KEY}: 1")
    found = _shared(parted, count)
    if found is None:
        most = parted[-1].train.gradient_accumulation_steps
        divisors = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
        began = (
            "micro-batches of a step, in which the run began" if situation.goes_on else "samples of a step"
        )
        other = "" if situation.goes_on else ", or other train.gradient_accumulation_steps"
        raise _refused(
            situation, f"{count} do not share the {most} {began} evenly", f"write one of {divisors}{other}"
        )
    return found


def _row(situation: Situation, count: int, chosen: RunConfig) -> Decision:
    """The row of the number, which says what would let more GPUs help."""
    gpus, alike, train = situation.facts.gpus, len(_alike(situation)), chosen.train
    each = train.gradient_accumulation_steps // count
    reason = f"each takes {each} of a step's {each * count} micro-batches; batch and rate are the whole run's"
    if count == 1 and chosen.method == "full":
        reason = "a full fine-tune trains on one GPU in this version"
    elif situation.on_gpu and count < alike:
        size = train.gradient_accumulation_steps * train.train_batch_size
        samples = f"{size} sample{'' if size == 1 else 's'}"
        more = -(-size // alike) * alike // train.train_batch_size
        reason = (
            f"a step has {samples}: train.gradient_accumulation_steps: {more} makes a step of"
            f" {more * train.train_batch_size} on {alike} GPUs, which takes about as long"
        )
    if situation.on_gpu and alike < len(gpus):
        left = len(gpus) - alike
        reason += f"; {left} of another kind {'stays' if left == 1 else 'stay'} unused"
    value = f"{count} of {len(gpus)}" if situation.on_gpu else str(count)
    source = "auto" if situation.config.parallel.gpus == "auto" else situation.source(KEY)
    return Decision("gpus", value, source, reason)


def _refused(situation: Situation, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{KEY}: {what}", where=situation.source(KEY), remedy=remedy)
