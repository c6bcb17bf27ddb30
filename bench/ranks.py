"""`bench ranks FAMILY`: a step on one GPU beside a step of several, with whole and with shared bases.

    python -m bench ranks flux1_dev --base BASE --record docs/benchmarks/NAME.json
    python -m bench ranks flux2_dev --base BASE --variants ours-bf16 --ways one,sharded
    python -m bench ranks llama --method full --base BASE --variants ours-bf16,ours-fp8 --ways one
    python -m bench ranks flux1_dev --base BASE --ways one,hosts
    python -m bench ranks flux1_dev --base BASE --ways one,replicated,sharded --gpus 2,4
    python -m bench ranks flux1_dev --base BASE --ways auto --gpus 4 --set features.memory_budget=35GiB

Every GPU has one micro-batch a step in each way, so that equal times are perfect weak scaling. Each way runs
through `trainer train` in processes of its own: round 1 all of them, round 2 all of them again. Times are
those of the slowest GPU: ranks meet at the end of a step, and `one` runs on each of the GPUs at the same
time, a run each, of which the slowest counts. Losses, the mean of the timed steps, are of equal
samples where as many GPUs train: replicated beside sharded. TRAINER_PROFILE=cpu tries it without GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import arguments as types
from bench import ours, processes
from bench.record import update_table
from trainer import families
from trainer.config import environment
from trainer.machine import description, idle

COLUMNS = (
    *("family", "variant", "way", "GPUs", "what the plan chose", "ms a step", "fastest to slowest", "of one"),
    *("peak GiB", "planned", "predicted ms", "loss", "forward and backward ms"),
)
WAYS: Mapping[str, str] = {"one": "", "replicated": "none", "sharded": "full", "auto": "", "hosts": ""}
"""Ways to spread a run -> `parallel.shard` where it has several GPUs; empty: the plan's choice. `hosts`: each
GPU is a host's, with a supervisor of its own.
"""
USUAL = ("one", "replicated", "sharded")
Case = tuple[str, str, int]
"""Variant, way, number of GPUs."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write the record; the exit code is 1 where a run failed."""
    options = parser().parse_args(arguments)
    options.base = types.require_base(options.base, "--base")
    if environment.read("TRAINER_PROFILE") != "cpu":
        idle.require_gpu(remedy="use a machine with several; TRAINER_PROFILE=cpu tries it on a CPU")
    found: dict[Case, list[dict[str, Any]]] = {}
    rows: Sequence[tuple[str, ...]] = ()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=options.work) as name:
        for number in range(1, options.rounds + 1):
            for variant in options.variants:
                for way, count in _ways_of_a_round(options):
                    folder = Path(name) / f"{variant}-{way}-{count}-{number}"
                    sample = _measure(_job(options, way, count), variant, folder, way, max(options.gpus))
                    found.setdefault((variant, way, count), []).append(sample)
                    what = f"{variant}, {way} of {count}"
                    print(f"round {number}, {what}: {_short(sample)}", file=sys.stderr, flush=True)
                    rows = _rows(options.family, options.method, found)
                    if options.record:  # what was measured is kept where the next run is cut off
                        write_record(options, rows)
    for row in rows:
        print(json.dumps(dict(zip(COLUMNS, row, strict=True))))
    return int(any(sample.get("problem") for samples in found.values() for sample in samples))


