"""Agreement of the ranks of a run on each step: what they tell each other, and how they end together.

Each tells at the end of a step whether it was asked to end, whether it can read the next one, and a number
that follows from its weights. All read the same row one step later, as the flag of a bad step, so all of them
decide alike.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence

import torch

from trainer.engine.context import Context
from trainer.engine.optimizing import exchange
from trainer.engine.optimizing.exchange import Told
from trainer.engine.optimizing.updater import HostFlag
from trainer.engine.training import orders
from trainer.engine.training.feed import Fed
from trainer.engine.training.state import State, Work
from trainer.errors import ExitCode, HardwareError, TrainerError


class Steps:
    """The steps that `feed` makes; of the next one can be told ahead whether it has a problem."""

    def __init__(self, made: Generator[tuple[Fed, ...], None, None]) -> None:
        self._made, self._next = made, tuple[Fed, ...]()

    def take(self) -> tuple[Fed, ...]:
        """The micro-batches of the next step. Raises what reading raised."""
        step, self._next = self._next or next(self._made), ()
        return step

    def problem_ahead(self) -> TrainerError | None:
        """The first problem of the next step, once it is read; None where there is no next step."""
        self._next = self._next or next(self._made, ())
        return next((fed.problem for fed in self._next if fed.problem is not None), None)

    def close(self) -> None:
        """Read no further."""
        self._made.close()


def look_ahead(work: Work, state: State, steps: Steps) -> None:
    """Raise the problem of the first step on all ranks, where there are several: none begins it alone."""
    context = work.context
    if context.ranks.size > 1:
        # read by all of them before one of them, reading ahead, finds a damaged entry and removes it
        context.ranks.agreed(lambda: len(work.entries.headers))
        state.problem = steps.problem_ahead()
        _raise_problem(context, state)


def _raise_problem(context: Context, state: State) -> None:
    """Raise the first problem of any rank on all of them."""
    context.ranks.agreed(functools.partial(_tell_problem, state))


def _tell_problem(state: State) -> None:
    if state.problem is not None:
        raise state.problem


def begin(work: Work, state: State) -> None:
    """Begin a step, where all ranks pass through the model together: none does alone.

    Raises on all of them the problem of one that cannot read the step, and as `StopFlag.raise_if_requested`
    where one was asked to end.
    """
    context = work.context

    def tell() -> None:
        _tell_problem(state)
        context.stop.raise_if_requested()

    if context.plan.in_rows:
        context.ranks.agreed(tell)


def check_told(work: Work, state: State) -> None:
    """Act on what the ranks said of themselves in the last step, all of them alike.

    Raises the problem of one that cannot read this step, and as `StopFlag.raise_if_requested` where one was
    asked to end. Names one that is slow.
    """
    if state.told is None:
        return
    context, said = work.context, Told.of(state.told.values())
    state.equal_step = max(state.equal_step, state.step - 1)
    state.orders = orders.of_bits(said.orders)
    state.add_computed(said.computed)
    slow = state.slow.look(said.seconds)
    if slow:
        context.say(slow)
    if said.asked:
        require_equal(work, state)  # before it is saved
        _raise_problem(context, state)
        context.stop.requested = ExitCode(said.asked)
        context.stop.raise_if_requested()


def check_equal(state: State) -> None:
    """Raise HardwareError where the ranks held different weights before the last step."""
    if state.told is not None and Told.of(state.told.values()).unequal:
        raise _unequal(state)


def require_equal(work: Work, state: State) -> None:
    """Raise HardwareError where the ranks hold different weights now, before they are measured or saved."""
    ranks = work.context.ranks
    if ranks.size == 1 or work.context.plan.in_rows:  # no two have rows in common
        return
    if len(set(ranks.gathered(float(state.updater.digest())))) > 1:
        if state.told is not None and not Told.of(state.told.values()).unequal:
            state.equal_step = state.step - 1
        with ranks.together():
            raise _unequal(state)
    state.equal_step = state.step


def _unequal(state: State) -> HardwareError:
    return HardwareError(
        f"step {state.step}: the processes of this run do not hold equal weights any more; after step"
        f" {state.equal_step} they did",
        remedy="look for errors of a device, its memory or a link (dmesg, nvidia-smi -q), then start again:"
        " what was saved before is sound",
    )


def agree(work: Work, state: State, steps: Steps, losses: Sequence[torch.Tensor], count: int) -> torch.Tensor:
    """The loss of a step of `count` micro-batches, of which `losses` are this rank's.

    What the rank tells besides is in `state.told`.
    """
    state.problem = steps.problem_ahead()
    failed = 0 if state.problem is None else state.problem.exit_code
    asked = max(work.context.stop.requested or 0, failed)
    digest, (computed, seconds) = state.updater.digest(), state.watch.lap()
    loss, said = exchange.agree(
        work.context.ranks,
        losses,
        count,
        asked=asked,
        orders=orders.bits(orders.taken(work)) if work.context.ranks.first else 0,
        computed=computed,
        seconds=seconds,
        digest=digest,
    )
    state.told = HostFlag(said)
    return loss
