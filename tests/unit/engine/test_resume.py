"""Conditions under which a run folder may be used."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests import killed
from trainer.engine.records import checkpoint, resume
from trainer.errors import ConfigError, NoSpaceError

FINGERPRINT = {"seed": "0"}


def context(run_dir: Path, *, wanted: str = "auto", disk_bytes: int = 0, limit: int = 3) -> Any:
    config = SimpleNamespace(
        checkpoint=SimpleNamespace(resume_from_checkpoint=wanted, checkpoints_total_limit=limit),
        train=SimpleNamespace(max_train_steps=10),
    )
    plan = SimpleNamespace(disk_bytes=disk_bytes)
    return SimpleNamespace(run_dir=run_dir, config=config, plan=plan, say=lambda text: None, alive=print)


def finished(run_dir: Path, fingerprint: str) -> None:
    (run_dir / "lora").mkdir(parents=True)
    (run_dir / "lora" / "x.safetensors").write_bytes(b"precious")
    (run_dir / resume.RUN_FILE).write_text(fingerprint)


def test_an_empty_folder_is_free(tmp_path: Path) -> None:
    resume.require_free_folder(context(tmp_path), FINGERPRINT, ())


def test_another_run_is_refused_where_results_are(tmp_path: Path) -> None:
    finished(tmp_path, '{"seed": "1"}')
    with pytest.raises(ConfigError, match=r"train\.seed: it began with '1', this start has '0'"):
        resume.require_free_folder(context(tmp_path), FINGERPRINT, ())


def test_another_runs_best_lora_is_a_result(tmp_path: Path) -> None:
    """A fresh start removes what is in `best/`, which may be all that somebody kept of a run."""
    (tmp_path / "best").mkdir()
    resume.require_free_folder(context(tmp_path), FINGERPRINT, ())
    (tmp_path / "best" / "x.safetensors").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="best of another run is here"):
        resume.require_free_folder(context(tmp_path), FINGERPRINT, ())
    with pytest.raises(ConfigError, match="best of an earlier run is here and resuming is forbidden"):
        resume.require_free_folder(context(tmp_path, wanted="never"), FINGERPRINT, ())
    (tmp_path / resume.RUN_FILE).write_text('{"seed": "1"}')
    with pytest.raises(ConfigError, match=r"train\.seed: it began with '1', this start has '0'"):
        resume.require_free_folder(context(tmp_path), FINGERPRINT, ())
    (tmp_path / resume.RUN_FILE).write_text('{"seed": "0"}')
    resume.require_free_folder(context(tmp_path), FINGERPRINT, ())


def test_the_same_run_may_start_again(tmp_path: Path) -> None:
    """Such as a full fine-tune that was told to write no checkpoints: it begins anew, and says so."""
    finished(tmp_path, '{"seed": "0"}')
    given, said = context(tmp_path), []
    given.say = said.append
    resume.require_free_folder(given, FINGERPRINT, ())
    assert said == [
        f"{tmp_path / 'lora'} of this run is here, and no checkpoint: all is trained again to write it anew"
    ]


@pytest.mark.parametrize("text", ["", '{"seed": ', "[]"])
def test_a_damaged_record_of_whose_results_these_are_is_told(tmp_path: Path, text: str) -> None:
    finished(tmp_path, text)
    with pytest.raises(ConfigError, match=r"run\.json: which run's results these are cannot be read"):
        resume.require_free_folder(context(tmp_path), FINGERPRINT, ())


def test_a_loss_before_the_first_step_is_no_result(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 0, "validation_loss": 1.0}\n')
    resume.require_free_folder(context(tmp_path, wanted="never"), FINGERPRINT, ())
    metrics.write_text('{"step": 0, "validation_loss": 1.0}\n{"step": 1, "loss": 1.0}\n')
    with pytest.raises(ConfigError, match=r"metrics\.jsonl of an earlier run is here"):
        resume.require_free_folder(context(tmp_path, wanted="never"), FINGERPRINT, ())


def test_never_refuses_results_of_the_same_run_too(tmp_path: Path) -> None:
    finished(tmp_path, '{"seed": "0"}')
    with pytest.raises(ConfigError, match="resuming is forbidden"):
        resume.require_free_folder(context(tmp_path, wanted="never"), FINGERPRINT, ())


def test_a_folder_without_a_usable_checkpoint_is_not_started_over(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints" / "step-000005"
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("[]")
    with pytest.raises(ConfigError, match="none of the checkpoints here can be used"):
        resume.start(context(tmp_path), ())


def test_space_that_the_run_holds_already_counts(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(NoSpaceError, match="GiB free"):
        resume.require_space(context(tmp_path, disk_bytes=1 << 60))
    kept = tmp_path / "checkpoints" / "step-000005.damaged"
    kept.mkdir()
    (kept / "big").touch()
    os.truncate(kept / "big", 1 << 43)  # nothing that the plan counts
    with pytest.raises(NoSpaceError, match="GiB free"):
        resume.require_space(context(tmp_path, disk_bytes=1 << 43))
    held = tmp_path / "checkpoints" / "step-000005" / "big"
    held.parent.mkdir()
    with held.open("wb") as file:
        file.truncate(1 << 43)  # sparse: eight TiB that take no room
    resume.require_space(context(tmp_path, disk_bytes=1 << 43))


def test_checkpoints_that_go_after_the_next_save_make_no_room_for_it(tmp_path: Path) -> None:
    """Of five that are there one is to be kept from now on: the plan counts it, and the next one."""
    each = 1 << 43
    for step in range(1, 6):
        sparse(tmp_path / "checkpoints" / f"step-{step:06d}" / "big", each)
    resume.require_space(context(tmp_path, disk_bytes=5 * each, limit=6))
    with pytest.raises(NoSpaceError, match=r"final files need 8\.19e\+03 GiB more"):
        resume.require_space(context(tmp_path, disk_bytes=2 * each, limit=1))


def test_a_start_that_may_not_resume_reads_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hash all of a full fine-tune's takes minutes."""
    for step in (5, 10):
        save(tmp_path / str(step), step, 1.0)
        shutil.copytree(tmp_path / str(step), tmp_path / "checkpoints", dirs_exist_ok=True)

    def read(*_: Any) -> Any:
        raise AssertionError("a checkpoint is read")

    monkeypatch.setattr(checkpoint, "damage", read)
    monkeypatch.setattr(checkpoint, "newest_valid", read)
    with pytest.raises(ConfigError, match="step-000010 exists and resuming is forbidden"):
        resume.start(context(tmp_path, wanted="never"), ())


