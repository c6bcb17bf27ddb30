"""Captions of different lengths, padded to a few, read as if they were not padded.

Compiled blocks, CUDA graphs and attention plans depend on shapes, and would be made anew for each caption's
length. Padded tokens pass through every layer of the text's stream, each for itself; only attention mixes
tokens, and there the layers named by `Family.text_keys` leave them out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention import AttentionModuleMixin

from trainer.modeling.fused.rotary import FusedProcessor, set_processor


class _TextKeys(FusedProcessor):
    """Attention of one stream over itself or over the caption's, with heads normed in fp32."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        rotary_emb: torch.Tensor | None = None,
        sparse_params: object | None = None,
    ) -> torch.Tensor:
        """Compute diffusers' processor, without padded text keys."""
        assert sparse_params is None, "sparse attention is for videos"
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (
            layer(tokens).unflatten(-1, (attn.num_heads, -1))
            for layer, tokens in ((attn.to_query, hidden_states), (attn.to_key, read), (attn.to_value, read))
        )
        query = attn.query_norm(query.float()).type_as(query)
        key = attn.key_norm(key.float()).type_as(key)
        if rotary_emb is not None:
            query, key = _rotated(query, rotary_emb), _rotated(key, rotary_emb)
        mask = None if self.text_mask is None else self.text_mask[:, None, None]
        output: torch.Tensor = attn.out_layer(self.attend(query, key, value, mask))
        return output


def _rotated(heads: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Heads (B, tokens, heads, width) times rope's matrices (..., width / 2, 2, 2), rounded to bf16 as in
    diffusers' own processor.
    """
    pairs = heads.float().unflatten(-1, (-1, 1, 2))
    return (rope * pairs).sum(dim=-1).flatten(-2).to(torch.bfloat16).type_as(heads)


_FLOAT_NORMS = {"to_query", "to_key", "to_value", "query_norm", "key_norm", "out_layer"}


def text_readers(model: torch.nn.Module, layers: Sequence[str]) -> tuple[FusedProcessor, ...]:
    """Processors of the attention layers whose whole names match, made able to leave padding out.

    Layers with two streams have been fused before (`rotary.fuse_rotary`).
    """
    readers = []
    for name, module in model.named_modules():
        if not any(re.fullmatch(layer, name) for layer in layers):
            continue
        below = {child for child, _ in module.named_children()}
        attention: Any = module
        if isinstance(module, AttentionModuleMixin) and below == _FLOAT_NORMS:
            set_processor(attention, _TextKeys())
        assert isinstance(attention.processor, FusedProcessor), f"{name} cannot leave padding out"
        readers.append(attention.processor)
    return tuple(readers)
