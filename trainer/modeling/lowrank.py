"""Floor 4: a layer's output plus a product of low rank, read and written once."""

from __future__ import annotations

from typing import Any

import torch

if torch.version.cuda is not None:
    from trainer.modeling import kernels


def add_low_rank(whole: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """whole (rows, columns) + hidden (rows, rank) @ up (columns, rank).T, all of one type.

    The sum is made in fp32 before it is rounded. Products of a higher rank than the kernel holds, and other
    types than bf16, are left to torch.
    """
    result: torch.Tensor = _AddLowRank.apply(whole, hidden, up)
    return result


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, up)
        types = {whole.dtype, hidden.dtype, up.dtype}
        if whole.device.type == "cpu" or types != {torch.bfloat16} or up.shape[1] > kernels.MOST_RANK:
            return whole + hidden @ up.t()
        # none of these copies what a linear layer gives
        return kernels.add_low_rank(whole.contiguous(), hidden.contiguous(), up.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden, up = ctx.saved_tensors
        return gradient, gradient @ up, gradient.t() @ hidden
