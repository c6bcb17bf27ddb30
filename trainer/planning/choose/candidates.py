"""The settings that `auto` may choose among: how the base is stored, what is recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from trainer.machine.facts import version_text
from trainer.planning.choose import optimizers, swap_and_shard
from trainer.planning.choose.situation import MEASURE_AGAIN, Situation
from trainer.planning.choose.switches import compile_key
from trainer.planning.cost.storage import Storage
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.ways.storages import WAYS, Way, find, frozen, multiplied_in

_BUDGETS = (0.6,)
"""Shares of a compiled block's activations that `auto` tries: what is cheap is recomputed. For less memory
whole blocks are.
"""
_PARTS = 8
"""`auto` tries to recompute this many parts of all blocks."""


def ladder(situation: Situation) -> tuple[list[Way], str]:
    """Ways that user and machine leave open, with their tiers here, and why none needs less memory.

    Raises KernelsFailedError for products that were asked for and that the probe saw failing, HardwareError
    for a storage that is multiplied in its own type alone where nothing can be.
    """
    config, asked = situation.config, asked_storage(situation)
    ways = [find(situation.dtype)]
    if situation.geometry.stored_as:
        ways = [WAYS[situation.geometry.stored_as]]
        no_more = f"the checkpoint is stored in {situation.geometry.stored_as}"
    elif asked != "auto":
        key = "features.compute" if config.features.weights == "auto" else "features.weights"
        ways, no_more = _written(situation, asked), f"{key} is {asked} ({situation.source(key)})"
        if not ways:
            raise situation.refuse(key, _no_way(situation, asked))
    elif situation.goes_on and situation.dtype == "fp16":
        # no word of features.weights: the plan that the run began with would have named any other storage
        no_more = "the run goes on over weights in fp16"
    elif config.method == "full":
        *others, last = frozen()
        no_more = f"{', '.join(others)} and {last} are for method: lora only"
    elif needs_whole_base(config):
        no_more = f"lora.type: {config.lora.type} wants a base that is not quantised"
    else:
        ways, no_more = _automatic(situation)
    least = min(way.tier for way in ways)
    return [dataclasses.replace(way, tier=way.tier - least) for way in ways], no_more


def asked_storage(situation: Situation) -> str:
    """The storage that follows from what the user wrote; `auto` where none does."""
    features = situation.config.features
    method = situation.config.method
    products = {
        way.compute: way.weights for way in WAYS.values() if way.compute and way.trains == (method == "full")
    }
    return features.weights if features.weights != "auto" else products.get(features.compute, "auto")


def asked_way(situation: Situation) -> Way:
    """The first way of the checkpoint's storage or of the one that was asked for; else of the run's type."""
    asked = situation.geometry.stored_as or asked_storage(situation)
    return next((way for way in WAYS.values() if way.weights == asked), WAYS[situation.dtype])


def _automatic(situation: Situation) -> tuple[list[Way], str]:
    """The run's type and what was measured to beat it; FP8 where the budget needs it; smaller storages."""
    ways, missing = [find(situation.dtype)], dict[str, str]()
    for way in (way for way in WAYS.values() if way.automatic and not way.trains):
        if way.compute and (situation.config.features.compute != "auto" or no_product(situation, way)):
            continue
        what = _obstacle(situation, way)
        if way.instead_of:
            compiled = bool(compile_key(situation)) and uncompiled(situation, way)
            offered = situation.on_gpu and way.instead_of in missing and not compiled
            ways += [way] if offered else []
        elif not what:
            faster = way.compute and product_verdict(situation, way.compute)[0]
            first = faster and not way.modulation
            ways.append(dataclasses.replace(way, tier=0) if first else way)
        elif way.package:
            missing[way.weights] = what
    return ways, "; ".join(missing.values())


def _written(situation: Situation, asked: str) -> list[Way]:
    """Ways to have a storage that was written; multiplied in its own type where that works and is open."""
    features, method = situation.config.features, situation.config.method
    ways = [way for way in WAYS.values() if way.weights == asked and way.method in ("", method)]
    if features.modulation == "auto":
        ways = [way for way in ways if way.automatic] or ways
    elif any(way.modulation for way in ways):
        beside = "" if features.modulation == "kept" else features.modulation
        ways = [way for way in ways if way.modulation == beside]
    multiplied = [way for way in ways if way.compute]
    unpacked = [way for way in ways if not way.compute]
    by_itself = features.compute == "auto" and bool(multiplied) and not multiplied[0].trains
    if not multiplied or (features.compute != multiplied[0].compute and not by_itself):
        return unpacked
    faster, reason = product_verdict(situation, multiplied[0].compute)
    if features.compute == "auto" and (faster is None or no_product(situation, multiplied[0])):
        return unpacked
    if faster is None:
        raise situation.refuse_failed("features.compute", multiplied[0].compute.upper(), reason)
    if features.modulation != "auto":
        return multiplied
    return [way for way in multiplied if not way.modulation or not _obstacle(situation, way)]


def _no_way(situation: Situation, asked: str) -> str:
    """Why a storage all of whose rows are multiplied in their own type has no way here."""
    way = next(way for way in WAYS.values() if way.weights == asked)
    why = no_product(situation, way) or f"features.compute is {situation.config.features.compute}"
    return f"{asked} has no way without products in {way.compute.upper()}: {why}"


