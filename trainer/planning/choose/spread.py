"""How many processes train a run: those that are asked for, where they share a step evenly.

Their number is a property of the machine: batch, accumulation, learning rate and steps are the whole run's,
whatever it is, and nothing is multiplied by it.
"""

from __future__ import annotations

from dataclasses import replace

from trainer.errors import ConfigError
from trainer.planning.choose import batching
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision

KEY = "parallel.gpus"


def spread(situation: Situation) -> tuple[Situation, Decision | None, Decision | None]:
    """The situation with the number of processes, and micro-batches that they share evenly; the rows of the
    number, and of a step's samples where they are parted for it.

    There is no row where nobody asks for more than one. Raises HardwareError on a GPU, ConfigError where a
    step cannot be shared by so many.
    """
    config, count = situation.config, situation.config.parallel.gpus
    if count in ("auto", 1):
        return situation, None, None
    assert count != "auto"
    if situation.on_gpu:
        raise situation.refuse(KEY, "this version trains on one GPU; several processes are for CPUs")
    if config.method == "full":
        raise _refused(situation, "a full fine-tune trains in one process in this version", f"write {KEY}: 1")
    parted = [config, *(() if situation.goes_on else batching.smaller(config))]
    shared = [one for one in parted if one.train.gradient_accumulation_steps % count == 0]
    if not shared:
        most = parted[-1].train.gradient_accumulation_steps
        divisors = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
        began = (
            "micro-batches of a step, in which the run began" if situation.goes_on else "samples of a step"
        )
        other = "" if situation.goes_on else ", or other train.gradient_accumulation_steps"
        remedy = f"write one of {divisors}{other}"
        raise _refused(situation, f"{count} do not share the {most} {began} evenly", remedy)
    each = shared[0].train.gradient_accumulation_steps // count
    reason = f"each takes {each} of a step's {each * count} micro-batches; batch and rate are the whole run's"
    row = Decision("gpus", str(count), situation.source(KEY), reason)
    split = None
    if shared[0] is not config:
        split = batching.row(shared[0], config, f"cannot be shared by {count} processes")
    return replace(situation, config=shared[0], ranks=count), row, split


def _refused(situation: Situation, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{KEY}: {what}", where=situation.source(KEY), remedy=remedy)
