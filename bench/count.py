"""Count on a GPU what one more block of a model keeps for backward: the calculator's figures.

    python -m bench count flux1_dev=BASE qwen_image=BASE --jobs 4 --table

In each mode the first blocks of a full-width model are trained, one more at a time, on a synthetic batch.
Printed are the bytes that are held after the forward pass and at the highest point of forward and backward,
beyond what was held before, for each number of blocks of each stack; of modes that train the whole model
without the gradients of weights. --table writes them, in units of tokens
x width, into trainer/planning/shapes/activations.json. Several GPUs, and with --jobs several runs on one,
work side by side: other processes' memory is not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import arguments as types
from bench import jobs, memory, processes
from trainer.families import language
from trainer.files import atomic
from trainer.machine import idle
from trainer.planning.shapes.activations import COUNTED_ATTENTION, COUNTS, OTHER_ATTENTION
from trainer.planning.shapes.run_activations import activation_units, head_bytes

if TYPE_CHECKING:
    import torch

# whichever kernels were probed on the machine: what compiled blocks keep under a budget depends on it
_ATTENTION = f"features.attention={COUNTED_ATTENTION}"
_OTHER = "features.attention=cudnn_strided"
_EAGER = ("features.compile=false", "features.weights=bf16", _ATTENTION)
_COMPILED = ("features.compile=true", "features.weights=bf16", _ATTENTION)
_KEPT, _RECOMPUTED = (f"features.activation_checkpointing={value}" for value in ("false", "true"))
_LINEARS = ("lora.target_modules=all-linear",)
_FULL = ("method=full", _ATTENTION)
_FULL_COMPILED = (*_FULL, "features.compile=true")
_IN_BF16, _IN_FP8 = (f"features.compute={value}" for value in ("bf16", "fp8"))
_BUDGETS = {"bf16": (0.8, 0.6, 0.4, 0.2), "int8": (0.6,), "nf4": (0.6,)}
MODES: Mapping[str, tuple[str, ...]] = {
    "eager": (*_EAGER, _KEPT),
    "eager, all linears": (*_EAGER, _KEPT, *_LINEARS),
    "eager, recomputed": (*_EAGER, _RECOMPUTED),
    "compiled": (*_COMPILED, _KEPT),
    "compiled, all linears": (*_COMPILED, _KEPT, *_LINEARS),
    "compiled, recomputed": (*_COMPILED, _RECOMPUTED),
    "compiled, recomputed outside": (*_COMPILED, "features.block_swap=1"),
    **{
        f"compiled, {'' if weights == 'bf16' else f'{weights}, '}{kernel}budget {share}": (
            "features.compile=true",
            f"features.weights={weights}",
            attention,
            f"features.activation_budget={share}",
        )
        for kernel, attention in (("", _ATTENTION), (f"{OTHER_ATTENTION}, ", _OTHER))
        for weights, shares in _BUDGETS.items()
        for share in shares
    },
    # larger shares are planned as those of bf16
    f"compiled, fp8, {OTHER_ATTENTION}, budget 0.2": (
        *("features.compile=true", "features.weights=fp8", "features.compute=fp8"),
        *(_OTHER, "features.activation_budget=0.2"),
    ),
    "full, eager": (*_FULL, "features.compile=false", _IN_BF16, _KEPT),
    "full, compiled": (*_FULL_COMPILED, _IN_BF16, _KEPT),
    "full, compiled, recomputed": (*_FULL_COMPILED, _IN_BF16, _RECOMPUTED),
    "full, compiled, fp8": (*_FULL_COMPILED, _IN_FP8, _KEPT),
    "full, compiled, fp8, recomputed": (*_FULL_COMPILED, _IN_FP8, _RECOMPUTED),
}
"""Overrides of each row by its name."""
_NEEDED = ("eager", "eager, recomputed", "compiled", "compiled, recomputed")
"""Modes without which a family has no entry."""
_WARM_UP = 2
_LOGITS_TOKENS = 32
"""Tokens whose logits exist at one time: as many as in a run would hide what a block holds."""


class _List(NamedTuple):
    """A stack of blocks in the model."""

    path: str
    parent: Any
    name: str
    blocks: Any


def main(arguments: Sequence[str] | None = None) -> int:
    """Count; print a line of JSON for each family and mode."""
    parser = types.command_parser("count", __doc__, types.listed("modes", MODES))
    parser.add_argument("families", nargs="*", type=types.family_base, metavar="FAMILY=BASE")
    types.add_choices(parser, "--modes", MODES)
    types.add_common(parser, "--tokens", "--jobs", "--record")
    parser.add_argument("--table", action="store_true", help="write trainer/planning/shapes/activations.json")
    options = parser.parse_args(arguments)
    if not options.families:
        parser.error("name what to count: FAMILY=BASE")
    table = json.loads(COUNTS.read_text())
    if options.table and options.modes and not set(_NEEDED) <= set(options.modes):
        new = [family for family, _ in options.families if "ways" not in table.get(family, {})]
        if new:
            parser.error(f"--table needs these modes of {', '.join(new)}: {', '.join(_NEEDED)}")
    cases = [
        memory.Case(family, types.require_base(base, f"{family}={base}"), mode, MODES[mode])
        for family, base in options.families
        for mode in options.modes or MODES
    ]
    idle.require_gpu(remedy="use a machine with one")
    rows = processes.side_by_side(counted_row, cases, jobs=options.jobs)
    types.write_rows(options.record, rows)
    if options.table:
        for family in dict.fromkeys(case.family for case in cases):
            found = [row for row in rows if row["family"] == family and "counted" in row]
            known = table.get(family, {})
            if found and set(_NEEDED) <= {row["mode"] for row in found} | known.get("ways", {}).keys():
                table[family] = merged(known, table_entry(found, known))
        atomic.write_text(COUNTS, table_text(table))
    missing = [f"{row['family']}, {row['mode']}" for row in rows if "counted" not in row]
    if missing:
        print(f"not counted: {'; '.join(missing)}", file=sys.stderr)
    return int(bool(missing))


def counted_row(case: memory.Case, environ: Mapping[str, str]) -> dict[str, Any]:
    """One mode, counted in a child and printed; `refused` or `failed` where it could not be."""
    keys = jobs.block_counts(case.family, case.base)
    cut = case._replace(blocks=(2,) * len(keys))
    found, _ = memory.in_child(cut, count, {"tokens": case.tokens}, environ)
    row = {"family": case.family, "mode": case.setting, **found}
    print(json.dumps(row), flush=True)
    return row


def count(spec: str, tokens: int) -> dict[str, Any]:
    """Build in the child, and count with one block of each kind, and with one more of each."""
    import torch

    from bench import steps
    from trainer.engine.building.build import build

    language.LOGITS_TOKENS = _LOGITS_TOKENS
    context = jobs.make_context(spec)
    built = build(context)
    forward = steps.make_forward(context, built, tokens)
    forward()  # a family may prepare its blocks in its first pass: all of them
    lists = list(block_lists(built.model, context.family.blocks))
    full = context.config.method == "full"
    gradient_bytes = let_go(built.model) if full else {}
    ones = [1] * len(lists)
    cuts = [ones, *([*ones[:kind], 2, *ones[kind + 1 :]] for kind in range(len(lists)))]
    counted = {}
    for cut in cuts:
        for one, number in zip(lists, cut, strict=True):
            one.parent.register_module(one.name, torch.nn.ModuleList(list(one.blocks)[:number]))
        for _ in range(_WARM_UP):
            _held(forward)
        last = list(lists[-1].blocks)[cut[-1] - 1]
        # a compiled block gives all of its gradients at its end, an eager one each by itself
        given = [*last.parameters()] if context.plan.compile else []
        counted[",".join(map(str, cut))] = _held(forward, sum(gradient_bytes.get(one, 0) for one in given))
    model_config = context.source.component_config(context.family.trained_component)
    shape = steps.shape_of(context, tokens)
    every, captions = activation_units(context.family, model_config, shape)
    return {
        "stacks": [one.path for one in lists],
        "units": {"every": every, "captions": captions},
        "head": head_bytes(context.family, model_config, shape),
        "counted": counted,
    }


def block_lists(model: torch.nn.Module, kinds: Sequence[str]) -> Iterator[_List]:
    """Every list of repeated blocks, in the model's order."""
    import torch

    for path, parent in list(model.named_modules()):
        for name, child in parent.named_children():
            if isinstance(child, torch.nn.ModuleList) and type(child[0]).__name__ in kinds:
                yield _List(f"{path}.{name}".lstrip("."), parent, name, child)


