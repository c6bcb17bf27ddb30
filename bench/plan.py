"""Time `plan_run` over all shipped configurations and recorded machines.

python -m bench plan --repeats 5
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from bench import arguments as types
from tests.golden import plans
from trainer.config.reading.load import Loaded
from trainer.errors import TrainerError
from trainer.machine.facts import Facts
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run


def main(arguments: Sequence[str] | None = None) -> int:
    """Print milliseconds a plan: the first one of each pair, and the best of the repeats."""
    parser = types.command_parser("plan", __doc__)
    parser.add_argument("--repeats", type=types.positive, default=5, help="further calls of each pair")
    repeats = parser.parse_args(arguments).repeats
    os.chdir(plans.ROOT)
    facts = {name: read_recorded(plans.MACHINES / f"{name}.json") for name in plans.machines()}
    rows: list[tuple[float, float, bool, str, str]] = []
    for path in sorted(Path("train_configs").glob("*.yaml")):
        loaded = plans.load_shipped(path)
        for name, machine in facts.items():
            calls = [_timed(loaded, machine) for _ in range(1 + repeats)]
            best = min(milliseconds for milliseconds, _ in calls[1:])
            rows.append((calls[0][0], best, calls[0][1], path.stem, name))
    print(f"{'config':24} {'machine':24} {'first ms':>9} {'ms':>9}")
    for first, best, planned, config, name in rows:
        print(f"{config:24} {name:24} {first:9.2f} {best:9.2f}{'' if planned else '  refused'}")
    for title, wanted in (("plans", True), ("refusals, with the nearest fit", False)):
        taken = [row[1] for row in rows if row[2] is wanted]
        if taken:
            print(
                f"{title}: {len(taken)}, median {statistics.median(taken):.2f} ms, most {max(taken):.2f} ms"
            )
    return 0


def _timed(loaded: Loaded, facts: Facts) -> tuple[float, bool]:
    """Milliseconds of one call, and whether it gave a plan rather than a refusal."""
    started = time.perf_counter()
    try:
        plan_run(loaded, facts, find_model=lambda _: None)
        planned = True
    except TrainerError:
        planned = False
    return (time.perf_counter() - started) * 1000, planned
