"""Files in the working directory are data: none of them is executed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config import interpreter

ROOT = Path(__file__).resolve().parents[3]
NAMES = (
    "random",
    "yaml",
    "calendar",
    "tokenize",
    "secrets",
    "pydantic",
    "json",
    "dataclasses",
    "numpy",
    "torch",
)
SCRIPT = "from trainer.cli import main; raise SystemExit(main())"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A folder with modules of usual names, each of which leaves a mark when it is executed."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in (*NAMES, "trainer"):
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'a').write({name!r})\n")
    (folder / "images").mkdir()
    (folder / "images" / "cat.txt").write_text("a cat")
    return folder


def run(folder: Path, command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("TRAINER_", "PYTHON"))
    }
    runtime = {"TRAINER_RUNTIME_DIR": str(folder / "runtime"), "TRAINER_CACHE_DIR": str(folder / "cache")}
    runtime |= {"TRAINER_PROFILE": "cpu", "TRAINER_METRICS_PORT": "0", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder, env={**environment, **runtime, **variables}, text=True, capture_output=True
    )


def train(folder: Path) -> list[str]:
    """A run that ends in the training process, with its data set that has no image in it."""
    arguments = ["train", str(ROOT / "train_configs/quickstart.yaml"), "--dataset", str(folder / "images")]
    base = f"model.pretrained_model_name_or_path={ROOT / 'assets/tiny-flux'}"
    held_out = f"validation.img_dir={ROOT / 'examples/style-held-out'}"
    return [*arguments, "--output", str(folder / "run"), "--set", base, "--set", held_out]


def test_a_run_executes_none_of_it(hostile: Path) -> None:
    # a console script has its own folder on the path, as -P has none
    done = run(hostile, [sys.executable, "-P", "-c", SCRIPT, *train(hostile)])
    assert not (hostile.parent / "executed").exists()
    assert done.returncode == 65, done.stderr
    assert (hostile / "run" / "log.jsonl").exists()


def test_python_m_trainer_executes_what_python_itself_imports_at_most(hostile: Path) -> None:
    for name in (
        "trainer",
        "dataclasses",
        "tokenize",
    ):  # the first is Python's doing, of the others some versions'
        (hostile / f"{name}.py").unlink()
    done = run(hostile, [sys.executable, "-m", "trainer", *train(hostile)])
    assert not (hostile.parent / "executed").exists()
    assert done.returncode == 65, done.stderr


def test_only_a_checkout_that_is_run_from_its_folder_stays_importable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", ["/elsewhere"])
    monkeypatch.setenv("PYTHONPATH", "/others")
    interpreter.keep_checkout("")
    interpreter.keep_checkout(str(tmp_path))
    assert (sys.path, os.environ["PYTHONPATH"]) == (["/elsewhere"], "/others")
    interpreter.keep_checkout(str(ROOT))
    assert sys.path == ["/elsewhere", str(ROOT)]
    assert os.environ["PYTHONPATH"] == f"/others{os.pathsep}{ROOT}"
    monkeypatch.delenv("PYTHONPATH")
    interpreter.keep_checkout(str(ROOT))
    assert os.environ["PYTHONPATH"] == str(ROOT)


def test_a_child_and_what_it_starts_have_no_working_directory_on_their_path(hostile: Path) -> None:
    inner = "subprocess.run([sys.executable, '-c', 'import random, yaml'], check=True)"
    again = f"import random, subprocess, sys; {inner}"
    done = run(hostile, interpreter.python("-c", again), **interpreter.with_safe_path({}))
    assert done.returncode == 0, done.stderr
    assert not (hostile.parent / "executed").exists()
