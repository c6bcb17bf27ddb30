"""Blocks compiled for every size at once on a GPU: batches of one and several, pictures wide and tall."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config

from tests.gpu.fast_models import DEVICE, SETTINGS, build, inputs, trainable
from tests.unit.modeling.small_models import relative
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.modeling.blocks.compiled import graphs_compiled

pytestmark = pytest.mark.gpu

# width, height, batch
SIZES = ((512, 512, 1), (512, 768, 2), (1024, 512, 1), (640, 896, 3), (512, 512, 4), (768, 512, 2))


def gradients(model: Any, size: tuple[int, int, int]) -> torch.Tensor:
    wide, tall, batch = size
    for parameter in trainable(model).values():
        parameter.grad = None
    weight = torch.tensor(float(batch), device=DEVICE)
    loss = FLUX1_DEV.loss(model, *inputs(1, wide, tall, batch), SETTINGS).sum() / weight
    loss.backward()
    return torch.cat(
        [one.grad.flatten().float() for one in trainable(model).values() if one.grad is not None]
    )


@pytest.mark.parametrize("storage", ["bf16", "fp8"])
def test_few_graphs_serve_batches_of_all_sizes(storage: str) -> None:
    """Also where the compiler would pad the LoRA's rank of 4, which a timing decides otherwise."""
    plain, fast = build(storage, fast=False), build(storage, fast=True, varies=True)
    before = graphs_compiled()
    with torch._inductor.config.patch(force_shape_pad=True):
        for size in SIZES:
            assert relative(gradients(fast, size), gradients(plain, size)) < 0.02, size
    # one for the first class of blocks, two for the other, whose first one's input has other strides; and all
    # of these again for batches of one, whose size is no variable
    assert graphs_compiled() - before <= 6
