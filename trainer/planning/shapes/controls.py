"""Pixels of the control images that a plan counts: those of another size than their picture's are encoded at
about 1024 x 1024, whatever `data.resolution` is. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from trainer.data.sets.controls import CONTROL_SIDE


class ControlPixels(NamedTuple):
    """Pixels of one control image."""

    most: int
    """Of the largest: memory is planned for samples with these."""
    mean: int
    """On average: time is planned for these."""
    why: str
    """Words on what makes the largest larger than its target; empty where it is not."""


def control_pixels(resolution: int, alike: float | None) -> ControlPixels:
    """Pixels of control images beside targets of this resolution; `alike` is the share of those that have
    their picture's size, None where that is not known.
    """
    target, other = resolution**2, CONTROL_SIDE**2
    share = (1.0 if target > other else 0.0) if alike is None else alike
    most = max([target] * (share > 0) + [other] * (share < 1))
    if most <= target:
        why = ""
    else:
        whose = "the sizes of this set's are not known" if alike is None else "this set has such"
        why = (
            f"control images count as {CONTROL_SIDE} x {CONTROL_SIDE} pixels, as those of another size than"
            f" their picture become about so large, and {whose}"
        )
    return ControlPixels(most, round(share * target + (1 - share) * other), why)
