"""The settings that `auto` may choose among: how the base is stored, what is recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from trainer.machine.facts import version_text
from trainer.planning.choose import swapping
from trainer.planning.choose.switches import MEASURE_AGAIN, Situation, fp8_verdict
from trainer.planning.cost.memory import Storage
from trainer.planning.plan import Decision
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.storages import WAYS, Way, find

_BUDGETS = (0.6,)
"""Shares of a compiled block's activations that `auto` tries: what is cheap is recomputed. For less memory
whole blocks are.
"""
_PARTS = 8
"""`auto` tries to recompute this many parts of all blocks."""


def ladder(situation: Situation, dtype: str, geometry: Geometry) -> tuple[list[Way], str]:
    """Ways that user and machine leave open, with their tiers here, and why none needs less memory.

    Raises HardwareError for one that was asked for and cannot be had.
    """
    features = situation.config.features
    products = {way.compute: way for way in WAYS.values() if way.compute}
    asked: str = features.weights
    if features.compute in products:
        _require_product(situation, dtype, products[features.compute])
        asked = products[features.compute].weights if asked == "auto" else asked
    if geometry.stored_as:
        ways, no_more = [_stored(situation, geometry)], f"the checkpoint is stored in {geometry.stored_as}"
    elif asked != "auto":
        key = "features.compute" if features.weights == "auto" else "features.weights"
        ways, no_more = (
            _asked(situation, dtype, geometry, asked),
            f"{key} is {asked} ({situation.source(key)})",
        )
    elif situation.config.method == "full":
        *others, last = dict.fromkeys(
            way.weights for way in WAYS.values() if way.automatic and not way.trains
        )
        ways, no_more = [find(dtype)], f"{', '.join(others)} and {last} are for method: lora only"
    else:
        ways, no_more = _automatic(situation, dtype, geometry)
    least = min(way.tier for way in ways)
    return [dataclasses.replace(way, tier=way.tier - least) for way in ways], no_more


def _automatic(situation: Situation, dtype: str, geometry: Geometry) -> tuple[list[Way], str]:
    """The run's type and what was measured to beat it; FP8 where the budget needs it; smaller storages."""
    config = situation.config
    if needs_whole_base(config):
        return [find(dtype)], f"lora.type: {config.lora.type} wants a base that is not quantised"
    verdict, ways, missing = fp8_verdict(situation, geometry), [find(dtype)], dict[str, str]()
    for way in (way for way in WAYS.values() if way.automatic and not way.trains):
        what = _obstacle(situation, geometry, way)
        if way.compute and (config.features.compute != "auto" or product_obstacle(situation, dtype, way)):
            continue
        if way.instead_of:
            compiled = bool(_compiling_key(situation)) and uncompiled(situation, way)
            offered = situation.on_gpu and way.instead_of in missing and not compiled
            ways += [way] if offered else []
        elif not what:
            first = way.compute and not way.modulation and verdict.faster
            ways.append(dataclasses.replace(way, tier=0) if first else way)
        elif way.package:
            missing[way.weights] = what
    return ways, "; ".join(missing.values())


def _asked(situation: Situation, dtype: str, geometry: Geometry, asked: str) -> list[Way]:
    """Ways to have a storage that was written: multiplied in FP8 where that works and is left open."""
    features, ways = situation.config.features, [way for way in WAYS.values() if way.weights == asked]
    _require_storage(situation, dtype, geometry, ways[0])
    if features.modulation == "auto":
        ways = [way for way in ways if way.automatic] or ways
    elif any(way.modulation for way in ways):
        beside = "" if features.modulation == "kept" else features.modulation
        ways = [way for way in ways if way.modulation == beside]
    multiplied = [way for way in ways if way.compute]
    unpacked = [way for way in ways if not way.compute]
    if not multiplied or features.compute == "bf16":
        return unpacked
    verdict = fp8_verdict(situation, geometry)
    if features.compute == "auto" and (verdict.fails or product_obstacle(situation, dtype, multiplied[0])):
        return unpacked
    if verdict.fails:
        raise situation.refuse_failed("features.compute", multiplied[0].compute.upper(), verdict.reason)
    if features.modulation != "auto":
        return multiplied
    return [way for way in multiplied if not way.modulation or not _obstacle(situation, geometry, way)]


