"""Committed activations beside what a GPU holds: every family, eager and compiled, blocks at full width."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from bench import count, memory, processes
from tests.random_bases import build
from trainer import families
from trainer.families import language
from trainer.families.values import Shape
from trainer.planning.shapes.activations import OTHER_ATTENTION, Activations, activations, counted
from trainer.planning.shapes.run_activations import head_bytes
from trainer.planning.shapes.run_shapes import component_config

# each process that ran one of them would take all counts
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1500), pytest.mark.xdist_group("counts")]

MOST = 1.03
"""Largest share of the committed count: a step that holds more fails."""
LEAST = 0.7
"""Least share of the committed count: a step below it was counted for other shapes, or is out of date."""
WAYS = (
    *("eager", "compiled", "compiled, recomputed", "compiled, budget 0.6"),
    *("compiled, int8, budget 0.6", "compiled, nf4, budget 0.6"),
    *("compiled, cudnn, budget 0.2", "compiled, int8, cudnn, budget 0.6"),
)
_SIDE_BY_SIDE = 14
"""Most counts taken at a time on one GPU: each holds two blocks of a full-size model."""


def entry(family: str) -> str:
    """The entry of activations.json for the family's own full-size model."""
    one = families.get(family)
    return one.counted_as(component_config(one, None, one.trained_component))


def ways(family: str) -> list[str]:
    """Counted ways; budget 0.2 only where the family has counts of its own model.

    At a small budget the compiler's choice depends on the time of attention, which grows with the tokens'
    square: with twice the tokens a block keeps fewer bytes than were counted.
    """
    found = [way for way in WAYS if way in counted(entry(family))["ways"]]
    return [way for way in found if entry(family) == family or not way.endswith("budget 0.2")]


@pytest.fixture(scope="module")
def rows(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], dict[str, Any]]:
    """Counts of the tests' ways, taken side by side: each takes a minute, mostly of the host, and little
    memory.
    """
    folder = tmp_path_factory.mktemp("bases")
    items = [one for one in request.session.items if one.path == request.path]
    asked = [one.callspec.params for one in items if "way" in one.callspec.params]
    for family in {params["family"] for params in asked}:
        build(family, "full", folder / family, weights=False)
    cases = [
        memory.Case(params["family"], folder / params["family"], params["way"], count.MODES[params["way"]])
        for params in asked
    ]
    # each keeps a core busy, mostly its compiler's
    jobs = max(1, min(_SIDE_BY_SIDE * len(processes.visible()), (os.cpu_count() or 1) * 7 // 8))
    found = processes.side_by_side(count.counted_row, cases, jobs=jobs)
    return {(row["family"], row["mode"]): row for row in found}


@pytest.mark.parametrize(
    ("family", "way"), [(family, way) for family in families.names() for way in ways(family)]
)
def test_a_step_holds_what_is_committed(
    family: str, way: str, rows: dict[tuple[str, str], dict[str, Any]]
) -> None:
    row = rows[family, way]
    assert "counted" in row, row
    for cut, held in row["counted"].items():
        blocks = dict(zip(row["stacks"], map(int, cut.split(",")), strict=True))
        planned = _planned(family, blocks, row, compiled=way.startswith("compiled"))
        if "recomputed" in way:
            kept, peak = planned.recomputed.kept, planned.peak(recomputed=sum(blocks.values()))
        elif "budget" in way:
            weights = next((one for _, one in planned.shares if f", {one}, " in way), "bf16")
            flash, share = f", {OTHER_ATTENTION}, " not in way, float(way.rpartition(" ")[2])
            kept = planned._budgets(weights, flash=flash)[share].kept
            peak = planned.peak(budget=share, weights=weights, flash=flash)
        else:
            kept, peak = planned.whole.kept, planned.peak()
        assert LEAST * kept <= held["kept"] <= MOST * kept, (cut, held)
        # the first block has gradients of its own: models have many
        if "2" in cut:
            assert LEAST * peak <= held["peak"] <= MOST * peak, (cut, held)


def _planned(family: str, blocks: dict[str, int], row: dict[str, Any], *, compiled: bool) -> Activations:
    units = (row["units"]["every"], row["units"]["captions"])
    one, more = families.get(family), language.MoreValues()
    if one.sample_kind == "conversation":  # its blocks were counted of another shape
        config = component_config(one, None, one.trained_component)
        more = language.more_values(config, linear_inputs=False, compiled=compiled)
    return activations(
        counted(entry(family)),
        blocks,
        units,
        compiled=compiled,
        linear_inputs=False,
        head=row["head"],
        more=more,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_head_holds_what_is_planned(dtype: torch.dtype) -> None:
    """Beside what its loss keeps for backward; in fp16 logits exist again there."""
    one = families.get("qwen3")
    config = component_config(one, None, one.trained_component)
    tokens, width = 2048, config["hidden_size"]
    shape = Shape(batch_size=1, width=1, height=1, text_tokens=tokens, bytes_per_value=2, controls=0)
    head = torch.nn.Linear(width, config["vocab_size"], bias=False, device="cuda", dtype=dtype)
    head.requires_grad_(False)
    states = torch.randn(tokens, width, device="cuda", dtype=dtype, requires_grad=True)
    labels = torch.randint(config["vocab_size"], (tokens,), device="cuda")

    def run() -> None:
        language._token_losses(head, states, labels, torch.ones(tokens, device="cuda")).sum().backward()

    run()  # cuBLAS takes its workspaces, one a thread
    states.grad = None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    held = torch.cuda.max_memory_allocated() - before
    planned = head_bytes(one, config, shape, again=dtype == torch.float16)
    assert 0.95 * planned <= held <= MOST * planned
