"""The quickstart in a real Slurm: stopped, held, released, preempted, proved; the same LoRA to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm
STEPS = 40
TRAINER = f"{sys.executable} -m trainer"
SHORTER = (
    f"train.max_train_steps={STEPS}",
    "train.lr_warmup_steps=5",
    "validation.num_inference_steps=2",
    # two hosts share a step
    "train.train_batch_size=4",
    "train.gradient_accumulation_steps=2",
)
PROVED = "Proved: reloaded from disk"


def submitted(cluster: Slurm, name: str, *options: str) -> tuple[str, Path]:
    """A job of a shortened quickstart, and its run folder."""
    run, cache = cluster.folder / "runs" / name, cluster.folder / "cache"
    words = ("train_configs/quickstart.yaml", "--output", str(run), "--set", f"data.cache_dir={cache}")
    sets = [word for text in SHORTER for word in ("--set", text)]
    return cluster.submit(*words, *sets, options=options, LAUNCH=TRAINER, HF_HUB_OFFLINE="1"), run


@pytest.fixture(scope="session")
def whole(cluster: Slurm) -> bytes:
    """The LoRA of a run on one node that nobody stopped."""
    job, run = submitted(cluster, "cats")
    cluster.wait(job, state="COMPLETED", text=PROVED, seconds=400)
    return (run / "lora/cats.safetensors").read_bytes()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_run_is_stopped_held_released_and_proved(cluster: Slurm, whole: bytes, nodes: int) -> None:
    job, run = submitted(cluster, f"stopped-{nodes}/cats", f"--nodes={nodes}")
    cluster.wait(job, state="RUNNING", text=f"step 10/{STEPS}", seconds=200)
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait(job, state="PENDING", text=f"stopped and held; scontrol release {job} goes on")
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert 10 <= int(checkpoint.name.removeprefix("step-")) < STEPS
    assert not list(run.glob("lora/*.safetensors"))
    cluster.ask("scontrol", "release", job)
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED", text=PROVED, seconds=400)
    assert (run / "lora/cats.safetensors").read_bytes() == whole


@pytest.mark.timeout(900)
def test_a_run_on_two_nodes_is_preempted_and_goes_on(cluster: Slurm, whole: bytes) -> None:
    job, run = submitted(cluster, "preempted/cats", "--nodes=2", "--exclusive")
    cluster.wait(job, state="RUNNING", text=f"step 10/{STEPS}", seconds=200)
    words = ("--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=:")
    urgent = cluster.ask("sbatch", "--parsable", *words).strip()
    cluster.wait(job, state="PENDING", text="saved for a job that goes before it")
    cluster.wait(urgent, state="COMPLETED")
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED", text=PROVED, seconds=400)
    assert (run / "lora/cats.safetensors").read_bytes() == whole