def storages(
    situation: Situation,
    dtype: str,
    ways: Sequence[Way],
    geometry: Geometry,
    attention: str,
    *,
    compiled: bool,
) -> Iterator[Storage]:
    """Every combination that was not excluded, untiled."""
    config, blocks = situation.config, geometry.blocks
    for way in ways:
        compiles = compiled and not uncompiled(situation, way)
        for recomputed, budget in _recomputing(situation, geometry, compiled=compiles):
            yield Storage(
                method=config.method,
                device=situation.profile.device,
                dtype=dtype,
                way=way,
                compile=compiles,
                activation_budget=budget,
                attention=attention,
                checkpointing=recomputed > 0,
                recomputed=recomputed if recomputed < blocks else 0,
                tiling=False,
                previews=bool(config.validation.prompts),
                swapped=swapping.written(config),
                optimizer=config.train.optimizer,
                averaged=config.train.ema_decay is not None,
            )


def _recomputing(situation: Situation, geometry: Geometry, *, compiled: bool) -> list[tuple[int, float]]:
    """(blocks that are recomputed, activation budget) of each setting that may be tried."""
    features, whole = situation.config.features, max(1, geometry.blocks)
    asked, budget = features.activation_checkpointing, features.activation_budget
    if asked is True or swapping.written(situation.config):
        return [(whole, 1.0)]
    if asked != "auto" and not isinstance(asked, bool):
        return [(asked, 1.0)]
    if budget != "auto":
        settings = [(0, budget)]
    else:
        counted = geometry.activations_compiled.shares.get(("", "bf16"), {}) if compiled else {}
        settings = [(0, 1.0), *((0, share) for share in _BUDGETS if share in counted)]
    if asked == "auto" and budget in ("auto", 1.0):
        counts = {math.ceil(whole * part / _PARTS) for part in range(1, _PARTS + 1)}
        settings += [(count, 1.0) for count in sorted(counts)]
    return settings


def require_blocks(situation: Situation, geometry: Geometry) -> None:
    """Raise HardwareError where more blocks are to be recomputed than the model has."""
    key, asked = "features.activation_checkpointing", situation.config.features.activation_checkpointing
    if asked != "auto" and not isinstance(asked, bool) and asked > geometry.blocks:
        what = f"{asked} blocks are to be recomputed, the model has {geometry.blocks}"
        raise situation.refuse(key, what, f"write {geometry.blocks} at most, or true for all")


def compiling(situation: Situation, storage: Storage, decided: Decision) -> Decision:
    """`decided`, or why blocks of this storage are not compiled though others would be."""
    if storage.compile or decided.value == "off":
        return decided
    reason = f"blocks with {storage.way.weights} weights cannot be compiled on this GPU"
    return dataclasses.replace(decided, value="off", reason=reason)


def uncompiled(situation: Situation, way: Way) -> bool:
    """Whether blocks with weights stored so cannot be compiled here."""
    return situation.on_gpu and situation.facts.gpu.capability < way.least_compiled


def product_obstacle(situation: Situation, dtype: str, way: Way) -> str:
    """Why nothing can be multiplied in this way's own type here; empty where it can."""
    kind = way.compute.upper()
    if not situation.on_gpu:
        return f"a CPU has no {kind} units"
    if situation.facts.gpu.capability < way.least_capability:
        return f"{situation.gpu} has no {kind} units, which need {version_text(way.least_capability)}"
    return "" if dtype == "bf16" else f"it needs bf16 beside it, the run computes in {dtype}"


def _compiling_key(situation: Situation) -> str:
    """The key by which the user asked for compiled blocks; empty where none does."""
    features = situation.config.features
    if features.compile is True:
        return "features.compile"
    return "features.activation_budget" if features.activation_budget not in ("auto", 1.0) else ""


def _unstored(situation: Situation, geometry: Geometry, way: Way) -> str:
    """Why the base cannot be stored so on this machine; empty where it can."""
    if way.modulation and not geometry.modulation.parameters:
        return f"this model has none that can be stored in {way.modulation}"
    for one in (way, WAYS[way.modulation]) if way.modulation else (way,):
        if one.package and one.package not in situation.facts.packages:
            return f"{one.weights} needs {one.package}, which is not installed"
    if not way.compute and situation.on_gpu and situation.facts.gpu.capability < way.least_capability:
        return f"{way.weights} needs {version_text(way.least_capability)}, this is {situation.gpu}"
    return ""


