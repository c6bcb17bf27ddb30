"""The running mean of the trained weights (`train.ema_decay`), in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Average:
    """A mean of some values over the steps, younger ones weighing more.

    The decay grows to `decay` as (1 + n) / (10 + n) after n steps, as diffusers' EMAModel has it: the mean of
    a short run is not the untrained start.
    """

    def __init__(self, values: Sequence[torch.Tensor], decay: float) -> None:
        self._least = 1.0 - decay
        self.means = [value.detach().float().clone() for value in values]

    def update(self, values: Sequence[torch.Tensor], steps_taken: int) -> None:
        """Take the values after another step into the mean; `steps_taken` counts it."""
        self._take(values, max(self._least, 9.0 / (10.0 + steps_taken)))

    def update_unless(self, bad: torch.Tensor, values: Sequence[torch.Tensor], applied: torch.Tensor) -> None:
        """As `update`, but nothing where `bad` is 1.0, without waiting for the device; `applied` counts steps
        that were not bad.
        """
        self._take(values, (9.0 / (10.0 + applied)).clamp(min=self._least) * (1.0 - bad))

    @torch.no_grad()
    def _take(self, values: Sequence[torch.Tensor], share: float | torch.Tensor) -> None:
        # one after the other: those of a full fine-tune would be copied to fp32 all at once
        for mean, value in zip(self.means, values, strict=True):
            mean.lerp_(value.detach().float(), share)
