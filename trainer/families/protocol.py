"""Floor 5: what a model family provides. Modules satisfy it structurally; nothing inherits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import ImageRecord
    from trainer.modeling.source import ModelSource

EntryKind = Literal["text", "latents"]
Header = Mapping[str, tuple[int, ...]]
"""Shapes of one cache entry's tensors, by name."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Stacked cache entries of samples that are equal inside: same shapes, no padding mask anywhere."""

    latents: Mapping[str, torch.Tensor]
    text: Mapping[str, torch.Tensor]
    size: int


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Randomness of one batch, made from (seed, sample index) alone, so resume needs no generator state.

    sigma (B,) fp32 in (0, 1); noise and vae_noise (B, C, H, W) fp32, standard normal; weight (B,) fp32 loss weights.
    """

    sigma: torch.Tensor
    noise: torch.Tensor
    vae_noise: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of one micro-batch for the planner."""

    batch_size: int
    width: int
    height: int
    text_tokens: int
    bytes_per_value: int


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What the kernel probe runs: one attention call of the run."""

    batch_size: int
    heads: int
    head_width: int
    tokens: int


class Family(Protocol):
    """One model family. Stateless; constants and functions of their arguments only."""

    name: str
    title: str
    licence: str
    cache_version: int
    pixel_multiple: int
    """Image sides are multiples of this."""
    defaults: Mapping[str, Mapping[str, Any]]
    """The family's layer of the configuration, above the schema and below the user's files."""
    lora_targets: Mapping[str, str]
    """Named presets of LoRA targets: a regular expression over module names."""
    high_precision: tuple[str, ...]
    """Regular expressions over module names that are never quantised."""
    blocks: tuple[str, ...]
    """Class names of the repeated blocks."""
    trained_component: str
    """Name of the component that trains (a folder of the base model)."""
    encoder_components: Mapping[EntryKind, tuple[str, ...]]
    """Components that must be loaded to write each kind of cache entry, in the order in which they are loaded."""

    def scan(self, config: RunConfig) -> tuple[ImageRecord, ...]: ...

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any: ...

    def encode_text(self, encoders: Any, caption: str, *, max_sequence_length: int) -> dict[str, torch.Tensor]: ...

    def encode_pixels(self, encoders: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]: ...

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]: ...

    def noise_shape(self, latents: Header) -> tuple[int, ...]: ...

    def loss(
        self, model: torch.nn.Module, batch: Batch, draw: Draw, *, guidance_scale: float
    ) -> torch.Tensor: ...

    def preview(
        self,
        model: torch.nn.Module,
        source: ModelSource,
        vae: Any,
        prompts: Sequence[Mapping[str, torch.Tensor]],
        *,
        width: int,
        height: int,
        num_inference_steps: int,
        guidance_scale: float,
        seed: int,
        on_step: Callable[[], None],
    ) -> list[Image]: ...

    def save_adapter(self, model: torch.nn.Module, path: Path, *, metadata: Mapping[str, str]) -> None: ...

    def load_adapter(self, model: torch.nn.Module, path: Path, *, adapter_name: str) -> None: ...

    def activations(self, config: Mapping[str, Any], shape: Shape, *, checkpointing: bool) -> int: ...

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape: ...
