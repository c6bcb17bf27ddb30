"""The training loop. One host synchronisation a log step; a bad step changes nothing and ends the
run.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer.data.sampler import MicroBatch
from trainer.engine.building.build import Built
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.entries import Entries
from trainer.engine.context import Context
from trainer.engine.optimizing.loss_scale import FLOOR
from trainer.engine.optimizing.optimizer import HostFlag
from trainer.engine.optimizing.schedule import learning_rate
from trainer.engine.records import checkpoint
from trainer.engine.records.journal import Journal
from trainer.engine.results.pictures import write_strip
from trainer.engine.results.proof import to_device
from trainer.engine.training import best, microbatch
from trainer.engine.training.feed import Fed, feed
from trainer.engine.training.graphs import Compute, Graphs
from trainer.engine.training.preview import draw_previews, preview_path
from trainer.engine.training.validation import HeldOut, measure
from trainer.errors import DataError, DivergedError, OutOfMemoryError, StoppedError, TrainerError
from trainer.modeling.blocks.compiled import graphs_compiled
from trainer.modeling.seeds import seeded
from trainer.telemetry.progress import Progress, progress
from trainer.telemetry.sinks.records import METRICS_LOG, ValidationRecord, read_metrics
from trainer.telemetry.status import Phase

_T = TypeVar("_T")


@dataclass(kw_only=True)
class State:
    """What changes while a run trains; `Snapshot` is its frozen copy."""

    step: int = 0
    interval_loss: float = 0.0
    interval_steps: int = 0
    """Since the last line of the log, also of a process that was killed since."""
    timed_steps: int = 0
    """Since the last line of the log, or since this process started; so are the next two."""
    interval_samples: int = 0
    interval_tokens: int = 0
    device_loss: torch.Tensor | None = None
    """Sum of the step losses that have not been read from the device."""
    device_lost: torch.Tensor | None = None
    """In fp16, how many of these were not finite, and are not in the sum."""
    grad_norm: torch.Tensor | None = None
    flag: HostFlag | None = None
    """1.0 where the last step was not finite; read one step later."""
    suspects: Sequence[MicroBatch] = field(default_factory=tuple)
    saved_step: int = 0
    saved_in: Path | None = None
    """Checkpoint of `saved_step`, which may be one of another folder that the run was resumed from."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts that the loop works with."""

    context: Context
    built: Built
    entries: Entries
    held_out: HeldOut | None
    journal: Journal
    settings: Any
    fingerprint: Mapping[str, str]
    """Values that a resume refuses to change."""
    recorded_settings: Mapping[str, str]
    """Values of which a resume tells the changes."""

    @functools.cached_property
    def graphs(self) -> Graphs | None:
        """Micro-batches as CUDA graphs, where the plan says so."""
        if not self.context.plan.cuda_graphs:
            return None
        predict = functools.partial(microbatch.predict, self.context, self.built, self.settings)
        return Graphs(self.compute, predict, self.context.say)

    @functools.cached_property
    def compute(self) -> Compute:
        """Forward and backward of a micro-batch."""
        return functools.partial(microbatch.compute, self.context, self.built, self.settings)


def train(run: Run, state: State) -> None:
    """Train from `state` to max_train_steps and save the last step.

    On a stop request, low memory or a damaged cache entry the last complete step is saved before it raises.
    """
    config = run.context.config
    total = config.train.max_train_steps
    steps = feed(run.context, run.entries, run.settings, state.step, total)
    run.context.status.beat(Phase.FIRST_STEP, step=state.step, total=total)
    run.journal.phase(Phase.FIRST_STEP)
    try:
        if state.step == 0:
            _validate_before_training(run)
        elif _owes_validation(run, state):
            _validate_late(run, state)
        if state.step == 0 or _owes_preview(run, state):
            _preview(run, state)
        with progress(total, "training", start=state.step) as bar:
            run.journal.start_clock()
            while state.step < total:
                first = state.flag is None
                _one_step(run, state, next(steps))
                if first:
                    run.journal.phase(Phase.TRAIN)
                _after_step(run, state, bar)
        _say_compiled(run)
        _check_finite(run, state)
        if _keeps_last_step(run):
            save(run, state)
    except (StoppedError, OutOfMemoryError, DataError):
        run.built.updater.drop_gradients()
        if state.step > 0:
            _check_finite(run, state)
            save(run, state)
        raise
    finally:
        steps.close()


