"""The reason why a run has learned nothing, where its optimizer knows one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.engine.optimizing.updater import Updater
from trainer.errors import DivergedError

_OTHER_TYPE = "write model.dtype: bf16 where the GPU has it, else fp32"


class NoEffectError(DivergedError):
    """The result changes nothing."""


@contextlib.contextmanager
def explained(updater: Updater) -> Iterator[None]:
    """Have a NoEffectError say what became of the optimizer's steps, with the remedy for that."""
    try:
        yield
    except NoEffectError as error:
        cause, remedy = _reason(updater)
        if not cause:
            raise
        (problem,) = error.problems
        raise NoEffectError(f"{problem.what}; {cause}", where=problem.where, remedy=remedy) from error


def _reason(updater: Updater) -> tuple[str, str]:
    """(what happened, what to do); empty for steps that were as they should be."""
    taken = updater.steps_taken
    if updater.scale is not None and taken and not int(updater.scale.applied.item()):
        what = f"none of the run's steps ({taken}) was applied, as the gradients of each overflowed fp16"
        more = "or train more steps: the loss is scaled down by half after each that overflows"
        return what, f"{_OTHER_TYPE}; {more}"
    if updater.kind == "prodigy" and isinstance(updater.optimizer, torch.optim.Optimizer):
        rate = float(updater.optimizer.param_groups[0]["d"])
        return (
            f"prodigy's own estimate of the rate is {rate:.0e} so far, and it begins at 1e-06",
            "train more steps, which it needs to find the rate, without train.lr_warmup_steps; or write"
            " train.optimizer: adamw, and a train.learning_rate for it",
        )
    return "", ""
