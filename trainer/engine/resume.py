"""Floor 6: what a run folder holds already, and whether this run may go on in it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import LoraSection
from trainer.data.records import Record
from trainer.engine import checkpoint
from trainer.engine.context import Context
from trainer.engine.entries import data_fingerprint
from trainer.errors import ConfigError, NoSpaceError
from trainer.telemetry.records import METRICS_LOG, read_metrics

RUN_FILE = "run.json"
_WRITTEN = ("checkpoints", "lora", "model", "best")
_GIB = 1024**3


def run_fingerprint(context: Context, records: Sequence[Record]) -> dict[str, str]:
    """What a checkpoint and the run that continues it must have in common."""
    config, source = context.config, context.source
    fingerprint = {
        "family": config.family,
        "method": config.method,
        "base": source.identity,
        "revision": source.revision or "",
        "weights": " ".join(filter(None, (source.weights, context.plan.weights, context.plan.modulation))),
        "dtype": context.plan.dtype,
        "seed": str(config.train.seed),
        "train_batch_size": str(context.plan.micro_batch_size),
        "gradient_accumulation_steps": str(context.plan.accumulation_steps),
        "caption_dropout_rate": str(config.data.caption_dropout_rate),
        "optimizer": context.plan.optimizer,
        "data": data_fingerprint(records),
    }
    if context.family.packed_by is not None:
        fingerprint["max_sequence_length"] = str(config.data.max_sequence_length)
    if config.method == "lora":
        targets = config.lora.target_modules
        fingerprint |= {
            "lora.rank": str(config.lora.rank),
            "lora.alpha": str(config.lora.alpha),
            "lora.target_modules": targets if isinstance(targets, str) else ",".join(sorted(targets)),
        }
        fingerprint |= _adapter_options(config.lora)
    if config.train.ema_decay is not None:
        fingerprint["train.ema_decay"] = str(config.train.ema_decay)
    return fingerprint


def _adapter_options(lora: LoraSection) -> dict[str, str]:
    """Those that differ from what they are when nobody writes them: older checkpoints have none."""
    usual = LoraSection()
    found = {
        f"lora.{name}": str(value)
        for name, value in (
            ("type", lora.type),
            ("dropout", lora.dropout),
            ("rank_pattern", sorted(lora.rank_pattern.items())),
            ("alpha_pattern", sorted(lora.alpha_pattern.items())),
        )
        if vars(lora)[name] != vars(usual)[name]
    }
    if lora.init_from is not None:
        found["lora.init_from"] = hashlib.sha256(lora.init_from.read_bytes()).hexdigest()[:16]
    return found


def find_checkpoint(context: Context, fingerprint: dict[str, str]) -> tuple[Path, checkpoint.Snapshot] | None:
    """The checkpoint to continue from, as `checkpoint.resume_from_checkpoint` says; before anything is
    loaded.
    """
    wanted = context.config.checkpoint.resume_from_checkpoint
    root = context.run_dir / "checkpoints"
    where = "checkpoint.resume_from_checkpoint"
    if isinstance(wanted, Path):
        problem = checkpoint.damage(wanted)
        if problem is not None:
            raise ConfigError(f"{wanted} is no usable checkpoint: {problem}", where=where)
        chosen = checkpoint.read_snapshot(wanted)
        found: tuple[Path, checkpoint.Snapshot] | None = (wanted, chosen)
        steps = [checkpoint.step_of(path) for path in checkpoint.steps_on_disk(root)]
        if any(step > chosen.step for step in steps):
            remedy = "move them away to go on from the older one, or set auto"
            raise ConfigError(f"{root} holds later checkpoints", where=where, remedy=remedy)
    else:
        found = checkpoint.newest_valid(root, context.say)
        if found is not None and wanted == "never":
            remedy = "set it to auto to continue, or choose another output_dir"
            raise ConfigError(f"{found[0]} exists and resuming is forbidden", where=where, remedy=remedy)
        if found is None and checkpoint.steps_on_disk(root):
            remedy = "remove them to start afresh, or choose another output_dir"
            raise ConfigError("none of the checkpoints here can be used", where=str(root), remedy=remedy)
    if found is None:
        return None
    folder, snapshot = found
    checkpoint.require_same_run(folder, snapshot.fingerprint, fingerprint)
    total = context.config.train.max_train_steps
    if snapshot.step > total:
        raise ConfigError(
            f"the newest checkpoint is of step {snapshot.step}, beyond max_train_steps {total}",
            where=str(folder),
            remedy="raise train.max_train_steps, or choose another output_dir",
        )
    return found


def require_free_folder(context: Context, fingerprint: dict[str, str]) -> None:
    """Without a checkpoint to continue, only the same run may start again in a folder that holds results."""
    run_dir = context.run_dir
    metrics = run_dir / METRICS_LOG
    results = [
        path for path in (run_dir / "lora", run_dir / "model") if path.is_dir() and any(path.iterdir())
    ]
    # what was measured before the first step is no result
    results += [metrics] if any(row["step"] for row in read_metrics(metrics)) else []
    if not results:
        return
    remedy = "choose another output_dir, or remove this one"
    if context.config.checkpoint.resume_from_checkpoint == "never":
        what = f"{results[0].name} of an earlier run is here and resuming is forbidden"
        raise ConfigError(what, where=str(run_dir), remedy=remedy)
    record = run_dir / RUN_FILE
    if not record.is_file():
        raise ConfigError(f"{results[0].name} of another run is here", where=str(run_dir), remedy=remedy)
    checkpoint.require_same_run(run_dir, json.loads(record.read_text()), fingerprint)


def require_space(context: Context) -> None:
    """Raise NoSpaceError now rather than at the first checkpoint."""
    free = shutil.disk_usage(context.run_dir).free
    held = [path for name in _WRITTEN for path in (context.run_dir / name).rglob("*")]
    # what an earlier start of this run wrote is part of the need
    needed = context.plan.disk_bytes - sum(path.stat().st_size for path in held if path.is_file())
    if free < needed:
        raise NoSpaceError(
            f"{free / _GIB:.3g} GiB free, checkpoints and final files need {needed / _GIB:.3g} GiB more",
            where=str(context.run_dir),
            remedy="free space, lower checkpoint.checkpoints_total_limit, or use --output on another disk",
        )
