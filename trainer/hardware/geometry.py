"""Floor 2: the shapes that memory is computed from: parameters from real tensors, activations from the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Role = Literal["trained", "text_encoder", "vae"]


@dataclass(frozen=True, kw_only=True)
class ComponentGeometry:
    """One component of a base model: every tensor's name and shape."""

    name: str
    role: Role
    shapes: Mapping[str, tuple[int, ...]]
    source: str
    """Where the shapes came from: safetensors headers of a folder, or the committed table."""

    @property
    def parameters(self) -> int:
        """Number of elements over all tensors."""
        total = 0
        for shape in self.shapes.values():
            count = 1
            for size in shape:
                count *= size
            total += count
        return total


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What `resolve` needs to know of one run's model, all of it in numbers.

    Built by the caller (see `cli`), because floors below the families cannot ask them.
    """

    components: tuple[ComponentGeometry, ...]
    lora_parameters: int
    """Parameters that the adapter adds for the run's rank and targets; 0 for `method: full`."""
    quantized_parameters: int
    """Parameters of linear weights that an int8 base would store in one byte."""
    quantized_rows: int
    """Output rows of those weights: one scale each."""
    activation_bytes: int
    """Saved for backward in one micro-batch without activation checkpointing."""
    activation_bytes_checkpointed: int
    """The same with every repeated block recomputed, the largest block's own activations included."""
    text_bytes_peak: int = 0
    """Activations of the text encoders while caching, in bytes."""
    vae_bytes_peak: int = 0
    """Activations of the VAE while caching one image at full size, in bytes."""
    vae_bytes_peak_tiled: int = 0
    """The same with tiling."""
    attention_shape_class: str = ""
    """Key of the probe's verdicts: heads, head width and tokens of the run."""
