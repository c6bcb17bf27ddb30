"""The few lengths that captions are padded to, and whether they are."""

from __future__ import annotations

from trainer.planning.choose.switches import NEEDS_COMPILED, Situation, on_off
from trainer.planning.cost.memory import Storage
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.kernels import KERNELS


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
    if KERNELS[attention].exact_only:
        return f"padding cannot be left out of {attention}"
    if storage.method != "lora":
        return "only beside a frozen base"
    return "" if storage.compile else NEEDS_COMPILED
