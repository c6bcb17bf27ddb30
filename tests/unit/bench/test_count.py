"""activations.json from what was counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import count, memory, processes
from tests.golden.plans import MACHINES
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.shapes.activations import COUNTS, full_way
from trainer.planning.shapes.run_shapes import CONFIGS


def row(mode: str, stacks: dict[str, int], *, fixed: int, beyond: int) -> dict[str, Any]:
    """Counts of one and two blocks, where each keeps so many bytes."""

    def held(numbers: list[int]) -> dict[str, int]:
        kept = fixed + sum(number * size for number, size in zip(numbers, stacks.values(), strict=True))
        return {"kept": kept, "peak": kept + beyond}

    ones = [1] * len(stacks)
    cuts = [ones, *([*ones[:kind], 2, *ones[kind + 1 :]] for kind in range(len(ones)))]
    return {
        "family": "a",
        "mode": mode,
        "stacks": list(stacks),
        "units": {"every": 1000, "captions": 100},
        "head": 0,
        "counted": {",".join(map(str, cut)): held(cut) for cut in cuts},
    }


def test_an_entry_has_units_of_the_tokens_that_blocks_see() -> None:
    entry = count.table_entry(
        [
            row("eager", {"text": 1700, "image": 24000}, fixed=1000, beyond=7000),
            row("eager, recomputed", {"text": 100, "image": 1000}, fixed=2000, beyond=30000),
        ]
    )
    assert entry == {
        "stacks": ["text", "image"],
        "captions": ["text"],
        "beside": {},
        "fp8_twice_as_bf16": False,
        "ways": {
            "eager": {"fixed": 1.0, "blocks": [17.0, 24.0], "beyond": 7.0},
            "eager, recomputed": {"fixed": 2.0, "blocks": [1.0, 1.0], "beyond": 30.0},
        },
    }


def test_the_committed_table_is_as_the_command_writes_it() -> None:
    text = COUNTS.read_text()
    assert count.table_text(json.loads(text)) == text


def test_new_modes_are_written_over_the_old_ones() -> None:
    known = {"stacks": ["a"], "captions": [], "ways": {"eager": {"fixed": 1}, "compiled": {"fixed": 2}}}
    entry = {"stacks": ["a"], "captions": [], "ways": {"eager": {"fixed": 3}}}
    found = count.merged(known, entry)["ways"]
    assert found == {"eager": {"fixed": 3}, "compiled": {"fixed": 2}}
    assert count.merged({"like": "b"}, entry) == entry


def test_values_of_captions_are_left_out_of_the_counts() -> None:
    entry = count.table_entry(
        [
            row("eager", {"image": 24400}, fixed=1000, beyond=7000),
            row("eager, recomputed", {"image": 1000}, fixed=2000, beyond=30400),
        ],
        {"beside": {"image": 4.0}},
    )
    assert entry["beside"] == {"image": 4.0}
    assert entry["ways"]["eager"] == {"fixed": 1.0, "blocks": [24.0], "beyond": 7.0}
    assert entry["ways"]["eager, recomputed"] == {"fixed": 2.0, "blocks": [1.0], "beyond": 30.0}


def test_one_mode_alone_is_added_to_what_is_known() -> None:
    """With the family's own stacks of captions, and what was written by hand."""
    known = {
        "stacks": ["text", "image"],
        "captions": ["text"],
        "beside": {"image": 4.0},
        "fp8_twice_as_bf16": True,
        "ways": {"compiled": {"fixed": 1.0, "blocks": [9.0, 14.0], "beyond": 8.5}},
    }
    new = row("compiled, int8, budget 0.6", {"text": 200, "image": 2400}, fixed=1000, beyond=15000)
    entry = count.merged(known, count.table_entry([new], known))
    assert entry == known | {
        "ways": {
            **known["ways"],
            "compiled, int8, budget 0.6": {"fixed": 1.0, "blocks": [2.0, 2.0], "beyond": 15.0},
        }
    }


def test_a_child_that_sees_one_gpu_runs_on_its_first(
    tiny_base: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made where all GPUs are seen, and takes another one while the first is in use."""
    facts = read_recorded(MACHINES / "several" / "h200-x8.json")
    used = [0.5, *[0.01] * (len(facts.gpus) - 1)]
    gpus = [
        replace(gpu, free_memory_bytes=int((1 - share) * gpu.total_memory_bytes))
        for gpu, share in zip(facts.gpus, used, strict=True)
    ]
    monkeypatch.setattr(memory, "machine_facts", lambda: replace(facts, gpus=tuple(gpus)))
    plans = []

    def called(job: object, loaded: object, plan: Plan, *given: object, **more: object) -> processes.Ended:
        plans.append(plan)
        return processes.Ended(code=0, host_gib=0.0, said="", answer={"seen": 1})

    monkeypatch.setattr(memory.jobs, "call", called)
    case = memory.Case("flux1_dev", tiny_base("flux1_dev"), "eager", count.MODES["eager"])
    _, plan = memory.planned(case, tmp_path)
    answer, _ = memory.in_child(case, count.count, {}, {"CUDA_VISIBLE_DEVICES": "1"})
    assert (plan.ranks, plan.devices) == (1, (1,))
    assert answer == {"seen": 1}
    assert [one.devices for one in plans] == [(0,)]


@pytest.mark.parametrize("mode", [mode for mode in count.MODES if mode.startswith("full")])
def test_modes_of_full_fine_tunes_are_planned_for_cut_models(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "h200.json"))
    monkeypatch.setenv("TRAINER_PROFILE", "auto")
    for family in ("llama", "flux1_dev", "kandinsky5"):
        blocks = (2,) * len(count.jobs.block_counts(family, CONFIGS / family))
        case = memory.Case(family, CONFIGS / family, mode, count.MODES[mode], blocks)
        (folder := tmp_path / family).mkdir()
        loaded, plan = memory.planned(case, folder)
        assert loaded.config.method == "full" and plan.attention == "flash"
        products = "fp8" if "fp8" in mode else "bf16"
        assert mode.startswith(full_way(compiled=plan.compile, products=products))
        assert (plan.compute, plan.activation_checkpointing) == (products, "recomputed" in mode)


def test_gradients_are_let_go_and_those_of_the_vocabulary_never_made() -> None:
    """The first block's input has a gradient all the same."""
    torch.manual_seed(0)
    embedding, block, head = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 7)
    model = torch.nn.Sequential(embedding, block, head)
    found = count.let_go(model)
    seen: list[torch.Tensor] = []
    block.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    model(torch.arange(7)).sum().backward()
    assert seen[0].requires_grad
    assert all(one.grad is None for one in model.parameters())
    assert found == {block.weight: 4 * 4 * 4, block.bias: 4 * 4}
    assert not embedding.weight.requires_grad and not head.weight.requires_grad
