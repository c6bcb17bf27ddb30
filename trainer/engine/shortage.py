"""Floor 6: memory ran out: what was predicted, and what the plan has not done against it yet. No torch."""

from __future__ import annotations

from trainer.config.schema import RunConfig
from trainer.errors import OutOfMemoryError
from trainer.hardware import memory
from trainer.hardware.plan import Plan
from trainer.telemetry.status import Phase

_GIB = 1024**3
_SMALLER = {"bf16": "int8", "fp16": "int8", "fp32": "int8", "fp8": "nf4", "int8": "nf4"}
"""How the base is stored, and what takes less."""


def out_of_memory(
    error: BaseException, phase: Phase | None, config: RunConfig, plan: Plan
) -> OutOfMemoryError:
    """The error to end with, for an allocation that failed in `phase`."""
    rows = plan.cache_memory if phase is Phase.CACHE else plan.train_memory
    predicted = ""
    if plan.device != "cpu":
        needed = memory.total(rows) / _GIB
        predicted = f"; {needed:.1f} GiB were predicted, {plan.budget_bytes / _GIB:.1f} are the budget"
    # advice to torch's own users follows in the next sentences
    said = str(error).split(" If reserved but unallocated")[0].strip() or type(error).__name__
    remedies = [*_remedies(phase, config, plan), "a lower data.resolution"]
    return OutOfMemoryError(
        f"memory ran out{predicted} ({said})",
        where=f"phase {phase or Phase.LOAD}",
        remedy=f"use {', or '.join(remedies)}; what was saved stays",
    )


def _remedies(phase: Phase | None, config: RunConfig, plan: Plan) -> list[str]:
    """What the run does not do yet, the cheapest first."""
    found = []
    if plan.device != "cpu" and phase is not Phase.CACHE:
        if plan.cuda_graphs:
            found.append("features.cuda_graphs: false")
        if not plan.activation_checkpointing or plan.recomputed_blocks:
            found.append("features.activation_checkpointing: true")
        if config.method == "lora" and plan.weights in _SMALLER:
            found.append(f"features.weights: {_SMALLER[plan.weights]}")
    if plan.device != "cpu":
        # the plan then chooses what needs less, without being told how
        less = 0.95 * plan.budget_bytes / _GIB
        found.append(f"features.memory_budget: {less:.1f}GiB")
    if config.train.train_batch_size > 1 and phase is not Phase.CACHE:
        found.append("a smaller train.train_batch_size")
    return found
