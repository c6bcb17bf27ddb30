"""An output path that cannot be written is told before the work, in the command's own words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.cli.test_runs import a_run
from trainer.cli import main

ROOT = Path(__file__).resolve().parents[3]
QUICKSTART = str(ROOT / "train_configs" / "quickstart.yaml")
# not even root makes a file there
SEALED = "/proc"
COMMANDS = {
    "--to /proc/new.safetensors": ("export", "lora.safetensors", "--format", "comfyui"),
    "--to /proc/model": ("merge", QUICKSTART, "--lora", "lora.safetensors"),
    "--picture /proc/new.png": ("sample", QUICKSTART),
    "--plot /proc/new.png": ("runs", "list", "run"),
}


@pytest.mark.parametrize("option", COMMANDS)
def test_a_place_that_cannot_be_written(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.safetensors").touch()
    a_run(tmp_path / "run", rank=4, losses=(1.0,))
    assert main([*COMMANDS[option], *option.split()]) == 78
    said = capsys.readouterr().err
    assert said == (
        f"error: bad configuration (exit code 78)\n{option}: {SEALED} cannot be written: No such file or"
        " directory\n    -> name a place that this user may write\n"
    )


@pytest.mark.parametrize(
    ("option", "name"), [("--picture new.jpg", "new.png"), ("--plot run/losses", "losses.png")]
)
def test_a_picture_that_would_not_be_what_its_name_says(
    option: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(tmp_path / "run", rank=4, losses=(1.0,))
    command = ("sample", QUICKSTART) if "picture" in option else ("runs", "list", "run")
    assert main([*command, *option.split()]) == 78
    said = capsys.readouterr().err
    assert said.endswith(f"{option}: pictures are written as PNG\n    -> name it {name}\n")
    assert not (tmp_path / option.split()[1]).exists()


def test_pictures_have_no_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    """The picture would be written elsewhere: where --picture says."""
    assert main(["sample", QUICKSTART, "--output", "new.png"]) == 78
    assert "--output new.png: it names a run's folder, and here is no run\n    -> " in capsys.readouterr().err
    assert main(["sample", "--help"]) == 0
    assert "--output" not in capsys.readouterr().out


def test_a_lora_whose_own_folder_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """The new file is meant to lie beside it."""
    assert main(["export", "/proc/version", "--format", "comfyui"]) == 78
    assert "beside /proc/version: /proc cannot be written" in capsys.readouterr().err
