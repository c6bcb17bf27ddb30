"""`make demo`: the whole path on a CPU: plan, train, prove, draw before and after, verify the file again.

The base model is assets/tiny-flux, which draws emoji-like things on white paper. A LoRA teaches it a style by
the 24 pictures of examples/style, and it draws other things in that style. Nothing is downloaded and no port
is opened; everything is written to build/demo.
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
RUN, PICTURE = DEMO / "run", DEMO / "before_after.png"
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
    environ = environment.snapshot()
    settings = {**environ, **SETTINGS}
    shutil.rmtree(REPOSITORY / RUN, ignore_errors=True)
    lora, config = str(RUN / "lora" / "run.safetensors"), ["--config", str(CONFIG), "--output", str(RUN)]
    steps: list[tuple[str, Sequence[str]]] = [
        ("plan and train", ["-m", "trainer", "train", str(CONFIG), "--output", str(RUN)]),
        ("verify the file on a fresh base model", ["-m", "trainer", "verify-lora", lora, *config]),
    ]
    for title, arguments in steps:
        print(f"\n== {title}: {' '.join(['python', *arguments])}", flush=True)
        command = [sys.executable, *arguments]
        code = subprocess.run(command, cwd=REPOSITORY, env=settings, check=False).returncode
        if code != 0:
            return code
    shutil.copy(REPOSITORY / RUN / "before_after.png", REPOSITORY / PICTURE)
    print_summary(time.monotonic() - started)
    show(REPOSITORY / PICTURE, environ)
    return 0


def print_summary(seconds: float) -> None:
    """Say what was learned, how long that took, and where everything is."""
    from scripts.style import learned
    from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

    rows = read_metrics(REPOSITORY / RUN / METRICS_LOG)
    print(f"\nDone in {seconds:.0f} s, {training_seconds(rows):.0f} s of them training steps.")
    for line in learned(REPOSITORY / RUN, rows).lines():
        print(f"  {line}")
    for what, path in (
        ("before and after", PICTURE),
        ("picture over time", RUN / "samples" / "strip.png"),
        ("LoRA (diffusers)", RUN / "lora" / "run.safetensors"),
        ("LoRA (ComfyUI)", RUN / "lora" / "run.comfyui.safetensors"),
        ("losses", RUN / "metrics.jsonl"),
    ):
        print(f"  {what:18} {path}")
    print("Now yours, after `. .venv/bin/activate`:")
    print("  trainer plan train_configs/flux1_dev_lora.yaml --dataset YOUR_FOLDER")


def training_seconds(rows: Sequence[Mapping[str, float]]) -> float:
    """Time in optimizer steps, without what lies between them: previews, held-out losses, checkpoints."""
    seconds, done = 0.0, 0.0
    for row in rows:
        if "seconds_per_step" in row:
            seconds += (row["step"] - done) * row["seconds_per_step"]
            done = row["step"]
    return seconds


def show(picture: Path, environ: Mapping[str, str]) -> None:
    """Open the picture where a person sits at a desktop; nowhere else, and without waiting for the viewer."""
    desktop = sys.platform == "darwin" or environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY")
    opener = shutil.which("open" if sys.platform == "darwin" else "xdg-open")
    if not (desktop and opener and sys.stdout.isatty()):
        return
    try:
        subprocess.Popen(
            [opener, str(picture)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        print(f"  not opened: {error}")


if __name__ == "__main__":
    sys.exit(main())
