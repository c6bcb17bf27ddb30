"""Storage of the text encoders while captions are encoded: the run's type where it fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from trainer.planning.cost import memory
from trainer.planning.cost.storage import Storage, parameters
from trainer.planning.plan import Decision, Plan
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.storages import WAYS
from trainer.words.sizes import gib


def text_storage(
    storage: Storage, geometry: Geometry, packages: Collection[str], budget_bytes: int
) -> tuple[str, str]:
    """The first storage of text encoders that fits beside one caption's activations, else the smallest; empty
    for the run's type. And why there are no smaller ones.
    """
    if not parameters(geometry, "text_encoder"):
        return "", ""
    stored = [way for way in WAYS.values() if way.encoder_bytes]
    kinds = ["", *(way.weights for way in stored if way.package in packages)]
    absent = (way for way in stored if way.package not in packages)
    fitting = [kind for kind in kinds if needed_bytes(storage, geometry, kind) <= budget_bytes]
    no_more = "; ".join(f"{way.weights} needs {way.package}, which is not installed" for way in absent)
    return [*fitting, kinds[-1]][0], no_more


def needed_bytes(storage: Storage, geometry: Geometry, kind: str) -> int:
    """Device memory while captions are encoded, with text encoders in `kind`."""
    return memory.total(memory.text_rows(dataclasses.replace(storage, text_encoders=kind), geometry))


def rows(storage: Storage, geometry: Geometry) -> Iterator[Decision]:
    """The row of quantised text encoders: what the more precise storages need."""
    chosen = storage.text_encoders
    if chosen:
        kinds = [way.weights for way in WAYS.values() if way.encoder_bytes]
        precise = ("", *kinds[: kinds.index(chosen)])
        needs = {kind or storage.dtype: needed_bytes(storage, geometry, kind) for kind in precise}
        reason = "; ".join(f"{name} needs {gib(size)}" for name, size in needs.items())
        yield Decision("text_encoders", chosen, "auto", reason)


def kept(plan: Plan, kind: str) -> Plan:
    """The plan of a run that began with its captions encoded in `kind`, whatever this start alone would
    take.
    """
    if kind == plan.text_encoder_weights:
        return plan
    reason = f"as the run began; this start alone would take {plan.text_encoder_weights}"
    row = Decision("text_encoders", kind, "auto", reason)
    others = (one for one in plan.decisions if one.feature != row.feature)
    return dataclasses.replace(plan, text_encoder_weights=kind, decisions=(*others, row))