def _obstacle(situation: Situation, geometry: Geometry, way: Way) -> str:
    """Why `auto` cannot take a storage on this machine, or what the probe saw failing; empty where it can."""
    ways = {one.verdict: one for one in (way, WAYS[way.modulation or way.name]) if one.verdict}
    failed = [
        f"the probe saw {ways[row.kernel].weights} failing: {row.reason}; {MEASURE_AGAIN}"
        for row in situation.facts.verdicts
        if row.kernel in ways and row.shape_class == geometry.matmul_shape_class and not row.works
    ]
    return _unstored(situation, geometry, way) or next(iter(failed), "")


def _require_product(situation: Situation, dtype: str, way: Way) -> None:
    """Raise HardwareError for products in FP8 that were asked for and cannot be had."""
    key, features = "features.compute", situation.config.features
    if features.weights not in ("auto", way.weights):
        what = f"{way.compute} multiplies FP8 weights, but features.weights is {features.weights}"
        raise situation.refuse(key, what, f"leave {key} out, or write features.weights: {way.weights}")
    if situation.config.method == "full":
        raise situation.refuse(key, "fp8 is for a frozen base", f"use method: lora, or leave {key} out")
    obstacle = product_obstacle(situation, dtype, way)
    if obstacle:
        raise situation.refuse(key, obstacle, f"leave {key} out; features.weights: fp8 saves memory anyway")


def _stored(situation: Situation, geometry: Geometry) -> Way:
    """The way of a checkpoint that is quantised already; only it or `auto` may be asked for."""
    asked, way = situation.config.features.weights, WAYS[geometry.stored_as]
    component = next(part.name for part in geometry.components if part.role == "trained")
    folder = situation.config.model.pretrained_model_name_or_path
    config = "/".join(filter(None, (folder, component, "config.json")))
    says = f"{config} says that the weights are stored in {way.weights}"
    if asked not in ("auto", way.weights) or situation.config.features.compute == "fp8":
        key = "features.compute" if asked in ("auto", way.weights) else "features.weights"
        wanted = "fp8" if asked in ("auto", way.weights) else asked
        remedy = f"leave {key} out, or use the model's full-precision files"
        raise situation.refuse(key, f"{says}, so they cannot be had in {wanted}", remedy)
    if situation.config.method == "full":
        remedy = "use method: lora, or the model's full-precision files"
        raise situation.refuse("method", f"{says}, which cannot be trained", remedy)
    if needs_whole_base(situation.config):
        what = f"{situation.config.lora.type} wants a base that is not quantised; {config} says {way.weights}"
        raise situation.refuse("lora.type", what, "write lora, or use the model's full-precision files")
    missing = _unstored(situation, geometry, way)
    if missing:
        raise situation.refuse("features.weights", f"{config}: {missing}", way.install)
    return way


def _require_storage(situation: Situation, dtype: str, geometry: Geometry, way: Way) -> None:
    """Raise HardwareError for a storage that was asked for and cannot be had."""
    config, key = situation.config, "features.weights"
    if way.trains:
        return
    if config.method == "full":
        raise situation.refuse(key, f"an {way.weights} base cannot be trained", "use method: lora, or bf16")
    if needs_whole_base(config):
        what = f"lora.type: {config.lora.type} wants a base that is not quantised, and {way.weights} is"
        raise situation.refuse(key, what, "write lora.type: lora, or bf16")
    what = "" if way.modulation else _unstored(situation, geometry, way)
    if what:
        absent = way.package not in ("", *situation.facts.packages)
        raise situation.refuse(key, what, way.install if absent else f"leave {key} out")
    compiling_key = _compiling_key(situation)
    if compiling_key and uncompiled(situation, way):
        why = product_obstacle(situation, dtype, way)
        what = f"blocks with {way.weights} weights cannot be compiled: {why}"
        raise situation.refuse(compiling_key, what, f"leave {compiling_key} out")
    beside = config.features.modulation
    if beside in WAYS and not way.packs:
        missing = _unstored(situation, geometry, dataclasses.replace(way, modulation=beside))
        if missing:
            key, none = "features.modulation", not geometry.modulation.parameters
            raise situation.refuse(key, missing, f"leave {key} out" if none else WAYS[beside].install)
