"""Everything that changes while a run trains, and its way to a checkpoint and back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from trainer.data.sampler import MicroBatch
from trainer.engine.building.build import Built
from trainer.engine.caching.entries import Entries
from trainer.engine.context import Context
from trainer.engine.optimizing.exchange import SlowRanks
from trainer.engine.optimizing.updater import HostFlag, Updater
from trainer.engine.records import checkpoint
from trainer.engine.records.early_stop import Patience
from trainer.engine.records.journal import Journal
from trainer.engine.records.resume import Start
from trainer.engine.results.checkpoint_lora import write_step_lora
from trainer.engine.scoring.score import Scorer
from trainer.engine.stopwatch import Stopwatch
from trainer.engine.training.flops import Counter
from trainer.engine.training.graphs import Graphs
from trainer.engine.training.held_out import HeldOut
from trainer.errors import DataError, TrainerError
from trainer.telemetry.control import Order
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Work:
    """The parts that an optimizer step works with, on every rank."""

    context: Context
    built: Built
    graphs: Graphs | None
    """Micro-batches as CUDA graphs, where the plan says so."""
    entries: Entries
    held_out: HeldOut | None
    flops: Counter
    """FLOP of training on a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Run(Work):
    """The parts that the loop of the first rank works with, which writes everything."""

    journal: Journal
    start: Start
    """Values that checkpoints record."""
    scorer: Scorer | None = None
    """Measures previews, where the configuration asks for it."""


@dataclass(kw_only=True)
class State:
    """Weights, moments, their mean and the loss scale (`updater`), and the counters of a run."""

    updater: Updater
    watch: Stopwatch
    """Times this rank's forward and backward passes."""
    interval_loss: torch.Tensor
    """Sum of the step losses since the last line of the log, also of a process that was killed since; a
    scalar on the device, as the next one.
    """
    interval_steps: torch.Tensor
    """Steps of this sum."""
    step: int = 0
    timed_steps: int = 0
    """Since the last line of the log, or since this process started; so are the next six."""
    interval_samples: int = 0
    interval_tokens: int = 0
    interval_learned: float = 0.0
    """Tokens that the loss is on."""
    interval_flops: float = 0.0
    interval_computed: float = 0.0
    """Seconds of forward and backward passes, of several ranks on the one where they took longest."""
    computed_steps: int = 0
    """Steps whose passes these are."""
    grad_norm: torch.Tensor | None = None
    flag: HostFlag | None = None
    """1.0 where the last step was not finite; read one step later."""
    told: HostFlag | None = None
    """Answers of the ranks to each other in the last step; read with the flag. None for one process."""
    orders: tuple[Order, ...] = ()
    """Orders that are carried out after this step, by all ranks alike."""
    slow: SlowRanks = field(default_factory=SlowRanks)
    equal_step: int = 0
    """The newest step after which all ranks had equal weights."""
    problem: TrainerError | None = None
    """Why this rank of several cannot read the next step."""
    suspects: Sequence[MicroBatch] = field(default_factory=tuple)
    patience: Patience = field(default_factory=Patience)
    """Rounds of validation that early stopping counts, on rank 0."""
    ended_early: str = ""
    """Why training ends before its last planned step; empty where it does not."""
    saved_step: int = 0
    saved_in: Path | None = None
    """Checkpoint of `saved_step`, which may be one of another folder that the run was resumed from."""

    def add_computed(self, seconds: float) -> None:
        """Count the passes of an earlier step; 0 where their time is not known yet."""
        self.interval_computed += seconds
        self.computed_steps += seconds > 0.0


