"""Whether `auto` picks well: its choice under some budgets beside the best of every setting that fits.

    python scripts/bench.py sweep flux1_dev=BASE --budgets 16,24,48 --record FILE

Every way to store the base, with and without compiled blocks, is measured with nothing recomputed, with a
part of the activations kept, and with all recomputed: milliseconds of a step and the most device memory that
was held. Then each budget's plan is made as `trainer plan --budget` makes it, and measured in the same way.
The best is the fastest setting whose measured peak is within the budget. Each run is alone on its GPU; where
CUDA_VISIBLE_DEVICES names several, they work side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any

from scripts.benches import arguments as types
from scripts.benches import gpus, machine, memory

STORED: dict[str, tuple[str, ...]] = {
    "bf16": ("features.weights=bf16", "features.compute=bf16"),
    "fp8": ("features.weights=fp8", "features.compute=fp8"),
    "int8": ("features.weights=int8",),
    "nf4": ("features.weights=nf4",),
}
KEPT: dict[str, tuple[str, ...]] = {
    "everything kept": ("features.compile=true", "features.activation_checkpointing=false"),
    **{
        f"{share} kept": ("features.compile=true", f"features.activation_budget={share}")
        for share in (0.7, 0.5, 0.3, 0.15)
    },
    "blocks recomputed": ("features.compile=true", "features.activation_checkpointing=true"),
    "eager": ("features.compile=false", "features.activation_checkpointing=false"),
    "eager, blocks recomputed": ("features.compile=false", "features.activation_checkpointing=true"),
}
SETTINGS: dict[str, tuple[str, ...]] = {
    f"{stored}, {kept}": (*STORED[stored], *KEPT[kept]) for stored, kept in itertools.product(STORED, KEPT)
}
"""What the rows are called, and the overrides that make them."""
_TIMED = 10
# a run that is long enough for auto to compile
_LONG = "train.max_train_steps=3000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print a line of JSON each and what auto's choice costs beside the best."""
    options = _parser().parse_args(arguments)
    family, base = options.family
    base = types.require_base(base, f"{family}={base}")
    machine.require_gpu(remedy="use a machine with one; `trainer plan --budget` predicts without")
    found = gpus.visible()
    settings = {f"auto, {budget:g} GiB": _auto(budget) for budget in options.budgets} | SETTINGS
    cases = [
        memory.Case(family, base, name, (_LONG, *overrides), timed=_TIMED)
        for name, overrides in settings.items()
    ]
    rows = gpus.side_by_side(memory.measured_row, cases, jobs=len(found), gpus=found)
    verdicts = [judge(rows, budget) for budget in options.budgets]
    for verdict in verdicts:
        print(json.dumps(verdict))
    if options.record:
        content = {"rows": rows, "budgets": verdicts}
        options.record.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    if any("auto" not in verdict for verdict in verdicts):
        print("auto has no figures under some budget", file=sys.stderr)
        return 1
    return 0


def _auto(budget: float) -> tuple[str, ...]:
    return (f"features.memory_budget={budget:g}GiB",)


def judge(rows: Sequence[dict[str, Any]], budget: float) -> dict[str, Any]:
    """auto's milliseconds under a budget beside the fastest measured setting that keeps within it."""
    known = [row for row in rows if "milliseconds" in row]
    chosen = next((row for row in known if row["setting"] == f"auto, {budget:g} GiB"), None)
    fitting = [row for row in known if peak(row) <= budget]
    if chosen is None or not fitting:
        return {"budget_gib": budget}
    best = min(fitting, key=lambda row: float(row["milliseconds"]))
    return {
        "budget_gib": budget,
        "auto": chosen["milliseconds"],
        "auto_peak_gib": round(peak(chosen), 2),
        "best": best["milliseconds"],
        "best_setting": best["setting"],
        "best_peak_gib": round(peak(best), 2),
        "ratio": round(chosen["milliseconds"] / best["milliseconds"], 4),
        "settings": len(known),
    }


def peak(row: dict[str, Any]) -> float:
    """Device memory of a measured row in GiB: the allocator's, and what the driver shows beyond it."""
    return float(row["held_gib"]) + float(row["driver_gib"])


def _parser() -> argparse.ArgumentParser:
    parser = types.command_parser("sweep", __doc__)
    parser.add_argument("family", type=types.family_base, metavar="FAMILY=BASE")
    parser.add_argument(
        "--budgets", type=types.amounts, default=(16.0, 24.0, 48.0), help="GiB, separated by commas"
    )
    parser.add_argument("--record", type=types.new_file, help="write the rows here")
    return parser


if __name__ == "__main__":
    sys.exit(main())
