"""The course of the learning rate, after warm-up that of diffusers' schedulers of the same names.

It is a function of the step alone, so that a resume needs no state. Warm-up is one step ahead of diffusers',
whose first step is taken at a rate of zero.
"""

from __future__ import annotations

import math

from trainer.config.schema import TrainSection


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of optimizer step `step` (1 is the first): linear warm-up, then `train.lr_scheduler`."""
    peak, warm_up = train.learning_rate, train.lr_warmup_steps
    if step <= warm_up:
        return peak * step / warm_up
    progress = min(1.0, (step - 1 - warm_up) / max(1, train.max_train_steps - warm_up))
    if train.lr_scheduler == "cosine_with_restarts" and progress < 1.0:
        progress = (progress * train.lr_num_cycles) % 1.0
    match train.lr_scheduler:
        case "linear":
            return peak * (1.0 - progress)
        case "cosine" | "cosine_with_restarts":
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))
        case "polynomial":
            end = min(1e-7, peak)
            return end + (peak - end) * (1.0 - progress) ** train.lr_power
        case "constant" | "constant_with_warmup":
            return peak
