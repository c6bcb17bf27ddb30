"""The state of a run that goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.optimizer import Updater
from trainer.engine.ranks import ALONE
from trainer.engine.records import checkpoint
from trainer.engine.training.state import restore


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
