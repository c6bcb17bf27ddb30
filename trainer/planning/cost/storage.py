"""The decisions that memory and time depend on, and sizes that several of their rows need."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.shapes.geometry import Geometry, Linears, Role
from trainer.ways.storages import VALUE_BYTES, Way

# scales of one byte that share one in fp32
_OUTER_BLOCK = 256


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Decisions that memory depends on."""

    method: str
    device: str
    dtype: str
    way: Way
    """Storage and product type of the base."""
    checkpointing: bool
    tiling: bool
    previews: bool
    attention: str
    """The attention kernel: the activations that compiled blocks keep under a budget depend on it."""
    recomputed: int = 0
    """Blocks that are recomputed with `checkpointing`, from the first on; 0: all."""
    compile: bool = False
    activation_budget: float = 1.0
    text_encoders: str = ""
    """`int8` or `nf4`: storage of the text encoders' layers while captions are encoded; empty: `dtype`."""
    swapped: int = 0
    """Repeated blocks whose frozen weights wait in host memory."""
    optimizer: str = "adamw_fused_fp32"
    """The optimizer by the plan's name for it."""
    rounds: int = 1
    """Micro-batches that a process computes for an optimizer step."""
    weight_gradient: str = ""
    """Type that gradients of trained weights are multiplied in, where products are in FP8."""
    averaged: bool = False
    """A running mean of the trained weights is kept."""
    ranks: int = 1
    """Processes that exchange gradients."""
    hosts: int = 1
    """Machines that they are on."""
    sharded: int = 0
    """Repeated blocks whose frozen weights lie with the GPUs of a group in turn."""
    group: int = 1
    """GPUs of such a group."""

    @property
    def in_rows(self) -> bool:
        """True where several processes hold rows of the trained weights each (FSDP2)."""
        return self.method == "full" and self.ranks > 1

    @property
    def ranks_here(self) -> int:
        """Processes on one machine."""
        return self.ranks // self.hosts

    @property
    def parts_by_use(self) -> bool:
        """True where a pass copies of blocks that lie elsewhere only what it reads itself: nothing of the
        forward pass is repeated in backward.
        """
        return not self.checkpointing and self.activation_budget == 1.0

    @property
    def value_bytes(self) -> int:
        """Bytes of one value in the compute type."""
        return VALUE_BYTES[self.dtype]


def parameters(geometry: Geometry, role: Role) -> int:
    """Parameters of all components in one role."""
    return sum(component.parameters for component in geometry.components if component.role == role)


def linear_bytes(way: Way, linears: Linears, layers: int = 0) -> int:
    """Bytes of weights with their scales."""
    scales = linears.parameters // way.block if way.block else 0
    values = way.copies * (linears.parameters * way.bits // 8)
    outer = scales // _OUTER_BLOCK * 4
    return values + scales + outer + linears.rows * way.row_bytes + layers * way.layer_bytes


def counted(parameters: int) -> str:
    """A number of parameters in words."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit} parameters"
    return f"{parameters} parameters"
