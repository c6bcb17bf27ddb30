"""Everything that changes while a run trains, and its way to a checkpoint and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.data.sampler import MicroBatch
from trainer.engine.building.build import Built
from trainer.engine.caching.entries import Entries
from trainer.engine.context import Context
from trainer.engine.optimizing.optimizer import HostFlag, Updater
from trainer.engine.records import checkpoint
from trainer.engine.records.journal import Journal
from trainer.engine.records.resume import Start
from trainer.engine.training.graphs import Graphs
from trainer.engine.training.held_out import HeldOut
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts that the loop works with."""

    context: Context
    built: Built
    graphs: Graphs | None
    """Micro-batches as CUDA graphs, where the plan says so."""
    entries: Entries
    held_out: HeldOut | None
    journal: Journal
    start: Start
    """Values that checkpoints record."""


@dataclass(kw_only=True)
class State:
    """Weights, moments, their mean and the loss scale (`updater`), and the counters of a run."""

    updater: Updater
    step: int = 0
    interval_loss: float = 0.0
    """Sum of the step losses since the last line of the log, also of a process that was killed since."""
    interval_steps: int = 0
    """Steps of this sum."""
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

    def add_loss(self, loss: torch.Tensor) -> None:
        """Add a step's loss, a scalar on the device, to the sum for the next line of the log."""
        if self.updater.scale is not None:
            # a step that overflowed in the forward pass was skipped, and has no loss
            lost = (~torch.isfinite(loss)).long()
            loss = torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)
            self.device_lost = lost if self.device_lost is None else self.device_lost + lost
        self.device_loss = loss if self.device_loss is None else self.device_loss + loss

    def collect_loss(self) -> None:
        """Read the losses that are still on the device."""
        if self.device_loss is not None:
            self.interval_loss += float(self.device_loss.item())
        if self.device_lost is not None:
            self.interval_steps -= int(self.device_lost.item())
        self.device_loss = self.device_lost = None


def save(run: Run, state: State) -> None:
    """Save the last complete step, unless it is saved already."""
    if state.saved_step == state.step:
        return
    context = run.context
    state.collect_loss()
    run.journal.sync()
    snapshot = checkpoint.Snapshot(
        step=state.step,
        interval_loss=state.interval_loss,
        interval_steps=state.interval_steps,
        fingerprint=run.start.fingerprint,
        settings=run.start.settings,
    )
    context.status.beat(Phase.SAVE, step=state.step)
    folder = checkpoint.save(
        context.run_dir / "checkpoints",
        snapshot,
        state.updater.weights(),
        state.updater.state(),
        keep=context.config.checkpoint.checkpoints_total_limit,
        on_tensor=functools.partial(context.status.beat, Phase.SAVE, step=state.step),
    )
    state.saved_step, state.saved_in = state.step, folder
    run.journal.metrics.checkpoint(state.step)
    context.say(f"checkpoint {folder.name} saved")


def restore(context: Context, updater: Updater, start: Start) -> State:
    """The state of the checkpoint that a run goes on from, else that of a fresh run."""
    if start.found is None:
        return State(updater=updater)
    folder, snapshot = start.found
    context.status.beat(Phase.LOAD)
    weights = checkpoint.read_group(folder, "weights", context.device)
    updater.load(weights, checkpoint.read_group(folder, "optimizer", context.device), snapshot.step)
    context.say(f"resumed from {folder.name}")
    return State(
        updater=updater,
        step=snapshot.step,
        interval_loss=snapshot.interval_loss,
        interval_steps=snapshot.interval_steps,
        saved_step=snapshot.step,
        saved_in=folder,
    )