def storages(
    situation: Situation, ways: Sequence[Way], attention: str, *, compiled: bool
) -> Iterator[Storage]:
    """Every combination that was not excluded, untiled."""
    config = situation.config
    kinds = [
        (kind, dataclasses.replace(way, tier=way.tier + len(ways) * place))
        for place, kind in enumerate(optimizers.kinds(situation))
        for way in ways
    ]
    parted = config.method == "full" and situation.ranks > 1
    for kind, way in kinds:
        if parted and way.compute and way.copies == 2:
            continue  # gathered bytes are transposed for each product
        compiles = compiled and not uncompiled(situation, way)
        for recomputed, budget in _recomputing(situation, compiled=compiles):
            yield Storage(
                method=config.method,
                device=situation.profile.device,
                dtype=situation.dtype,
                way=way,
                compile=compiles,
                activation_budget=budget,
                attention=attention,
                checkpointing=recomputed > 0,
                recomputed=recomputed if recomputed < situation.geometry.blocks else 0,
                tiling=False,
                previews=bool(config.validation.prompts),
                swapped=swap_and_shard.swapped(config),
                optimizer=kind,
                rounds=max(1, config.train.gradient_accumulation_steps // situation.ranks),
                weight_gradient=weight_gradient(situation, way),
                averaged=config.train.ema_decay is not None,
                ranks=situation.ranks,
                hosts=situation.hosts.count,
                sharded=swap_and_shard.sharded(situation),
                group=situation.ranks_here if swap_and_shard.sharded(situation) else 1,
            )


def _recomputing(situation: Situation, *, compiled: bool) -> list[tuple[int, float]]:
    """(blocks that are recomputed, activation budget) of each setting that may be tried."""
    features, whole = situation.config.features, max(1, situation.geometry.blocks)
    asked, budget = features.activation_checkpointing, features.activation_budget
    if asked is True:
        return [(whole, 1.0)]
    if asked != "auto" and not isinstance(asked, bool):
        return [(asked, 1.0)]
    shares = situation.geometry.activations_compiled.shares.get(("", "bf16"), {})
    counted = shares if compiled and budget == "auto" else {}
    kept = [1.0, *(share for share in _BUDGETS if share in counted)] if budget == "auto" else [budget]
    counts = {math.ceil(whole * part / _PARTS) for part in range(1, _PARTS + 1)}
    tried = sorted(counts) if asked == "auto" and budget in ("auto", 1.0) else []
    return [*((0, share) for share in kept), *((count, 1.0) for count in tried)]


def weight_gradient(situation: Situation, way: Way) -> str:
    """Type that the gradients of trained weights are multiplied in; empty where FP8 has no part in them."""
    if not (way.trains and way.compute):
        return ""
    asked = situation.config.features.weight_gradient
    return way.compute if asked == "auto" else asked


def uncompiled(situation: Situation, way: Way) -> bool:
    """True if blocks with weights in this storage cannot be compiled here."""
    return situation.on_gpu and situation.facts.gpu.capability < way.least_compiled


def no_product(situation: Situation, way: Way) -> str:
    """Why nothing can be multiplied in the way's own type here; empty where it can."""
    kind = way.compute.upper()
    if not situation.on_gpu:
        return f"a CPU has no {kind} units"
    if situation.facts.gpu.capability < way.least_capability:
        return f"{situation.gpu} has no {kind} units, which need {version_text(way.least_capability)}"
    other = f"it needs bf16 beside it, the run computes in {situation.dtype}"
    return "" if situation.dtype == "bf16" else other


def product_verdict(situation: Situation, compute: str) -> tuple[bool | None, str]:
    """True if the probe saw products in this type take less time than bf16 at the run's shape, and why; None
    where it saw them failing. Trained weights have the verdict of a frozen base's.
    """
    way = multiplied_in(compute)
    assert way is not None, f"no way is multiplied in {compute}"
    found = {
        row.kernel: row
        for row in situation.facts.verdicts
        if row.shape_class == situation.geometry.matmul_shape_class
    }
    own, bf16 = found.get(way.verdict), found.get(WAYS["bf16"].verdict)
    if own is not None and not own.works:
        return None, own.reason
    if own is None or bf16 is None or own.milliseconds is None or bf16.milliseconds is None:
        return False, "not measured here (`trainer probe CONFIG`)"
    reason = f"measured at {own.shape_class}: {own.milliseconds:.2f} ms, bf16 {bf16.milliseconds:.2f} ms"
    return own.milliseconds < bf16.milliseconds, reason


def not_stored(situation: Situation, way: Way) -> str:
    """Why the base cannot be stored so on this machine; empty where it can."""
    if way.modulation and not situation.geometry.modulation.parameters:
        return f"this model has none that can be stored in {way.modulation}"
    for one in (way, WAYS[way.modulation]) if way.modulation else (way,):
        if situation.lacks(one.package):
            return f"{one.weights} needs {one.package}, which is not installed"
    if not way.compute and situation.on_gpu and situation.facts.gpu.capability < way.least_capability:
        return f"{way.weights} needs {version_text(way.least_capability)}, this is {situation.gpu}"
    return ""


def _obstacle(situation: Situation, way: Way) -> str:
    """Why `auto` cannot take a storage on this machine, or what the probe saw failing; empty where it can."""
    ways = {one.verdict: one for one in (way, WAYS[way.modulation or way.name]) if one.verdict}
    failed = (
        f"the probe saw {ways[row.kernel].weights} failing: {row.reason}; {MEASURE_AGAIN}"
        for row in situation.facts.verdicts
        if row.kernel in ways and row.shape_class == situation.geometry.matmul_shape_class and not row.works
    )
    return not_stored(situation, way) or next(failed, "")
