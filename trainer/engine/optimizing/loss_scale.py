"""The loss scale of fp16, as torch's GradScaler moves it, but with a floor; checkpoints hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_START, _GROWTH_STEPS = 2.0**16, 2000
FLOOR = 1.0
"""Below this the gradients themselves overflow: no scale makes them fit."""
_SCALE, _GROWTH, _APPLIED = "loss/scale", "loss/growth", "loss/applied"


class LossScale:
    """Multiplies the loss so that fp16 gradients do not vanish; halved after a step that overflowed, which is
    skipped, and doubled after 2000 steps that did not. Nothing here waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._scale = torch.full((), _START, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        """How many steps were not skipped."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to start backward from."""
        return loss * self._scale

    @torch.no_grad()
    def unscale(self, values: Sequence[torch.nn.Parameter]) -> None:
        """Make the fp32 gradients those of the loss itself."""
        gradients = [value.grad for value in values if value.grad is not None]
        torch._foreach_mul_(gradients, self._scale.reciprocal())

    @torch.no_grad()
    def update(self, bad: torch.Tensor) -> torch.Tensor:
        """Count a step, which overflowed where `bad` is 1.0; gives 1.0 where the scale is below its floor."""
        self.applied += (bad == 0).long()
        # what torch.amp.GradScaler.update does; the class itself wants fp32 parameters and a copy of the flag
        torch._amp_update_scale_(self._scale, self._growth, bad, 2.0, 0.5, _GROWTH_STEPS)
        return (self._scale < FLOOR).float()

    def state(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        return {_SCALE: self._scale, _GROWTH: self._growth, _APPLIED: self.applied}

    def load(self, state: dict[str, Any]) -> int:
        """Take what `state` gave out of `state`; returns how many steps were not skipped."""
        self._scale.copy_(state.pop(_SCALE))
        self._growth.copy_(state.pop(_GROWTH))
        self.applied.copy_(state.pop(_APPLIED))
        return int(self.applied.item())
