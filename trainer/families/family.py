"""What a model family provides. Modules satisfy it structurally; nothing inherits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainer.families.values import (
    AttentionShape,
    Batch,
    Draw,
    Header,
    PreviewPrompt,
    PreviewRequest,
    Rows,
    Shape,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import Scan
    from trainer.modeling.base.source import ModelSource

EntryKind = Literal["text", "latents"]


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
    sample_kind: Literal["image", "conversation"]
    """What a data set holds."""
    control_counts: tuple[int, int]
    """Least and most control images of a sample; (0, 0) for text to image."""
    text_sees_controls: bool
    """Whether the text encoder is shown the control images: then captions are encoded once a sample."""
    max_sequence_length: int
    """Most text tokens that the family's model takes."""
    caption: str | None
    """Text tensor (L, D) that is as long as the caption, where `encode_text` does not pad; else None."""
    text_keys: tuple[str, ...]
    """Regular expressions over whole names of the attention layers that read its tokens, as keys; of two
    streams, before all others."""
    packed_by: str | None
    """Text tensor whose first axis counts against `data.max_sequence_length`, for families that pack several
    samples into one row; None where equal samples are batched."""
    comfyui: str | None
    """Where ComfyUI's key mapping is stated; None where ComfyUI does not take the family's LoRAs."""
    comfyui_swaps: tuple[str, ...]
    """Modules whose weights have their halves of rows, scale and shift, in the other order there."""
    defaults: Mapping[str, Mapping[str, Any]]
    """The family's layer of the configuration, above the schema and below the user's files."""
    lora_targets: Mapping[str, str]
    """Named presets of LoRA targets: a regular expression over whole module names."""
    high_precision: tuple[str, ...]
    """Regular expressions over whole names of modules that are kept as they are."""
    modulation: tuple[str, ...]
    """Those of them that int8 and nf4 bases quantise all the same, as others' 4-bit files do: they compute
    for a sample, not for each token, so that their size is all they cost.
    """
    blocks: tuple[str, ...]
    """Class names of the repeated blocks."""
    trained_component: str
    """Name of the component that trains: a folder of the base model, empty where the model is the folder."""
    encoder_components: Mapping[EntryKind, tuple[str, ...]]
    """Folders that must be loaded to write each kind of cache entry; written in this order. A family without
    `latents` has no images."""
    support_components: tuple[str, ...]
    """Folders without weights that are needed besides: tokenizers, scheduler."""

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
        """All samples of the run, checked; raises DataError with every problem found, or lists what was left
        out, as `data.on_bad_file` says."""

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """The encoders that write entries of one kind, on the device, frozen."""

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """One text entry on the CPU, without a batch axis.

        `controls` are RGB, empty unless `text_sees_controls`. `prompt`: of a preview, where that differs.
        """

    def caption_tokens(self, source: ModelSource) -> Callable[[str], int] | None:
        """Counts a caption's tokens as they count against `data.max_sequence_length`, by the tokenizer alone.

        None where nothing is cut.
        """

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """One latents entry on the CPU, without a batch axis.

        Pixels (3, H, W) fp32 in [-1, 1]; so are `controls`, each of its own size.
        """

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """Size that the family's pipeline gives a control image of this size, in pixels."""

    def vae_shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Widest channels of the VAE at full resolution, and the side of its tiles in pixels."""

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Equal for samples that may share a batch."""

    def collate(self, text: Rows, latents: Rows) -> Batch:
        """One batch on the CPU of samples of one key."""

    def settings(self, source: ModelSource, config: RunConfig) -> Any:
        """What draws and loss depend on besides the batch."""

    def draw(self, settings: Any, positions: Sequence[int], latents: Header) -> Draw | None:
        """Randomness of one micro-batch from (seed, sample position) alone, on the CPU."""

    def model_class(self, source: ModelSource) -> Any:
        """Class of the trained component."""

    def predict(self, model: torch.nn.Module, batch: Batch, draw: Draw | None, settings: Any) -> torch.Tensor:
        """The model's output for one noised batch; the LoRA proof compares these."""

    def loss(self, model: torch.nn.Module, batch: Batch, draw: Draw | None, settings: Any) -> torch.Tensor:
        """One fp32 loss a sample: (B,). Their sum over `Batch.weight` is the mean that is minimised."""

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """A random batch with the shapes of a real one, from the trained component's config.json."""

    def preview(
        self,
        model: torch.nn.Module,
        source: ModelSource,
        encoders: Any,
        prompts: Sequence[PreviewPrompt],
        request: PreviewRequest,
        on_step: Callable[[], None],
    ) -> list[Image] | list[str]:
        """One image or text a prompt through the real pipeline; `on_step` runs after every denoising step,
        or token, and may raise. `encoders` are those of `latents`, else of `text`.
        """

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write the adapter as the family's pipeline loads it; `state` is peft's, `config` the LoraConfig
        as a dict. Returns the file with the tensors; others may lie beside it.
        """

    def load_adapter(self, model: torch.nn.Module, path: Path, *, adapter_name: str) -> None:
        """Load a saved adapter onto a model the way the family's pipeline does."""

    def comfyui_keys(self, module: str) -> str | None:
        """Prefix under which ComfyUI knows a module of the trained component; None where it does not."""

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """The entry of trainer/planning/shapes/activations.json that holds for a base with this config."""

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """The run's attention call, for the kernel probe."""
