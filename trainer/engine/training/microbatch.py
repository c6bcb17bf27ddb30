"""One micro-batch: forward and backward, or forward alone."""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainer.engine.building.build import Built
from trainer.engine.building.fast import uncompiled
from trainer.engine.context import Context
from trainer.engine.training.graphs import Graphs
from trainer.families.values import ENDS, Batch, Draw
from trainer.modeling.attention.text_lengths import padded_text


def compute(
    context: Context,
    built: Built,
    settings: Any,
    batch: Batch,
    draw: Draw | None,
    weight: float | torch.Tensor,
) -> torch.Tensor:
    """Forward and backward: adds the gradients to the optimizer's sums and returns the loss, a scalar."""
    if context.plan.compile:
        _mark_lengths(batch)
    with padded_text(built.text_readers, batch.text_mask):
        losses = context.family.loss(built.model, batch, draw, settings)
        loss = losses.sum() / weight
        built.accelerator.backward(built.updater.scaled(loss))
    built.updater.accumulate()
    return loss.detach()


def _mark_lengths(batch: Batch) -> None:
    """Have compiled blocks take any number and length of captions, and any number of samples in a row."""
    from trainer.modeling.blocks.compiled import mark_varying

    if batch.text_mask is not None:
        mark_varying(batch.text_mask, [0, 1])
    if ENDS in batch.text:
        mark_varying(batch.text[ENDS], [0])


def predict(context: Context, built: Built, settings: Any, batch: Batch, draw: Draw | None) -> None:
    """One forward pass as it is written, for the tables that a model keeps by the shapes that it saw."""
    with torch.no_grad(), uncompiled(context), padded_text(built.text_readers, batch.text_mask):
        context.family.predict(built.model, batch, draw, settings)


def as_graphs(context: Context, built: Built) -> Graphs | None:
    """`compute` as CUDA graphs, where the plan says so."""
    if not context.plan.cuda_graphs:
        return None
    parts = (context, built, context.settings)
    return Graphs(functools.partial(compute, *parts), functools.partial(predict, *parts), context.say)
