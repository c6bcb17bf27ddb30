"""The plan's attention kernel, set through diffusers, in the memory layouts that make cuDNN safe.

diffusers hands cuDNN contiguous queries, keys and values, but the gradient of a permuted output arrives in
another layout than the output: on an H200 with torch 2.11 cuDNN's backward then died with an illegal memory
access. With the gradient laid out as the output it is right (docs/benchmarks.md), in either order of heads
and tokens: `cudnn` copies all tensors to (B, heads, tokens, width), `cudnn_strided` leaves them where they
are. Every function here compiles into one graph with its caller.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import flop_registry, register_flop_formula

SDPA_BACKENDS: dict[str, SDPBackend] = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "cudnn_strided": SDPBackend.CUDNN_ATTENTION,
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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kernel: str, *, causal: bool = False
) -> torch.Tensor:
    """Scaled dot-product attention by one named kernel; all tensors (B, tokens, heads, width).

    There may be fewer heads of keys and values than of queries. Raises RuntimeError when the kernel does not
    take the inputs.
    """
    with selected(kernel):
        return attend(query, key, value, kernel, causal=causal)


def selected(kernel: str) -> contextlib.AbstractContextManager[None]:
    """Context in which `attend` may be called with this kernel; enter it once for several calls."""
    if kernel in SDPA_BACKENDS:
        return sdpa_kernel(SDPA_BACKENDS[kernel])
    return contextlib.nullcontext()


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel: str,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """`attention` inside `selected(kernel)`."""
    groups = query.shape[2] // key.shape[2]
    strided = kernel == "cudnn_strided"
    if (kernel == "cudnn" or strided) and key.shape[1] == 1:
        # cuDNN takes no single key: all weight is on it, as in a caption of one token
        return value.repeat_interleave(groups, dim=2).expand(-1, query.shape[1], -1, -1)
    if kernel in _PACKAGES:
        assert dropout == 0.0, f"{kernel} is not given any dropout"
        return _PACKAGES[kernel](query, key, value, causal, scale)
    if kernel == "efficient" and groups > 1:  # the one kernel that wants a key for every query head
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
        groups = 1
    if strided:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if kernel == "cudnn":
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    output = scaled_dot_product_attention(
        query, key, value, is_causal=causal, scale=scale, dropout_p=dropout, enable_gqa=groups > 1
    )
    if kernel == "cudnn":
        output = ContiguousGradient.apply(output)
    output = output.transpose(1, 2)
    # cuDNN lays the output out as the query, and its backward wants the gradient laid out as the output
    return ContiguousGradient.apply(output) if strided else output


# flash-attn's packages: all tensors (B, tokens, heads, width), optional, imported when first called


def _flash_attn_2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    from flash_attn import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    output: torch.Tensor = flash_attn_func(query, key, value, causal=causal, softmax_scale=scale)
    return output


def _flash_attn_3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    from flash_attn_interface import flash_attn_func  # type: ignore[import-not-found, unused-ignore]

    output = flash_attn_func(query, key, value, causal=causal, softmax_scale=scale)
    # older releases return the logarithms of the sums too
    first: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return first


def _flash_attn_4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    output, _ = _flash_4(query, key, value, causal, query.shape[-1] ** -0.5 if scale is None else scale)
    return output


_PACKAGES: dict[str, Callable[..., torch.Tensor]] = {
    "flash_attn_2": _flash_attn_2,
    "flash_attn_3": _flash_attn_3,
    "flash_attn_4": _flash_attn_4,
}


# flash-attn 4 generates its kernels in Python, which no compiler traces through: custom operators hide that


@torch.library.custom_op("trainer::flash_attn_4", mutates_args=())
def _flash_4(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd  # type: ignore[import-not-found, unused-ignore]

    output, sums, *_ = _flash_attn_fwd(query, key, value, causal=causal, softmax_scale=scale, return_lse=True)
    return output.contiguous(), sums.contiguous()


@torch.library.custom_op("trainer::flash_attn_4_backward", mutates_args=())
def _flash_4_backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from flash_attn.cute.interface import _flash_attn_bwd  # type: ignore[import-not-found, unused-ignore]

    found = _flash_attn_bwd(
        query, key, value, output, gradient.contiguous(), sums, softmax_scale=scale, causal=causal
    )
    # the layouts that the compiler is told of below
    return found[0].contiguous(), found[1].contiguous(), found[2].contiguous()


@_flash_4.register_fake
def _(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, tokens, heads = query.shape[:3]
    sums = query.new_empty((batch, heads, tokens), dtype=torch.float32)
    return query.new_empty((batch, tokens, heads, value.shape[-1])), sums


@_flash_4_backward.register_fake
def _(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return *_flash_4_backward(gradient, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None


_flash_4.register_autograd(_differentiate, setup_context=_keep_for_backward)


@register_flop_formula(torch.ops.trainer.flash_attn_4)
def _operations(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """FLOPs of the forward pass: recomputation takes operators without FLOPs first where memory is short."""
    batch, tokens, heads, width = query
    return 2 * batch * heads * tokens * key[1] * (width + value[3])


def _grouped_operations(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> int:
    """FLOPs of torch's kernels, tensors (B, heads, tokens, width): each query head is its own product."""
    batch, heads, tokens, width = query.shape
    return 2 * batch * heads * tokens * key.shape[2] * (width + value.shape[3])


# torch 2.11 ends with an error where queries have more heads than keys
for _kernel in ("flash", "cudnn"):
    _packet = getattr(torch.ops.aten, f"_scaled_dot_product_{_kernel}_attention")
    flop_registry[_packet] = _grouped_operations
