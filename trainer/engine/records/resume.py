"""Resuming a run in its folder: whether it may, and from which checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import json
import shutil
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.data.records import Record
from trainer.engine.context import Context
from trainer.engine.records import checkpoint, early_stop, samples_file
from trainer.engine.records.fingerprint import Change, changes, values
from trainer.errors import ConfigError, NoSpaceError
from trainer.files import atomic
from trainer.planning.choose import encoding
from trainer.telemetry.run_folder.results import BEST_FOLDER
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB

RUN_FILE = "run.json"
"""The fingerprint of the run, and `_BEGAN_FROM`."""
_BEGAN_FROM = "began_from"
_RESUME = "checkpoint.resume_from_checkpoint"
_ELSEWHERE = "choose another output_dir, or remove this one"


@dataclass(frozen=True, kw_only=True)
class Start:
    """The start of a run: afresh, or from a checkpoint."""

    context: Context
    """Context with the decisions on which the run's data depend, unchanged since it began."""
    found: tuple[Path, checkpoint.Snapshot] | None
    fingerprint: Mapping[str, str]
    """Values that the next start must share."""
    settings: Mapping[str, str]
    """Values of which the next start tells the changes."""
    began_from: Mapping[str, str]
    """The named checkpoint that the run began from, by `path` and `state_sha256`; empty without one."""
    relabels: bool
    """Whether the folder's record of settings would be replaced by settings that trained nothing."""


def start(context: Context, records: Sequence[Record]) -> Start:
    """Find the checkpoint to continue from, as `checkpoint.resume_from_checkpoint` says, before anything is
    loaded; tell what changed since, and rename damaged checkpoints after it.

    Raises ConfigError where this is another run, or the folder holds results of one, and StorageError.
    """
    put_back(context.run_dir, context.say)
    found, began_from = _wanted_checkpoint(context)
    record = context.run_dir / RUN_FILE
    if found is not None:
        saved = found[1].fingerprint
    else:  # values of a run whose results are here and that left no checkpoint
        saved = _fingerprint(record) if record.is_file() and _results(context.run_dir) else {}
    began, now = saved.get("text_encoders"), context.plan.text_encoder_weights
    if began is not None and began != now:
        # captions are encoded as they were: free memory, which decides it, changes between two starts
        context.say(f"captions stay encoded in {began}, as the run began; this start alone would take {now}")
        context = dataclasses.replace(context, plan=encoding.kept(context.plan, began))
    fingerprint, settings = values(context, records)
    relabels = False
    root = context.run_dir / "checkpoints"
    if found is None or found[0].resolve().parent != root.resolve():
        require_free_folder(context, fingerprint, records)
    if found is not None:
        folder, snapshot = found
        others = functools.partial(samples_file.differences, records, folder.resolve().parent.parent)
        succeeding = checkpoint.require_same_run(folder, saved, fingerprint, context.say, others)
        total = context.config.train.max_train_steps
        if snapshot.step > total:
            raise ConfigError(
                f"the newest checkpoint is of step {snapshot.step}, beyond max_train_steps {total}",
                where=str(folder),
                remedy="raise train.max_train_steps, or train.num_train_epochs, or choose another output_dir",
            )
        relabels = _tell_changes(context, snapshot, settings, succeeding)
        checkpoint.set_aside(root, snapshot.step, context.say)
    return Start(
        context=context,
        found=found,
        fingerprint=fingerprint,
        settings=settings,
        began_from=began_from,
        relabels=relabels,
    )


def put_back(run_dir: Path, say: Callable[[str], None]) -> None:
    """Give folders of the run that a killed start was replacing their names again, before anything is looked
    for there. Raises StorageError.
    """
    steps = checkpoint.steps_kept_aside(run_dir / "checkpoints")
    for folder in (run_dir / "model", run_dir / BEST_FOLDER, *steps):
        if atomic.put_back(folder):
            name = folder.relative_to(run_dir)
            say(f"{name} is here again, as it was before a start replaced it that was killed")


def record_text(start: Start) -> str:
    """The content of `RUN_FILE`."""
    began = {_BEGAN_FROM: dict(start.began_from)} if start.began_from else {}
    return json.dumps({**start.fingerprint, **began}, indent=1, sort_keys=True) + "\n"


