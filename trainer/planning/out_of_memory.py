"""The out-of-memory error: the predicted memory, and savings that the plan does not use yet. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import OutOfMemoryError
from trainer.planning.choose.suggestions import ALLOWED_ON_RESUME, START_AFRESH, setting
from trainer.planning.cost import memory
from trainer.planning.kept_decisions import starts_from_checkpoint
from trainer.planning.plan import Plan
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.telemetry.status import Phase
from trainer.words.sizes import GIB

_OF_HOST = "DefaultCPUAllocator"
# CUDA's allocator, the CPU's, and cuBLAS: torch has a class of its own for the first only
_ALLOCATION_FAILED = ("out of memory", _OF_HOST, "CUBLAS_STATUS_ALLOC_FAILED")

_FREE_HOST = "end what else takes memory of this machine"

Allowed = Callable[[Mapping[str, Any]], bool]
"""True if the run loads and is planned with these values, by dotted key."""


def is_out_of_memory(error: BaseException | None) -> bool:
    """True if an allocation failed, also where it made the end of a CUDA graph's capture fail."""
    return any(
        isinstance(one, MemoryError) or any(text in str(one) for text in _ALLOCATION_FAILED)
        for one in _chain(error)
    )


def _is_of_host(error: BaseException) -> bool:
    """True if host memory is what an allocation did not get."""
    return any(isinstance(one, MemoryError) or _OF_HOST in str(one) for one in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error with those that it came from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def out_of_memory(
    error: BaseException, phase: Phase | None, config: RunConfig, plan: Plan, allowed: Allowed
) -> OutOfMemoryError:
    """The error to end with, for an allocation that failed in `phase`; it advises only what is `allowed`, and
    to a run that has a checkpoint nothing that this refuses.

    Of a GPU that has memory of its own host memory is told apart, with what takes less of that.
    """
    what, predicted, changes = "memory", "", _changes(phase, config, plan)
    of_host = plan.device == "cuda" and plan.pin_memory and _is_of_host(error)
    if of_host:
        what, needed = "host memory", memory.total(plan.host_memory) / GIB
        predicted, changes = f"; {needed:.1f} GiB of it were predicted", _host_changes(plan)
    elif plan.device != "cpu":
        rows = plan.cache_memory if phase is Phase.CACHE else plan.train_memory
        needed = memory.total(rows) / GIB
        predicted = f"; {needed:.1f} GiB were predicted, {plan.budget_bytes / GIB:.1f} are the budget"
    # advice to torch's own users follows in the next sentences
    said = str(error).split(" If reserved but unallocated")[0].strip() or type(error).__name__
    goes_on, settings = starts_from_checkpoint(config), list[str]()
    for key, values in changes:
        if key in ALLOWED_ON_RESUME or not goes_on:
            fitting = (setting(key, value) for value in values if allowed({key: value}))
            settings += itertools.islice(fitting, 1)
    others = [START_AFRESH] if goes_on else list(_smaller(phase, config, plan))
    others = [_FREE_HOST] if of_host else others
    use = "use " if settings or not (goes_on or of_host) else ""
    return OutOfMemoryError(
        f"{what} ran out{predicted} ({said})",
        where=f"phase {phase or Phase.LOAD}",
        remedy=f"{use}{', or '.join((*settings, *others))}; what was saved stays",
    )


def _host_changes(plan: Plan) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The same of what takes less host memory."""
    if plan.keep_bytes:
        yield "data.cache_in_memory", (False,)
    if plan.swapped_blocks:
        yield "features.block_swap", (plan.swapped_blocks // 2,)
    fewer = range(plan.ranks_here - 1, 0, -1)
    yield "parallel.gpus", tuple(plan.hosts * here for here in fewer)


def _smaller(phase: Phase | None, config: RunConfig, plan: Plan) -> Iterator[str]:
    """Advice to take less at a time, which is another experiment."""
    if plan.micro_batch_size > 1 and phase is not Phase.CACHE:
        yield "a smaller train.train_batch_size"
    talks = any(one.has_conversations for one in config.data.sets)
    yield f"a lower data.{'max_sequence_length' if talks else 'resolution'}"


def _changes(phase: Phase | None, config: RunConfig, plan: Plan) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Keys of settings that the run does not have yet, the cheapest first, with the values to try."""
    if plan.device == "cpu":
        return
    if phase is not Phase.CACHE:
        if plan.cuda_graphs:
            yield "features.cuda_graphs", (False,)
        if not plan.activation_checkpointing or plan.recomputed_blocks:
            yield "features.activation_checkpointing", (True,)
        if config.method == "lora":
            if needs_whole_base(config):
                yield "lora.type", ("lora",)
            yield "features.weights", plan.way.smaller
    # the plan then chooses what needs less than was predicted, without being told how
    needed = memory.total(plan.cache_memory if phase is Phase.CACHE else plan.train_memory)
    if needed == plan.peak_bytes:
        yield "features.memory_budget", (f"{0.95 * min(needed, plan.budget_bytes) / GIB:.1f}GiB",)
