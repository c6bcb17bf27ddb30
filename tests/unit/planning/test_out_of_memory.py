"""The out-of-memory message names the prediction, and advises only settings that the run does not use."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.unit.planning.test_encoding import Make, of, planned
from trainer.errors import ExitCode
from trainer.planning.cost import memory
from trainer.planning.out_of_memory import out_of_memory
from trainer.telemetry.status import Phase

CUDA = RuntimeError(
    "CUDA out of memory. Tried to allocate 96.00 MiB. 23.25 GiB allowed; Of the allocated memory 20.06 GiB is"
    " allocated by PyTorch. If reserved but unallocated memory is large try setting something else"
)


def said(config: Make, phase: Phase | None = Phase.TRAIN, family: str = "flux1_dev", **changes: Any) -> str:
    made = of(config, family, **changes)
    error = out_of_memory(CUDA, phase, made, planned(made), lambda values: True)
    assert error.exit_code == ExitCode.OUT_OF_MEMORY
    return str(error)


def test_prediction_and_budget_are_named_beside_the_allocators_words(config: Make) -> None:
    made = of(config, "flux1_dev", features__memory_budget="16GiB")
    plan = planned(made)
    needed = memory.total(plan.train_memory) / 1024**3
    text = str(out_of_memory(CUDA, Phase.FIRST_STEP, made, plan, lambda values: True))
    assert f"memory ran out; {needed:.1f} GiB were predicted, 16.0 are the budget (CUDA out" in text
    assert text.startswith("phase first_step: ") and "try setting" not in text


def test_only_what_the_run_does_not_do_is_advised(config: Make) -> None:
    roomy = said(config)
    for remedy in ("cuda_graphs: false", "activation_checkpointing: true", "weights: nf4"):
        assert f"features.{remedy}" in roomy
    tight = said(config, family="flux2_dev", features__memory_budget="24GiB")
    needed = memory.total(planned(of(config, "flux2_dev", features__memory_budget="24GiB")).train_memory)
    assert f"features.memory_budget: {0.95 * needed / 1024**3:.1f}GiB" in tight
    for done in ("cuda_graphs", "activation_checkpointing", "features.weights", "train_batch_size"):
        assert done not in tight


def test_a_budget_that_is_advised_is_below_what_the_run_was_predicted_to_take(config: Make) -> None:
    """One of 95 % of the budget leaves a run that fills a third of it as it is."""
    made = of(config, "flux1_dev")
    plan = planned(made)
    needed = plan.peak_bytes / 1024**3
    assert needed < plan.budget_bytes / 1024**3 / 2
    assert f"features.memory_budget: {0.95 * needed:.1f}GiB" in said(config)
    # a budget that is less than what training takes changes training, and encoding takes less
    assert memory.total(plan.cache_memory) < memory.total(plan.train_memory)
    assert "memory_budget" not in said(config, Phase.CACHE)


CPU = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 283115520 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize("error", [CPU, MemoryError()])
def test_host_memory_is_told_apart_from_the_gpus(config: Make, error: BaseException) -> None:
    made = of(config, "flux1_dev")
    plan = planned(made)
    needed = memory.total(plan.host_memory) / 1024**3
    text = str(out_of_memory(error, Phase.TRAIN, made, plan, lambda values: True))
    assert f"host memory ran out; {needed:.1f} GiB of it were predicted (" in text
    assert "use data.cache_in_memory: false, or end what else takes memory of this machine; what" in text
    waiting = dataclasses.replace(plan, keep_bytes=0, swapped_blocks=8, ranks=4, devices=(0, 1), hosts=2)
    text = str(out_of_memory(error, Phase.TRAIN, made, waiting, lambda values: True))
    assert "use features.block_swap: 4, or parallel.gpus: 2, or end what else" in text
    # where the GPU's memory is the host's, what takes less of one takes less of the other
    shared = dataclasses.replace(plan, pin_memory=False)
    text = str(out_of_memory(error, Phase.TRAIN, made, shared, lambda values: True))
    assert "host memory" not in text and "features.activation_checkpointing: true" in text


@pytest.mark.parametrize("phase", [Phase.CACHE, Phase.TRAIN])
def test_a_phase_is_advised_what_concerns_it(config: Make, phase: Phase) -> None:
    text = said(config, phase, train__train_batch_size=2)
    assert ("train.train_batch_size" in text) == ("features.weights" in text) == (phase is Phase.TRAIN)
    assert "a lower data.resolution; what was saved stays" in text