def let_go(model: torch.nn.Module) -> Mapping[torch.nn.Parameter, int]:
    """Have a model that trains as a whole let go of each gradient as it is made, so that activations alone
    are counted; gives the bytes of each that was made.

    An embedding over a vocabulary and the head over it do not train: their gradients are known, and would
    hide what blocks hold.
    """
    import torch

    found: dict[torch.nn.Parameter, int] = {}

    def drop(parameter: torch.Tensor) -> None:
        assert isinstance(parameter, torch.nn.Parameter) and parameter.grad is not None
        found[parameter] = parameter.grad.nbytes
        parameter.grad = None

    def with_gradient(module: torch.nn.Module, given: object, output: torch.Tensor) -> torch.Tensor:
        return output.requires_grad_()

    words = {one.num_embeddings for one in model.modules() if isinstance(one, torch.nn.Embedding)}
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.requires_grad_(False)
            module.register_forward_hook(with_gradient)
        elif isinstance(module, torch.nn.Linear) and module.out_features in words:
            module.requires_grad_(False)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(drop)
    return found


def _held(forward: Callable[[], torch.Tensor], gradients: int = 0) -> dict[str, int]:
    """Bytes held after a forward pass, and the most, beyond what is held without, but for `gradients`, which
    are there at the highest point.
    """
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = forward()
    kept = torch.cuda.memory_allocated() - before
    loss.backward()
    return {"kept": kept, "peak": torch.cuda.max_memory_allocated() - before - gradients}