def _one_step(run: Run, state: State, step: Sequence[Fed]) -> None:
    """One optimizer step over its micro-batches; nothing here waits for the device but the previous step's
    flag.
    """
    context, built = run.context, run.built
    total = context.config.train.max_train_steps
    # a mean over the step, however its samples are parted
    weight = sum(fed.batch.weight for fed in step)
    # float64: sums do not depend on where a resume cut them
    step_loss = torch.zeros((), device=context.device, dtype=torch.float64)
    for fed in step:
        context.stop.raise_if_requested()
        batch, draw = to_device(fed.batch, fed.draw, context.device, context.dtype)
        if run.graphs is None:
            with _dropout_drawn(run, fed):
                step_loss += run.compute(batch, draw, weight)
        else:
            step_loss += run.graphs(batch, draw, torch.full((), weight, device=context.device))
        phase = Phase.FIRST_STEP if state.flag is None else Phase.TRAIN
        context.status.beat(phase, step=state.step, total=total)
    _check_finite(run, state)
    rate = learning_rate(context.config.train, state.step + 1)
    state.grad_norm, bad = built.updater.step(rate, step_loss)
    state.flag = HostFlag(bad)
    state.suspects = tuple(fed.micro_batch for fed in step)
    _sum_up(state, step_loss, scaled=built.updater.scale is not None)
    state.step += 1
    state.interval_steps += 1
    state.timed_steps += 1
    state.interval_samples += sum(fed.batch.size for fed in step)
    state.interval_tokens += sum(fed.batch.tokens for fed in step)
    context.status.beat(Phase.TRAIN, step=state.step, total=total, item_done=True)


def _sum_up(state: State, loss: torch.Tensor, *, scaled: bool) -> None:
    """Add a step's loss to what the next line of the log is the mean of."""
    if scaled:
        # a step that overflowed in the forward pass was skipped, and has no loss
        lost = (~torch.isfinite(loss)).long()
        loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
        state.device_lost = lost if state.device_lost is None else state.device_lost + lost
    state.device_loss = loss if state.device_loss is None else state.device_loss + loss


def _dropout_drawn(run: Run, fed: Fed) -> contextlib.AbstractContextManager[None]:
    """What the adapter's dropout draws in a micro-batch follows from the seed and its first sample alone."""
    config, first = run.context.config, fed.micro_batch.samples[0]
    if config.method != "lora" or not config.lora.dropout:
        return contextlib.nullcontext()
    return seeded(f"{config.train.seed}/dropout/{first.position}", run.context.device)


def _say_compiled(run: Run) -> None:
    """How many graphs of both kinds the run's shapes took."""
    if run.context.plan.compile:
        captured = "" if run.graphs is None else f"{run.graphs}; "
        run.context.say(f"{captured}{graphs_compiled()} graphs compiled")


def _check_finite(run: Run, state: State) -> None:
    """Read the last step's flag; raise DivergedError naming the files that were in it."""
    if state.flag is None or state.flag.read() == 0.0:
        return
    records = run.entries.records
    files = sorted({str(records[sample.record].path) for micro in state.suspects for sample in micro.samples})
    saved = _last_save(run, state)
    what = "the loss or a gradient is NaN or infinite; the step changed nothing"
    if run.built.updater.scale is not None:
        what = (
            f"gradients overflow fp16 however small the loss is made (its scale fell below {FLOOR:g}); the"
            " last steps changed nothing"
        )
    raise DivergedError(
        f"step {state.step}: {what} and {saved}",
        where=", ".join(files),
        remedy="look at these files, lower train.learning_rate, or train in fp32",
    )


def _last_save(run: Run, state: State) -> str:
    """The checkpoint that the run can go on from, read once more before anybody relies on it."""
    step, folder, status = state.saved_step, state.saved_in, run.context.status
    if folder is None:
        return "nothing was saved"
    try:
        problem = checkpoint.damage(folder, lambda: status.beat(Phase.SAVE, step=step))
    except TrainerError as error:
        problem = str(error)
    if problem is not None:
        return f"the checkpoint of step {step} cannot be used: {problem}"
    return f"the checkpoint of step {step} is intact (its checksums were compared just now)"


def _after_step(run: Run, state: State, bar: Progress) -> None:
    """Log, preview, validate and save where this step is due for it."""
    config = run.context.config
    last = state.step == config.train.max_train_steps
    try:
        due = _validation_is_due(run, state)
        validation = _untimed(run, lambda: _validate(run, state.step)) if due else None
    except DataError:
        # the step is saved now, so that no later process can write its line
        bar.advance(1, text=_log(run, state, None))
        raise
    if state.step % config.train.log_every_steps == 0 or last or validation is not None:
        bar.advance(1, text=_log(run, state, validation))
    else:
        bar.advance(1)
    # saved first: what goes wrong in a preview loses nothing, and a resumed run draws the one it owes
    if state.step % config.checkpoint.checkpointing_steps == 0:
        _check_finite(run, state)
        _untimed(run, lambda: save(run, state))
    if _preview_is_due(run, state):
        _untimed(run, lambda: _preview(run, state))


def _validate(run: Run, step: int) -> ValidationRecord | None:
    """The held-out loss; None where nothing is held out."""
    if run.held_out is None:
        return None
    with beside_training(run):
        record = measure(run.context, run.built.model, run.held_out, step=step)
        if step:
            best.keep(run.context, run.built.model, record)
    return record


