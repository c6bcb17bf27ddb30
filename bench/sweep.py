"""Compare what `auto` picks under some budgets with the best of every setting that fits.

    python -m bench sweep flux1_dev=BASE --budgets 16,24,48 --record FILE

Every way to store the base is measured with nothing recomputed, with cheap parts of all blocks recomputed,
and with a quarter of the blocks to all, compiled, and bf16 eager too: milliseconds of a step and the most
device memory that was held. Before that each budget's plan is made as `trainer train` makes it, with kernels
that have no verdict probed first, and measured in the same way. The best is the fastest setting whose
measured peak is within the budget. Each run is alone on its GPU; where CUDA_VISIBLE_DEVICES names several,
they work side by side.

A setting is taken not to be the best under any budget, and left out, where its predicted peak is more than
6 % above the largest, or a faster one fits each budget that it may fit: it is taken to be no faster than
those of the same storage that recompute less, and one copy of FP8 weights no faster than two. --all leaves
none out.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import jobs, memory, processes
from trainer.errors import TrainerError
from trainer.machine import idle

STORED: dict[str, tuple[str, ...]] = {
    "fp8": ("features.weights=fp8", "features.compute=fp8"),
    "fp8, one copy": ("features.weights=fp8", "features.compute=fp8"),
    "bf16": ("features.weights=bf16", "features.compute=bf16"),
    "int8": ("features.weights=int8",),
    "nf4": ("features.weights=nf4",),
}
_COMPILED = ("features.compile=true",)
_EAGER = ("features.compile=false",)
_PARTS = 4
"""Parts that the blocks are divided into: so many of them are recomputed, or fewer."""
_TIMED = 10
_MISSED = 1.06
"""Share of a budget above which a prediction does not fit it. Predictions miss by up to 4 %."""
# a run that is long enough for auto to compile
_LONG = "train.max_train_steps=3000"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; print a line of JSON each and what auto's choice costs beside the best."""
    parser = types.command_parser("sweep", __doc__)
    add = parser.add_argument
    add("family", type=types.family_base, metavar="FAMILY=BASE")
    add("--budgets", type=types.amounts, default=(16.0, 24.0, 48.0), help="GiB, separated by commas")
    add("--all", action="store_true", help="measure what cannot be the best, too")
    types.add_common(parser, "--record")
    options = parser.parse_args(arguments)
    family, base = options.family
    base = types.require_base(base, f"{family}={base}")
    idle.require_gpu(remedy="use a machine with one; `trainer plan --budget` predicts without")
    found = processes.visible()
    blocks = sum(jobs.block_counts(family, base).values())
    auto = {f"auto, {one:g} GiB": (f"features.memory_budget={one:g}GiB",) for one in options.budgets}
    cases = [
        memory.Case(family, base, name, (_LONG, *overrides), timed=_TIMED, one_copy="one copy" in name)
        for name, overrides in (auto | all_settings(blocks)).items()
    ]
    for case in cases[: len(options.budgets)]:
        probe(case)
    known: list[dict[str, Any]] = []

    def measured(case: memory.Case, environ: Mapping[str, str]) -> dict[str, Any]:
        row: dict[str, Any] = {"family": family, "setting": case.setting}
        needless = "" if options.all else _needless(case, known, options.budgets)
        row = {**row, "left_out": needless} if needless else memory.measured_row(case, environ)
        known.append(row)
        return row

    rows = processes.side_by_side(measured, cases, jobs=len(found), gpus=found)
    verdicts = [judge(rows, budget) for budget in options.budgets]
    for verdict in verdicts:
        print(json.dumps(verdict))
    types.write_rows(options.record, {"rows": rows, "budgets": verdicts})
    if any("auto" not in verdict for verdict in verdicts):
        print("auto has no figures under some budget, or held more than it", file=sys.stderr)
        return 1
    return 0


def probe(case: memory.Case) -> None:
    """Measure kernels without a verdict, as `trainer train` does: without one auto keeps to safe kernels."""
    from trainer.cli import measure

    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        try:
            loaded, _ = memory.planned(case, Path(scratch))
        except TrainerError:
            return  # the case's own row says why it cannot be planned
        measure.planned(loaded, probe=True)


