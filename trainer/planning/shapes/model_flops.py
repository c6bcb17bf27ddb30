"""FLOP of the trained component for samples as they are: model TFLOP/s and MFU are computed from them.

Counted are two for each multiply-add of the repeated blocks' linear layers, of attention, where it is causal
half of it, and of a language model's head; nothing for embedders, modulation, norms, an adapter, or what is
computed again. A backward pass counts once where weights are frozen, and twice where they are trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.planning.shapes.adapters import TEXT_SIDE
from trainer.planning.shapes.geometry import ComponentGeometry, linear_blocks

_PASSES = {"lora": 2.0, "full": 3.0}
"""Products of a layer in forward and backward."""
_ACROSS = re.compile(r"cross_attention\.to_(key|value)$")


@dataclass(frozen=True, kw_only=True)
class ModelFlops:
    """FLOP of training on one sample, by its size."""

    family: Family
    method: str
    model_config: Mapping[str, Any]
    blocks: tuple[tuple[int, int, int], ...]
    """Of each repeated block, as `geometry.linear_blocks`."""
    across: tuple[int, ...]
    """Parameters of each linear among those of the image's blocks that reads the caption."""

    def of(
        self,
        *,
        tokens: int,
        width: int = 0,
        height: int = 0,
        controls: int = 0,
        control_pixels: int = 0,
    ) -> float:
        """FLOP, forward and backward, of a conversation of so many tokens, or of a picture (in pixels) and a
        caption of so many; each of its controls has `control_pixels`, or as many as it.
        """
        shape = Shape(
            batch_size=1,
            width=width,
            height=height,
            text_tokens=tokens,
            bytes_per_value=2,
            controls=controls,
            control_pixels=control_pixels,
        )
        attention = self.family.attention_shape(self.model_config, shape)
        linear, calls = linear_flops(self.blocks, every=attention.tokens, text=tokens)
        across = attention.heads * attention.head_width
        products = 4.0 * across * attention.tokens**2 * calls
        # an attention call has two of these linears, for keys and for values
        products += 2.0 * across * attention.tokens * tokens * len(self.across)
        linear -= 2.0 * (attention.tokens - tokens) * sum(self.across)
        if attention.causal:
            products /= 2
            linear += 2.0 * tokens * self.model_config["vocab_size"] * self.model_config["hidden_size"]
        return _PASSES[self.method] * (linear + products)


def model_flops(
    family: Family, method: str, model_config: Mapping[str, Any], component: ComponentGeometry
) -> ModelFlops:
    """The FLOP of a run's samples; `component` is the trained one."""
    blocks = linear_blocks(component, family.high_precision, TEXT_SIDE)
    across = [math.prod(size) for name, size in component.linears.items() if _ACROSS.search(name)]
    return ModelFlops(
        family=family, method=method, model_config=model_config, blocks=blocks, across=tuple(across)
    )


def linear_flops(blocks: tuple[tuple[int, int, int], ...], *, every: int, text: int) -> tuple[float, int]:
    """(FLOP of the blocks' linear layers in one forward pass over so many tokens, of which so many are text;
    calls of attention).
    """
    flops = 0.0
    for textual, others, _ in blocks:
        flops += 2.0 * text * textual
        flops += 2.0 * (every - text if textual else every) * others
    # a block of text alone has no attention of its own
    return flops, sum(1 for _, others, _ in blocks if others)