def _validate_before_training(run: Run) -> None:
    """The held-out loss of the base model, which the later ones are compared with."""
    record = _validate(run, 0)
    if record is not None:
        run.journal.log_validation(record)
        run.context.say(f"held-out loss before the first step: {record.validation_loss:.4f}")


def _validation_is_due(run: Run, state: State) -> bool:
    config = run.context.config
    return state.step % config.validation.every_steps == 0 or state.step == config.train.max_train_steps


def _owes_validation(run: Run, state: State) -> bool:
    """Whether the run ended because the held-out samples of its checkpoint's step could not be read."""
    if run.held_out is None or not _validation_is_due(run, state):
        return False
    rows = read_metrics(run.context.run_dir / METRICS_LOG)
    return not any(row["step"] == state.step and "validation_loss" in row for row in rows)


def _validate_late(run: Run, state: State) -> None:
    """The held-out loss of the checkpoint's step, on a line of its own."""
    record = _validate(run, state.step)
    if record is not None:
        run.journal.log_validation(record)
        run.context.say(f"held-out loss of step {state.step}, measured now: {record.validation_loss:.4f}")


def _keeps_last_step(run: Run) -> bool:
    """Whether the last step is saved before the export, so that a failing export loses nothing.

    Not for a full fine-tune that was told to write no checkpoints: they are four times the model's size.
    """
    config = run.context.config
    return config.method == "lora" or config.checkpoint.checkpointing_steps <= config.train.max_train_steps


def _preview_is_due(run: Run, state: State) -> bool:
    """A run that ends at this step draws its last preview with the LoRA loaded from its file."""
    config = run.context.config
    return state.step % config.validation.every_steps == 0 and state.step < config.train.max_train_steps


def _owes_preview(run: Run, state: State) -> bool:
    """Whether the run was stopped while it drew the preview of its checkpoint's step."""
    return _preview_is_due(run, state) and not preview_path(run.context, state.step).exists()


def _untimed(run: Run, work: Callable[[], _T]) -> _T:
    """Do work whose time is not training time."""
    started = time.monotonic()
    result = work()
    run.journal.pause(time.monotonic() - started)
    return result


@contextlib.contextmanager
def beside_training(run: Run) -> Generator[None, None, None]:
    """Room for what is not training: without the activations that graphs hold, and without compiling more;
    with the mean of the weights, where one is kept.
    """
    if run.graphs is not None:
        run.graphs.drop()
    with uncompiled(run.context), run.built.updater.averaged():
        yield


def _collect_loss(state: State) -> None:
    """Read the losses that are still on the device."""
    if state.device_loss is not None:
        state.interval_loss += float(state.device_loss.item())
        state.device_loss = None
    if state.device_lost is not None:
        state.interval_steps -= int(state.device_lost.item())
        state.device_lost = None


def _log(run: Run, state: State, validation: ValidationRecord | None) -> str:
    train = run.context.config.train
    _collect_loss(state)
    _check_finite(run, state)
    assert state.grad_norm is not None
    row = {
        "loss": state.interval_loss / state.interval_steps if state.interval_steps > 0 else math.nan,
        "learning_rate": learning_rate(train, state.step),
        "grad_norm": float(state.grad_norm.item()),
    }
    line = run.journal.log_step(
        row,
        step=state.step,
        steps=state.timed_steps,
        samples=state.interval_samples,
        tokens=state.interval_tokens,
        validation=validation,
    )
    state.interval_loss, state.interval_steps, state.timed_steps = 0.0, 0, 0
    state.interval_samples, state.interval_tokens = 0, 0
    return line


def _preview(run: Run, state: State) -> None:
    with beside_training(run):
        path = draw_previews(run.context, run.built.model, run.entries, state.step)
    if path is not None:
        write_strip(path.parent, up_to_step=state.step)
        run.journal.picture("previews", path, state.step)


def save(run: Run, state: State) -> None:
    """Save the last complete step, unless it is saved already."""
    if state.saved_step == state.step:
        return
    context = run.context
    _collect_loss(state)
    run.journal.sync()
    snapshot = checkpoint.Snapshot(
        step=state.step,
        interval_loss=state.interval_loss,
        interval_steps=state.interval_steps,
        fingerprint=run.fingerprint,
        settings=run.recorded_settings,
    )
    context.status.beat(Phase.SAVE, step=state.step)
    folder = checkpoint.save(
        context.run_dir / "checkpoints",
        snapshot,
        run.built.updater.weights(),
        run.built.updater.state(),
        keep=context.config.checkpoint.checkpoints_total_limit,
        on_tensor=lambda: context.status.beat(Phase.SAVE, step=state.step),
    )
    state.saved_step, state.saved_in = state.step, folder
    run.journal.metrics.checkpoint(state.step)
    context.say(f"checkpoint {folder.name} saved")
