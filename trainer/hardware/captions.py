"""Floor 2: the few lengths that captions are padded to, and whether they are."""

from __future__ import annotations

import bisect

from trainer.hardware.choices import NEEDS_COMPILED, Situation, on_off
from trainer.hardware.geometry import Geometry
from trainer.hardware.memory import Storage
from trainer.hardware.plan import Decision
from trainer.hardware.roofline import EXACT_ONLY

TEXT_LENGTHS = (64, 128, 256, 384, 512, 768, 1024)
"""Tokens that captions are padded to; longer ones become multiples of 256. Of captions of 1 to 300 tokens, as
many short as long by their logarithm, 73 % become 64.
"""
_BEYOND = 256


def padded_length(tokens: int) -> int:
    """The first of `TEXT_LENGTHS` that holds a caption of so many tokens."""
    place = bisect.bisect_left(TEXT_LENGTHS, tokens)
    if place < len(TEXT_LENGTHS):
        return TEXT_LENGTHS[place]
    return -(-tokens // _BEYOND) * _BEYOND


def text_padding(situation: Situation, geometry: Geometry, storage: Storage, attention: str) -> Decision:
    """Whether captions are padded to a few lengths; raises HardwareError where that cannot be had."""
    asked, feature, key = situation.config.features.text_padding, "text_padding", "features.text_padding"
    obstacle = _padding_obstacle(geometry, storage, attention)
    if asked != "auto":
        if asked and obstacle:
            remedy = f"leave {key} out"
            if obstacle == NEEDS_COMPILED:
                remedy += ", or write features.compile: true"
            raise situation.refuse(key, obstacle, remedy)
        source = situation.source(key)
        return Decision(feature=feature, value=on_off(asked), source=source, reason="as written")
    if obstacle == NEEDS_COMPILED:
        obstacle = "blocks that are not compiled take every length as it comes"
    reason = obstacle or "captions become 64, 128, 256, 384, 512 ... tokens long, which attention leaves out"
    return Decision(feature=feature, value=on_off(not obstacle), source="auto", reason=reason)


def _padding_obstacle(geometry: Geometry, storage: Storage, attention: str) -> str:
    """Why captions are not padded to a few lengths; empty where they can be."""
    if not geometry.captions_vary:
        return "this family's captions are not of different lengths"
    if attention in EXACT_ONLY:
        return f"padding cannot be left out of {attention}"
    if storage.method != "lora":
        return "only beside a frozen base"
    return "" if storage.compile else NEEDS_COMPILED
