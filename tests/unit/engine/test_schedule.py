"""Schedules are diffusers' of the same names."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.schedule import learning_rate
from trainer.modeling.vision import make_torchvision_importable

NAMES = ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_after_warm_up_the_rate_is_that_of_diffusers_scheduler(name: Any, warmup: int) -> None:
    make_torchvision_importable()
    from diffusers.optimization import get_scheduler

    steps, more = 20, {"cosine_with_restarts": {"num_cycles": 3}, "polynomial": {"power": 2.0}}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=steps, **more.get(name, {})
    )
    train = TrainSection(
        learning_rate=1e-3,
        lr_scheduler=name,
        lr_warmup_steps=warmup,
        max_train_steps=steps,
        lr_num_cycles=3,
        lr_power=2.0,
    )
    for step in range(1, steps + 1):
        if step > warmup:
            assert learning_rate(train, step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9), step
        else:
            assert learning_rate(train, step) == pytest.approx(1e-3 * step / warmup)
        optimizer.step()
        scheduler.step()