def _measure(job: ours.Job, variant: str, folder: Path, way: str, gpus: int) -> dict[str, Any]:
    """The figures of a run; of `one` those of the slowest of `gpus` runs, or of one that failed."""
    names = processes.visible()[:gpus] if way == "one" else [""]

    def run(number: int, environ: Mapping[str, str]) -> dict[str, Any]:
        mine = folder / str(number)
        # a data set of its own: another run writes while this one reads
        shared = folder.with_name(f"shared-{number}")
        sample = ours.train(job, variant, mine, shared, environ=environ)
        if sample.get("problem"):
            return sample
        plan = json.loads((mine / "run" / "plan.json").read_text())
        return sample | {"ranks": plan["ranks"], "predicted": plan["step_milliseconds"]}

    samples = processes.side_by_side(run, range(len(names)), jobs=len(names), gpus=names)
    if len(samples) > 1:
        print(f"on each GPU: {'; '.join(map(_short, samples))}", file=sys.stderr, flush=True)
    failed = [sample for sample in samples if sample.get("problem")]
    return failed[0] if failed else max(samples, key=lambda sample: statistics.median(sample["times"]))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("ranks", __doc__)
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", type=Path, required=True, help="folder with the full-size configs")
    counts = "GPUs of the ways but `one`: 2,4 runs each way on two and on four"
    one.add_argument("--gpus", type=types.counts, default=(2,), metavar="N,N", help=counts)
    variants, ways = types.names_of("variant", ours.OURS), types.names_of("way", WAYS)
    one.add_argument("--variants", type=variants, default=("ours-bf16", "ours-fp8"), metavar="NAME,NAME")
    one.add_argument("--ways", type=ways, default=USUAL, metavar="NAME,NAME")
    one.add_argument("--method", choices=("lora", "full"), default="lora")
    one.add_argument("--rounds", type=types.positive, default=2)
    one.add_argument("--steps", type=types.positive, default=20, help="timed steps of each run")
    one.add_argument("--warmup", type=types.positive, default=8, help="steps before them")
    one.add_argument("--resolution", type=types.positive, default=1024)
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--set", "--tokens", "--work", "--month")
    return one


def _ways_of_a_round(options: argparse.Namespace) -> list[tuple[str, int]]:
    """Ways of a round with their numbers of GPUs, the fewest first."""
    ones = [("one", 1)] if "one" in options.ways else []
    return [*ones, *((way, count) for count in options.gpus for way in options.ways if way != "one")]


def _job(options: argparse.Namespace, way: str, count: int) -> ours.Job:
    spread = [f"parallel.gpus={count}", f"train.gradient_accumulation_steps={count}"]
    if WAYS[way]:
        spread.append(f"parallel.shard={WAYS[way]}")
    return ours.Job(
        family=options.family,
        base=options.base,
        resolution=options.resolution,
        batch=1,
        rank=16,
        tokens=options.tokens,
        steps=options.steps,
        warmup=options.warmup,
        overrides=(*spread, *options.overrides),
        method=options.method,
        hosts=count if way == "hosts" else 1,
    )


def _short(sample: Mapping[str, Any]) -> str:
    if sample.get("problem"):
        return str(sample["problem"])
    return f"{statistics.median(sample['times']):.1f} ms, loss {sample['loss']:.6f}"


def _rows(
    family: str, method: str, found: Mapping[Case, Sequence[Mapping[str, Any]]]
) -> Sequence[tuple[str, ...]]:
    """The rows of the record; runs that failed are left out."""
    rows, alone = [], dict[str, float]()
    named = family if method == "lora" else f"{family}, {method}"
    for (variant, way, _), samples in found.items():
        times = [time for one in samples for time in one.get("times", ())]
        if not times:
            continue
        median, first = statistics.median(times), next(one for one in samples if "times" in one)
        if way == "one":
            alone[variant] = median
        ratio = f"{median / alone[variant]:.3f}" if variant in alone else ""
        computed = [time for one in samples for time in one.get("computed", ())]
        reserved = [one["reserved_gib"] for one in samples if "reserved_gib" in one]
        rows.append(
            (
                *(named, variant, way, str(first["ranks"]), first["settings"]),
                *(f"{median:.1f}", f"{min(times):.0f} to {max(times):.0f}", ratio),
                f"{max(reserved):.1f}" if reserved else "",
                f"{first['planned_gib']:.1f}" if "planned_gib" in first else "",
                f"{first['predicted']:.0f}",
                f"{first['loss']:.6f}",
                f"{statistics.median(computed):.1f}" if computed else "",
            )
        )
    return rows


def write_record(options: argparse.Namespace, rows: Sequence[tuple[str, ...]]) -> None:
    """The record with these rows in the place of those of the same family, variant, way and number."""
    update_table(
        options.record,
        rows,
        keys=4,
        title="A step of several GPUs beside one GPU's",
        where=description.describe(options.month),
        command="python -m bench ranks FAMILY --base BASE --record FILE",
        columns=COLUMNS,
    )