def sparse(path: Path, size: int) -> Path:
    """A file of that size which takes no room."""
    path.parent.mkdir(parents=True)
    path.touch()
    os.truncate(path, size)
    return path


def test_what_killed_writes_left_is_removed_and_takes_no_room(tmp_path: Path) -> None:
    sparse(tmp_path / "checkpoints" / "step-000005.tmp" / "big", 1 << 43)
    sparse(tmp_path / "model.tmp" / "big", 1 << 43)
    other = sparse(tmp_path / "checkpoints" / "mine.tmp" / "big", 1)
    resume.require_space(context(tmp_path, disk_bytes=1))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [other]


def test_what_a_killed_replacement_kept_aside_is_removed_or_comes_back(tmp_path: Path) -> None:
    """An older model of tens of GB waited, hidden, for the next export."""
    step = tmp_path / "checkpoints" / "step-000005"
    step.mkdir(parents=True)
    sparse(step.with_name(".step-000005.old") / "big", 1 << 43)
    older = [sparse(tmp_path / f".{name}.old" / "config.json", 1) for name in ("model", "best")]
    other = sparse(tmp_path / "checkpoints" / ".mine.old" / "big", 1)
    said: list[str] = []
    resume.put_back(tmp_path, said.append)
    back = [tmp_path / name / "config.json" for name in ("model", "best")]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted([*back, other])
    assert [text.partition(" ")[0] for text in said] == ["model", "best"]
    older[0].parent.mkdir()
    resume.put_back(tmp_path, said.append)
    assert not older[0].parent.exists() and back[0].is_file()
    assert len(said) == 2, "nothing came back"


def save(root: Path, step: int, value: float) -> None:
    snapshot = checkpoint.Snapshot(step=step, interval_loss=0.0, interval_steps=1, fingerprint=FINGERPRINT)
    weights = {"w": torch.full((3,), value)}
    checkpoint.save(
        root, snapshot, weights, {"w/m": weights["w"]}, least_bytes=12, keep=1, on_tensor=lambda: None
    )


