"""Every hardware decision of a run, made once by `resolve`, as data with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from trainer.ways.storages import Way, find


@dataclass(frozen=True)
class Decision:
    """One row of the plan's table, its cells in the order of its columns."""

    feature: str
    value: str
    source: str
    """`auto`, `profile NAME`, or where the user wrote it (file:line, variable, --set)."""
    reason: str


def on_off(value: bool) -> str:
    """Word for a switch in the plan's table."""
    return "on" if value else "off"


@dataclass(frozen=True)
class MemoryRow:
    """One predicted component of device or host memory, in bytes."""

    name: str
    bytes: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The run's decisions on this machine: typed fields for code, `decisions` for people."""

    profile: str
    device: str
    """`cuda` or `cpu`."""
    dtype: str
    """`bf16`, `fp16` or `fp32`: the run's type, and storage of the base unless `weights` says another."""
    weights: str
    """`bf16`, `fp16`, `fp32`, `int8`, `nf4` or `fp8`: storage of the base."""
    compute: str
    """`bf16`, `fp16`, `fp32` or `fp8`: type of the linears' products; `fp8` with frozen weights in fp8, or
    with trained ones in bf16."""
    weight_gradient: str
    """`fp8` or `bf16`: type that the gradients of weights trained in FP8 are multiplied in; else empty."""
    weight_copies: int
    """2: FP8 weights have a transposed copy for backward (faster); 1: they are transposed each time."""
    modulation: str
    """`int8`: how the linears of `Family.modulation` are stored beside FP8 weights; empty: as the base, or in
    `dtype`.
    """
    text_encoder_weights: str
    """`dtype`, or `int8` or `nf4`: storage of the text encoders' layers while captions are encoded."""
    compile: bool
    """Repeated blocks are compiled with torch.compile."""
    activation_budget: float
    """Share of a compiled block's activations that is kept; 1.0 without a limit."""
    cuda_graphs: bool
    """A micro-batch's forward and backward are replayed as one CUDA graph."""
    text_padding: bool
    """Captions are padded to a few lengths, and packed rows to one; attention leaves the padding out."""
    attention: str
    """`flash`, `cudnn`, `cudnn_strided`, `flash_attn_2`, `flash_attn_3`, `flash_attn_4`, `efficient`, `math`
    or `native`."""
    activation_checkpointing: bool
    """Blocks are recomputed whole in backward."""
    recomputed_blocks: int
    """Blocks that are recomputed, from the first on, where not all of them are; 0 for all, and for none."""
    swapped_blocks: int
    """Repeated blocks whose frozen weights wait in host memory and are copied to the device for each use."""
    sharded_blocks: int
    """Repeated blocks whose frozen weights lie with the GPUs of a group in turn, and are read from there."""
    shard_group: int
    """GPUs of such a group; 1 where each has the whole base."""
    in_rows: bool
    """Trained weights, their gradients and moments lie in rows with all ranks (FSDP2), which pass through the
    model together."""
    micro_batch_size: int
    """Samples of one forward pass: `train.train_batch_size`, or a divisor where that does not fit."""
    accumulation_steps: int
    """Micro-batches of one optimizer step; with `micro_batch_size` the configured effective batch."""
    ranks: int
    """Processes that train together, on all hosts; they share the micro-batches of a step."""
    devices: tuple[int, ...]
    """Places of this host's GPUs among the visible ones, by their ranks' order; empty on a CPU."""
    vae_tiling: bool
    tf32: bool
    pin_memory: bool
    keep_bytes: int
    """Host memory in which encoded samples that were read may stay."""
    loader: str
    """`safetensors`, `fastsafetensors`, or `auto`: decided for each file by where its bytes are;
    `fastsafetensors-cold`, `fastsafetensors-cached`: as `auto`, but by that for files in this state.
    """
    optimizer: str
    """`adamw_fused_fp32` (fp32 masters), `adamw_split_bf16` (fp32 masters in two halves, for full fine-tunes
    in bf16), `adamw_8bit` or `prodigy` (both with fp32 masters)."""
    environment: Mapping[str, str]
    """Variables that must exist before the training process imports torch; where the user wrote one, it has
    the user's value.
    """
    train_memory: tuple[MemoryRow, ...]
    cache_memory: tuple[MemoryRow, ...]
    host_memory: tuple[MemoryRow, ...]
    """Memory of the training process beside the device; empty on a CPU, whose memory is the device's."""
    step_milliseconds: float
    """Predicted time of `micro_batch_size` samples of usual shapes, forward and backward, with their share of
    the optimizer's step in a full fine-tune; 0.0 where the machine's rates are unknown.
    """
    peak_tflops: float
    """bf16 peak of one GPU by its maker's data sheet; 0.0 where it is not known, and on a CPU."""
    budget_bytes: int
    """Device memory the plan keeps within."""
    disk_bytes: int
    """Free space the run needs in output_dir: checkpoints and final files."""
    decisions: tuple[Decision, ...]
    warnings: tuple[str, ...] = ()
    rank_environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of each of several ranks, besides `environment`, with the user's values likewise."""
    unset: tuple[str, ...] = ()
    """Variables that the training process must not have: other spellings of those in `environment`."""
    hosts: int = 1
    """Machines of these processes, each with as many."""
    optimizer_milliseconds: float = 0.0
    """Predicted time of a full fine-tune's optimizer step; 0.0 of a LoRA's, and where rates are unknown."""

    @property
    def step_seconds(self) -> float | None:
        """Predicted time of an optimizer step; None where the machine's rates are unknown."""
        return self.step_milliseconds * self.accumulation_steps / self.ranks / 1e3 or None

    @property
    def ranks_here(self) -> int:
        """Processes on one host."""
        return self.ranks // self.hosts

    def child_environment(self, environ: Mapping[str, str]) -> dict[str, str]:
        """`environ` with what the training process needs; the user's own `OMP_*` values stay."""
        kept = {name: value for name, value in environ.items() if name not in self.unset}
        own = {name: value for name, value in kept.items() if name.startswith("OMP_")}
        return {**kept, **self.environment, **own}

    @property
    def first_device(self) -> str:
        """torch device of the first rank. Kernels are measured there for all: their GPUs are of one kind."""
        return f"cuda:{self.devices[0]}" if self.device == "cuda" else "cpu"

    @property
    def of_one_process(self) -> Plan:
        """The plan for a job that one process does alone, with a whole base."""
        return replace(
            self, ranks=1, hosts=1, devices=self.devices[:1], sharded_blocks=0, shard_group=1, in_rows=False
        )

    @property
    def way(self) -> Way:
        """Storage and product type of the base, found by `weights` to `modulation`."""
        return find(self.weights, self.compute, self.weight_copies, self.modulation)

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of device memory over caching and training."""
        return max(sum(row.bytes for row in self.train_memory), sum(row.bytes for row in self.cache_memory))
