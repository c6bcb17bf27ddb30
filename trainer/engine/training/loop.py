"""The training loop. One host synchronisation a log step; a bad step changes nothing and ends the run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Generator

import torch

from trainer.engine.building.build import Built
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.batches import to_device
from trainer.engine.context import Context
from trainer.engine.optimizing.exchange import told
from trainer.engine.optimizing.optimizer import FLOOR, HostFlag
from trainer.engine.optimizing.schedule import learning_rate
from trainer.engine.records import checkpoint
from trainer.engine.training import held_out
from trainer.engine.training.feed import Fed, feed
from trainer.engine.training.preview import draw_previews, preview_path, sample
from trainer.engine.training.state import Run, State, Work, save
from trainer.errors import (
    DataError,
    DivergedError,
    ExitCode,
    HardwareError,
    OutOfMemoryError,
    StoppedError,
    TrainerError,
)
from trainer.families.values import ENDS, TEXT_MASK, Batch, Draw
from trainer.modeling.attention.text_lengths import padded_text
from trainer.modeling.blocks.compiled import graphs_compiled, mark_varying
from trainer.modeling.seeds import seeded
from trainer.telemetry.progress import Progress, progress
from trainer.telemetry.sinks.records import METRICS_LOG, ValidationRecord, read_metrics
from trainer.telemetry.status import Phase


def train(run: Run, state: State) -> None:
    """Train from `state` to max_train_steps and save the last step.

    On a stop request, low memory or a damaged cache entry the last complete step is saved before it raises.
    """
    context, config = run.context, run.context.config
    total = config.train.max_train_steps
    steps = Steps(feed(context, run.entries, context.settings, state.step, total))
    context.status.beat(Phase.FIRST_STEP, step=state.step, total=total)
    run.journal.phase(Phase.FIRST_STEP)
    try:
        _look_before(run, state)
        _look_ahead(run, state, steps)
        with progress(total, "training", start=state.step) as bar:
            run.journal.start_clock()
            while state.step < total:
                first = state.flag is None
                _one_step(run, state, steps)
                if first:
                    run.journal.phase(Phase.TRAIN)
                _after_step(run, state, bar)
        if context.plan.compile:
            captured = "" if run.graphs is None else f"{run.graphs}; "
            context.say(f"{captured}{graphs_compiled()} graphs compiled")
        _check_finite(run, state)
        # before the export, so that a failing export loses nothing; not of a full fine-tune that was told to
        # write no checkpoints: they are four times the model's size
        if config.method == "lora" or config.checkpoint.checkpointing_steps <= total:
            save(run, state)
    except (StoppedError, OutOfMemoryError, DataError):
        state.updater.drop_gradients()
        if state.step > 0:
            _check_finite(run, state)
            save(run, state)
        raise
    finally:
        steps.close()


def follow(work: Work, state: State) -> bool:
    """Train as rank 0 does in `train`, draw this rank's share of the previews, and leave it to that one to
    write and to say anything.

    Where all ranks are to end, it returns False: rank 0 saves, says why, and ends them. They do by every
    error of ours, because each of these is agreed on before it is raised.
    """
    context, config = work.context, work.context.config
    total, every = config.train.max_train_steps, config.validation.every_steps
    steps = Steps(feed(context, work.entries, context.settings, state.step, total))
    context.status.beat(Phase.FIRST_STEP, step=state.step, total=total)
    with contextlib.closing(steps), contextlib.suppress(TrainerError):
        measures, draws = context.ranks.from_first(lambda: (False, False))  # as `_look_before` says
        if measures:
            _validate(work, state.step)
        if draws:
            _draw_share(work)
        _look_ahead(work, state, steps)
        while state.step < total:
            _one_step(work, state, steps)
            if state.step % every == 0 or state.step == total:
                _validate(work, state.step)
            if state.step % every == 0 and state.step < total:
                _draw_share(work)
        return True
    return False


def _draw_share(work: Work) -> None:
    """Draw this rank's previews where rank 0 draws all of a step."""
    if work.context.config.validation.prompts:
        with beside_training(work):
            sample(work.context, work.built.model, work.entries, work.context.ranks)


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


def _look_ahead(work: Work, state: State, steps: Steps) -> None:
    """Raise the problem of the first step on all ranks, where there are several: none begins it alone."""
    context = work.context
    if context.ranks.size > 1:
        # read by all of them before one of them, reading ahead, finds a damaged entry and removes it
        context.ranks.agreed(lambda: len(work.entries.headers))
        state.problem = steps.problem_ahead()
        _raise_problem(context, state)


def _raise_problem(context: Context, state: State) -> None:
    """Raise the first problem of any rank on all of them."""

    def tell() -> None:
        if state.problem is not None:
            raise state.problem

    context.ranks.agreed(tell)


