"""Rounds of validation: held-out losses, previews, and the end of training where rounds get no better."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator

from trainer.engine.building.fast import uncompiled
from trainer.engine.records import early_stop
from trainer.engine.training import held_out, scores, together
from trainer.engine.training.preview import draw_previews, preview_path, sample
from trainer.engine.training.state import Run, State, Work
from trainer.telemetry.progress import progress
from trainer.telemetry.sinks.records import (
    METRICS_LOG,
    EarlyStopRecord,
    ValidationRecord,
    of_tokens,
    read_metrics,
    written_values,
)


def look_before(run: Run, state: State) -> None:
    """The held-out loss and preview of the base before the first step; on a resume, those of
    the checkpoint's step that are missing: held-out samples could not be read, or its preview was stopped.
    """
    step, context, config = state.step, run.context, run.context.config
    rows = read_metrics(context.run_dir / METRICS_LOG)
    state.patience = early_stop.after_rows(state.patience, rows, config.validation.early_stop)
    measured = any(row["step"] == step and "validation_loss" in row for row in rows)
    due, last = step % config.validation.every_steps == 0, step == config.train.max_train_steps
    scored = run.scorer is None or any(row["step"] == step and "score_data" in row for row in rows)
    # drawn again to be measured: prompts may have changed since
    draws = step == 0 or (due and not last and not (scored and preview_path(context, step).exists()))
    measures = step == 0 or ((due or last) and not measured)
    context.ranks.from_first((measures, draws))
    record = _measured_at_start(run, state) if measures else None
    if record is not None:
        run.journal.log_validation(record)
        when = f"of step {step}, measured now" if step else "before the first step"
        context.say(f"held-out loss {when}: {record.validation_loss:.4f}{of_tokens(written_values(record))}")
    elif lowest := held_out.lowest_now(context, rows, run.held_out, step):
        with beside_training(run):
            held_out.keep_best(context, run.built.model, lowest)
    if draws:
        _draw(run, state)
    _stop_early(run, state)


def follow_before(work: Work, state: State) -> None:
    """Take this rank's part in `look_before`."""
    measures, draws = work.context.ranks.from_first((False, False))
    if measures:
        validate(work, state)
    if draws:
        _draw_share(work, state)
    _stop_early(work, state)


def _measured_at_start(run: Run, state: State) -> ValidationRecord | None:
    """`validate` with a bar of its own: nothing was trained yet that would show that the run is alive."""
    if run.held_out is None:
        return None
    with progress(len(run.held_out.entries.records), "measuring the held-out loss") as bar:
        return validate(run, state, advance=bar.advance)


def validate(
    run: Work, state: State, *, advance: Callable[[int], None] = held_out.no_progress
) -> ValidationRecord | None:
    """The held-out loss, measured by all ranks together; None where nothing is held out.

    `advance` is told of samples that are done.
    """
    context, model, step = run.context, run.built.model, state.step
    if run.held_out is None:
        return None
    together.require_equal(run, state)
    with beside_training(run):
        record = held_out.measure(
            context, model, run.held_out, step=step, ranks=context.ranks, advance=advance
        )
        if step and isinstance(run, Run):
            run.journal.look_at_folder()
            held_out.keep_best(context, model, record)
    settings = context.config.validation.early_stop
    state.patience = early_stop.after_round(state.patience, vars(record), settings)
    return record


def draw(run: Run, state: State) -> None:
    """The previews of a step before the last one, unless its held-out loss ends training: the last step's
    are drawn with the LoRA loaded from its file.
    """
    _stop_early(run, state)
    if not state.ended_early:
        _draw(run, state)
        _stop_early(run, state)


def draw_asked(run: Run, state: State) -> None:
    """Previews that somebody asked for: not measured, and no round that early stopping counts."""
    together.require_equal(run, state)
    with beside_training(run):
        draw_previews(run, state.step)


def follow_asked(work: Work, state: State) -> None:
    """Take this rank's part in `draw_asked`."""
    together.require_equal(work, state)
    if work.context.config.validation.prompts:
        with beside_training(work):
            sample(work.context, work.built.model, work.entries, work.context.ranks)


def follow(work: Work, state: State) -> None:
    """Take this rank's part in `draw`."""
    _stop_early(work, state)
    if not state.ended_early:
        _draw_share(work, state)
        _stop_early(work, state)


def _draw(run: Run, state: State) -> None:
    draw_asked(run, state)
    if run.context.config.validation.metrics:
        run.context.ranks.agreed(functools.partial(_score, run, state))


def _score(run: Run, state: State) -> None:
    """Measure the previews of this step; the other ranks wait for that, and end with this one."""
    record = scores.score_previews(run, state.step)
    if record is not None:
        settings = run.context.config.validation.early_stop
        state.patience = early_stop.after_round(state.patience, vars(record), settings)


def _draw_share(work: Work, state: State) -> None:
    """Draw this rank's previews where rank 0 draws all of a step."""
    follow_asked(work, state)
    if work.context.config.validation.metrics:
        work.context.ranks.agreed(lambda: None)


def _stop_early(work: Work, state: State) -> None:
    """Have all ranks know whether training ends after this step: as rank 0 counts the rounds."""
    context, settings = work.context, work.context.config.validation.early_stop
    if settings is not None and state.step < context.config.train.max_train_steps:
        state.ended_early = context.ranks.from_first(early_stop.reason(state.patience, settings, state.step))


def tell_early_stop(run: Run, state: State) -> None:
    """Say why training ended before its last planned step, and record it where that is not done yet."""
    context, step = run.context, state.step
    context.status.early_stop = state.ended_early
    run.journal.metrics.ended_early(step)
    context.say(f"{state.ended_early}; {context.config.train.max_train_steps} steps were planned")
    rows = read_metrics(context.run_dir / METRICS_LOG)
    if not any(row["step"] == step and "early_stop" in row for row in rows):
        run.journal.metrics_log.record(EarlyStopRecord(step=step, early_stop=state.ended_early))


@contextlib.contextmanager
def beside_training(run: Work) -> Generator[None, None, None]:
    """Previews, held-out losses and exports: without the activations that CUDA graphs hold, and without
    compiling more; with the mean of the weights, where one is kept.
    """
    if run.graphs is not None:
        run.graphs.drop()
    with uncompiled(run.context), run.built.updater.averaged():
        yield
