"""What one more block of a model keeps for backward, counted on a GPU: the calculator's figures.

    python scripts/bench.py count flux1_dev=BASE qwen_image=BASE --record FILE

In each mode the first blocks of a full-width model are trained, one more at a time, on a synthetic batch.
Printed are the bytes that are held after the forward pass and at the highest point of forward and backward,
beyond what was held before, for each number of blocks of each kind. Several GPUs, and with --jobs several
runs on one, work side by side: other processes' memory is not counted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.benches import arguments as types
from scripts.benches import gpus, machine, memory, profile_step
from trainer.engine.spec import read_spec
from trainer.errors import TrainerError

if TYPE_CHECKING:
    import torch

_EAGER = ("features.compile=false", "features.weights=bf16")
_COMPILED = ("features.compile=true", "features.weights=bf16", "features.activation_checkpointing=false")
_LINEARS = ("lora.target_modules=all-linear",)
MODES: Mapping[str, tuple[str, ...]] = {
    "eager": _EAGER,
    "eager, all linears": (*_EAGER, *_LINEARS),
    "eager, recomputed": (*_EAGER, "features.activation_checkpointing=true"),
    "compiled": _COMPILED,
    "compiled, all linears": (*_COMPILED, *_LINEARS),
    "compiled, recomputed": (*_COMPILED[:2], "features.activation_checkpointing=true"),
    **{
        f"compiled, budget {share}": (*_COMPILED[:2], f"features.activation_budget={share}")
        for share in (0.8, 0.6, 0.4, 0.2)
    },
}
"""What the rows are called, and the overrides that make them."""
_WARM_UP = 2


class _List(NamedTuple):
    """Blocks of one kind in the model."""

    parent: Any
    name: str
    blocks: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Count; print a line of JSON for each family and mode."""
    options = _parser().parse_args(arguments)
    if options.spec is not None:
        count(options.spec, options.tokens)
        return 0
    cases = [
        memory.Case(family, types.require_base(base, f"{family}={base}"), mode, MODES[mode])
        for family, base in options.families
        for mode in options.modes or MODES
    ]
    machine.require_gpu(remedy="use a machine with one")
    rows = gpus.side_by_side(_row, cases, jobs=options.jobs)
    if options.record:
        options.record.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    return int(any("counted" not in row for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = types.command_parser("count", __doc__, types.listed("modes", MODES))
    parser.add_argument("families", nargs="*", type=types.family_base, metavar="FAMILY=BASE")
    parser.add_argument(
        "--modes", action="append", choices=list(MODES), metavar="MODE", help="one of those below, only it"
    )
    parser.add_argument("--tokens", type=types.positive, default=512, help="text tokens")
    parser.add_argument("--jobs", type=types.positive, default=1, help="runs side by side")
    parser.add_argument("--record", type=types.new_file, help="write the rows here")
    parser.add_argument("--spec", type=Path, help=argparse.SUPPRESS)
    return parser


def _row(case: memory.Case, environ: Mapping[str, str]) -> dict[str, Any]:
    """One mode, counted in a child."""
    row: dict[str, Any] = {"family": case.family, "mode": case.setting}
    with tempfile.TemporaryDirectory(prefix="count-") as scratch:
        folder = Path(scratch)
        keys = profile_step.count_keys(case.family, case.base)
        try:
            loaded, plan = memory.planned(case._replace(blocks=(2,) * len(keys)), folder)
        except TrainerError as error:
            return {**row, "refused": str(error)}
        spec = profile_step.write_job(loaded, plan, folder)
        command = [sys.executable, "-m", "scripts.benches.count", "--spec", str(spec)]
        done = subprocess.run(
            [*command, "--tokens", str(case.tokens)],
            env=plan.child_environment(environ),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        row["failed"] = done.stderr.strip()[-300:]
    else:
        row |= json.loads(done.stdout.splitlines()[-1])
    print(json.dumps(row), flush=True)
    return row


def count(spec_path: Path, tokens: int) -> None:
    """In the child: build, and count with one block of each kind, and with one more of each."""
    import torch

    from trainer.engine.build import build

    context = profile_step.make_context(read_spec(spec_path))
    built = build(context)
    forward = profile_step.make_forward(context, built, tokens)
    lists = list(block_lists(built.model, context.family.blocks))
    ones = [1] * len(lists)
    cuts = [ones, *([*ones[:kind], 2, *ones[kind + 1 :]] for kind in range(len(lists)))]
    counted = {}
    for cut in cuts:
        for one, number in zip(lists, cut, strict=True):
            one.parent._modules[one.name] = torch.nn.ModuleList(list(one.blocks)[:number])
        for _ in range(_WARM_UP):
            _held(forward)
        counted[",".join(map(str, cut))] = _held(forward)
    kinds = [type(one.blocks[0]).__name__ for one in lists]
    print(json.dumps({"kinds": kinds, "counted": counted}))


def block_lists(model: torch.nn.Module, kinds: Sequence[str]) -> Iterator[_List]:
    """Every list of repeated blocks, in the model's order."""
    import torch

    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and type(child[0]).__name__ in kinds:
                yield _List(parent, name, child)


def _held(forward: Callable[[], torch.Tensor]) -> dict[str, int]:
    """Bytes held after a forward pass, and the most, beyond what is held without."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return {"kept": kept, "peak": torch.cuda.max_memory_allocated() - before}


if __name__ == "__main__":
    sys.exit(main())
