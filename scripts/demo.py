"""`make demo`: the whole path on a CPU within a minute: plan, train, prove, draw, verify the file again.

The base model is a tiny one with random weights, built on the spot, so the pictures cannot be good. What the
demo shows is that a LoRA is learned, saved, loaded from its file and changes what the model draws. Nothing is
downloaded and no port is opened; everything is written to build/demo.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CONFIG = Path("train_configs/quickstart.yaml")
DEMO = Path("build/demo")
BASE, RUN = DEMO / "base", DEMO / "run"
# the CPU on purpose, also where there is a GPU: the same numbers everywhere
SETTINGS = {
    "TRAINER_PROFILE": "cpu",
    "TRAINER_METRICS_PORT": "0",
    "TRAINER_CACHE_DIR": str(DEMO / "cache"),
    "TRAINER_RUNTIME_DIR": str(DEMO / "runtime"),
    "HF_HUB_OFFLINE": "1",
}


def main() -> int:
    """Run every step; returns the first exit code that is not 0."""
    from trainer.config import environment

    started = time.monotonic()
    settings = {**environment.snapshot(), **SETTINGS}
    shutil.rmtree(REPOSITORY / RUN, ignore_errors=True)
    lora = RUN / "lora" / "run.safetensors"
    steps: list[tuple[str, Sequence[str]]] = [
        ("plan and train", ["-m", "trainer", "train", str(CONFIG), "--output", str(RUN)]),
        (
            "verify the file on a fresh base model",
            ["-m", "trainer", "verify-lora", str(lora), "--config", str(CONFIG), "--output", str(RUN)],
        ),
    ]
    if not (REPOSITORY / BASE / "model_index.json").is_file():
        build = ["scripts/random_base.py", "flux1_dev", "--size", "tiny", "--output", str(BASE)]
        steps.insert(0, ("build a tiny base model with random weights", build))
    for title, arguments in steps:
        code = step(title, arguments, settings)
        if code != 0:
            return code
    print_summary(time.monotonic() - started)
    return 0


def step(title: str, arguments: Sequence[str], settings: Mapping[str, str]) -> int:
    """Run one command with this Python, its output shown as it comes."""
    print(f"\n== {title}: {' '.join(['python', *arguments])}", flush=True)
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=dict(settings), check=False
    ).returncode


def print_summary(seconds: float) -> None:
    """Say where everything is, and what training did to the loss on images that it did not see."""
    from trainer.telemetry.records import METRICS_LOG, held_out_line, read_metrics

    print(f"\nDone in {seconds:.0f} s.")
    for what, path in (
        ("before and after", RUN / "before_after.png"),
        ("picture over time", RUN / "samples" / "strip.png"),
        ("LoRA (diffusers)", RUN / "lora" / "run.safetensors"),
        ("LoRA (ComfyUI)", RUN / "lora" / "run.comfyui.safetensors"),
        ("losses", RUN / "metrics.jsonl"),
    ):
        print(f"  {what:18} {path}")
    line = held_out_line(read_metrics(REPOSITORY / RUN / METRICS_LOG))
    if line is not None:
        print(f"  {line}")
    print("Now yours: trainer plan train_configs/flux1_dev_lora.yaml --dataset YOUR_FOLDER")


if __name__ == "__main__":
    sys.exit(main())
