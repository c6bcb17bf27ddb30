"""The optimizers by the plan's names, and their state as named tensors that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from trainer.config.schema import TrainSection
from trainer.planning.choose.optimizers import second_beta_and_decay

Values = Sequence[torch.nn.Parameter]
OF_ALL = "group"
"""Stands for a parameter's name before what an optimizer keeps of all together."""
_SMALLEST_8BIT = 4096


def build(kind: str, values: Values, train: TrainSection) -> torch.optim.Optimizer:
    """The optimizer of a plan over these values."""
    return _BUILD[kind](values, train, *second_beta_and_decay(train, kind))


def _fused(values: Values, train: TrainSection, beta_2: float, decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        list(values),
        lr=train.learning_rate,
        betas=(train.adam_beta1, beta_2),
        eps=train.adam_epsilon,
        weight_decay=decay,
        fused=True,
    )


def _compensated(values: Values, train: TrainSection, beta_2: float, decay: float) -> torch.optim.Optimizer:
    from optimi import AdamW

    optimizer: torch.optim.Optimizer = AdamW(
        list(values),
        lr=train.learning_rate,
        betas=(train.adam_beta1, beta_2),
        eps=train.adam_epsilon,
        weight_decay=decay,
        kahan_sum=True,
        # one kernel a tensor; foreach would hold copies of all of them at once
        triton=values[0].device.type == "cuda",
        foreach=False,
    )
    return optimizer


def _in_8_bits(values: Values, train: TrainSection, beta_2: float, decay: float) -> torch.optim.Optimizer:
    from bitsandbytes.optim.adamw import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(
        list(values),
        lr=train.learning_rate,
        betas=(train.adam_beta1, beta_2),
        eps=train.adam_epsilon,
        weight_decay=decay,
        min_8bit_size=_SMALLEST_8BIT,
    )
    return optimizer


def _prodigy(values: Values, train: TrainSection, beta_2: float, decay: float) -> torch.optim.Optimizer:
    import contextlib
    import io

    from prodigyopt import Prodigy

    # it tells of its weight decay by print
    with contextlib.redirect_stdout(io.StringIO()):
        optimizer: torch.optim.Optimizer = Prodigy(
            list(values),
            lr=train.learning_rate,
            betas=(train.adam_beta1, beta_2),
            eps=train.adam_epsilon,
            weight_decay=decay,
            use_bias_correction=True,
            safeguard_warmup=train.lr_warmup_steps > 0,
        )
    return optimizer


_BUILD: Mapping[str, Callable[[Values, TrainSection, float, float], torch.optim.Optimizer]] = {
    "adamw_fused_fp32": _fused,
    "adamw_kahan_bf16": _compensated,
    "adamw_8bit": _in_8_bits,
    "prodigy": _prodigy,
}
WHOLE_STATE = ("adamw_8bit", "prodigy")
"""Those whose state is kept as it is: its tensors have other shapes than the parameters."""


def whole_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """All that an optimizer keeps, as `<name>/<key>`: numbers as tensors without dimensions, on the CPU."""
    found: dict[str, torch.Tensor] = {}
    (group,) = optimizer.param_groups
    for name, value in zip(names, group["params"], strict=True):
        for key, kept in optimizer.state[value].items():
            found[f"{name}/{key}"] = kept if torch.is_tensor(kept) else _number(kept)
    own = {key: value for key, value in group.items() if _is_number(value)}
    return found | {f"{OF_ALL}/{key}": _number(value) for key, value in own.items() if key not in _SETTINGS}


_SETTINGS = ("lr", "eps", "weight_decay")
"""Numbers of a group that the configuration decides."""


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: int | float) -> torch.Tensor:
    # exact both ways
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def load_whole_state(
    optimizer: torch.optim.Optimizer, names: Sequence[str], state: Mapping[str, torch.Tensor]
) -> None:
    """Put back what `whole_state` gave."""
    (group,) = optimizer.param_groups
    values = dict(zip(names, group["params"], strict=True))
    for label, tensor in state.items():
        name, _, key = label.rpartition("/")
        is_number = tensor.dim() == 0 and tensor.dtype in (torch.int64, torch.float64)
        kept: Any = tensor.item() if is_number else tensor
        if name == OF_ALL:
            group[key] = kept
        else:
            optimizer.state[values[name]][key] = kept.to(values[name].device) if not is_number else kept
