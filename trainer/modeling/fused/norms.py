"""Root-mean-square norms of heads with frozen weights, forward and backward in one pass each.

A compiler fuses such a norm with what comes before and after it and then reads its rows several times: on
an H200 the norms and their gradients took a third of all pointwise time (docs/benchmarks.md).
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.normalization import RMSNorm

if torch.version.cuda is not None:
    from trainer.modeling.triton import head_norm as kernel

# wider rows are whole tokens, which compilers fuse well with what is beside them
_MOST_WIDTH = 256


def head_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """values / rms(values) * weight over the last axis, computed in fp32, in the values' type.

    values (batch, tokens, heads, width), the width a power of two; they alone have a gradient.
    """
    result: torch.Tensor = _HeadNorm.apply(values, weight, eps)
    return result


def fuse_head_norms(model: torch.nn.Module) -> int:
    """Let every frozen norm of narrow rows compute in one pass; returns their number."""
    count = 0
    for module in model.modules():
        fused = FUSED.get(type(module))
        if fused is None or not is_fusible(module):
            continue
        module.__class__ = fused
        count += 1
    return count


def is_fusible(module: Any) -> bool:
    if module.weight is None or module.weight.requires_grad or module.weight.ndim != 1:
        return False
    width = len(module.weight)
    return 16 <= width <= _MOST_WIDTH and width & (width - 1) == 0


class _HeadNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        # the kernels take any strides but the last
        values = values if values.stride(-1) == 1 else values.contiguous()
        ctx.save_for_backward(values, weight)
        ctx.eps = eps
        if values.device.type == "cpu":
            return (unit_of(values, eps)[0] * weight.float()).to(values.dtype)
        return kernel.head_norm(values, weight, None, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        values, weight = ctx.saved_tensors
        if values.device.type != "cpu":
            return kernel.head_norm(values, weight, gradient.contiguous(), ctx.eps), None, None
        return unit_gradient(gradient.float() * weight.float(), values, ctx.eps), None, None


def unit_of(values: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows divided by their rms, in fp32, and 1 / rms of each."""
    wide = values.float()
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide * inverse, inverse


def unit_gradient(gradient: torch.Tensor, values: torch.Tensor, eps: float) -> torch.Tensor:
    """The gradient of `values`, of their type, from the fp32 one of `unit_of`."""
    unit, inverse = unit_of(values, eps)
    mean = (gradient * unit).mean(-1, keepdim=True)
    return ((gradient - unit * mean) * inverse).to(values.dtype)


def torch_eps(eps: float | None) -> float:
    """A norm's eps; where it is None, torch's default: that of fp32, in which torch computes, whatever its
    documentation says.
    """
    return torch.finfo(torch.float32).eps if eps is None else eps


class _FusedTorch(torch.nn.RMSNorm):
    """Class that `fuse_head_norms` assigns to a module; it is never constructed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute torch's norm; of heads (batch, tokens, heads, width) in one pass."""
        return head_norm(x, self.weight, torch_eps(self.eps)) if x.ndim == 4 else super().forward(x)


class _FusedDiffusers(RMSNorm):
    """Class that `fuse_head_norms` assigns to a module; it is never constructed."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Compute diffusers' norm; of heads in one pass, without its rounding before the weight."""
        if hidden_states.ndim != 4 or self.bias is not None:
            return super().forward(hidden_states)
        assert self.weight is not None
        return head_norm(hidden_states, self.weight, self.eps)


FUSED: dict[type, type] = {torch.nn.RMSNorm: _FusedTorch, RMSNorm: _FusedDiffusers}
