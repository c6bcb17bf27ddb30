"""The training loop. One host synchronisation a log step; a bad step changes nothing and ends the run."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence

import torch

from trainer.engine.building.build import Built
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.batches import to_device
from trainer.engine.context import Context
from trainer.engine.optimizing.schedule import learning_rate
from trainer.engine.optimizing.updater import FLOOR, HostFlag
from trainer.engine.records import checkpoint
from trainer.engine.training import orders, rounds, together
from trainer.engine.training.feed import Fed, feed
from trainer.engine.training.state import Run, State, Work, save, take_part_in_save
from trainer.errors import (
    AccessError,
    DataError,
    DivergedError,
    EndedTogether,
    OutOfMemoryError,
    StoppedError,
    TrainerError,
)
from trainer.families.values import ENDS, TEXT_MASK, Batch, Draw
from trainer.modeling.attention.text_lengths import padded_text
from trainer.modeling.blocks.compiled import graphs_compiled, mark_varying
from trainer.modeling.seeds import seeded
from trainer.telemetry.control import Order
from trainer.telemetry.progress import Progress, progress
from trainer.telemetry.sinks.records import ValidationRecord
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

_SAVED = (StoppedError, OutOfMemoryError, DataError, AccessError)
"""Errors before which the last complete step is saved."""


def train(run: Run, state: State) -> None:
    """Train from `state` to max_train_steps and save the last step.

    On a stop request, low memory or a damaged cache entry the last complete step is saved before it raises.
    """
    context, config = run.context, run.context.config
    total = config.train.max_train_steps
    steps = together.Steps(feed(context, run.entries, context.settings, state.step, total))
    context.status.beat(Phase.FIRST_STEP, step=state.step, total=total)
    run.journal.publish()
    try:
        rounds.look_before(run, state)
        if not state.ended_early:
            together.look_ahead(run, state, steps)
        with progress(total, "training", start=state.step) as bar:
            run.journal.start_clock()
            while state.step < total and not state.ended_early:
                _one_step(run, state, steps)
                _after_step(run, state, bar)
        if context.plan.compile:
            captured = "" if run.graphs is None else f"{run.graphs}; "
            context.say(f"{captured}{numbered(graphs_compiled(), 'graph')} compiled")
        _check_finite(run, state)
        together.require_equal(run, state)
        if state.ended_early:
            rounds.tell_early_stop(run, state)
        if _saves_last(run):
            save(run, state)
    except _SAVED:
        state.updater.drop_gradients()
        if state.step > 0:
            _check_finite(run, state)
            save(run, state)
        raise
    finally:
        steps.close()


def _saves_last(work: Work) -> bool:
    """Whether the last step is saved: before the export, so that a failing export loses nothing; not of a
    full fine-tune that was told to write no checkpoints, which are four times the model's size.
    """
    config = work.context.config
    return config.method == "lora" or config.checkpoint.checkpointing_steps <= config.train.max_train_steps


def follow(work: Work, state: State) -> None:
    """Train as rank 0 does in `train`, draw this rank's share of the previews, and leave it to that one to
    write and to say anything; give the rows that this rank has of what that one saves. Raises EndedTogether
    where all ranks end.
    """
    try:
        _follow(work, state)
    except EndedTogether as ended:
        state.updater.drop_gradients()
        if work.context.plan.in_rows and isinstance(ended.__cause__, _SAVED) and state.step > 0:
            _check_with_first(work, state)
            take_part_in_save(work, state)
        raise


def _follow(work: Work, state: State) -> None:
    context, config = work.context, work.context.config
    total, every = config.train.max_train_steps, config.validation.every_steps
    steps = together.Steps(feed(context, work.entries, context.settings, state.step, total))
    context.status.beat(Phase.FIRST_STEP, step=state.step, total=total)
    with contextlib.closing(steps):
        rounds.follow_before(work, state)
        if not state.ended_early:
            together.look_ahead(work, state, steps)
        while state.step < total and not state.ended_early:
            _one_step(work, state, steps)
            validates = state.step % every == 0 or state.step == total
            validation = rounds.validate(work, state) if validates else None
            saves = state.step % config.checkpoint.checkpointing_steps == 0 or Order.SAVE in state.orders
            if saves or _logs(work, state, validation):
                _check_with_first(work, state)
            if saves:
                together.require_equal(work, state)
                take_part_in_save(work, state)
            if state.step % every == 0 and state.step < total:
                rounds.follow(work, state)
            elif Order.SAMPLE in state.orders and state.step < total:
                rounds.follow_asked(work, state)
        _check_with_first(work, state)
        together.require_equal(work, state)
        if _saves_last(work):
            take_part_in_save(work, state)


def _check_with_first(work: Work, state: State) -> None:
    """`_check_finite` where rank 0 makes it by itself: all end for the same reason, on every host."""
    with work.context.ranks.together():
        _check_finite(work, state)


def _one_step(run: Work, state: State, steps: together.Steps) -> None:
    """One optimizer step over its micro-batches; nothing here waits for the device but the previous step's
    flag.

    Of several ranks each tells at the end whether it can read the next one. Where one cannot, all end after
    the micro-batches of that next step, and before it changes anything; those that pass through the model
    together end before these.
    """
    context, total = run.context, run.context.config.train.max_train_steps
    made = steps.take()
    together.begin(run, state)
    loss, losses = _micro_batches(run, state, made)
    step = [fed for fed in made if not fed.spare]
    with context.ranks.together():
        _check_finite(run, state)
        together.check_told(run, state)
    if context.ranks.size > 1:
        loss = together.agree(run, state, steps, losses, len(step))
    else:
        state.add_computed(state.watch.lap()[0])
    state.grad_norm, bad = state.updater.step(learning_rate(context.config.train, state.step + 1), loss)
    state.flag = HostFlag(bad)
    state.suspects = tuple(fed.micro_batch for fed in step)
    # in fp16 a step that overflowed in the forward pass was skipped, and has no loss; in other types it ends
    # the run before the sum is read
    state.interval_loss += torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
    state.interval_steps += torch.isfinite(loss)
    state.step += 1
    state.timed_steps += 1
    state.interval_samples += sum(len(fed.micro_batch) for fed in step)
    state.interval_tokens += sum(fed.tokens for fed in step)
    state.interval_learned += sum(fed.weight for fed in step if fed.tokens)
    state.interval_flops += sum(run.flops(fed.micro_batch) for fed in step)
    context.status.beat(Phase.TRAIN, step=state.step, total=total, item_done=True)


def _micro_batches(run: Work, state: State, step: Sequence[Fed]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gradients of a step's micro-batches, of several ranks exchanged in rounds. Gives the sum of this rank's
    losses, on the device, and of several ranks each of them.
    """
    context, total = run.context, run.context.config.train.max_train_steps
    exchange, phase = run.built.updater.exchange, Phase.FIRST_STEP if state.flag is None else Phase.TRAIN
    several = context.ranks.size > 1
    # a mean over the step, however its samples are parted
    weight = sum(fed.weight for fed in step if not fed.spare)
    # float64: sums do not depend on where a resume cut them
    loss, losses = torch.zeros((), device=context.device, dtype=torch.float64), list[torch.Tensor]()
    for number, fed in enumerate(step):
        if not several:  # several ranks end together, as they agree before or after the step
            context.stop.raise_if_requested()
        if fed.batch is not None:
            units = fed.tokens or fed.batch.size
            with state.watch.running(units):
                # a spare one has neither loss nor gradients
                found = _micro_batch(run, fed, fed.batch, math.inf if fed.spare else weight)
            loss += 0.0 if fed.spare else found
            # a graph writes to the same place again
            losses += [found.clone()] if several and not fed.spare else []
            context.status.beat(phase, step=state.step, total=total)
        if exchange is not None and ((number + 1) % context.ranks.size == 0 or fed is step[-1]):
            exchange.add_round(number % context.ranks.size + 1)
    return loss, losses