def _needless(case: memory.Case, known: Sequence[dict[str, Any]], budgets: Sequence[float]) -> str:
    """The reason why a setting cannot be the best under any budget; empty where it can, or none is known."""
    if case.setting.startswith("auto"):
        return ""
    with tempfile.TemporaryDirectory(prefix="sweep-") as scratch:
        try:
            _, plan = memory.planned(case, Path(scratch))
        except TrainerError as error:
            return str(error)
    needed = sum(part.bytes for part in plan.train_memory) / processes.GIB
    return needless(case.setting, needed, [row for row in known if "milliseconds" in row], budgets)


def needless(setting: str, needed: float, known: Sequence[dict[str, Any]], budgets: Sequence[float]) -> str:
    """The reason of `_needless` for a setting with a predicted peak of `needed` GiB, beside measured rows."""
    fitted = [budget for budget in budgets if needed <= _MISSED * budget]
    if not fitted:
        return f"needs {needed:.1f} GiB by prediction"
    # what recomputes more is slower
    least = max(
        (row["milliseconds"] for row in known if recomputes_less(row["setting"], setting)), default=0.0
    )
    best = [
        min((row["milliseconds"] for row in known if peak(row) <= one), default=math.inf) for one in fitted
    ]
    return f"{least} ms at least, {best} are known" if all(least >= one for one in best) else ""


def recomputes_less(other: str, setting: str) -> bool:
    """True where `other` recomputes only a part of what `setting` does, and stores the base in the same way.

    Also where it stores two FP8 copies, not one, and recomputes no more: then no step transposes weights.
    """
    stored, _, way = setting.rpartition(", ")
    other_stored, _, other_way = other.rpartition(", ")
    if other == setting or other_stored not in (stored, stored.removesuffix(", one copy")):
        return False
    if other_way == way:
        return True
    # comparisons with what a way does not say are false
    shares, counts = (_share(other_way), _share(way)), (_count(other_way), _count(way))
    return other_way == "everything kept" or shares[0] > shares[1] or counts[0] < counts[1]


def _share(way: str) -> float:
    """Share of the activations that is kept where cheap parts of all blocks are recomputed; else NaN."""
    return float(way.split()[0]) if way.endswith(" kept") and way != "everything kept" else math.nan


def _count(way: str) -> float:
    """Number of blocks that are recomputed; NaN where the way names none."""
    if way == "all blocks recomputed":
        return math.inf
    return float(way.split()[0]) if way.endswith(" blocks recomputed") else math.nan


def all_settings(blocks: int) -> dict[str, tuple[str, ...]]:
    """Overrides of each row by its name, for a model of so many blocks."""
    key = "features.activation_checkpointing"
    kept: dict[str, tuple[str, ...]] = {
        "everything kept": (*_COMPILED, f"{key}=false"),
        **{f"{share} kept": (*_COMPILED, f"features.activation_budget={share}") for share in (0.6, 0.4, 0.2)},
        **{
            f"{count} of {blocks} blocks recomputed": (*_COMPILED, f"{key}={count}")
            for count in sorted({max(1, blocks * part // _PARTS) for part in range(1, _PARTS)})
        },
        "all blocks recomputed": (*_COMPILED, f"{key}=true"),
    }
    eager = {
        "bf16, eager": (*STORED["bf16"], *_EAGER, f"{key}=false"),
        "bf16, eager, all blocks recomputed": (*STORED["bf16"], *_EAGER, f"{key}=true"),
    }
    compiled = {f"{stored}, {way}": (*STORED[stored], *kept[way]) for stored, way in product(STORED, kept)}
    return compiled | eager


def judge(rows: Sequence[dict[str, Any]], budget: float) -> dict[str, Any]:
    """auto's milliseconds under a budget beside the fastest measured setting that keeps within it.

    Without them where auto has no figures, or held more than the budget.
    """
    known = [row for row in rows if "milliseconds" in row]
    chosen = next((row for row in known if row["setting"] == f"auto, {budget:g} GiB"), None)
    fitting = [row for row in known if peak(row) <= budget]
    if chosen is None or not fitting:
        return {"budget_gib": budget}
    best = min(fitting, key=lambda row: float(row["milliseconds"]))
    if peak(chosen) > budget:
        return {"budget_gib": budget, "auto_peak_gib": round(peak(chosen), 2)}
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
