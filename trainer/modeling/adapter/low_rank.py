"""A layer's output plus a product of low rank, read and written once."""

from __future__ import annotations

from typing import Any

import torch

if torch.version.cuda is not None:
    from trainer.modeling.triton import low_rank as kernel


def add_low_rank(whole: torch.Tensor, hidden: torch.Tensor, *ups: torch.Tensor) -> torch.Tensor:
    """whole (..., columns) + hidden (..., rank) @ up (columns, rank).T, all of one type.

    Of several `ups` the first has the first columns of `whole` and the first of `hidden`, and so on. The sum
    is made in fp32 before it is rounded. Products of a higher rank than the kernel holds, and other types
    than bf16, are left to torch.
    """
    result: torch.Tensor = _AddLowRank.apply(whole.flatten(0, -2), hidden.flatten(0, -2), *ups)
    return result.view(whole.shape)


class _AddLowRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, hidden: torch.Tensor, *ups: torch.Tensor) -> torch.Tensor:
        up = ups[0] if len(ups) == 1 else side_by_side(ups)
        ctx.save_for_backward(hidden, up)
        ctx.shapes = [tuple(one.shape) for one in ups]
        types = {whole.dtype, hidden.dtype, up.dtype}
        if whole.device.type == "cpu" or types != {torch.bfloat16} or up.shape[1] > kernel.MOST_RANK:
            return whole + hidden @ up.t()
        # none of these copies what a linear layer gives
        return kernel.add_low_rank(whole.contiguous(), hidden.contiguous(), up.contiguous())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, up = ctx.saved_tensors
        return gradient, gradient @ up, *of_ups(gradient, hidden, ctx.shapes)


def side_by_side(ups: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """All `ups` in one matrix, each in its own rows and columns, zeros elsewhere: one product serves all."""
    total, start, rows = sum(up.shape[1] for up in ups), 0, []
    for up in ups:
        rows.append(torch.nn.functional.pad(up, (start, total - start - up.shape[1])))
        start += up.shape[1]
    return torch.cat(rows)


def of_ups(
    gradient: torch.Tensor, hidden: torch.Tensor, shapes: list[tuple[int, ...]]
) -> tuple[torch.Tensor, ...]:
    """The gradient of each `up`, from its columns of `gradient` and its columns of `hidden`."""
    if len(set(shapes)) == 1 and len(shapes) > 1:
        columns, rank = shapes[0]
        left = gradient.reshape(-1, len(shapes), columns).permute(1, 2, 0)
        # one product, whose parts are views: they need no kernels of their own
        return torch.bmm(left, hidden.view(-1, len(shapes), rank).transpose(0, 1)).unbind(0)
    column, start, found = 0, 0, []
    for columns, rank in shapes:
        part = gradient[:, column : column + columns]
        found.append(part.t() @ hidden[:, start : start + rank])
        column, start = column + columns, start + rank
    return tuple(found)
