"""The queue's command, whose first job trains; the others leave what a run does.

python few_runs.py queue run --drain
python few_runs.py CONFIG
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path

import yaml

from trainer.queue import local
from trainer.telemetry.sinks.records import METRICS_LOG

SECONDS = 2.0
"""Between two sightings of jobs there are fewer."""


def leave(config: Path) -> None:
    """Do what `bench queue` sees of a run: be there for a while, log steps, write and prove a LoRA."""
    given = yaml.safe_load(config.read_text())
    run = Path(given["output_dir"])
    (run / "lora").mkdir(parents=True)
    time.sleep(SECONDS)
    row = {"step": given["train"]["max_train_steps"], "loss": 1.0, "seconds_per_step": SECONDS}
    (run / METRICS_LOG).write_text(json.dumps(row) + "\n")
    (run / "lora" / "run.safetensors").touch()
    print("Proved: it was left")


if __name__ == "__main__":
    if sys.argv[1] == "queue":
        local.TRAIN = (str(Path(__file__).resolve()),)  # type: ignore[assignment]
        runpy.run_module("trainer", run_name="__main__")
    elif os.environ["TRAINER_QUEUE_JOB"] == "1":
        sys.argv.insert(1, "train")
        runpy.run_module("trainer", run_name="__main__")
    else:
        leave(Path(sys.argv[1]))
