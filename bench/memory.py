"""Compare planned with measured device memory over many settings: how right the calculator is.

    python -m bench memory flux1_dev=BASE qwen_image=BASE --blocks flux1_dev=2,4 --record FILE

Every setting is planned as `trainer plan` does, built and trained for some steps on a synthetic batch in a
process of its own. Measured is the most that the allocator held, plus what the driver shows beyond it.
Models may be cut to a few blocks: the calculator is asked about the same model.

With --jobs several run side by side, on all GPUs that CUDA_VISIBLE_DEVICES names. Where several share a GPU,
what the driver shows is everybody's: it is measured for one run of each way to compute, alone, and counted
for all of that way. Where no setting could be measured, no record is written and the exit code is 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import arguments as types
from bench import jobs, processes
from bench.processes import GIB, REPOSITORY
from trainer import families
from trainer.cli.options import Layers
from trainer.config.reading.load import Loaded
from trainer.errors import ConfigError, TrainerError
from trainer.machine import idle
from trainer.planning.plan import Plan
from trainer.planning.planning import machine_facts, plan_run, requested_profile

_STEPS = 6
_BF16 = ("features.weights=bf16", "features.compute=bf16")
_EAGER, _COMPILED = (*_BF16, "features.compile=false"), (*_BF16, "features.compile=true")
_RECOMPUTED = "features.activation_checkpointing=true"
SETTINGS: dict[str, tuple[str, ...]] = {
    "eager": _EAGER,
    "eager, recomputed": (*_EAGER, _RECOMPUTED),
    "eager, rank 64, all linears": (*_EAGER, "lora.rank=64", "lora.target_modules=all-linear"),
    "eager, batch 2, 768 px": (*_EAGER, "train.train_batch_size=2", "data.resolution=768"),
    "int8, recomputed": ("features.weights=int8", _RECOMPUTED),
    "compiled": (*_COMPILED, "features.activation_checkpointing=false"),
    "compiled, budget 0.4": (*_COMPILED, "features.activation_budget=0.4"),
    "fp8, two copies": ("features.compile=true", "features.compute=fp8"),
    "nf4, recomputed": ("features.weights=nf4", _RECOMPUTED),
}
"""Overrides of each row by its name."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure every setting of every family; print a line of JSON each and the worst difference."""
    parser = types.command_parser("memory", __doc__, types.listed("settings", SETTINGS))
    parser.add_argument("families", nargs="*", type=types.family_base, metavar="FAMILY=BASE")
    parser.add_argument("--blocks", type=types.family_counts, action="append", default=[],
                        metavar="FAMILY=2,4", help="cut its base: blocks of each kind")  # fmt: skip
    types.add_choices(parser, "--settings", SETTINGS)
    types.add_common(parser, "--tokens", "--jobs", "--record")
    options = parser.parse_args(arguments)
    if not options.families:
        parser.error("name what to measure: FAMILY=BASE")
    cases = _cases(options)
    idle.require_gpu(remedy="use a machine with one; `trainer plan` predicts without")
    rows = processes.side_by_side(measured_row, cases, jobs=options.jobs)
    if options.jobs > len(processes.visible()):
        _count_drivers(cases, rows)
    for row in rows:
        _compare(row)
        print(json.dumps(row), flush=True)
    known = [row["difference"] for row in rows if "difference" in row]
    if not known:
        print("no setting could be measured: nothing is recorded", file=sys.stderr)
        return 1
    print(f"{len(known)} settings, worst {max(known, key=abs):+.1%}")
    types.write_rows(options.record, rows)
    return 0


class Case(NamedTuple):
    """One row to be measured."""

    family: str
    base: Path
    setting: str
    overrides: tuple[str, ...]
    blocks: tuple[int, ...] = ()
    tokens: int = 512
    timed: int = 0
    """Steps that are timed after those that warm up."""
    micro_batches: int = 1
    """Micro-batches of a step."""
    one_copy: bool = False
    """One copy of FP8 weights where a plan takes two if they fit; overrides settle what is recomputed."""


def _cases(options: argparse.Namespace) -> list[Case]:
    """Every setting of every family. Raises AccessError for a base that is none, ConfigError for --blocks."""
    blocks = dict(options.blocks)
    bases = [(family, types.require_base(base, f"{family}={base}")) for family, base in options.families]
    unused = set(blocks) - {family for family, _ in bases}
    if unused:
        raise ConfigError(
            f"{', '.join(sorted(unused))} is not measured",
            where="--blocks",
            remedy="give its base too: FAMILY=BASE",
        )
    for family, base in bases:
        jobs.block_keys(family, base, blocks.get(family, ()))
    return [
        Case(family, base, name, SETTINGS[name], blocks.get(family, ()), options.tokens)
        for family, base in bases
        for name in options.settings or SETTINGS
    ]