def test_a_checkpoint_that_a_killed_save_was_replacing_is_gone_on_from(tmp_path: Path) -> None:
    """The only one waited aside under a hidden name: the run was started over."""
    seen = set()
    for folder in killed.at_each_change(
        lambda folder: save(folder / "checkpoints", 5, 2.0),
        lambda folder: save(folder / "checkpoints", 5, 1.0),
        tmp_path,
    ):
        said: list[str] = []
        start = context(folder)
        start.say = said.append
        found, _ = resume._wanted_checkpoint(start)
        absent = found is None
        resume.put_back(folder, said.append)
        found, _ = resume._wanted_checkpoint(start)
        assert found is not None and found[1].step == 5
        seen.add((absent, checkpoint.read_group(found[0], "weights", "cpu")["w"][0].item()))
        told = "checkpoints/step-000005 is here again, as it was before a start replaced it that was killed"
        assert said == ([told] if absent else [])
        resume.require_space(start)
        assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-000005"]
    assert seen == {(False, 1.0), (True, 1.0), (False, 2.0)}


def test_a_kill_at_any_moment_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path) -> None:
    """Of two only one is kept: the older goes once the new one is on the disk."""
    seen = []
    for folder in killed.at_each_change(
        lambda folder: save(folder / "checkpoints", 10, 2.0),
        lambda folder: save(folder / "checkpoints", 5, 1.0),
        tmp_path,
    ):
        start = context(folder)
        resume.put_back(folder, print)
        found, _ = resume._wanted_checkpoint(start)
        assert found is not None
        value = checkpoint.read_group(found[0], "weights", "cpu")["w"][0].item()
        assert (found[1].step, value) in ((5, 1.0), (10, 2.0))
        seen.append(found[1].step)
    assert seen == sorted(seen) and set(seen) == {5, 10}


def test_a_start_looks_for_what_a_killed_one_left_aside_first(tmp_path: Path) -> None:
    """A model alone would be another run's that started over."""
    sparse(tmp_path / ".model.old" / "config.json", 1)
    save(tmp_path / "checkpoints", 5, 1.0)
    (tmp_path / "checkpoints" / "step-000005").rename(tmp_path / "checkpoints" / ".step-000005.old")
    (tmp_path / resume.RUN_FILE).write_text(json.dumps({"seed": "1"}))
    said: list[str] = []
    started = context(tmp_path, wanted="never")
    started.say = said.append
    with pytest.raises(ConfigError, match="step-000005 exists and resuming is forbidden"):
        resume.start(started, ())
    assert len(said) == 2 and (tmp_path / "model" / "config.json").is_file()


def test_an_older_model_and_links_to_the_base_make_no_room(tmp_path: Path) -> None:
    """The new model is written beside the older one; what links lead to is the base's."""
    base = sparse(tmp_path / "base" / "encoder.safetensors", 1 << 43)
    run = tmp_path / "run"
    sparse(run / "model" / "transformer" / "big", 1 << 43)
    (run / "best").mkdir()
    (run / "best" / "encoder.safetensors").symlink_to(base)
    with pytest.raises(NoSpaceError, match="GiB free"):
        resume.require_space(context(run, disk_bytes=1 << 43))


def test_a_run_that_began_from_a_checkpoint_never_goes_back_behind_it(tmp_path: Path) -> None:
    """Its own later checkpoint counts, and where that is damaged the named one, not an earlier own one."""
    root, named = tmp_path / "own" / "checkpoints", tmp_path / "first" / "checkpoints" / "step-000006"
    for step in (4, 8):
        save(tmp_path / str(step), step, float(step))
        shutil.copytree(tmp_path / str(step), root, dirs_exist_ok=True)
    save(named.parent, 6, 6.0)
    began: dict[str, Any] = {"path": str(named.resolve()), "state_sha256": checkpoint.identity(named)}
    (tmp_path / "own" / resume.RUN_FILE).write_text(json.dumps({**FINGERPRINT, "began_from": began}))
    start = context(tmp_path / "own")
    start.config.checkpoint.resume_from_checkpoint = named
    found, recorded = resume._wanted_checkpoint(start)
    assert found is not None and (found[0], found[1].step) == (root / "step-000008", 8)
    assert recorded == began
    next((root / "step-000008").glob("*.safetensors")).write_bytes(b"")
    found, recorded = resume._wanted_checkpoint(start)
    assert found is not None and (found[0], found[1].step) == (named, 6)
    assert recorded == began
