"""The state of a run that goes on."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.engine.ranks import ALONE
from trainer.engine.records import checkpoint
from trainer.engine.records.early_stop import Patience
from trainer.engine.stopwatch import Stopwatch
from trainer.engine.training import state
from trainer.engine.training.state import State, restore
from trainer.errors import DataError
from trainer.modeling.rows import Rows
from trainer.telemetry.status import Phase


def made() -> Updater:
    parameter = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    return Updater({"w": parameter}, TrainSection(), "adamw_split_bf16")


def test_nothing_of_a_checkpoint_is_read_onto_the_device(tmp_path: Path) -> None:
    """There it would lie beside the weights and the state that take it. "meta" keeps no values."""
    first, second = made(), made()
    first.parameters["w"].grad = torch.full((64,), 0.5, dtype=torch.bfloat16)
    first.step(1e-2, torch.zeros(()))
    snapshot = checkpoint.Snapshot(step=1, interval_loss=2.0, interval_steps=1, fingerprint={})
    given: dict[str, Any] = {"least_bytes": 0, "keep": 1, "on_tensor": lambda: None}
    folder = checkpoint.save(tmp_path, snapshot, *first.saved(), **given)
    status = SimpleNamespace(beat=lambda phase: None)
    context: Any = SimpleNamespace(device="meta", ranks=ALONE, status=status, say=lambda text: None)
    begun: Any = SimpleNamespace(found=(folder, snapshot))
    assert restore(context, second, begun).step == 1
    assert torch.equal(second.parameters["w"], first.parameters["w"])
    state = first.state()
    assert state and all(torch.equal(value, state[name]) for name, value in second.state().items())


def test_a_run_goes_on_with_the_sums_and_the_patience_of_its_checkpoint(tmp_path: Path) -> None:
    """Else the next line of the log would leave out the steps before the stop, and a round count anew."""
    updater = made()
    updater.parameters["w"].grad = torch.full((64,), 0.5, dtype=torch.bfloat16)
    updater.step(1e-2, torch.zeros(()))
    waited = Patience(monitor="validation_loss", data="a", best=0.5, best_step=1, last_step=7, rounds=2)
    snapshot = checkpoint.Snapshot(
        step=7, interval_loss=2.5, interval_steps=3, fingerprint={}, early_stop=dataclasses.asdict(waited)
    )
    given: dict[str, Any] = {"least_bytes": 0, "keep": 1, "on_tensor": lambda: None}
    folder = checkpoint.save(tmp_path, snapshot, *updater.saved(), **given)
    beats: list[Phase] = []
    context: Any = SimpleNamespace(
        device="cpu", ranks=ALONE, status=SimpleNamespace(beat=beats.append), say=lambda text: None
    )
    found = restore(context, made(), cast("Any", SimpleNamespace(found=(folder, snapshot))))
    assert (found.interval_loss.item(), found.interval_steps.item(), found.patience) == (2.5, 3, waited)
    assert (found.step, found.saved_step, found.equal_step, found.saved_in) == (7, 7, 7, folder)
    assert beats == [Phase.LOAD]
    fresh = restore(context, made(), cast("Any", SimpleNamespace(found=None)))
    assert (fresh.interval_loss.item(), fresh.interval_steps.item(), fresh.step) == (0.0, 0, 0)
    assert (fresh.interval_samples, fresh.interval_tokens, fresh.interval_learned, fresh.timed_steps) == (
        0,
    ) * 4


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"w": torch.ones(6, 2), "head": torch.ones(6, 2)}, "1 weights are in this checkpoint or .* as head"),
        ({"w": torch.ones(8, 2)}, "1 weights have another shape in this checkpoint .* as w: 8 x 2 and 6 x 2"),
        ({}, "1 weights are in this checkpoint or in the model but not in both, as w"),
    ],
    ids=["one more", "more rows", "one less"],
)
def test_rows_of_another_model_are_refused_before_they_are_read(
    tmp_path: Path, saved: dict[str, torch.Tensor], words: str
) -> None:
    """A tensor with more rows has those that a rank asks for."""
    snapshot = checkpoint.Snapshot(step=1, interval_loss=2.0, interval_steps=1, fingerprint={})
    given: dict[str, Any] = {"least_bytes": 0, "keep": 1, "on_tensor": lambda: None}
    state = {f"{name}/m": value for name, value in saved.items()}
    folder = checkpoint.save(tmp_path, snapshot, saved, state, **given)
    own = {"w": torch.ones(3, 2)}
    rows = {"w": Rows(shape=(6, 2), rank=1, size=2)}
    updater: Any = SimpleNamespace(in_rows=SimpleNamespace(rows=rows), weights=lambda: own)
    status = SimpleNamespace(beat=lambda phase: None)
    context: Any = SimpleNamespace(device="cpu", ranks=ALONE, status=status, say=lambda text: None)
    begun: Any = SimpleNamespace(found=(folder, snapshot))
    with pytest.raises(DataError, match=words):
        restore(context, updater, begun)


def test_records_are_on_the_disk_before_the_checkpoint_that_relies_on_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume cuts them back to its step: after a power cut, lines before it would be missing."""
    done: list[str] = []

    def saved(*_: object, **__: object) -> Path:
        done.append("checkpoint")
        return tmp_path / "step-000003"

    monkeypatch.setattr(checkpoint, "save", saved)
    status = SimpleNamespace(beat=lambda *_, **__: None)
    config = SimpleNamespace(checkpoint=SimpleNamespace(checkpoints_total_limit=1))
    context = SimpleNamespace(run_dir=tmp_path, status=status, config=config, say=lambda text: None)
    journal = SimpleNamespace(
        sync=lambda: done.append("records"),
        metrics=SimpleNamespace(checkpoint=lambda step: None),
        look_at_folder=lambda: None,
    )
    run: Any = SimpleNamespace(
        context=context, journal=journal, start=SimpleNamespace(fingerprint={}, settings={})
    )
    sums = {"interval_loss": torch.zeros(()), "interval_steps": torch.zeros(())}
    now = State(updater=made(), watch=Stopwatch("cpu"), **sums, step=3)
    state.save(run, now)
    assert done == ["records", "checkpoint"]
    state.save(run, now)
    assert done == ["records", "checkpoint"], "it is saved already"
