"""A stand-in for `trainer`, where only Slurm and the script are asked for.

It shows its variables and its words, then ends with the codes that a test gives each node and start, or after
TERM and a moment with 75.

    CODES='70,76;0,0': the codes of two nodes at the first start, and at the second one
    DEAF=1: it does not heed TERM yet
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time

SAVE_SECONDS = 1.0


def main() -> int:
    shown = {name: value for name, value in os.environ.items() if name.startswith("TRAINER_")}
    received: list[int] = []
    if "DEAF" not in os.environ:
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    print("begins", json.dumps({"variables": shown, "words": sys.argv[1:]}), flush=True)
    starts = os.environ.get("CODES", "").split(";")
    start = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    if start < len(starts) and starts[start]:
        return int(starts[start].split(",")[int(os.environ["TRAINER_NODE_RANK"])])
    while not received:
        time.sleep(0.05)
    time.sleep(SAVE_SECONDS)
    print("saved", flush=True)
    return 75


if __name__ == "__main__":
    sys.exit(main())
