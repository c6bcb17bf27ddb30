"""Full fine-tunes in FP8 beside bf16, eager blocks and torchao's recipes: a step's milliseconds, alternating.

    python -m bench recipes llama=BASE flux1_dev=BASE --rounds 2 --record docs/benchmarks/NAME.json
    python -m bench recipes llama=BASE --ways bf16,fp8 --micro-batches 4

Every way is planned as `trainer plan` does, built and trained for some steps on a synthetic batch in a
process of its own; round 1 all of them, round 2 all of them again. torchao's ways have our plan, optimizer,
head and compiled blocks, and torchao's linears where ours are in FP8; they join no layers of one input. Times
are medians of all steps; "of bf16" has the 95 % interval of the ratio of two medians, by bootstrap within
rounds.
TRAINER_PROFILE=cpu tries it without GPUs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench import arguments as types
from bench import memory, sweep
from bench.processes import GIB
from bench.record import update_table
from trainer.config import environment
from trainer.errors import HardwareError
from trainer.machine import description, idle
from trainer.planning.plan import Plan
from trainer.telemetry import figures

_COMPILED = ("method=full", "features.compile=true", "features.compute=bf16")
WAYS: Mapping[str, tuple[str, ...]] = {
    "eager": ("method=full", "features.compile=false", "features.compute=bf16"),
    "bf16": _COMPILED,
    "fp8": ("method=full", "features.compile=true", "features.compute=fp8"),
    "torchao-tensorwise": _COMPILED,
    "torchao-rowwise": _COMPILED,
    "torchao-rowwise_with_gw_hp": _COMPILED,
}
"""Overrides of each way by its name; after `torchao-` the name of its recipe."""
COLUMNS = (
    *("family", "way", "micro-batches a step", "what the plan chose", "ms a step"),
    *("fastest to slowest", "of bf16", "95 % of it", "peak GiB"),
)
_WARMUP = 6


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all ways in turn; print a line of JSON each, and write the record. 1 where a way failed."""
    options = parser().parse_args(arguments)
    steps = (f"train.gradient_accumulation_steps={options.micro_batches}", *options.overrides)
    cases = [
        memory.Case(
            family,
            types.require_base(base, f"{family}={base}"),
            way,
            (*WAYS[way], *steps),
            tokens=options.tokens,
        )
        for family, base in options.families
        for way in options.ways
    ]
    if environment.read("TRAINER_PROFILE") != "cpu":
        idle.require_gpu(remedy="use a machine with one; TRAINER_PROFILE=cpu tries it on a CPU")
        for case in cases:
            sweep.probe(case)
    found = _rounds(options, cases)
    rows = [row for key, rounds in found.items() if (row := _row(key, rounds, found, options.micro_batches))]
    for row in rows:
        print(json.dumps(dict(zip(COLUMNS, row, strict=True))))
    if options.record and rows:
        update_table(
            options.record,
            rows,
            keys=3,
            title="Full fine-tunes beside torchao's recipes",
            where=description.describe(options.month),
            command="python -m bench recipes FAMILY=BASE ... --record FILE",
            columns=COLUMNS,
        )
    return int(any("ms" not in one for rounds in found.values() for one in rounds))


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("recipes", __doc__)
    one.add_argument("families", nargs="+", type=types.family_base, metavar="FAMILY=BASE")
    ways = types.names_of("way", WAYS)
    one.add_argument("--ways", type=ways, default=tuple(WAYS), metavar="NAME,NAME")
    one.add_argument("--rounds", type=types.positive, default=2)
    one.add_argument("--steps", type=types.positive, default=20, help="that are timed, of each round; 20")
    one.add_argument("--micro-batches", type=types.positive, default=1, help="of an optimizer step; 1")
    types.add_common(one, "--set", "--tokens", "--record", "--month")
    return one


def _rounds(
    options: argparse.Namespace, cases: Sequence[memory.Case]
) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Answers of `measure` by family and way, one a round, with what the plan chose."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    given = {"steps": options.steps, "tokens": options.tokens, "micro_batches": options.micro_batches}
    environ = environment.snapshot()
    for number in range(1, options.rounds + 1):
        for case in cases:
            answer, plan = memory.in_child(case, measure, {**given, "way": case.setting}, environ)
            chose = "" if plan is None else _chosen(plan)
            found.setdefault((case.family, case.setting), []).append({**answer, "chose": chose})
            shown = json.dumps(answer)[:400]
            print(f"round {number}, {case.family}, {case.setting}: {shown}", file=sys.stderr, flush=True)
    return found


