"""Floor 6: the running mean of the trained weights (`train.ema_decay`), in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim.swa_utils import get_ema_multi_avg_fn


class Average:
    """A mean of some values over the steps, younger ones weighing more.

    The decay grows to `decay` as (1 + n) / (10 + n) after n steps, as diffusers' EMAModel has it: the mean of
    a short run is not the untrained start.
    """

    def __init__(self, values: Sequence[torch.Tensor], decay: float) -> None:
        self._decay = decay
        self.means = [value.detach().float().clone() for value in values]

    def update(self, values: Sequence[torch.Tensor], steps_taken: int) -> None:
        """Take the values after another step into the mean; `steps_taken` counts it."""
        decay = min(self._decay, (1 + steps_taken) / (10 + steps_taken))
        current = [value.detach().float() for value in values]
        get_ema_multi_avg_fn(decay)(self.means, current, steps_taken)
