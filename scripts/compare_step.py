"""Time a LoRA step written the way diffusers' and peft's own examples are: what ours is compared with.

    python scripts/compare_step.py flux1_dev --base FOLDER --steps 20

The variant `diffusers` of scripts/benches/peers.py by itself; `scripts/bench.py train` runs it beside ours.
Prints one line of JSON: milliseconds a step (median, fastest, slowest) and peak device memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # also when it is run as a file

from scripts.benches.peers import add_step_arguments, measure


def main() -> None:
    """Parse arguments, train, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_step_arguments(parser)
    options = parser.parse_args()
    found = measure("diffusers", options)
    times = found.get("times", [float("nan")])
    row = {
        "family": options.family,
        "milliseconds": round(statistics.median(times), 1),
        "fastest": round(min(times), 1),
        "slowest": round(max(times), 1),
        "peak_gib": round(found.get("allocated_gib", 0.0), 1),
    }
    print(json.dumps(row | ({"problem": found["problem"]} if "problem" in found else {})))


if __name__ == "__main__":
    main()