def table_entry(
    rows: Sequence[Mapping[str, Any]], known: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """A family's entry of activations.json from the rows of its modes; `known` is the one that it has.

    `beside`, by stack, are values that a block keeps of each token of the caption besides: they are not
    counted apart, but written into the entry by hand, and are left out of the counts. So is
    `fp8_twice_as_bf16`.
    """
    by_mode, beside = {row["mode"]: row for row in rows}, known.get("beside", {})
    some = rows[0]
    captions = known["captions"] if "captions" in known else _captions(by_mode["eager, recomputed"])
    ways = {}
    for mode, row in by_mode.items():
        every, more = row["units"]["every"], _more(row)
        beyond: float = _beyond(row)
        units = [row["units"]["captions" if name in captions else "every"] for name in row["stacks"]]
        left = [0.0 if "recomputed" in mode else beside.get(name, 0.0) for name in row["stacks"]]
        more = [size - part * row["units"]["captions"] for size, part in zip(more, left, strict=True)]
        if "recomputed" in mode:
            beyond -= max(beside.values(), default=0.0) * row["units"]["captions"]
        ways[mode] = {
            "fixed": round((_ones(row)["kept"] - sum(_more(row))) / every, 3),
            "blocks": [round(size / unit, 3) for size, unit in zip(more, units, strict=True)],
            "beyond": round(beyond / every, 3),
        }
    by_hand = {"beside": dict(beside), "fp8_twice_as_bf16": known.get("fp8_twice_as_bf16", False)}
    return {"stacks": list(some["stacks"]), "captions": captions, **by_hand, "ways": ways}


def _captions(recomputed: Mapping[str, Any]) -> list[str]:
    """Stacks whose blocks see the caption alone: their input is smaller."""
    units = recomputed["units"]
    return [
        name
        for name, more in zip(recomputed["stacks"], _more(recomputed), strict=True)
        if more < (units["captions"] + units["every"]) / 2
    ]


def _beyond(row: Mapping[str, Any]) -> int:
    return max(held["peak"] - held["kept"] for cut, held in row["counted"].items() if "2" in cut)


def _ones(row: Mapping[str, Any]) -> Mapping[str, int]:
    """Bytes that a model with one block of each stack holds."""
    ones: Mapping[str, int] = row["counted"][",".join("1" for _ in row["stacks"])]
    return ones


def _more(row: Mapping[str, Any]) -> list[int]:
    """Bytes that one more block of each stack keeps."""
    numbers = range(len(row["stacks"]))
    cuts = [",".join("2" if number == kind else "1" for number in numbers) for kind in numbers]
    return [row["counted"][cut]["kept"] - _ones(row)["kept"] for cut in cuts]


def merged(known: Mapping[str, Any], entry: Mapping[str, Any]) -> dict[str, Any]:
    """A family's entry with newly counted modes over those that it had."""
    return {**entry, "ways": {**known.get("ways", {}), **entry["ways"]}}


def table_text(table: Mapping[str, Any]) -> str:
    """activations.json with a line for each mode."""
    texts = []
    for name, entry in sorted(table.items()):
        order = sorted(entry["ways"], key=list(MODES).index)
        ways = ",\n".join(f"   {json.dumps(way)}: {json.dumps(entry['ways'][way])}" for way in order)
        texts.append(
            f" {json.dumps(name)}: {{\n"
            f'  "stacks": {json.dumps(entry["stacks"])},\n'
            f'  "captions": {json.dumps(entry["captions"])},\n'
            f'  "beside": {json.dumps(entry["beside"])},\n'
            f'  "fp8_twice_as_bf16": {json.dumps(entry["fp8_twice_as_bf16"])},\n'
            f'  "ways": {{\n{ways}\n  }}\n }}'
        )
    return "{\n" + ",\n".join(texts) + "\n}\n"
