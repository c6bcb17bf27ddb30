"""Checkpoints: whole or absent, pruned, refused where they belong to another run."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.engine.records import checkpoint
from trainer.engine.training.state import _require_same_weights
from trainer.errors import ConfigError, DataError, NoSpaceError, StorageError
from trainer.modeling.rows import Rows
from trainer.modeling.tensor_file import Later, Writable

FINGERPRINT = {"seed": "0", "lora.rank": "8"}


def quiet() -> None:
    """Nobody waits for a heartbeat."""


def save(root: Path, step: int, keep: int = 3) -> Path:
    snapshot = checkpoint.Snapshot(step=step, interval_loss=0.1, interval_steps=1, fingerprint=FINGERPRINT)
    weights = {"w": torch.full((3,), float(step))}
    return checkpoint.save(
        root, snapshot, weights, {"w/m": weights["w"]}, least_bytes=12, keep=keep, on_tensor=lambda: None
    )


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    save(tmp_path, 5)
    found = checkpoint.newest_valid(tmp_path, print, quiet)
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


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.write_bytes(data)


def rewrite_state(folder: Path, **values: object) -> None:
    """Change state.json as an editor would; None removes a key."""
    path = folder / "state.json"
    state = {**json.loads(path.read_text()), **values}
    path.write_text(json.dumps({key: value for key, value in state.items() if value is not None}))


def sign(folder: Path) -> None:
    """Give a changed state.json its own checksum again, as no damage would."""
    state = json.loads((folder / "state.json").read_text())
    rewrite_state(folder, state_sha256=checkpoint._own_checksum(state))


def hurt(folder: Path, damage: str) -> None:
    file = next(folder.glob("weights-*"))
    earlier = folder.with_name("step-000001")
    if damage == "truncated":
        file.write_bytes(file.read_bytes()[:-1])
    elif damage == "missing":
        file.unlink()
    elif damage == "bit":
        flip(file, -1)
    elif damage == "header":
        flip(file, 12)
    elif damage == "optimizer":
        flip(next(folder.glob("optimizer-*")), -1)
    elif damage == "of another step":
        shutil.copyfile(next(earlier.glob("weights-*")), file)
    elif damage == "whole, of another step":
        shutil.rmtree(folder)
        shutil.copytree(earlier, folder)
    elif damage == "state":
        (folder / "state.json").write_text("{")
    elif damage == "a list":
        (folder / "state.json").write_text("[]")
    elif damage == "a digit of state":
        rewrite_state(folder, interval_loss=0.2)
    elif damage == "a digit of the version":
        rewrite_state(folder, version=checkpoint.FORMAT_VERSION + 2)
    else:
        rewrite_state(folder, **{damage: None})
        sign(folder)


DAMAGES = (
    "truncated",
    "missing",
    "bit",
    "header",
    "optimizer",
    "of another step",
    "whole, of another step",
    "state",
    "a list",
    "a digit of state",
    "a digit of the version",
    "step",
    "fingerprint",
    "files",
    "interval_loss",
    "version",
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    hurt(folder, damage)
    said: list[str] = []
    found = checkpoint.newest_valid(tmp_path, said.append, quiet)
    assert found is not None
    assert found[1].step == 1
    assert len(said) == 1
    assert "step-000002" in said[0]


def test_a_damaged_checkpoint_is_kept_under_another_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    said: list[str] = []
    for _ in range(2):
        folder = save(tmp_path, 2)
        flip(next(folder.glob("weights-*")), -1)
        hurt_bytes = next(folder.glob("weights-*")).read_bytes()
        checkpoint.set_aside(tmp_path, 1, said.append)
    kept = ["step-000001", "step-000002.damaged", "step-000002.damaged-2"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept
    assert next((tmp_path / kept[-1]).glob("weights-*")).read_bytes() == hurt_bytes
    assert ["step-000002.damaged" in line for line in said] == [True, True]
    save(tmp_path, 2, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", *kept[1:]]


def test_a_checkpoint_without_checksums_is_used_and_that_is_said(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    rewrite_state(folder, sha256=None, state_sha256=None, settings=None)  # as 0.1.0 wrote it
    said: list[str] = []
    found = checkpoint.newest_valid(tmp_path, said.append, quiet)
    assert found is not None
    assert not found[1].settings
    assert said == ["checkpoint step-000001 is of an earlier version and has no checksums to check it by"]
    next(folder.glob("weights-*")).write_bytes(b"short")
    assert "has 5 bytes" in (checkpoint.damage(folder, quiet) or "")


def test_a_newer_trainers_checkpoint_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    rewrite_state(folder, version=99)
    sign(folder)
    with pytest.raises(ConfigError, match="a newer trainer wrote this checkpoint"):
        checkpoint.newest_valid(tmp_path, print, quiet)


def test_a_disk_that_fails_to_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path, 1)

    class Failing(io.BytesIO):
        def readinto(self, buffer: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    whole = Path.open

    def open_file(path: Path, *rest: Any, **options: Any) -> Any:
        return Failing() if path.suffix == ".safetensors" else whole(path, *rest, **options)

    monkeypatch.setattr(Path, "open", open_file)
    with pytest.raises(StorageError, match="Input/output error while reading it"):
        checkpoint.damage(folder, quiet)


def test_other_files_in_a_checkpoint_are_not_read(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    other = save(tmp_path / "other", 7)
    shutil.copyfile(next(other.glob("weights-*")), folder / "weights-00002 (copy).safetensors")
    assert checkpoint.damage(folder, quiet) is None
    assert torch.equal(checkpoint.read_group(folder, "weights", "cpu")["w"], torch.full((3,), 1.0))


def test_checksums_are_those_of_sha256sum(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    state = json.loads((folder / "state.json").read_text())
    for name, checksum in state["sha256"].items():
        said = subprocess.run(["sha256sum", folder / name], capture_output=True, text=True, check=True).stdout
        assert said.split()[0] == checksum


def test_a_disk_that_fills_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1)
    calls = []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:  # the second file of the new checkpoint
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError):
        save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.damage(tmp_path / "step-000001", quiet) is None


def test_a_disk_that_takes_no_more_at_the_rename_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)

    def read_only(path: Path, target: Path) -> Path:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", read_only)
        with pytest.raises(StorageError, match="Read-only file system while writing it"):
            save(tmp_path, 2)
    assert checkpoint.damage(tmp_path / "step-000001", quiet) is None


def test_another_run_is_refused_with_every_difference(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with pytest.raises(ConfigError) as caught:
        checkpoint.require_same_run(folder, FINGERPRINT, {"seed": "1", "lora.rank": "16"}, print)
    text = str(caught.value)
    assert "train.seed: it began with '0', this start has '1'" in text
    assert "lora.rank: it began with '8', this start has '16'" in text
    assert text.endswith("-> set back what is listed, or choose another output_dir to start afresh")
    with pytest.raises(ConfigError, match="data: images, captions, conversations, what is done with them or"):
        one, two = {"data": "18c0a833651f21ef"}, {"data": "57a2d81abf5c18d5"}
        checkpoint.require_same_run(folder, one, two, print)


@pytest.mark.parametrize("seed", ["0", "1"])
def test_an_order_of_samples_that_no_key_has_is_not_to_be_set_back(tmp_path: Path, seed: str) -> None:
    """A checkpoint of before samples were drawn by the step, whatever else differs."""
    older, newer = {"seed": "0"}, {"seed": seed, "sample_order": "drawn by the step"}
    with pytest.raises(ConfigError) as caught:
        checkpoint.require_same_run(save(tmp_path, 1), older, newer, print)
    text = str(caught.value)
    assert "sample_order: this version puts other samples into a step than the one that began the run" in text
    assert text.endswith(
        "-> go on with the version that began the run, or choose another output_dir to start afresh"
    )


def test_an_older_checkpoint_that_is_in_use_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody drew with its LoRA on NFS: a traceback, after the new one was saved."""
    save(tmp_path, 1, keep=1)

    def in_use(path: str, **options: int) -> None:
        raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", in_use)
        save(tmp_path, 2, keep=1)
    found = checkpoint.newest_valid(tmp_path, print, quiet)
    assert found is not None and found[1].step == 2
    save(tmp_path, 3, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


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


WHOLE = torch.ones(4, 2)
LESS = Later(dtype=torch.float32, shape=(4, 2), make=lambda: torch.ones(2, 2))
"""A tensor of which a part was not given."""


@pytest.mark.parametrize(
    ("weights", "optimizer", "words"),
    [
        ({"w": torch.ones(0, 2)}, {}, "0 bytes of weights are to be written, the model has 32"),
        ({"w": torch.ones(2, 2)}, {}, "16 bytes of weights are to be written, the model has 32"),
        ({"w": WHOLE, "b": torch.ones(0)}, {}, "b has no values"),
        ({"w": WHOLE}, {"w/m": torch.ones(0, 2)}, "w/m has no values"),
        ({"w": LESS}, {}, r"w is \(2, 2\) in torch.float32, not \(4, 2\)"),
        ({"w": WHOLE}, {"w/m": LESS}, r"w/m is \(2, 2\) in torch.float32, not \(4, 2\)"),
    ],
)
def test_a_checkpoint_with_less_than_was_trained_is_not_written(
    tmp_path: Path, weights: dict[str, Writable], optimizer: dict[str, Writable], words: str
) -> None:
    """The one before stays, and nothing of the new one."""
    save(tmp_path, 5)
    snapshot = checkpoint.Snapshot(step=6, interval_loss=0.1, interval_steps=1, fingerprint=FINGERPRINT)
    with pytest.raises(DataError, match=words):
        checkpoint.save(tmp_path, snapshot, weights, optimizer, least_bytes=32, keep=1, on_tensor=quiet)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000005"]


def test_rows_are_read_of_what_was_saved_whole(tmp_path: Path) -> None:
    values, moments = torch.arange(10.0).view(5, 2), torch.arange(10, dtype=torch.int16).view(5, 2)
    snapshot = checkpoint.Snapshot(step=6, interval_loss=0.1, interval_steps=1, fingerprint=FINGERPRINT)
    folder = checkpoint.save(
        tmp_path, snapshot, {"w": values}, {"w/m": moments}, least_bytes=40, keep=1, on_tensor=quiet
    )
    for rank in range(4):
        rows = Rows(shape=(5, 2), rank=rank, size=4)  # two rows, two, one and none
        weights = checkpoint.read_group(folder, "weights", "cpu", {"w": rows})
        state = checkpoint.read_group(folder, "optimizer", "cpu", {"w": rows})
        assert torch.equal(weights["w"], values[rows.start : rows.stop])
        assert torch.equal(state["w/m"], moments[rows.start : rows.stop])
        assert state["w/m"].dtype == torch.int16


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """A tied head that was trained apart is in one of them only: nothing of it is dropped silently."""
    one, wide = (4, 2), (4, 8)
    with pytest.raises(DataError, match=r"1 weights are in this checkpoint or in the model .* as head"):
        _require_same_weights({"head": one, "words": one}, {"words": one}, tmp_path)
    with pytest.raises(DataError, match=r"1 weights have another shape .* as words: 4 x 8 and 4 x 2"):
        _require_same_weights({"words": wide}, {"words": one}, tmp_path)
    _require_same_weights({"words": one}, {"words": one}, tmp_path)


def test_values_of_early_stopping_that_are_not_known_are_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    rewrite_state(folder, early_stop={"later": 1})
    sign(folder)
    assert checkpoint.damage(folder, quiet) == "state.json is not one of ours: early_stop has 'later'"
