"""A `trainer` that trains nothing and writes a run's folder as a real one does: its words are those of one.

    python fake_trainer.py SCRIPT.json train CONFIG.yaml --output DIR

The script says by a text that the configuration's file name contains what happens: `ms` of each step in turn,
`losses` (null for a step without one), `end` (exit code after so many steps), `slow` (seconds of real time a
step), `plan` (a file).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import yaml


def main(script_path: str, command: str, config_path: str, _: str, output: str) -> int:
    script: dict[str, Any] = json.loads(Path(script_path).read_text())
    name, run = Path(config_path).stem, Path(output)
    with Path(script["journal"]).open("a") as journal:
        given = [variable for variable in os.environ if variable.startswith("TRAINER__")]
        row = {"name": name, "command": command, "pid": os.getpid(), "given": given}
        journal.write(json.dumps(row) + "\n")
    if command == "cache":
        return int(script.get("cache_code", 0))
    asked: list[int] = []

    def stop(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)

    signal.signal(signal.SIGTERM, stop)
    config = yaml.safe_load(Path(config_path).read_text())
    does: dict[str, Any] = {}
    for text, values in script["runs"].items():
        does |= values if text in name else {}
    run.mkdir(parents=True)
    if "plan" in does:
        (run / "plan.json").write_text(Path(does["plan"]).read_text())
    end, code = does.get("end", (config["train"]["max_train_steps"], 0))
    with (run / "metrics.jsonl").open("w") as log:
        for step in range(1, end + 1):
            time.sleep(does.get("slow", 0.0))
            if asked:
                return 75
            ms = does.get("ms", [100.0])
            seconds = ms[(step - 1) % len(ms)] / 1000
            losses = does.get("losses", [1.0])
            loss = losses[(step - 1) % len(losses)]
            row = {
                "step": step,
                "loss": None if loss is None else loss * does.get("loss_factor", 1.0),
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "seconds_per_step": seconds,
                "samples_per_second": does.get("samples", 2) / seconds,
                "device_memory_peak_bytes": does.get("peak", 0),
                "seed": config["train"]["seed"],
            }
            log.write(json.dumps(row) + "\n")
            log.flush()
    if code:
        print("error: the fake run fails as it was told", file=sys.stderr)
    return int(code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
