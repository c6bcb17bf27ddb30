"""Attention that leaves padding out exactly, at the speed of a kernel that takes no mask.

A padded key is a vector of zeros, with a value of zeros: every query scores it with 0, so that P of them add
P to the sum of the softmax and nothing to its result. The kernel returns the logarithm of that sum for each
query, and the share of real keys in it, 1 - P exp(-lse), is divided out of the result; backward is given the
true result and the true logarithm, and zero keys add nothing to any gradient. The mean of the real keys is
taken off all of them first, which changes no softmax: the real keys' sum is then at least their number (by
Jensen's inequality), so that the share never falls below real / (real + padded) keys, and the division is
exact to a few roundings whatever the scores are. A mask in cuDNN costs half an attention call more
(docs/adr/0010-captions-as-they-are.md).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from trainer.ways.kernels import KERNELS

_aten = torch.ops.aten


def attend_without_padding(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, kernel: str
) -> torch.Tensor:
    """Attention of each query over the keys where `mask` (B, key tokens) is True, by one named kernel.

    Tensors (B, tokens, heads, width), as many heads of keys as of queries; so is the result. Each sample has
    a real key. The gradient of a padded key and of its value is zero.
    """
    row = KERNELS[kernel]
    if row.takes_mask:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        return scaled_dot_product_attention(query, key, value, attn_mask=mask[:, None, None]).transpose(1, 2)
    assert not row.exact_only, f"{kernel} is given captions without padding"
    # outside the function, so that a compiler can merge these passes with their neighbours
    real = mask[:, :, None, None]
    number = mask.sum(dim=1, dtype=torch.float32)
    mean = torch.where(real, key, 0).sum(dim=1, keepdim=True, dtype=torch.float32) / number.view(-1, 1, 1, 1)
    # a constant of the softmax: its gradient is zero
    centred = torch.where(real, key - mean.detach().to(key.dtype), 0)
    padded = mask.shape[1] - number
    output: torch.Tensor = _ZeroKeys.apply(query, centred, torch.where(real, value, 0), padded, kernel)
    return output


class _ZeroKeys(torch.autograd.Function):
    """Attention over keys of which `padded` (B,) fp32 are zeros, with values of zeros."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        padded: torch.Tensor,
        kernel: str,
    ) -> torch.Tensor:
        heads = (_laid_out(query, kernel), _laid_out(key, kernel), _laid_out(value, kernel))
        output, sums, *drawn = _forward(*heads, kernel)
        # (B, heads, query tokens)
        share = 1.0 - padded.view(-1, 1, 1) * torch.exp(-sums)
        result = (output / share.transpose(1, 2)[..., None]).to(query.dtype)
        ctx.save_for_backward(*heads, result, sums + torch.log(share), *drawn)
        ctx.kernel = kernel
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, output, sums, *drawn = ctx.saved_tensors
        found = _backward(_laid_out(gradient, ctx.kernel), query, key, value, output, sums, drawn, ctx.kernel)
        return *found, None, None


def _laid_out(tensor: torch.Tensor, kernel: str) -> torch.Tensor:
    """(B, tokens, heads, width) in the memory layout that the kernel is called with."""
    if kernel == "cudnn":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    return tensor.contiguous()


def _forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str) -> list[torch.Tensor]:
    """Result (B, tokens, heads, width), logarithms of sums (B, heads, tokens), and what backward reads."""
    if kernel == "flash_attn_4":
        return list(torch.ops.trainer.flash_attn_4(query, key, value, False, query.shape[-1] ** -0.5))
    heads = [one.transpose(1, 2) for one in (query, key, value)]
    if query.device.type == "cpu":
        output, sums = _aten._scaled_dot_product_flash_attention_for_cpu(*heads)
        return [output.transpose(1, 2), sums]
    if kernel == "flash":
        found = _aten._scaled_dot_product_flash_attention(*heads)
    else:
        found = _aten._scaled_dot_product_cudnn_attention(*heads, None, True)
    return [found[0].transpose(1, 2), found[1].flatten(2), found[6], found[7]]


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    drawn: list[torch.Tensor],
    kernel: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value, (B, tokens, heads, width)."""
    if kernel == "flash_attn_4":
        kept = (query, key, value, output, sums)
        found = torch.ops.trainer.flash_attn_4_backward(gradient, *kept, False, query.shape[-1] ** -0.5)
        return found[0], found[1], found[2]
    tensors = [one.transpose(1, 2) for one in (gradient, query, key, value, output)]
    if query.device.type == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, sums, 0.0, False)
    elif kernel == "flash":
        lengths = (query.shape[1], key.shape[1])
        found = _aten._scaled_dot_product_flash_attention_backward(
            *tensors, sums, None, None, *lengths, 0.0, False, *drawn
        )
    else:
        found = _cudnn_backward(*tensors, sums, *drawn)
    return found[0].transpose(1, 2), found[1].transpose(1, 2), found[2].transpose(1, 2)


# a compiler gives the sums' last axis, which is one long, any stride; cuDNN refuses all but 1


@torch.library.custom_op("trainer::cudnn_attention_backward", mutates_args=())
def _cudnn_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    seed: torch.Tensor,
    offset: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    lengths = (query.shape[2], key.shape[2])
    found = _aten._scaled_dot_product_cudnn_attention_backward(
        *(gradient, query, key, value, output, sums.contiguous()[..., None], seed, offset),
        *(None, None, None, *lengths, 0.0, False),
    )
    # the layouts that the compiler is told of below
    return _as(found[0], query), _as(found[1], key), _as(found[2], value)


def _as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The tensor laid out as another of its size."""
    return tensor if tensor.stride() == other.stride() else torch.empty_like(other).copy_(tensor)


@_cudnn_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
