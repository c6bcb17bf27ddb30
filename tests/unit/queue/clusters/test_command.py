"""`trainer queue` with jobs of a cluster, by clients of the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.data.pictures import write_pair
from tests.unit.queue.clusters.fakes import client, words
from trainer.cli import main

TEXT = """\
family: flux1_dev
train: {max_train_steps: 100, learning_rate: 1e-4}
data: {sets: [{img_dir: images}]}
output_dir: runs/cats
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    clients: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The command, in a folder with a configuration, beside a Slurm that has taken job 7."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.yaml").write_text(TEXT)
    (tmp_path / "images").mkdir()
    write_pair(tmp_path / "images", "cat.png")
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    client(clients, "sbatch", "echo 7")
    client(clients, "squeue", "case $1 in --steps) echo 7.0;; *) echo '7|RUNNING|0|None';; esac")
    client(clients, "scontrol", "")
    client(clients, "scancel", "")

    def command(*given: str) -> tuple[int, str, str]:
        code = main(given)
        out, err = capsys.readouterr()
        return code, out, err

    return command


def test_a_job_is_handed_over_listed_stopped_and_released(run: Run, clients: Path, tmp_path: Path) -> None:
    assert run("queue", "add", "my.yaml", "--slurm=--time=60 --comment='a b'")[:2] == (
        0, f"job slurm-7: cats -> {tmp_path}/runs/cats\n",
    )  # fmt: skip
    assert {"--time=60", "--comment=a b"} < set(words(clients, "sbatch"))
    _, out, err = run("queue", "list")
    assert out.splitlines()[1].split() == ["slurm-7", "cats", "running"] and not err
    assert run("queue", "stop", "cats")[0] == 0
    assert words(clients, "scontrol") == ["hold", "7"]
    assert words(clients, "scancel") == ["--signal=TERM", "7"]
    assert run("queue", "hold", "slurm-7", "--release")[0] == 0
    assert words(clients, "scontrol")[-2:] == ["release", "7"]
    (tmp_path / "runs/cats/slurm/output.log").write_text("one\ntwo\n")
    assert run("queue", "log", "slurm-7", "--lines", "1")[1] == "two\n"


@pytest.mark.parametrize(
    ("given", "what"),
    [
        (["add", "my.yaml", "--slurm=", "--on", "0"], "a cluster chooses the GPUs itself"),
        (["add", "my.yaml", "--slurm=", "--kueue", "x"], "a job goes to one cluster"),
        (["add", "my.yaml", "--slurm=--comment='a"], "--slurm: No closing quotation"),
        (["move", "slurm-7", "1"], "its order and its GPUs are the cluster's"),
        (["assign", "slurm-7", "--on", "any"], "its order and its GPUs are the cluster's"),
        (["stop", "slurm-7", "--forget"], "it is running"),
        (["stop", "slurm-8"], 'no job is called "slurm-8"'),
    ],
)
def test_what_does_not_fit_is_refused(run: Run, given: list[str], what: str) -> None:
    run("queue", "add", "my.yaml", "--slurm=")
    code, _, err = run("queue", *given)
    assert code == 78 and what in err


def test_kueue_without_kubectl_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are the cluster's: none are looked for here."""
    shutil.rmtree(tmp_path / "images")
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, err = run("queue", "add", "my.yaml", "--kueue", "my-run")
    assert code == 78 and "kubectl: it is not installed here" in err
