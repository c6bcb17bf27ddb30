"""The course of the learning rate, after warm-up that of diffusers' schedulers of the same names.

It is a function of the step alone, so that a resume needs no state. Warm-up is one step ahead of diffusers',
whose first step is taken at a rate of zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from trainer.config.schema import TrainSection


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of optimizer step `step` (1 is the first): linear warm-up, then `train.lr_scheduler`."""
    if step <= train.lr_warmup_steps:
        return train.learning_rate * step / train.lr_warmup_steps
    rest = max(1, train.max_train_steps - train.lr_warmup_steps)
    return _COURSES[train.lr_scheduler](train, min(1.0, (step - 1 - train.lr_warmup_steps) / rest))


def _polynomial(train: TrainSection, progress: float) -> float:
    end = min(1e-7, train.learning_rate)
    return end + (train.learning_rate - end) * (1.0 - progress) ** train.lr_power


def _cosine(train: TrainSection, progress: float) -> float:
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


_COURSES: Mapping[str, Callable[[TrainSection, float], float]] = {
    "constant": lambda train, _: train.learning_rate,
    "constant_with_warmup": lambda train, _: train.learning_rate,
    "linear": lambda train, progress: train.learning_rate * (1.0 - progress),
    "cosine": _cosine,
    "cosine_with_restarts": lambda train, progress: (
        _cosine(train, (progress * train.lr_num_cycles) % 1.0) if progress < 1.0 else 0.0
    ),
    "polynomial": _polynomial,
}
