"""Names in a run's folder: links lead nowhere, and files and folders keep their kinds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.telemetry.rundir import require_own_names


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "log.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "samples",
        "best",
        "checkpoints/step-000004",
        "samples/step-000004.png",
        ".model.old",
        ".best.old",
        "checkpoints/.step-000004.old",
    ],
)
def test_a_link_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    precious, run_dir = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    link = run_dir / name
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    with pytest.raises(ConfigError, match="does not follow links") as caught:
        require_own_names(run_dir)
    assert caught.value.problems[0].where == str(link)
    assert str(precious) in caught.value.problems[0].what


def test_other_names_and_the_folder_itself_may_be_links(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "run"
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "notes").symlink_to("/etc")
    (folder / "checkpoints" / "kept").symlink_to("/etc")
    (tmp_path / "run").symlink_to(folder)
    require_own_names(tmp_path / "run")
    require_own_names(tmp_path / "absent")


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "plan.json", "process.json", "before_after.png"])
def test_a_folder_in_the_place_of_a_file_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="removes nothing that it has not made") as caught:
        require_own_names(tmp_path)
    assert caught.value.problems[0].where == str(tmp_path / name)
    assert caught.value.problems[0].what == "a folder, where a run has a file"
    assert (tmp_path / name / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["checkpoints", "samples", "lora", "model", "best", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_refused_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(ConfigError, match="removes nothing that it has not made") as caught:
        require_own_names(tmp_path)
    assert caught.value.problems[0].what == "no folder, where a run has one"
    assert (tmp_path / name).read_text() == "mine"


def _made(folder: Path) -> Path:
    """A run's folder."""
    for name in ("checkpoints", "samples", "lora", "model", "best", "tensorboard", "wandb"):
        (folder / name).mkdir()
    for name in (".lock", "metrics.jsonl", "plan.json", "process.json", "run.json", "config.resolved.yaml"):
        (folder / name).touch()
    return folder


def test_what_a_run_has_made_is_accepted(tmp_path: Path) -> None:
    require_own_names(_made(tmp_path))


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "checkpoints", "samples", "lora"])
def test_names_that_another_user_owns_are_told_before_training(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_own_names(_made(tmp_path))
    real = os.access

    def access(path: Path, mode: int) -> bool:  # permission bits do not hold root
        return real(path, mode) and not (path.name == name and mode & os.W_OK)

    monkeypatch.setattr(os, "access", access)
    with pytest.raises(ConfigError, match="another user may have begun this one") as caught:
        require_own_names(tmp_path)
    assert caught.value.problems[0].where == str(tmp_path / name)


def test_files_that_are_replaced_may_belong_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replaced = ("plan.json", "process.json", "run.json", "config.resolved.yaml")
    monkeypatch.setattr(os, "access", lambda path, mode: path.name not in replaced or mode == os.F_OK)
    require_own_names(_made(tmp_path))