def measure(spec: str, *, way: str, steps: int, tokens: int, micro_batches: int) -> dict[str, Any]:
    """Build and train in the child; gives the milliseconds of each timed step and the memory held, in GiB."""
    import torch

    from bench import jobs
    from bench import steps as taken
    from trainer.engine.building.build import build

    context = jobs.make_context(spec)
    _, _, recipe = way.partition("torchao-")
    built = build_with_torchao(context, recipe) if recipe else build(context)
    step = taken.make_step(context, built, tokens, micro_batches)
    taken.timed(step, _WARMUP)
    times = taken.timed(step, steps)
    held = torch.cuda.max_memory_reserved() / GIB if torch.cuda.is_available() else 0.0
    return {"ms": [round(one, 2) for one in times], "peak": round(held, 1)}


def build_with_torchao(context: Any, recipe: str) -> Any:
    """A full fine-tune as `build` makes it, of the layers that ours has in FP8, as torchao's linears.

    Raises HardwareError where torchao is not installed, or the plan recomputes blocks.
    """
    from accelerate import Accelerator

    from trainer.engine.building.build import Built, load_base
    from trainer.engine.building.fast import compile_model
    from trainer.engine.optimizing.updater import Updater

    if context.plan.activation_checkpointing:
        what = "the plan recomputes blocks, which torchao's ways here do not"
        raise HardwareError(what, where="--ways", remedy="use a GPU with more memory, or leave them out")
    model = load_base(context)
    model.module.requires_grad_(True).train()
    count = _convert(model.module, context.family.high_precision, recipe)
    print(f"torchao {recipe}: {count} linear layers", file=sys.stderr, flush=True)
    compile_model(context, model, ())
    trained = {name: value for name, value in model.module.named_parameters() if value.requires_grad}
    updater = Updater(trained, context.config.train, context.plan.optimizer, context.ranks, None)
    accelerator = Accelerator(cpu=context.device == "cpu", mixed_precision="no")
    return Built(model=model.module, updater=updater, accelerator=accelerator, context=context)


def _convert(model: Any, high_precision: Sequence[str], recipe: str) -> int:
    """Replace the linears that `multiply_in_fp8` would by torchao's; gives their number."""
    from trainer.modeling.storage.layers import any_of
    from trainer.modeling.storage.row_scaled import takes_fp8

    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        what = f"torchao cannot be imported: {error}"
        raise HardwareError(
            what, where="--ways", remedy="pip install torchao, or leave its ways out"
        ) from error
    keep, found = any_of(high_precision), []

    def is_converted(layer: Any, name: str) -> bool:
        taken = not keep.fullmatch(name) and takes_fp8(layer)
        found.extend([name] * taken)
        return taken

    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    return len(found)


def _chosen(plan: Plan) -> str:
    again = f", {plan.recomputed_blocks or 'all'} blocks recomputed" if plan.activation_checkpointing else ""
    return f"attention {plan.attention}, {plan.optimizer}{again}"


def _row(
    key: tuple[str, str],
    rounds: Sequence[Mapping[str, Any]],
    found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]],
    micro_batches: int,
) -> tuple[str, ...] | None:
    """A row of `COLUMNS`; None where a round failed."""
    times, base = _times(rounds), _times(found.get((key[0], "bf16"), ()))
    if not times:
        return None
    all_of, ratio = figures.summed_up(times), figures.ratio_of_medians(times, base) if base else None
    return (
        *(*key, str(micro_batches), rounds[0]["chose"], f"{all_of.median:.1f}"),
        f"{all_of.fastest:.0f} to {all_of.slowest:.0f}",
        "" if ratio is None else f"{ratio.value:.3f}",
        "" if ratio is None else f"{ratio.low:.3f} to {ratio.high:.3f}",
        f"{max(one['peak'] for one in rounds):.1f}",
    )


def _times(rounds: Sequence[Mapping[str, Any]]) -> list[Sequence[float]]:
    """Milliseconds of the steps of each round; none where a round failed."""
    return [one["ms"] for one in rounds] if all("ms" in one for one in rounds) else []
