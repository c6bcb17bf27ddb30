"""Checkpoints: whole or absent, pruned, refused where they belong to another run."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from trainer.engine import checkpoint
from trainer.errors import ConfigError, NoSpaceError
from trainer.modeling import tensorfile

FINGERPRINT = {"seed": "0", "lora.rank": "8"}


def save(root: Path, step: int, keep: int = 3) -> Path:
    snapshot = checkpoint.Snapshot(step=step, interval_loss=0.1, interval_steps=1, fingerprint=FINGERPRINT)
    weights = {"w": torch.full((3,), float(step))}
    return checkpoint.save(root, snapshot, weights, {"w/m": weights["w"]}, keep=keep, on_tensor=lambda: None)


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.newest_valid(tmp_path, print)
    assert found is not None
    folder, snapshot = found
    assert (snapshot.step, snapshot.interval_loss, dict(snapshot.fingerprint)) == (5, 0.1, FINGERPRINT)
    assert torch.equal(checkpoint.read_group(folder, "weights", "cpu")["w"], torch.full((3,), 5.0))
    assert set(checkpoint.read_group(folder, "optimizer", "cpu")) == {"w/m"}


def test_equal_state_gives_equal_bytes(tmp_path: Path) -> None:
    one, two = save(tmp_path / "1", 5), save(tmp_path / "2", 5)
    for path in one.iterdir():
        assert path.read_bytes() == (two / path.name).read_bytes()


def test_only_the_newest_are_kept_and_leftovers_removed(tmp_path: Path) -> None:
    (tmp_path / "step-000001.tmp").mkdir(parents=True)
    for step in (2, 4, 6, 8):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000008"]


@pytest.mark.parametrize("damage", ["truncated", "missing", "state", "version"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    file = next(folder.glob("weights-*"))
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "state":
        (folder / "state.json").write_text("{")
    else:
        state = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps({**state, "version": 99}))
    said: list[str] = []
    found = checkpoint.newest_valid(tmp_path, said.append)
    assert found is not None
    assert found[1].step == 1
    assert len(said) == 1
    assert "step-000002" in said[0]


def test_a_disk_that_fills_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the second file of the new checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tensorfile.os, "fsync", full)
    with pytest.raises(NoSpaceError):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.damage(tmp_path / "step-000001") is None


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        checkpoint.require_same_run(folder, FINGERPRINT, {"seed": "1", "lora.rank": "16"})
    text = str(caught.value)
    assert "seed: the checkpoint has '0', this run '1'" in text
    assert "lora.rank: the checkpoint has '8', this run '16'" in text
    assert text.endswith("-> set back what is listed, or choose another output_dir to start afresh")
    with pytest.raises(ConfigError, match="data: images, captions or what is done with them are not those"):
        checkpoint.require_same_run(folder, {"data": "18c0a833651f21ef"}, {"data": "57a2d81abf5c18d5"})


def test_a_renamed_checkpoint_is_kept_and_not_offered(tmp_path: Path) -> None:
    save(tmp_path, 1).rename(tmp_path / "step-000001-best")
    for step in (2, 3):
        save(tmp_path, step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000001-best", "step-000003"]
    assert [checkpoint.step_of(path) for path in checkpoint.steps_on_disk(tmp_path)] == [3]


def test_later_checkpoints_do_not_push_out_the_new_one(tmp_path: Path) -> None:
    for step in (55, 60, 35):
        save(tmp_path, step, keep=2)
    assert "step-000035" in {path.name for path in tmp_path.iterdir()}


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    for step in (1_000_000, 999_999):
        save(tmp_path, step, keep=9)
    assert [checkpoint.step_of(path) for path in checkpoint.steps_on_disk(tmp_path)] == [999_999, 1_000_000]
