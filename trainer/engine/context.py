"""The run that every part of the engine is given: configuration, plan, family, and channels outside."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config.schema import RunConfig
from trainer.engine.ranks import ALONE, Ranks
from trainer.errors import HardwareError
from trainer.families.family import Family
from trainer.modeling.base.source import ModelSource
from trainer.planning.cost.memory import CUDA_CONTEXT_BYTES
from trainer.planning.plan import Plan
from trainer.telemetry.status import Phase, StatusWriter
from trainer.telemetry.stop import StopFlag

DTYPES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class Context:
    """One run: its configuration, its plan, its family, and the channels to the supervisor."""

    config: RunConfig
    plan: Plan
    family: Family
    source: ModelSource
    cache_dir: Path
    status: StatusWriter
    stop: StopFlag
    say: Callable[[str], None]
    """Prints one line for people and adds it to the run's log; on ranks but the first nothing."""
    ranks: Ranks = ALONE
    tell: Callable[[str], None] = lambda text: None
    """Prints one line for the people at this host, whichever it is."""
    cache_ranks: tuple[int, ...] = ()
    """Ranks whose hosts share a cache with this one, which is among them; empty for all."""
    shares_run_dir: bool = True
    """Whether this host sees the run's folder of host 0."""

    @property
    def fills(self) -> tuple[int, ...]:
        """Ranks that fill this process's cache together, in their order."""
        return self.cache_ranks or tuple(range(self.ranks.size))

    def alive(
        self, phase: Phase, *, step: int | None = None, total: int | None = None, item_done: bool = False
    ) -> None:
        """Tell the supervisor that the run is alive; raises where a stop was requested."""
        self.stop.raise_if_requested()
        self.status.beat(phase, step=step, total=total, item_done=item_done)

    @functools.cached_property
    def settings(self) -> Any:
        """The family's values that draws and loss depend on besides the batch."""
        return self.family.settings(self.source, self.config)

    @property
    def dtype(self) -> torch.dtype:
        """Compute type of the model."""
        return DTYPES[self.plan.dtype]

    @property
    def device(self) -> str:
        """torch device of this process."""
        return f"cuda:{self.plan.devices[self.ranks.local_rank]}" if self.plan.device == "cuda" else "cpu"

    @property
    def run_dir(self) -> Path:
        """Folder that everything the run leaves is written to."""
        return self.config.output_dir


def limit_memory(context: Context, held_bytes: int = 0) -> None:
    """Have torch's allocator fail beyond an imposed budget, on a larger card too.

    `held_bytes` of it are taken outside the allocator.
    """
    rest = context.plan.budget_bytes - CUDA_CONTEXT_BYTES - held_bytes
    if context.config.features.memory_budget != "auto" and rest < (total := torch.cuda.mem_get_info()[1]):
        torch.cuda.set_per_process_memory_fraction(max(0, rest) / total)


def apply_backend_settings(context: Context) -> None:
    """Apply torch's global settings: TF32, algorithms that do not vary, the memory limit.

    Raises HardwareError when the plan is for a GPU and this torch sees none.
    """
    plan = context.plan
    if plan.device == "cuda" and not torch.cuda.is_available():
        raise HardwareError(
            "the plan is for a GPU, but torch sees none",
            where=f"torch {torch.__version__}",
            remedy="run `trainer probe`; TRAINER_PROFILE=cpu trains on the CPU on purpose",
        )
    if plan.device == "cuda":
        torch.cuda.set_device(context.device)
        torch.cuda.init()  # its statistics cannot be asked for before
        limit_memory(context)
    torch.backends.cuda.matmul.allow_tf32 = plan.tf32
    torch.backends.cudnn.allow_tf32 = plan.tf32
    # algorithm choice by timing would differ from run to run
    torch.backends.cudnn.benchmark = False
