"""Orders to a run from outside, carried out between two steps: all ranks do so after the same one."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.engine.training.preview import preview_path
from trainer.engine.training.state import Run, State, Work
from trainer.telemetry import control
from trainer.telemetry.control import BETWEEN_STEPS, Order


def taken(work: Work) -> tuple[Order, ...]:
    """The orders that came since the last call; for rank 0, which the others believe."""
    return control.take(work.context.status.directory, BETWEEN_STEPS)


def bits(orders: Iterable[Order]) -> int:
    """Orders as a number that ranks tell each other."""
    return sum(1 << BETWEEN_STEPS.index(order) for order in orders)


def of_bits(told: int) -> tuple[Order, ...]:
    """The orders of a number that `bits` gave."""
    return tuple(order for place, order in enumerate(BETWEEN_STEPS) if told & 1 << place)


def answer(run: Run, state: State) -> None:
    """Say of each order that was carried out after this step what came of it."""
    context, step = run.context, state.step
    for order in state.orders:
        if order is Order.SAMPLE and (state.ended_early or step == context.config.train.max_train_steps):
            continue  # the result's previews are drawn at the end: `answer_rest`
        done = "no previews: validation.prompts is empty"
        if order is Order.SAVE:
            done = f"checkpoints/step-{step:06d}"
        elif context.config.validation.prompts:
            done = str(preview_path(context, step).relative_to(context.run_dir))
        control.answer(context.status.directory, order, step=step, done=done)
        context.say(f"asked to {order}, done at step {step}: {done}")
    state.orders = ()


def answer_rest(run: Run, step: int) -> None:
    """Answer what was asked for after the last step: its results are saved and drawn."""
    folder = run.context.status.directory
    taken(run)
    for request in control.requests(folder):
        if request.step is None and request.order in BETWEEN_STEPS:
            done = "training was over: the results are saved, and previews of them drawn"
            control.answer(folder, request.order, step=step, done=done)
