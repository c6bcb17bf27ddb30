"""The quickstart as a job of a real Slurm: stopped, held, released, proved, and the same LoRA to the bit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.slurm.cluster import Slurm

pytestmark = pytest.mark.slurm
STEPS = 40
TRAINER = f"{sys.executable} -m trainer"


def submitted(cluster: Slurm, name: str) -> tuple[str, Path]:
    """A job of a shortened quickstart, and its run folder."""
    run, cache = cluster.folder / "runs" / name, cluster.folder / "cache"
    words = ("train_configs/quickstart.yaml", "--output", str(run), "--set", f"data.cache_dir={cache}")
    shorter = (
        f"train.max_train_steps={STEPS}",
        "train.lr_warmup_steps=5",
        "validation.num_inference_steps=2",
    )
    sets = [word for text in shorter for word in ("--set", text)]
    return cluster.submit(*words, *sets, LAUNCH=TRAINER, HF_HUB_OFFLINE="1"), run


@pytest.mark.timeout(900)
def test_a_run_is_stopped_held_released_and_proved(cluster: Slurm) -> None:
    whole, its_run = submitted(cluster, "whole")
    cluster.wait(whole, state="COMPLETED", text="Proved: reloaded from disk", seconds=400)
    job, run = submitted(cluster, "stopped")
    cluster.wait(job, state="RUNNING", text=f"step 10/{STEPS}", seconds=200)
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait(job, state="PENDING", text=f"stopped and held; scontrol release {job} goes on")
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    assert 10 <= int(checkpoint.name.removeprefix("step-")) < STEPS
    assert not list(run.glob("lora/*.safetensors"))
    cluster.ask("scontrol", "release", job)
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED", text="Proved: reloaded from disk", seconds=400)
    (lora,) = run.glob("lora/stopped.safetensors")
    assert lora.read_bytes() == (its_run / "lora/whole.safetensors").read_bytes()
