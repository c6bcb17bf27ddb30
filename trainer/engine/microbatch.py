"""Floor 6: what a micro-batch computes: forward and backward, or forward alone."""

from __future__ import annotations

from typing import Any

import torch

from trainer.engine.build import Built
from trainer.engine.context import Context
from trainer.engine.fast import uncompiled
from trainer.families.protocol import Batch, Draw
from trainer.modeling.text_lengths import padded_text


def compute(
    context: Context,
    built: Built,
    settings: Any,
    batch: Batch,
    draw: Draw | None,
    weight: float | torch.Tensor,
) -> torch.Tensor:
    """Forward and backward: adds the gradients to the optimizer's sums and returns the loss, a scalar."""
    with padded_text(built.text_readers, _any_length(context, batch)):
        losses = context.family.loss(built.model, batch, draw, settings)
        loss = losses.sum() / weight
        built.accelerator.backward(built.updater.scaled(loss))
    built.updater.accumulate()
    return loss.detach()


def _any_length(context: Context, batch: Batch) -> torch.Tensor | None:
    """The batch's text mask, for graphs of any number and length of captions where blocks are compiled."""
    if context.plan.compile and batch.text_mask is not None:
        from trainer.modeling.compiled import mark_varying

        mark_varying(batch.text_mask, [0, 1])
    return batch.text_mask


def predict(context: Context, built: Built, settings: Any, batch: Batch, draw: Draw | None) -> None:
    """One forward pass as it is written, for what a model keeps by the shapes that it saw."""
    with torch.no_grad(), uncompiled(context), padded_text(built.text_readers, batch.text_mask):
        context.family.predict(built.model, batch, draw, settings)
