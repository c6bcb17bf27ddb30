"""One frozen value of constants and functions for each model family. A variant replaces some of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainer.families import diffusion, draws
from trainer.families.losses import velocity_loss
from trainer.families.values import (
    AttentionShape,
    Batch,
    Draw,
    EntryKind,
    Header,
    Learn,
    PreviewPrompt,
    Rows,
    Shape,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import DataSet, RunConfig, ValidationSection
    from trainer.data.records import Scan
    from trainer.modeling.base.source import ModelSource


class LoadEncoders(Protocol):
    """Load the encoders that write entries of one kind, on the device, frozen."""

    def __call__(
        self, kind: EntryKind, source: ModelSource, /, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any: ...


class EncodeText(Protocol):
    """Write one text entry on the CPU, without a batch axis.

    `controls` are RGB, empty unless `text_sees_controls`. `prompt`: of a preview, where that differs.
    """

    def __call__(
        self,
        encoders: Any,
        text: str,
        controls: Sequence[Image],
        /,
        *,
        prompt: bool,
        max_sequence_length: int,
    ) -> dict[str, torch.Tensor]: ...


class EncodeConversation(Protocol):
    """Write the text entry of a conversation (JSON) on the CPU, without a batch axis."""

    def __call__(
        self, encoders: Any, text: str, /, *, max_sequence_length: int, learn: Learn
    ) -> dict[str, torch.Tensor]: ...


def no_pixels(*arguments: Any) -> Any:
    """Stand in for a function that is never called, as the family has no pixels or takes no controls."""
    raise AssertionError("the family has no pixels, or no controls")


def no_window(config: Mapping[str, Any]) -> int | None:
    """`Family.window` of models whose tokens attend to all before them."""
    return None


def no_tokens(folder: Path | None) -> int:
    """`Family.control_tokens` of families whose text encoder sees no control images."""
    return 0


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """One model family. Its functions depend on their arguments only. Defaults are those of diffusion.

    Encoders and settings are each family's own types: `encode_*`, `draw` and `predict` read what
    `load_encoders` and `settings` made.
    """

    name: str
    title: str
    licence: str
    cache_version: int = 1
    """Part of every cache key: raise it when encoding changes."""
    pixel_multiple: int
    """Image sides are multiples of this."""
    most_side: int | None = None
    """Pixels that the model has positions for along a side; None where it computes them for any."""
    sample_kind: Literal["image", "conversation"] = "image"
    """Kind of a data set's samples."""
    control_counts: tuple[int, int] = (0, 0)
    """Least and most control images of a sample; (0, 0) for text to image."""
    text_sees_controls: bool = False
    """Whether the text encoder sees the control images: then captions are encoded once per sample."""
    control_tokens: Callable[[Path | None], int] = no_tokens
    """Text tokens that each of them becomes, by the base in this folder; None: the family's own base."""
    takes_negative: bool = False
    """Whether previews are guided away from the empty caption, which a negative prompt may replace."""
    max_sequence_length: int
    """Most text tokens that the family's model takes."""
    caption: str | None = None
    """Text tensor (L, D) that is as long as the caption, where `encode_text` does not pad; else None."""
    text_keys: tuple[str, ...] = ()
    """Regular expressions over whole names of the attention layers that read the caption's tokens as keys; of
    two streams, before all others."""
    packed_by: str | None = None
    """Text tensor whose first axis counts against `data.max_sequence_length`, for families that pack several
    samples into one row; None where equal samples are batched."""
    comfyui: str | None = None
    """Source of ComfyUI's key mapping; None where ComfyUI does not take the family's LoRAs."""
    comfyui_swaps: tuple[str, ...] = ()
    """Modules whose weights have their halves of rows, scale and shift, in the other order there."""
    defaults: Mapping[str, Mapping[str, Any]]
    """The family's layer of the configuration, above the schema and below the user's files."""
    lora_targets: Mapping[str, str]
    """Named presets of LoRA targets: a regular expression over whole module names."""
    high_precision: tuple[str, ...]
    """Regular expressions over whole names of modules that are kept as they are."""
    modulation: tuple[str, ...] = ()
    """Modules of `high_precision` that int8 and nf4 bases quantise all the same, as others' 4-bit files do:
    they compute for a sample, not for each token, so that their size is all they cost."""
    blocks: tuple[str, ...]
    """Class names of the repeated blocks."""
    model: str
    """Class of the trained component: "library.Class"."""
    trained_component: str = "transformer"
    """Name of the component that trains: a folder of the base model, empty where the model is the folder."""
    encoder_components: Mapping[EntryKind, tuple[str, ...]]
    """Folders that must be loaded to write each kind of cache entry; written in this order. A family without
    `latents` has no images."""
    support_components: tuple[str, ...] = ()
    """Folders without weights that are needed besides: tokenizers, scheduler."""

    load_encoders: LoadEncoders
    encode_text: EncodeText
    caption_tokens: Callable[[ModelSource], Callable[[str], int] | None]
    """Make a counter of a caption's tokens as they count against `data.max_sequence_length`, by the tokenizer
    alone; None where nothing is cut."""
    encode_conversation: EncodeConversation | None = None
    """The same as `encode_text` for samples that are conversations, of which `learn` says what is learned."""
    conversation_tokens: Callable[[ModelSource], Callable[[str], int]] | None = None
    """Make a counter of a conversation's tokens: those that are too long are shortened before, or refused."""
    encode_pixels: Callable[[Any, torch.Tensor, Sequence[torch.Tensor]], dict[str, torch.Tensor]] = no_pixels
    """Write one latents entry on the CPU, without a batch axis, by encoders, pixels (3, H, W) fp32 in [-1, 1]
    and controls, the same but each of its own size."""
    control_size: Callable[[int, int], tuple[int, int]] = no_pixels
    """Size that the family's pipeline gives a control image of this width and height, in pixels."""
    vae_shape: Callable[[Mapping[str, Any]], tuple[int, int]] = diffusion.vae_shape
    """Widest channels of the VAE with this config at full resolution, and the side of its tiles in pixels."""
    batch_key: Callable[[Header, Header], tuple[Any, ...]] = diffusion.batch_key
    """Equal for samples that may share a batch, by the shapes of their latents and their text."""
    collate: Callable[[Rows, Rows], Batch] = diffusion.collate
    """One batch on the CPU of the text and latents entries of samples of one key."""
    pad_row: Callable[[Batch, int], Batch] | None = None
    """Pad a packed row to so many tokens, which change nothing; of families with `packed_by`."""
    settings: Callable[[ModelSource, RunConfig], Any] = draws.settings
    """Settings of a run that draws and predictions depend on."""
    draw: Callable[[Any, Sequence[int], Header], Draw | None] = draws.draw
    """Randomness of one micro-batch from settings, sample positions and latents' shapes alone, on the CPU."""
    predict: Callable[[Any, Batch, Any, Any], torch.Tensor]
    """The model's output for a batch noised by a draw, with settings; the LoRA proof compares these."""
    own_loss: Callable[[Any, Batch], torch.Tensor] | None = None
    """The loss of a model and a batch where it is not that of the velocity that `predict` gives."""
    own_scores: Callable[[Any, Batch], tuple[torch.Tensor, torch.Tensor]] | None = None
    """`own_loss` and how many of each sample's learned tokens are the most likely ones, (B,) each, without
    gradients; of families that learn tokens."""
    synthetic_batch: Callable[[Mapping[str, Any], Shape, int], Batch]
    """A random batch with the shapes of a real one, from the trained component's config.json and a seed."""
    preview: Callable[
        [Any, ModelSource, Any, Sequence[PreviewPrompt], ValidationSection, Callable[[], None]],
        list[Image] | list[str],
    ]
    """One image or text a prompt through the real pipeline: of a model, its source, encoders of `latents`,
    else of `text`, prompts and their settings, to whose seed a prompt's number is added. The last argument
    runs after every denoising step, or token, and may raise."""
    save_adapter: Callable[[Mapping[str, torch.Tensor], Mapping[str, Any], Path, str], Path]
    """Write peft's state with its LoraConfig as a dict into a folder as the family's pipeline loads it, under
    this file name. Returns the file with the tensors; others may lie beside it."""
    load_adapter: Callable[[Any, Path], None] = diffusion.load_adapter
    """Load a saved adapter onto a model the way the family's pipeline does, under the name `lora.ADAPTER`."""
    comfyui_keys: Callable[[str], str | None]
    """Prefix under which ComfyUI knows a module of the trained component; None where it does not."""
    counted_as: Callable[[Mapping[str, Any]], str]
    """The entry of trainer/planning/shapes/activations.json that holds for a base with this config."""
    window: Callable[[Mapping[str, Any]], int | None] = no_window
    """Tokens that a token of a base with this config attends to, itself among them; None for all before it.
    Rows are computed without a window: a base whose window is shorter than a conversation is refused."""
    attention_shape: Callable[[Mapping[str, Any], Shape], AttentionShape]
    """The run's attention call, for the kernel probe, by the trained component's config."""

    def scan(
        self,
        config: RunConfig,
        progress: Callable[[int, int], None] | None,
        beside: Sequence[DataSet] = (),
    ) -> Scan:
        """All samples of the run's sets, checked, without folders of sets in `beside`; raises DataError with
        every problem found, or lists what was left out, as `data.on_bad_file` says."""
        from trainer.data import chat
        from trainer.data.sets.scan import scan_images

        if self.sample_kind == "conversation":
            return chat.scan(config, progress)
        data = config.data
        return scan_images(
            data.sets,
            beside=beside,
            resolution=data.resolution,
            multiple=self.pixel_multiple,
            controls=self.control_counts,
            trigger_word=data.trigger_word,
            on_bad_file=data.on_bad_file,
            progress=progress,
        )

    def model_class(self, source: ModelSource) -> Any:
        """Class of the trained component of this base."""
        library, _, name = self.model.rpartition(".")
        return getattr(importlib.import_module(library), name)

    def loss(self, model: Any, batch: Batch, draw: Draw | None, settings: Any) -> torch.Tensor:
        """One fp32 loss a sample: (B,). Their sum over `Batch.weight` is the mean that is minimised."""
        if self.own_loss is not None:
            return self.own_loss(model, batch)
        assert draw is not None
        prediction = self.predict(model, batch, draw, settings)
        return velocity_loss(prediction, draws.sample_latents(batch, draw), batch, draw)
