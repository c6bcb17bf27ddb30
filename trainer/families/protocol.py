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

    sigma (B,) fp32 in (0, 1); noise and vae_noise (B, C, H, W) fp32, standard normal; weight (B,) fp32 loss
    weights.
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


@dataclass(frozen=True, kw_only=True)
class PreviewRequest:
    """How previews are drawn; sizes in pixels. `seed` is that of the first prompt, the next one has seed +
    1.
    """

    width: int
    height: int
    num_inference_steps: int
    guidance_scale: float
    seed: int


class Family(Protocol):
    """One model family. Stateless; constants, and functions of their arguments only.

    `Settings` and `Encoders` are each family's own types: what its draws and its encoding need.
    """

    name: str
    title: str
    licence: str
    cache_version: int
    """Part of every cache key: raise it when encoding changes."""
    pixel_multiple: int
    """Image sides are multiples of this."""
    defaults: Mapping[str, Mapping[str, Any]]
    """The family's layer of the configuration, above the schema and below the user's files."""
    lora_targets: Mapping[str, str]
    """Named presets of LoRA targets: a regular expression over whole module names."""
    high_precision: tuple[str, ...]
    """Regular expressions over whole module names that are never quantised."""
    blocks: tuple[str, ...]
    """Class names of the repeated blocks."""
    trained_component: str
    """Name of the component that trains: a folder of the base model."""
    encoder_components: Mapping[EntryKind, tuple[str, ...]]
    """Folders that must be loaded to write each kind of cache entry; written in this order."""
    support_components: tuple[str, ...]
    """Folders without weights that are needed besides: tokenizers, scheduler."""

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> tuple[ImageRecord, ...]:
        """All samples of the run, checked; raises DataError with every problem found."""

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """The encoders that write entries of one kind, on the device, frozen."""

    def encode_text(
        self, encoders: Any, caption: str, *, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """One text entry on the CPU, without a batch axis."""

    def encode_pixels(self, encoders: Any, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        """One latents entry on the CPU, without a batch axis, from pixels (3, H, W) fp32 in [-1, 1]."""

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Equal for samples that may share a batch."""

    def settings(self, source: ModelSource, config: RunConfig) -> Any:
        """What draws and loss depend on besides the batch."""

    def draw(self, settings: Any, positions: Sequence[int], latents: Header) -> Draw | None:
        """Randomness of one micro-batch from (seed, sample position) alone, on the CPU."""

    def model_class(self) -> Any:
        """Class of the trained component."""

    def predict(self, model: torch.nn.Module, batch: Batch, draw: Draw | None, settings: Any) -> torch.Tensor:
        """The model's output for one noised batch; the LoRA proof compares these."""

    def loss(self, model: torch.nn.Module, batch: Batch, draw: Draw | None, settings: Any) -> torch.Tensor:
        """One fp32 loss a sample: (B,)."""

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """A random batch with the shapes of a real one, from the trained component's config.json."""

    def preview(
        self,
        model: torch.nn.Module,
        source: ModelSource,
        encoders: Any,
        prompts: Sequence[Mapping[str, torch.Tensor]],
        request: PreviewRequest,
        on_step: Callable[[], None],
    ) -> list[Image]:
        """One image a prompt through the real pipeline; `on_step` runs after every denoising step and may
        raise.
        """

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write the adapter as the family's pipeline loads it; `state` is peft's, `config` the LoraConfig
        as a dict.
        """

    def load_adapter(self, model: torch.nn.Module, path: Path, *, adapter_name: str) -> None:
        """Load a saved adapter onto a model the way the family's pipeline does."""

    def comfyui_keys(self, module: str) -> str | None:
        """Prefix under which ComfyUI knows a module of the trained component; None where it does not."""

    def activations(
        self, config: Mapping[str, Any], shape: Shape, *, checkpointing: bool, linear_inputs: bool = False
    ) -> int:
        """Bytes saved for backward in one micro-batch with a frozen base and LoRA on attention.

        `linear_inputs`: the inputs of all linears are kept as well, as an int8 base, a LoRA on all linears
        and a full fine-tune do.
        """

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """The run's attention call, for the kernel probe."""