def _tell_changes(
    context: Context,
    snapshot: checkpoint.Snapshot,
    settings: Mapping[str, str],
    succeeding: Sequence[Change],
) -> bool:
    """Say every value that has changed since the checkpoint, `succeeding` ones of the fingerprint too; gives
    `Start.relabels`.
    """
    watched, older = context.config.validation.early_stop, not snapshot.settings
    # previews are measured after the checkpoint of their step
    rows = [row for row in read_metrics(context.run_dir / METRICS_LOG) if row["step"] <= snapshot.step]
    rounds = early_stop.after_rows(early_stop.Patience(**snapshot.early_stop), rows, watched)
    is_last = snapshot.step == context.config.train.max_train_steps
    ended_early = "" if is_last else early_stop.reason(rounds, watched, snapshot.step)
    finished = is_last or bool(ended_early)
    if older:
        context.say("an older trainer wrote the checkpoint: what changed in the settings since is not known")
    found = [*succeeding, *([] if older else changes(snapshot.settings, settings)[0])]
    for change in found:
        if finished:
            context.say(f"{change.name}: the run was trained with {change.old}; {change.new} has no effect")
        else:
            context.say(f"{change.name}: {change.new} from here on, {change.old} before")
    if found and finished:
        trained = numbered(snapshot.step, "step is", "steps are")
        done, more = f"{trained} trained already, which is all", "raise train.max_train_steps"
        if ended_early:
            done, more = ended_early, "raise validation.early_stop.patience, or leave early_stop out,"
        context.say(f"{done}: {more} to train on, or choose another output_dir to train with other settings")
    return finished and (older or bool(found))


_Found = tuple[Path, checkpoint.Snapshot]


def _wanted_checkpoint(context: Context) -> tuple[_Found | None, Mapping[str, str]]:
    """The newest valid checkpoint, or the named one, and `Start.began_from`; raises ConfigError where it
    cannot be used.
    """
    wanted, root = context.config.checkpoint.resume_from_checkpoint, context.run_dir / "checkpoints"
    steps = checkpoint.steps_on_disk(root)
    began_from = _began_from(context) if steps else {}
    if isinstance(wanted, Path):
        return _named_checkpoint(context, wanted, steps, began_from)
    if steps and wanted == "never":  # before they are read, which takes minutes of large ones
        remedy = "set it to auto to continue, or choose another output_dir"
        raise ConfigError(f"{steps[-1]} exists and resuming is forbidden", where=_RESUME, remedy=remedy)
    found = checkpoint.newest_valid(root, context.say, functools.partial(context.alive, Phase.LOAD))
    if found is None and steps:
        remedy = "remove them to start afresh, or choose another output_dir"
        raise ConfigError("none of the checkpoints here can be used", where=str(root), remedy=remedy)
    return found, began_from


def _named_checkpoint(
    context: Context, wanted: Path, steps: Sequence[Path], recorded: Mapping[str, str]
) -> tuple[_Found, Mapping[str, str]]:
    """The checkpoint `wanted`, or the newest one in the folder of the run that began from it: a job that is
    started again with the same command goes on.

    steps: the folder's own; recorded: the `Start.began_from` of the run there. Raises ConfigError.
    """
    root, on_chunk = context.run_dir / "checkpoints", functools.partial(context.alive, Phase.LOAD)
    named: _Found | None = None
    began_from: Mapping[str, str] = {"path": str(wanted.resolve())}
    if wanted.is_dir():
        if (problem := checkpoint.damage(wanted, on_chunk)) is not None:
            remedy = "name another one, or set auto, which takes the newest intact one"
            raise ConfigError(f"{wanted} is no usable checkpoint: {problem}", where=_RESUME, remedy=remedy)
        named = wanted, checkpoint.read_snapshot(wanted)
        began_from = {**began_from, "state_sha256": checkpoint.identity(wanted)}
        later = any(checkpoint.step_of(path) > named[1].step for path in steps)
        if later and recorded.get("state_sha256") != began_from["state_sha256"]:
            remedy = "move them away to go on from the older one, or set auto"
            raise ConfigError(f"{root} holds later checkpoints", where=_RESUME, remedy=remedy)
        if not later:
            return named, began_from
    # one that is gone may have been pruned since the run began from it
    same = named is not None or recorded.get("path") == began_from["path"]
    own = checkpoint.newest_valid(root, context.say, on_chunk) if same else None
    if own is not None and (named is None or own[1].step > named[1].step):
        context.say(f"this run began from {wanted}: it goes on from its own {own[0].name}")
        return own, recorded
    if named is not None:
        return named, began_from
    held = ", ".join(map(str, steps)) or "none"
    remedy = f"name a folder such as checkpoints/step-000500; the run's own are: {held}"
    if (aside := atomic.names_beside(wanted)[1]).is_dir():
        remedy = f"name {aside}: a save of that run was killed while it replaced it"
    raise ConfigError(f"there is no folder {wanted}", where=_RESUME, remedy=remedy)


