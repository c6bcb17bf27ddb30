"""The reason why a run has learned nothing, where its optimizer knows one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from trainer.engine.optimizing.updater import Updater
from trainer.errors import DivergedError

_GO_ON = "raise train.max_train_steps and go on"


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
        other = "write model.dtype: bf16 where the GPU has it, else fp32, and another output_dir"
        return what, f"{other}; or {_GO_ON}: the loss is scaled down by half after each that overflows"
    if updater.kind == "prodigy" and isinstance(updater.optimizer, torch.optim.Optimizer):
        group = updater.optimizer.param_groups[0]
        return (
            f"prodigy's own estimate of the rate is {group['d']:.0e} so far, and began at {group['d0']:.0e}",
            f"{_GO_ON}: it needs steps to find the rate; or write train.optimizer: adamw, a"
            " train.learning_rate for it and another output_dir",
        )
    return "", ""
