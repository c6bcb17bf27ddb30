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

    @torch.no_grad()
    def update(
        self,
        values: Sequence[torch.Tensor],
        steps_taken: int | torch.Tensor,
        bad: torch.Tensor | None = None,
    ) -> None:
        """Take the values after another step into the mean; `steps_taken` counts it.

        With `bad` nothing where that is 1.0, without waiting for the device; `steps_taken` is a tensor then,
        which counts the steps that were not bad.
        """
        share: float | torch.Tensor
        if bad is None:
            share = max(self._least, 9.0 / (10.0 + int(steps_taken)))
        else:
            share = (9.0 / (10.0 + torch.as_tensor(steps_taken))).clamp(min=self._least) * (1.0 - bad)
        # one after the other: those of a full fine-tune would be copied to fp32 all at once
        for mean, value in zip(self.means, values, strict=True):
            mean.lerp_(value.detach().float(), share)
