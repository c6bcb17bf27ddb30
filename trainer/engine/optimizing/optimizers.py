"""The optimizers by the plan's names, and their state as named tensors that a checkpoint holds."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing.split_adamw import SplitAdamW
from trainer.planning.choose.optimizers import SPLIT, STOCHASTIC, second_beta_and_decay

__all__ = ["OF_BF16", "build", "build_split", "load_whole_state", "whole_state"]

OF_BF16 = (SPLIT, STOCHASTIC)
"""Optimizers of weights that are bf16 themselves."""
OF_ALL = "group"
"""Stands for a parameter's name before the values that an optimizer keeps once for all parameters."""
_SMALLEST_8BIT = 4096


def build(kind: str, values: Sequence[torch.nn.Parameter], train: TrainSection) -> torch.optim.Optimizer:
    """The optimizer of a plan over these values."""
    beta_2, decay = second_beta_and_decay(train)
    # as all of these libraries call them
    settings: dict[str, Any] = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, beta_2),
        "eps": train.adam_epsilon,
        "weight_decay": decay,
    }
    if kind == "adamw_8bit":
        from bitsandbytes.optim.adamw import AdamW8bit

        return AdamW8bit(values, min_8bit_size=_SMALLEST_8BIT, **settings)
    if kind == "prodigy":
        from prodigyopt import Prodigy

        warms_up = train.lr_warmup_steps > 0
        # it tells of its weight decay by print
        with contextlib.redirect_stdout(io.StringIO()):
            return Prodigy(values, use_bias_correction=True, safeguard_warmup=warms_up, **settings)
    assert kind == "adamw_fused_fp32", kind
    return torch.optim.AdamW(values, fused=True, **settings)


def build_split(
    kind: str,
    parameters: Mapping[str, torch.nn.Parameter],
    train: TrainSection,
    first_values: Mapping[str, int],
) -> SplitAdamW:
    """AdamW over these parameters in bf16, or over rows of them that begin at `first_values`."""
    beta_2, decay = second_beta_and_decay(train)
    return SplitAdamW(
        parameters,
        betas=(train.adam_beta1, beta_2),
        eps=train.adam_epsilon,
        weight_decay=decay,
        first_values=first_values,
        masters=kind == SPLIT,
    )


WHOLE_STATE = ("adamw_8bit", "prodigy")
"""Optimizers whose state tensors have other shapes than the parameters, and are saved as they are."""


def whole_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """All that an optimizer keeps, as `<name>/<key>`: numbers as tensors without dimensions, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    (group,) = optimizer.param_groups
    for name, value in zip(names, group["params"], strict=True):
        for key, kept in optimizer.state[value].items():
            found[f"{name}/{key}"] = kept if torch.is_tensor(kept) else _number(kept)
    for key, kept in group.items():
        if isinstance(kept, int | float) and not isinstance(kept, bool) and key not in _SETTINGS:
            found[f"{OF_ALL}/{key}"] = _number(kept)
    return found


_SETTINGS = ("lr", "eps", "weight_decay")
"""Numbers of a group that the configuration decides."""


def _number(value: int | float) -> torch.Tensor:
    # exact both ways
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def load_whole_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], state: Mapping[str, torch.Tensor]
) -> None:
    """Load the tensors of `whole_state`."""
    (group,) = optimizer.param_groups
    values = dict(zip(names, group["params"], strict=True))
    for label, tensor in state.items():
        name, _, key = label.rpartition("/")
        is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
        held = group if name == OF_ALL else optimizer.state[values[name]]
        place = group["params"][0] if name == OF_ALL else values[name]
        held[key] = tensor.item() if is_number else tensor.to(place.device)
