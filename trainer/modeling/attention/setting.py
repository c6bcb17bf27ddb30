"""Make a model's attention layers use the plan's kernel, through diffusers or transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainer.modeling.attention.kernels import attention
from trainer.modeling.attention.key_padding import attend_without_padding
from trainer.ways.kernels import KERNELS, OWN_SLOT


def set_attention(model: Any, kernel: str) -> None:
    """Make every attention layer use the plan's kernel; language models read several samples in one row."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from trainer.modeling.attention.packed_rows import set_packed_attention

        set_packed_attention(model, kernel)
        return
    if KERNELS[kernel].backend == OWN_SLOT:
        from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

        # in the place of diffusers' cuDNN function, whose arguments it takes
        slot = AttentionBackendName(OWN_SLOT)
        _AttentionBackendRegistry._backends[slot] = functools.partial(_dispatched, kernel)
    model.set_attention_backend(KERNELS[kernel].backend)


def _dispatched(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: object | None = None,
) -> torch.Tensor:
    """Attention with diffusers' signature; every option that no family of ours uses is refused.

    The mask (B, 1, 1, key tokens) is True for keys that are no padding.
    """
    unused = (dropout_p == 0.0, not is_causal, scale is None, not enable_gqa)
    assert all(unused) and not return_lse and _parallel_config is None, (
        f"an option that {kernel} is not set up for"
    )
    if attn_mask is not None:
        assert attn_mask.dtype == torch.bool and attn_mask.shape[1:3] == (1, 1), "a mask of keys"
        return attend_without_padding(query, key, value, attn_mask[:, 0, 0], kernel)
    return attention(query, key, value, kernel)
