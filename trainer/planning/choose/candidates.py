"""The settings that `auto` may choose among: how the base is stored, what is recomputed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.machine.facts import version_text
from trainer.planning.choose import swapping
from trainer.planning.choose.switches import FP8_CAPABILITY, MEASURE_AGAIN, Situation, fp8_verdict
from trainer.planning.cost.memory import Storage
from trainer.planning.plan import Decision
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.storages import QUANTIZED
from trainer.words import extras

PACKAGES = {"int8": "optimum-quanto", "nf4": "bitsandbytes"}
"""What each quantised storage of the base needs."""
_INSTALL = {"int8": extras.remedy(), "nf4": extras.remedy("nf4")}
_BUDGETS = (0.6,)
"""Shares of a compiled block's activations that `auto` tries: what is cheap is recomputed. For less memory
whole blocks are.
"""
_PARTS = 8
"""`auto` tries to recompute this many parts of all blocks."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One way to store the base and to multiply with it."""

    weights: str
    compute: str
    copies: int = 1
    modulation: str = ""
    """`int8`: beside FP8, which leaves it out."""
    tier: int = 0
    """A higher one changes the base's precision more: it is tried where nothing of the lower ones fits."""


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What was left open by the user and the machine."""

    kinds: tuple[Kind, ...]
    no_more: str
    """Why there are no smaller ones."""


def ladder(situation: Situation, dtype: str, geometry: Geometry) -> Ladder:
    """Ways to store and multiply; raises HardwareError for one that was asked for and cannot be had."""
    features = situation.config.features
    asked = features.weights
    if features.compute == "fp8":
        _require_fp8_compute(situation, dtype)
    if geometry.stored_as:
        kind = _stored(situation, geometry)
        no_more = f"the checkpoint is stored in {geometry.stored_as}"
        return Ladder(kinds=(Kind(weights=kind, compute=dtype),), no_more=no_more)
    if asked in QUANTIZED:
        _require_quantizable(situation, asked)
    if asked == "fp8" or (asked == "auto" and features.compute == "fp8"):
        key = "features.weights" if asked == "fp8" else "features.compute"
        no_more = f"{key} is fp8 ({situation.source(key)})"
        return Ladder(kinds=_asked_fp8(situation, dtype, geometry), no_more=no_more)
    if asked != "auto":
        no_more = f"features.weights is {asked} ({situation.source('features.weights')})"
        return Ladder(kinds=(Kind(weights=asked, compute=dtype),), no_more=no_more)
    if situation.config.method == "full":
        no_more = "int8, nf4 and fp8 are for method: lora only"
        return Ladder(kinds=(Kind(weights=dtype, compute=dtype),), no_more=no_more)
    return _automatic(situation, dtype, geometry)


def storages(
    situation: Situation,
    dtype: str,
    kinds: Sequence[Kind],
    geometry: Geometry,
    attention: str,
    *,
    compiled: bool,
) -> Iterator[tuple[int, Storage]]:
    """Every combination that was not excluded, untiled, with the tier of its kind."""
    config, blocks = situation.config, geometry.blocks
    for kind in kinds:
        compiles = compiled and not _uncompiled(situation, kind.weights)
        for recomputed, budget in _recomputing(situation, geometry, compiled=compiles):
            yield (
                kind.tier,
                Storage(
                    method=config.method,
                    device=situation.profile.device,
                    dtype=dtype,
                    weights=kind.weights,
                    compute=kind.compute,
                    weight_copies=kind.copies,
                    modulation=kind.modulation,
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
                ),
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
        counted = geometry.activations_compiled.shares if compiled else {}
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
    return dataclasses.replace(decided, value="off", reason=_uncompiled(situation, storage.weights))


def _uncompiled(situation: Situation, weights: str) -> str:
    """Why blocks with weights stored so are not compiled; empty where they are."""
    if weights == "fp8" and _fp8_uncompiled(situation):
        return "blocks with fp8 weights cannot be compiled on this GPU"
    return ""


def _compiling_key(situation: Situation) -> str:
    """The key by which the user asked for compiled blocks; empty where none does."""
    features = situation.config.features
    if features.compile is True:
        return "features.compile"
    return "features.activation_budget" if features.activation_budget not in ("auto", 1.0) else ""


def _fp8_uncompiled(situation: Situation) -> bool:
    """Triton has no FP8 values for GPUs without FP8 units, torch itself has."""
    return situation.on_gpu and situation.facts.gpu.capability < FP8_CAPABILITY


def _automatic(situation: Situation, dtype: str, geometry: Geometry) -> Ladder:
    """bf16 and what was measured to beat it; FP8 where the budget needs it; then the smaller storages."""
    kinds = [Kind(weights=dtype, compute=dtype)]
    if needs_whole_base(situation.config):
        what = f"lora.type: {situation.config.lora.type} wants a base that is not quantised"
        return Ladder(kinds=tuple(kinds), no_more=what)
    missing = {kind: _missing(situation, geometry, kind) for kind in QUANTIZED}
    verdict = fp8_verdict(situation, geometry)
    may_multiply = situation.config.features.compute == "auto" and not fp8_obstacle(situation, dtype)
    if may_multiply and not verdict.fails:
        tier = 0 if verdict.faster else 1
        kinds += [Kind(weights="fp8", compute="fp8", copies=copies, tier=tier) for copies in (2, 1)]
        if geometry.modulation.parameters and not missing["int8"]:
            kinds.append(Kind(weights="fp8", compute="fp8", modulation="int8", tier=2))
    if not missing["int8"]:
        kinds.append(Kind(weights="int8", compute=dtype, tier=2))
    elif situation.on_gpu and not (_fp8_uncompiled(situation) and _compiling_key(situation)):
        kinds.append(Kind(weights="fp8", compute=dtype, tier=2))
    if not missing["nf4"]:
        kinds.append(Kind(weights="nf4", compute=dtype, tier=3))
    return Ladder(kinds=tuple(kinds), no_more="; ".join(reason for reason in missing.values() if reason))


def _asked_fp8(situation: Situation, dtype: str, geometry: Geometry) -> tuple[Kind, ...]:
    """FP8 weights: multiplied in FP8 where that works, unless the user wrote how."""
    compute = situation.config.features.compute
    if situation.config.method == "full":
        what = "an fp8 base cannot be trained"
        raise situation.refuse("features.weights", what, "use method: lora, or bf16")
    _require_plain_adapter(situation, "fp8")
    key = _compiling_key(situation)
    if key and _fp8_uncompiled(situation):
        what = f"blocks with fp8 weights cannot be compiled: {fp8_obstacle(situation, dtype)}"
        raise situation.refuse(key, what, f"leave {key} out")
    modulation = _asked_modulation(situation, geometry)
    unpacked = Kind(weights="fp8", compute=dtype, modulation=modulation, tier=1)
    verdict = fp8_verdict(situation, geometry)
    if compute == "bf16" or (compute == "auto" and (fp8_obstacle(situation, dtype) or verdict.fails)):
        return (unpacked,)
    if verdict.fails:
        raise situation.refuse_failed("features.compute", "FP8", verdict.reason)
    one, two = (Kind(weights="fp8", compute="fp8", copies=copies, modulation=modulation) for copies in (1, 2))
    packable = geometry.modulation.parameters and not _missing(situation, geometry, "int8")
    if situation.config.features.modulation != "auto" or not packable:
        return two, one
    return two, one, dataclasses.replace(one, modulation="int8", tier=1)


def _asked_modulation(situation: Situation, geometry: Geometry) -> str:
    """`int8` where modulation is to be stored so; raises HardwareError where it cannot be."""
    key = "features.modulation"
    if situation.config.features.modulation != "int8":
        return ""
    if not geometry.modulation.parameters:
        raise situation.refuse(key, "this model has none that can be stored in int8", f"leave {key} out")
    missing = _not_installed(situation, "int8")
    if missing:
        raise situation.refuse(key, missing, _INSTALL["int8"])
    return "int8"


def fp8_obstacle(situation: Situation, dtype: str) -> str:
    """Why nothing can be multiplied in FP8 here; empty where it can."""
    if not situation.on_gpu:
        return "a CPU has no FP8 units"
    if situation.facts.gpu.capability < FP8_CAPABILITY:
        return f"{situation.gpu} has no FP8 units, which need {version_text(FP8_CAPABILITY)}"
    return "" if dtype == "bf16" else f"it needs bf16 beside it, the run computes in {dtype}"


def _require_fp8_compute(situation: Situation, dtype: str) -> None:
    key, features = "features.compute", situation.config.features
    if features.weights not in ("auto", "fp8"):
        what = f"fp8 multiplies FP8 weights, but features.weights is {features.weights}"
        raise situation.refuse(key, what, f"leave {key} out, or write features.weights: fp8")
    if situation.config.method == "full":
        raise situation.refuse(key, "fp8 is for a frozen base", f"use method: lora, or leave {key} out")
    obstacle = fp8_obstacle(situation, dtype)
    if obstacle:
        raise situation.refuse(key, obstacle, f"leave {key} out; features.weights: fp8 saves memory anyway")


def _stored(situation: Situation, geometry: Geometry) -> str:
    """The storage of a checkpoint that is quantised already; only it or `auto` may be asked for."""
    asked, kind = situation.config.features.weights, geometry.stored_as
    component = next(part.name for part in geometry.components if part.role == "trained")
    folder = situation.config.model.pretrained_model_name_or_path
    config = "/".join(filter(None, (folder, component, "config.json")))
    if asked not in ("auto", kind) or situation.config.features.compute == "fp8":
        key = "features.compute" if asked in ("auto", kind) else "features.weights"
        wanted = "fp8" if asked in ("auto", kind) else asked
        raise situation.refuse(
            key,
            f"{config} says that the weights are stored in {kind}, so they cannot be had in {wanted}",
            f"leave {key} out, or use the model's full-precision files",
        )
    if situation.config.method == "full":
        raise situation.refuse(
            "method",
            f"{config} says that the weights are stored in {kind}, which cannot be trained",
            "use method: lora, or the model's full-precision files",
        )
    if needs_whole_base(situation.config):
        what = f"{situation.config.lora.type} wants a base that is not quantised; {config} says {kind}"
        raise situation.refuse("lora.type", what, "write lora, or use the model's full-precision files")
    missing = _not_installed(situation, kind)
    if missing:
        raise situation.refuse("features.weights", f"{config}: {missing}", _INSTALL[kind])
    return kind


def _require_quantizable(situation: Situation, kind: str) -> None:
    if situation.config.method == "full":
        what = f"an {kind} base cannot be trained"
        raise situation.refuse("features.weights", what, "use method: lora, or bf16")
    _require_plain_adapter(situation, kind)
    missing = _not_installed(situation, kind)
    if missing:
        raise situation.refuse("features.weights", missing, _INSTALL[kind])


def _require_plain_adapter(situation: Situation, kind: str) -> None:
    """Raise HardwareError where the adapter wants a base that is not quantised, and this one is asked for."""
    if needs_whole_base(situation.config):
        what = f"lora.type: {situation.config.lora.type} wants a base that is not quantised"
        raise situation.refuse("features.weights", f"{what}, and {kind} is", "write lora.type: lora, or bf16")


def _missing(situation: Situation, geometry: Geometry, kind: str) -> str:
    """Why `auto` cannot take a quantised storage on this machine; empty where it can."""
    failed = [
        row.reason
        for row in situation.facts.verdicts
        if (row.kernel, row.shape_class) == (f"matmul.{kind}", geometry.matmul_shape_class) and not row.works
    ]
    seen = f"the probe saw {kind} failing: {failed[0]}; {MEASURE_AGAIN}" if failed else ""
    return _not_installed(situation, kind) or seen


def _not_installed(situation: Situation, kind: str) -> str:
    package = PACKAGES[kind]
    return "" if package in situation.facts.packages else f"{kind} needs {package}, which is not installed"