def _micro_batch(run: Work, fed: Fed, batch: Batch, weight: float) -> torch.Tensor:
    """The loss of a micro-batch of this rank, as `compute` gives it, from a graph where there are graphs."""
    context, train, lora = run.context, run.context.config.train, run.context.config.lora
    batch, draw = to_device(batch, fed.draw, context.device, context.dtype)
    if run.graphs is not None:
        return run.graphs(batch, draw, torch.full((), weight, device=context.device))
    drops = context.config.method == "lora" and lora.dropout
    # the dropout of a micro-batch follows from the seed and its first sample alone
    label = f"{train.seed}/dropout/{fed.micro_batch[0].position}"
    with seeded(label, context.device) if drops else contextlib.nullcontext():
        return compute(context, run.built, batch, draw, weight)


def compute(
    context: Context, built: Built, batch: Batch, draw: Draw | None, weight: float | torch.Tensor
) -> torch.Tensor:
    """Forward and backward of a micro-batch: adds its gradients to the optimizer's sums.

    Gives its loss: a scalar on the device, detached.
    """
    if context.plan.compile:
        _mark_lengths(batch)
    with padded_text(built.text_readers, batch.text.get(TEXT_MASK)):
        loss = context.family.loss(built.model, batch, draw, context.settings).sum() / weight
        built.accelerator.backward(built.updater.scaled(loss))
    built.updater.accumulate()
    if built.staged is not None and built.staged.closed:
        built.staged.empty()
    return loss.detach()