def _count_drivers(cases: Sequence[Case], rows: Sequence[dict[str, Any]]) -> None:
    """Put in what the driver shows beyond the allocator, measured alone for the first row of each way."""
    first = {row["way"]: case for case, row in reversed(list(zip(cases, rows, strict=True))) if "way" in row}
    again = processes.side_by_side(
        measured_row, first.values(), jobs=min(len(first), len(processes.visible())) or 1
    )
    alone = {row["way"]: row["driver_gib"] for row in again if "way" in row}
    for row in rows:
        if row.get("way") in alone:
            row["driver_gib"] = alone[row["way"]]
        elif "way" in row:
            row["failed"] = f"what the driver shows alone for {row.pop('way')} could not be measured"


def _compare(row: dict[str, Any]) -> None:
    if "way" in row:
        peak = row["held_gib"] + row["driver_gib"]
        row["difference"] = round(row["planned_gib"] / peak - 1.0, 4)


def measured_row(case: Case, environ: Mapping[str, str]) -> dict[str, Any]:
    """One setting, planned here and measured in a child; `refused` or `failed` where it could not be.

    The row is printed on stderr too: many settings take long.
    """
    given = {"tokens": case.tokens, "timed": case.timed, "micro_batches": case.micro_batches}
    found, plan = in_child(case, measure, given, environ)
    blocks = ",".join(map(str, case.blocks))
    row = {"family": case.family, "setting": case.setting, "blocks": blocks, **found}
    if plan is not None:
        planned_bytes = {part.name: part.bytes for part in plan.train_memory}
        row |= {
            "way": f"{plan.compute}, {'compiled' if plan.compile else 'eager'}",
            "planned_gib": round(sum(planned_bytes.values()) / GIB, 3),
            "planned_milliseconds": round(plan.step_milliseconds, 1),
            "parts": {name: round(size / GIB, 3) for name, size in planned_bytes.items()},
        }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def in_child(
    case: Case, job: Callable[..., Any], given: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[dict[str, Any], Plan | None]:
    """The answer of `job` on a case's run, and the plan; `refused` or `failed`, and None, without one.

    The child sees one GPU, which is its first whichever the plan chose among those that are seen here.
    """
    with tempfile.TemporaryDirectory(prefix="memory-") as scratch:
        folder = Path(scratch)
        try:
            loaded, plan = planned(case, folder)
        except TrainerError as error:
            return {"refused": str(error)}, None
        plan = dataclasses.replace(plan, devices=(0,))
        log = folder / "log.txt"
        ended = jobs.call(job, loaded, plan, folder, given, environ=environ, log=log)
    return (ended.answer, plan) if ended.answer else ({"failed": ended.said.strip()[-300:]}, None)


def planned(case: Case, folder: Path) -> tuple[Loaded, Plan]:
    """The run of a case and its plan; a cut base is written into `folder`. Raises as `plan_run`."""
    base = case.base
    if case.blocks:
        base = jobs.cut_base(case.family, base, folder / "base", case.blocks)
    of_images = families.get(case.family).sample_kind == "image"
    data = "data.sets=[{img_dir: .}]" if of_images else "data.sets=[{chat_file: none.jsonl}]"
    method = "full" if "method=full" in case.overrides else "lora"
    adapter = ("lora.rank=16", "lora.target_modules=attention") if method == "lora" else ()
    overrides = (
        *(f"model.pretrained_model_name_or_path={base}", "model.weights=random", data),
        *(*adapter, "validation.prompts=[]", "parallel.gpus=1"),
        *case.overrides,
    )
    config = REPOSITORY / "train_configs" / f"{case.family}_{method}.yaml"
    loaded = Layers((config,), overrides, None, folder / "run").load()
    # the synthetic batch is of one shape, and is not parted
    several = loaded.config.train.train_batch_size > 1
    alike = loaded.config.data.max_sequence_length if several else None
    alike = case.tokens if method == "full" else alike
    plan = plan_run(loaded, machine_facts(), requested_profile(), caption_tokens=alike)
    if case.one_copy and plan.weight_copies == 2:
        # in less than two copies need, the plan takes one
        less = sum(part.bytes for part in plan.train_memory) / GIB
        overrides = (*overrides, f"features.memory_budget={less:.1f}GiB")
        loaded = Layers((config,), overrides, None, folder / "run").load()
        plan = plan_run(loaded, machine_facts(), requested_profile())
    return loaded, plan


def measure(spec: str, tokens: int, timed: int, micro_batches: int) -> dict[str, float]:
    """Build and train in the child; gives the memory held while building and while training, in GiB, and the
    milliseconds of a micro-batch with its share of the rest of a step.
    """
    import torch

    from bench import steps
    from trainer.engine.building.build import build

    context = jobs.make_context(spec)
    built = build(context)
    loading = torch.cuda.max_memory_reserved()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step = steps.make_step(context, built, tokens, micro_batches)
    steps.timed(step, _STEPS)
    times = steps.timed(step, timed)
    free, total = torch.cuda.mem_get_info()
    figures = {
        "held_gib": torch.cuda.max_memory_reserved() / GIB,
        "allocated_gib": torch.cuda.max_memory_allocated() / GIB,
        "driver_gib": (total - free - torch.cuda.memory_reserved()) / GIB,
        "loading_gib": loading / GIB,
    }
    if times:
        figures["milliseconds"] = statistics.median(times) / micro_batches
    return {name: round(value, 3) for name, value in figures.items()}
