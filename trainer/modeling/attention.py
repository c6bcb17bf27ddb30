"""Floor 4: the plan's attention kernel, set through diffusers, with a layout that makes cuDNN safe.

diffusers hands cuDNN contiguous queries, keys and values, but the gradient of a permuted output arrives
permuted:
on an H200 with torch 2.11 cuDNN's backward then died with an illegal memory access. Making the output's
gradient
contiguous made it right (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS: dict[str, str] = {
    "flash": "_native_flash",
    "cudnn": "_native_cudnn",
    "efficient": "_native_efficient",
    "math": "_native_math",
    "native": "native",
}
"""The plan's names and diffusers' names of the same kernels."""

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


class ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is made contiguous."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str, *, contiguous: bool
) -> torch.Tensor:
    """Scaled dot-product attention by one named kernel; all tensors (B, tokens, heads, width).

    `contiguous` lays tensors and the output's gradient out as (B, heads, tokens, width) in memory. Raises
    RuntimeError when the kernel does not take the inputs.
    """
    if kernel == "cudnn" and key.shape[1] == 1:
        # cuDNN takes no single key: all weight is on it, as in a caption of one token
        return value.expand(-1, query.shape[1], -1, -1)
    query, key, value = (tensor.permute(0, 2, 1, 3) for tensor in (query, key, value))
    if contiguous:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    with sdpa_kernel(SDPA_BACKENDS[kernel]):
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    if contiguous:
        output = ContiguousGradient.apply(output)
    return output.permute(0, 2, 1, 3)


def set_attention(model: Any, kernel: str) -> None:
    """Make every attention layer use the plan's kernel; language models read several samples in one row."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from trainer.modeling.packed import set_packed_attention

        set_packed_attention(model, kernel)
        return
    if kernel == "cudnn":
        _make_cudnn_safe()
    model.set_attention_backend(BACKENDS[kernel])


def _make_cudnn_safe() -> None:
    """Replace diffusers' cuDNN function by one that differs in the output gradient's layout only."""
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_CUDNN] = _safe_cudnn


def _safe_cudnn(
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
    """cuDNN attention with diffusers' signature; every option that no family of ours uses is refused."""
    unused = (
        attn_mask is None,
        dropout_p == 0.0,
        not is_causal,
        scale is None,
        not enable_gqa,
        not return_lse,
    )
    assert all(unused) and _parallel_config is None, (
        "an option that the safe cuDNN attention does not implement"
    )
    return attention(query, key, value, "cudnn", contiguous=True)