def save(run: Run, state: State) -> None:
    """Save the last complete step, unless it is saved already. Raises ConfigError where another run has the
    folder by now.
    """
    if state.saved_step == state.step:
        return
    context = run.context
    run.journal.look_at_folder()
    run.journal.sync()
    snapshot = checkpoint.Snapshot(
        step=state.step,
        interval_loss=float(state.interval_loss.item()),
        interval_steps=int(state.interval_steps.item()),
        fingerprint=run.start.fingerprint,
        settings=run.start.settings,
        early_stop=dataclasses.asdict(state.patience),
    )
    context.status.beat(Phase.SAVE, step=state.step)
    folder = checkpoint.save(
        context.run_dir / "checkpoints",
        snapshot,
        *state.updater.saved(),
        least_bytes=state.updater.saved_bytes,
        keep=context.config.checkpoint.checkpoints_total_limit,
        on_tensor=functools.partial(context.status.beat, Phase.SAVE, step=state.step),
        beside=functools.partial(_write_lora, run, state.step),
    )
    state.saved_step, state.saved_in = state.step, folder
    run.journal.metrics.checkpoint(state.step)
    context.say(f"checkpoint {folder.name} saved")


def _write_lora(run: Run, step: int, folder: Path) -> None:
    """Write the LoRA of this step, where the configuration wants one: of the mean, where one is kept."""
    config = run.context.config
    if config.method == "lora" and config.checkpoint.lora_files:
        with run.built.updater.averaged():
            write_step_lora(run.context, run.built.model, step, folder)


def take_part_in_save(work: Work, state: State) -> None:
    """Give the rows that this rank has of the step that rank 0 saves; nothing of weights that are whole."""
    if state.saved_step == state.step or not work.context.plan.in_rows:
        return
    work.context.status.beat(Phase.SAVE, step=state.step)
    checkpoint.take_part_in_save(*state.updater.saved())
    state.saved_step = state.step


def _require_same_weights(
    saved: Mapping[str, Sequence[int]], own: Mapping[str, Sequence[int]], folder: Path
) -> None:
    """Raise DataError where a checkpoint's weights are not those of this run's model, by names and shapes."""
    what, others = "", saved.keys() ^ own.keys()
    if others:
        what = (
            f"{len(others)} weights are in this checkpoint or in the model but not in both, as {min(others)}"
        )
    elif differing := sorted(name for name in own if tuple(saved[name]) != tuple(own[name])):
        shapes = " and ".join(" x ".join(map(str, held[differing[0]])) for held in (saved, own))
        what = (
            f"{len(differing)} weights have another shape in this checkpoint than in the model, as "
            f"{differing[0]}: {shapes}"
        )
    if what:
        remedy = "has the base model's folder changed? Train with the one that the run began with"
        raise DataError(what, where=str(folder), remedy=remedy)


def restore(context: Context, updater: Updater, start: Start) -> State:
    """The state of the checkpoint that a run goes on from, else that of a fresh run."""
    state = State(
        updater=updater,
        # float64: sums do not depend on where a resume cut them
        interval_loss=torch.zeros((), device=context.device, dtype=torch.float64),
        interval_steps=torch.zeros((), device=context.device, dtype=torch.int64),
        watch=Stopwatch(context.device),
    )
    if start.found is not None:
        state.saved_in, snapshot = start.found
        context.status.beat(Phase.LOAD)
        rows = {} if updater.in_rows is None else updater.in_rows.rows
        own: dict[str, Sequence[int]] = {name: one.shape for name, one in updater.weights().items()}
        own |= {name: one.shape for name, one in rows.items()}  # of which this rank has some
        _require_same_weights(checkpoint.shapes(state.saved_in, "weights"), own, state.saved_in)
        # mapped on the host: on the device they would lie beside the model and the state that take them
        weights, optimizer = (
            checkpoint.read_group(state.saved_in, group, "cpu", rows) for group in ("weights", "optimizer")
        )
        updater.load(weights, optimizer, snapshot.step)
        context.say(f"resumed from {state.saved_in.name}")
        state.step = state.saved_step = state.equal_step = snapshot.step
        state.interval_loss += snapshot.interval_loss
        state.interval_steps += snapshot.interval_steps
        state.patience = Patience(**snapshot.early_stop)
    return state
