"""Floor 2: every hardware decision of a run, made once by `resolve`, as data with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One row of the plan's table."""

    feature: str
    value: str
    source: str
    """`auto`, `profile NAME`, or where the user wrote it (file:line, variable, --set)."""
    reason: str


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """One predicted component of device memory, in bytes."""

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the run will do on this machine: typed fields for code, `decisions` for people."""

    profile: str
    device: str
    """`cuda` or `cpu`."""
    dtype: str
    """`bf16` or `fp32`: compute type, and storage of the base unless `weights` says int8 or nf4."""
    weights: str
    """`bf16`, `fp32`, `int8` or `nf4`."""
    attention: str
    """`flash`, `cudnn`, `efficient`, `math` or `native`."""
    activation_checkpointing: bool
    vae_tiling: bool
    tf32: bool
    pin_memory: bool
    optimizer: str
    """`adamw_fused_fp32` (fp32 masters) or `adamw_kahan_bf16` (compensated, for full fine-tunes in bf16)."""
    environment: Mapping[str, str]
    """Variables that must exist before the training process imports torch."""
    train_memory: tuple[MemoryRow, ...]
    cache_memory: tuple[MemoryRow, ...]
    budget_bytes: int
    """Device memory the plan keeps within."""
    disk_bytes: int
    """Free space the run needs in output_dir: checkpoints and final files."""
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()

    def child_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with what the training process needs; the user's own `OMP_*` values stay."""
        needed = {
            name: value
            for name, value in self.environment.items()
            if not (name.startswith("OMP_") and name in environ)
        }
        return {**environ, **needed}

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory over caching and training."""
        return max(sum(row.bytes for row in self.train_memory), sum(row.bytes for row in self.cache_memory))