def _began_from(context: Context) -> Mapping[str, str]:
    """The record of the checkpoint that the run in the folder was told to begin from; empty without one."""
    path = context.run_dir / RUN_FILE
    try:
        began = _read_record(path).get(_BEGAN_FROM) if path.is_file() else None
    except ConfigError as error:  # the checkpoints say which run they are of
        context.say(f"{RUN_FILE}: {error.problems[0].what}")
        return {}
    return began if isinstance(began, dict) else {}


def _results(run_dir: Path) -> list[Path]:
    """The results of a run in its folder besides checkpoints."""
    metrics = run_dir / METRICS_LOG
    named = (run_dir / name for name in ("lora", "model", BEST_FOLDER))
    folders = [one for one in named if one.is_dir() and any(one.iterdir())]
    # a loss measured before the first step is no result
    return folders + ([metrics] if any(row["step"] for row in read_metrics(metrics)) else [])


def require_free_folder(context: Context, fingerprint: Mapping[str, str], records: Sequence[Record]) -> None:
    """Without a checkpoint to continue, only the same run may start again in a folder that holds results; it
    is told where one of them is whole.
    """
    run_dir = context.run_dir
    results = _results(run_dir)
    if not results:
        return
    if context.config.checkpoint.resume_from_checkpoint == "never":
        what = f"{results[0].name} of an earlier run is here and resuming is forbidden"
        raise ConfigError(what, where=str(run_dir), remedy=_ELSEWHERE)
    record = run_dir / RUN_FILE
    if not record.is_file():
        raise ConfigError(f"{results[0].name} of another run is here", where=str(run_dir), remedy=_ELSEWHERE)
    others = functools.partial(samples_file.differences, records, run_dir)
    checkpoint.require_same_run(run_dir, _fingerprint(record), fingerprint, context.say, others)
    if results[0].is_dir():
        context.say(
            f"{results[0]} of this run is here, and no checkpoint: all is trained again to write it anew"
        )


def _fingerprint(path: Path) -> dict[str, str]:
    return {name: value for name, value in _read_record(path).items() if name != _BEGAN_FROM}


def _read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        if not isinstance(record, dict):
            raise ValueError("not a JSON object")
    except (OSError, ValueError) as error:
        what = f"which run's results these are cannot be read ({error})"
        raise ConfigError(what, where=str(path), remedy=_ELSEWHERE) from error
    return record


def require_space(context: Context) -> None:
    """Raise NoSpaceError now rather than at the first checkpoint, once what killed writes left is removed."""
    checkpoints = context.run_dir / "checkpoints"
    checkpoint.remove_unfinished(checkpoints)
    for name in ("lora", "model"):
        shutil.rmtree(context.run_dir / f"{name}.tmp", ignore_errors=True)
    free = shutil.disk_usage(context.run_dir).free
    # an older `model` stays until the new one is written; others below `checkpoints` were renamed and stay;
    # older ones than are to be kept go after the next save, not before
    steps = checkpoint.steps_on_disk(checkpoints)
    folders = [
        # from the first step the best one of an earlier run is kept aside
        *(context.run_dir / name for name in ("lora", *([BEST_FOLDER] if steps else []))),
        *steps[-context.config.checkpoint.checkpoints_total_limit :],
    ]
    # files that an earlier start of this run wrote are part of the need; links are not
    held = [path.lstat() for folder in folders for path in folder.rglob("*")]
    needed = context.plan.disk_bytes - sum(one.st_size for one in held if stat.S_ISREG(one.st_mode))
    if free < needed:
        raise NoSpaceError(
            f"{free / GIB:.3g} GiB free, checkpoints and final files need {needed / GIB:.3g} GiB more",
            where=str(context.run_dir),
            remedy="free space, lower checkpoint.checkpoints_total_limit, or use --output on another disk",
        )
