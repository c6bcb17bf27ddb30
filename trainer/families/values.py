"""Small values that families, the planner and the engine hand each other: batches, draws, shapes, prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

EntryKind = Literal["text", "latents"]
Learn = Literal["answers", "last_answer", "all"]
"""`data.learn`: the tokens of a conversation that the loss is on."""
"""Kinds of cache entries."""
Header = Mapping[str, tuple[int, ...]]
"""Shapes of one cache entry's tensors, by name."""
Rows = Sequence[Mapping[str, "torch.Tensor"]]
"""Cache entries of one kind, one a sample."""

TEXT_MASK = "text_mask"
"""Text tensor of a batch whose captions are padded, (B, text tokens): False for padding."""
ENDS = "ends"
"""Name in `Batch.text` of the ends of a packed row's samples; the tensor's size may differ by row."""
ON_HOST = ("lengths",)
"""Text tensors of a batch that stay on the CPU: reading them from the device would wait for it."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Cache entries of samples that are equal inside, or packed into one row."""

    latents: Mapping[str, torch.Tensor]
    text: Mapping[str, torch.Tensor]
    size: int
    """Samples."""
    weight: float
    """Divisor of the sum of `Family.loss`: samples, or the tokens that are learned from."""
    tokens: int = 0
    """Text tokens of the samples, without any padding, where speed is counted in them."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Randomness of one batch, made from (seed, sample index) alone, so resume needs no RNG state.

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
    controls: int = 0
    """Control images of a sample."""
    control_pixels: int = 0
    """Pixels of each; 0: as many as the target has."""


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One attention call of the run, as the kernel probe runs it."""

    batch_size: int
    heads: int
    head_width: int
    tokens: int
    key_heads: int = 0
    """Heads of keys and values where they are fewer than those of queries, else 0."""
    causal: bool = False
    """Every token reads itself and earlier tokens, as in a language model's rows."""
    samples: int = 1
    """Samples in a row, each of which reads itself only: causal rows of several."""
    reach: int = 0
    """Mean length of the sample that a token belongs to, where it is less than the row's; else 0."""


@dataclass(frozen=True, kw_only=True)
class PreviewPrompt:
    """One preview: its text entry, the pictures it edits, and its size in pixels."""

    text: Mapping[str, torch.Tensor]
    empty: Mapping[str, torch.Tensor] | None
    """Text entry of the empty caption with the same controls, for guidance; None where there is none."""
    controls: tuple[Image, ...]
    width: int
    height: int
    number: int
    """Its place among the run's prompts, which is added to the seed."""
