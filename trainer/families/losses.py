"""The loss of flow matching, and the tensors of a cache entry that it needs besides the prediction.

torch is imported inside the functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from trainer.families.values import Batch, Draw

if TYPE_CHECKING:
    import torch

LOSS_MASK, LOSS_WEIGHT = "loss_mask", "loss_weight"
"""Tensors that stand beside a batch's latents where a run has them: (B, 1, h, w) in [0, 1], and (B,)."""


def velocity_loss(prediction: torch.Tensor, clean: torch.Tensor, batch: Batch, draw: Draw) -> torch.Tensor:
    """Weighted squared error against the velocity `noise - clean`, one fp32 value a sample: (B,).

    Where the batch has a mask, each position's error is multiplied by it; the mean is over all positions all
    the same, so that a mask of m everywhere multiplies the loss by m. The sample's weight multiplies that.
    """
    weight = draw.weight.view(-1, *[1] * (clean.ndim - 1))
    error = weight * (prediction.float() - (draw.noise - clean)) ** 2
    if LOSS_MASK in batch.latents:
        error = error * batch.latents[LOSS_MASK]
    losses = error.flatten(1).mean(1)
    return losses * batch.latents[LOSS_WEIGHT] if LOSS_WEIGHT in batch.latents else losses


def mask_entry(pixels: torch.Tensor, latents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mask (1, H, W) as part of a latents entry: its mean over each latent position, (1, h, w)."""
    import torch

    *_, height, width = latents["mean"].shape
    return {LOSS_MASK: torch.nn.functional.adaptive_avg_pool2d(pixels, (height, width))}


def weighed(
    latents: Mapping[str, torch.Tensor], loss_weight: float | None, *, masked: bool
) -> Mapping[str, torch.Tensor]:
    """A latents entry with loss mask and loss weight, so that all entries of a run have the same names.

    `loss_weight` is None where no sample has one; with `masked` a sample without a mask counts everywhere.
    """
    import torch

    extra: dict[str, torch.Tensor] = {}
    if masked and LOSS_MASK not in latents:
        extra[LOSS_MASK] = torch.ones(1, *latents["mean"].shape[-2:])
    if loss_weight is not None:
        extra[LOSS_WEIGHT] = torch.tensor(loss_weight)
    return {**latents, **extra}
