"""Compare plans of full fine-tunes with what they hold and take: three families, in bf16 and in FP8,
recomputed and not.

    python -m bench full llama=BASE flux1_dev=BASE kandinsky5=BASE --record docs/benchmarks/NAME.json

Every setting is planned as `trainer plan` does, after the kernels that it may choose were probed, then built
and trained for some steps on a synthetic batch in a process of its own. Printed are the planned and the
measured peak of device memory, and the predicted and the measured time of a micro-batch with its share of
the optimizer's step. Of several GPUs each has one run at a time. The exit code is 1 where a setting was
refused or failed, or where a ratio is outside of what is allowed: 5 % of memory, 10 % of time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from bench import arguments as types
from bench import memory, processes, sweep
from bench.record import update_table
from trainer.machine import description, idle

_RECOMPUTED = "features.activation_checkpointing"
SETTINGS: Mapping[str, tuple[str, ...]] = {
    f"{products}{words}": (
        *("method=full", "features.compile=true"),
        *(f"features.compute={products}", f"{_RECOMPUTED}={value}"),
    )
    for products in ("bf16", "fp8")
    for words, value in (("", "false"), (", recomputed", "true"))
}
"""Overrides of each row by its name."""
ALLOWED = {"gib": 0.05, "ms": 0.10}
"""Difference of a plan from what was measured, as a share of that."""
COLUMNS = (
    *("family", "setting", "micro-batches a step", "planned GiB", "measured GiB", "planned of measured"),
    *("predicted ms", "measured ms", "predicted of measured"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every setting of every family; print a line of JSON each, and write the record."""
    options = parser().parse_args(arguments)
    micro_batches = options.micro_batches
    cases = [
        memory.Case(
            family,
            types.require_base(base, f"{family}={base}"),
            name,
            (*SETTINGS[name], f"train.gradient_accumulation_steps={micro_batches}", *options.overrides),
            tokens=options.tokens,
            timed=options.steps,
            micro_batches=micro_batches,
        )
        for family, base in options.families
        for name in options.settings or SETTINGS
    ]
    idle.require_gpu(remedy="use a machine with one; `trainer plan` predicts without")
    for case in cases:
        sweep.probe(case)
    found = processes.visible()
    rows = processes.side_by_side(memory.measured_row, cases, jobs=len(found), gpus=found)
    compared = [compared_row(row, micro_batches) for row in rows]
    for row in compared:
        print(json.dumps(row), flush=True)
    cells = [tuple(str(row[name]) for name in COLUMNS) for row in compared if "problem" not in row]
    if options.record and cells:
        update_table(
            options.record,
            cells,
            keys=3,
            title="Plans of full fine-tunes beside what was measured",
            where=description.describe(options.month),
            command="python -m bench full FAMILY=BASE ... --record FILE",
            columns=COLUMNS,
        )
    return int(not all(is_near(row) for row in compared))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("full", __doc__, types.listed("settings", SETTINGS))
    one.add_argument("families", nargs="+", type=types.family_base, metavar="FAMILY=BASE")
    one.add_argument("--micro-batches", type=types.positive, default=1, help="of an optimizer step; 1")
    one.add_argument("--steps", type=types.positive, default=10, help="that are timed; 10")
    types.add_choices(one, "--settings", SETTINGS)
    types.add_common(one, "--set", "--tokens", "--record", "--month")
    return one


def compared_row(row: Mapping[str, Any], micro_batches: int) -> dict[str, Any]:
    """A row of `memory.measured_row` by the names of `COLUMNS`; `problem` where there are no figures."""
    found = {"family": row["family"], "setting": row["setting"], "micro-batches a step": micro_batches}
    if "milliseconds" not in row:
        return {**found, "problem": row.get("refused") or row.get("failed") or "no times"}
    peak, time = sweep.peak(dict(row)), float(row["milliseconds"])
    planned, predicted = float(row["planned_gib"]), float(row["planned_milliseconds"])
    return {
        **found,
        "planned GiB": round(planned, 1),
        "measured GiB": round(peak, 1),
        "planned of measured": round(planned / peak, 3),
        "predicted ms": round(predicted),
        "measured ms": round(time),
        "predicted of measured": round(predicted / time, 3),
    }


def is_near(row: Mapping[str, Any]) -> bool:
    """True where memory and time of a compared row differ by no more than is allowed."""
    if "problem" in row:
        return False
    gib, ms = (round(abs(row[f"{kind} of measured"] - 1.0), 3) for kind in ("planned", "predicted"))
    return gib <= ALLOWED["gib"] and ms <= ALLOWED["ms"]