def _one_step(run: Work, state: State, steps: Steps) -> None:
    """One optimizer step over its micro-batches; nothing here waits for the device but the previous step's
    flag.

    Of several ranks each tells at the end whether it can read the next one. Where one cannot, all end after
    the micro-batches of that next step, and before it changes anything.
    """
    context, total = run.context, run.context.config.train.max_train_steps
    step = steps.take()
    exchange, phase = run.built.updater.exchange, Phase.FIRST_STEP if state.flag is None else Phase.TRAIN
    # a mean over the step, however its samples are parted
    weight = sum(fed.weight for fed in step)
    # float64: sums do not depend on where a resume cut them
    loss, losses = torch.zeros((), device=context.device, dtype=torch.float64), list[torch.Tensor]()
    for number, fed in enumerate(step):
        if exchange is None:  # several ranks end together, as they agree below
            context.stop.raise_if_requested()
        if fed.batch is not None:
            loss += (found := _micro_batch(run, fed, fed.batch, weight))
            losses += [] if exchange is None else [found.clone()]  # a graph writes to the same place again
            context.status.beat(phase, step=state.step, total=total)
        if exchange is not None and ((number + 1) % context.ranks.size == 0 or fed is step[-1]):
            exchange.add_round(number % context.ranks.size + 1)
    _check_finite(run, state)
    _check_told(context, state)
    if exchange is not None:
        state.problem = steps.problem_ahead()
        failed = 0 if state.problem is None else state.problem.exit_code
        loss, said = exchange.agree(
            losses,
            len(step),
            asked=max(context.stop.requested or 0, failed),
            seconds=context.status.last_step_seconds,
            digest=state.updater.digest(),
        )
        state.told = HostFlag(said)
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
    context.status.beat(Phase.TRAIN, step=state.step, total=total, item_done=True)


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


def _check_told(context: Context, state: State) -> None:
    """Act on what the ranks said of themselves in the last step, all of them alike.

    Raises the problem of one that cannot read this step, and as `StopFlag.raise_if_requested` where one was
    asked to end. Names one that is slow.
    """
    if state.told is None:
        return
    said = told(state.told.values())
    state.equal_step = state.step - 1
    slow = state.slow.look(said.seconds)
    if slow:
        context.say(slow)
    if said.asked:
        _raise_problem(context, state)
        context.stop.requested = ExitCode(said.asked)
        context.stop.raise_if_requested()


def _check_equal(state: State) -> None:
    """Raise HardwareError where the ranks held different weights before the last step."""
    if state.told is None or not told(state.told.values()).unequal:
        return
    raise HardwareError(
        f"step {state.step}: the processes of this run do not hold equal weights any more; after step"
        f" {state.equal_step} they did",
        remedy="look for errors of a device, its memory or a link (dmesg, nvidia-smi -q), then start again:"
        " the newest checkpoint is gone on with",
    )


def _check_finite(run: Work, state: State) -> None:
    """Read the last step's flag; raise DivergedError naming the files that were in it, HardwareError where
    ranks do not hold equal weights.
    """
    _check_equal(state)
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
        remedy="look at these files, lower train.learning_rate, or train in fp32",
    )


def _after_step(run: Run, state: State, bar: Progress) -> None:
    """Log, preview, validate and save where this step is due for it."""
    config, step = run.context.config, state.step
    total, every = config.train.max_train_steps, config.validation.every_steps
    validation = None
    with run.journal.untimed():
        if step % every == 0 or step == total:
            try:
                validation = _validate(run, step)
            except DataError:
                # the step is saved now, so that no later process can write its line
                bar.advance(1, text=_log(run, state, None))
                raise
    logs = step % config.train.log_every_steps == 0 or step == total or validation is not None
    bar.advance(1, text=_log(run, state, validation) if logs else "")
    with run.journal.untimed():
        # saved first: a failing preview loses no step, and a resumed run draws the preview that is missing
        if step % config.checkpoint.checkpointing_steps == 0:
            _check_finite(run, state)
            save(run, state)
        if step % every == 0 and step < total:  # the last one is drawn with the LoRA loaded from its file
            with beside_training(run):
                draw_previews(run, step)


def _look_before(run: Run, state: State) -> None:
    """The held-out loss and preview of the base before the first step; on a resume, those of
    the checkpoint's step that are missing: held-out samples could not be read, or its preview was stopped.
    """
    step, context, config = state.step, run.context, run.context.config
    rows = read_metrics(context.run_dir / METRICS_LOG)
    measured = any(row["step"] == step and "validation_loss" in row for row in rows)
    due, last = step % config.validation.every_steps == 0, step == config.train.max_train_steps
    draws = step == 0 or (due and not last and not preview_path(context, step).exists())
    measures = step == 0 or ((due or last) and not measured)
    context.ranks.from_first(lambda: (measures, draws))
    record = _validate(run, step) if measures else None
    if record is not None:
        run.journal.log_validation(record)
        when = f"of step {step}, measured now" if step else "before the first step"
        context.say(f"held-out loss {when}: {record.validation_loss:.4f}")
    if draws:
        with beside_training(run):
            draw_previews(run, step)


def _validate(run: Work, step: int) -> ValidationRecord | None:
    """The held-out loss, measured by all ranks together; None where nothing is held out."""
    context, model = run.context, run.built.model
    if run.held_out is None:
        return None
    with beside_training(run):
        record = held_out.measure(context, model, run.held_out, step=step, ranks=context.ranks)
        if step and context.ranks.first:
            held_out.keep_best(context, model, record)
    return record


@contextlib.contextmanager
def beside_training(run: Work) -> Generator[None, None, None]:
    """Previews, held-out losses and exports: without the activations that CUDA graphs hold, and without
    compiling more; with the mean of the weights, where one is kept.
    """
    if run.graphs is not None:
        run.graphs.drop()
    with uncompiled(run.context), run.built.updater.averaged():
        yield


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
        validation=validation,
    )
    state.interval_loss.zero_()
    state.interval_steps.zero_()
    state.timed_steps = state.interval_samples = state.interval_tokens = 0
    return line