def _mark_lengths(batch: Batch) -> None:
    """Have compiled blocks take any number and length of captions, and any number of samples in a row."""
    if TEXT_MASK in batch.text:
        mark_varying(batch.text[TEXT_MASK], [0, 1])
    if ENDS in batch.text:
        mark_varying(batch.text[ENDS], [0])


def predict(context: Context, built: Built, batch: Batch, draw: Draw | None) -> None:
    """One forward pass as it is written, for the tables that a model keeps by the shapes that it saw."""
    with torch.no_grad(), uncompiled(context), padded_text(built.text_readers, batch.text.get(TEXT_MASK)):
        context.family.predict(built.model, batch, draw, context.settings)


def _check_finite(run: Work, state: State) -> None:
    """Read the last step's flag; raise DivergedError naming the files that were in it, HardwareError where
    ranks do not hold equal weights.
    """
    together.check_equal(state)
    if state.flag is None or state.flag.read() == 0.0:
        return
    records = run.entries.records
    files = sorted({str(records[sample.record].path) for micro in state.suspects for sample in micro})
    step, status = state.saved_step, run.context.status
    saved = f"the checkpoint of step {step} is intact (its checksums were compared just now)"
    if state.saved_in is None:
        saved = "nothing was saved"
    else:  # read once more before anybody relies on it
        try:
            problem = checkpoint.damage(state.saved_in, functools.partial(status.beat, Phase.SAVE, step=step))
        except TrainerError as error:
            problem = str(error)
        if problem is not None:
            saved = f"the checkpoint of step {step} cannot be used: {problem}"
    what = "the loss or a gradient is NaN or infinite; the step changed nothing"
    if state.updater.scale is not None:
        what = (
            f"gradients overflow fp16 however small the loss is made (its scale fell below {FLOOR:g}); the"
            " last steps changed nothing"
        )
    raise DivergedError(
        f"step {state.step}: {what} and {saved}",
        where=", ".join(files),
        remedy="look at these files, or lower train.learning_rate; or train in fp32, into another output_dir",
    )


def _after_step(run: Run, state: State, bar: Progress) -> None:
    """Log, preview, validate and save where this step is due for it, or was asked to."""
    if run.context.ranks.size == 1:  # several agreed on it in this step
        state.orders = orders.taken(run)
    config, step = run.context.config, state.step
    total, every = config.train.max_train_steps, config.validation.every_steps
    validation = None
    with run.journal.untimed():
        if step % every == 0 or step == total:
            try:
                validation = rounds.validate(run, state)
            except DataError:
                # the step is saved now, so that no later process can write its line
                bar.advance(1, text=_log(run, state, None))
                raise
    bar.advance(1, text=_log(run, state, validation) if _logs(run, state, validation) else "")
    with run.journal.untimed():
        # saved first: a failing preview loses no step, and a resumed run draws the preview that is missing
        if step % config.checkpoint.checkpointing_steps == 0 or Order.SAVE in state.orders:
            _check_finite(run, state)
            together.require_equal(run, state)
            save(run, state)
        if step % every == 0 and step < total:
            rounds.draw(run, state)
        elif Order.SAMPLE in state.orders and step < total:
            rounds.draw_asked(run, state)
        orders.answer(run, state)


def _logs(work: Work, state: State, validation: ValidationRecord | None) -> bool:
    """Whether rank 0 writes a line of the log after this step, and so reads the flag of a bad one."""
    train = work.context.config.train
    due = state.step % train.log_every_steps == 0 or state.step == train.max_train_steps
    return due or validation is not None


def _log(run: Run, state: State, validation: ValidationRecord | None) -> str:
    """Record the steps since the last line of the log, and give the line for people."""
    _check_finite(run, state)
    assert state.grad_norm is not None
    line = run.journal.log_step(
        loss=float((state.interval_loss / state.interval_steps).item()),  # NaN where no step has a loss
        learning_rate=learning_rate(run.context.config.train, state.step),
        grad_norm=float(state.grad_norm.item()),
        step=state.step,
        steps=state.timed_steps,
        samples=state.interval_samples,
        tokens=state.interval_tokens,
        # weights that are NaN end the run a moment later
        learned_tokens=int(state.interval_learned) if math.isfinite(state.interval_learned) else 0,
        flops=state.interval_flops,
        computed=state.interval_computed / state.computed_steps if state.computed_steps else None,
        validation=validation,
    )
    state.interval_loss.zero_()
    state.interval_steps.zero_()
    state.timed_steps = state.computed_steps = state.interval_samples = state.interval_tokens = 0
    state.interval_learned = state.interval_flops = state.interval_computed = 0.0
    return line
