"""flash-attn 4 over a row of several samples, whose ends it reads on the device, as custom operators.

The package generates its kernels in Python, which no compiler traces through. Samples without tokens, which a
padded row has, are no work of the kernels' scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


@torch.library.custom_op("trainer::flash_attn_4_rows", mutates_args=())
def attend_by_ends(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention inside each sample: (tokens, heads, width), and the logarithms of the sums, fp32
    (heads, tokens). Query (tokens, heads, width), key and value (tokens, key heads, width).
    """
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found, unused-ignore]

    output, sums, *_ = _flash_attn_fwd(
        query,
        key,
        value,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=len(query),
        max_seqlen_k=len(query),
        softmax_scale=scale,
        causal=True,
        return_lse=True,
    )
    return output.contiguous(), sums.contiguous()


@torch.library.custom_op("trainer::flash_attn_4_rows_backward", mutates_args=())
def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found, unused-ignore]

    found = _flash_attn_bwd(
        query,
        key,
        value,
        output,
        gradient.contiguous(),
        sums,
        softmax_scale=scale,
        causal=True,
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=len(query),
        max_seqlen_k=len(query),
    )
    # the layouts that the compiler is told of below
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@attend_by_ends.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, heads = query.shape[:2]
    sums = query.new_empty((heads, tokens), dtype=torch.float32)
    return query.new_empty((tokens, heads, value.shape[-1])), sums


@_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_backward(gradient, *ctx.saved_tensors, ctx.scale), None, None


attend_by_ends.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.trainer.flash_attn_4_rows)
def _operations(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the forward pass of the row as one sample: a compiler does not know its samples."""
    tokens, heads, width = query
    return 2 * heads * tokens * key[0] * (width + value[2])
