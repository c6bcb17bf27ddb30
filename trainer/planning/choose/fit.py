"""How a run is made to fit: the fastest setting by prediction whose memory is within the budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer.errors import HardwareError
from trainer.planning.choose import candidates, encoding, swapping
from trainer.planning.choose.budget import Budget
from trainer.planning.choose.switches import TIGHT, Situation, fp8_verdict, on_off
from trainer.planning.cost import memory, roofline
from trainer.planning.cost.memory import Storage
from trainer.planning.cost.roofline import Speed
from trainer.planning.plan import Decision, MemoryRow
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.planning.shapes.geometry import Geometry
from trainer.ways.storages import WAYS, Way, find
from trainer.words.sizes import gib

_MOST_NAMED = 3
"""Settings that a reason names."""


class DoesNotFitError(HardwareError):
    """No combination that the user left open fits the budget; the smallest one needs `least_bytes`."""

    least_bytes = 0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One setting with what it would need and take."""

    storage: Storage
    milliseconds: float
    """Predicted for a batch; only proportions count where the machine's rates are unknown."""
    train: tuple[MemoryRow, ...]
    cache: tuple[MemoryRow, ...]
    """Rows of the larger stage of caching."""
    cache_note: str

    @property
    def way(self) -> Way:
        """How the base is stored and multiplied with."""
        return self.storage.way

    @property
    def tier(self) -> int:
        """Of the way, in this run."""
        return self.storage.way.tier

    @property
    def peak_bytes(self) -> int:
        """The larger of training and caching."""
        return max(memory.total(self.train), memory.total(self.cache))


def compile_gain(situation: Situation, dtype: str, geometry: Geometry, speed: Speed) -> float:
    """Milliseconds that a batch is predicted to gain by compiled blocks, in the first setting."""
    ways = [find(dtype)]
    eager = next(candidates.storages(situation, dtype, ways, geometry, speed.attention, compiled=False))
    compiled = dataclasses.replace(eager, compile=True)
    return roofline.milliseconds(eager, geometry, speed) - roofline.milliseconds(compiled, geometry, speed)


def choose(
    situation: Situation,
    dtype: str,
    geometry: Geometry,
    limit: Budget,
    speed: Speed,
    *,
    compiled: bool,
    swap: bool = False,
) -> tuple[Outcome, list[Outcome]]:
    """The first setting that fits, by precision and then by predicted time, and the better ones that do not.

    With `swap` blocks of the smallest setting may wait in host memory where none fits. Raises DoesNotFitError
    with the smallest need where nothing fits.
    """
    ways, no_more = candidates.ladder(situation, dtype, geometry)
    ordered = sorted(
        (
            (storage.way.tier, roofline.milliseconds(storage, geometry, speed), storage)
            for storage in candidates.storages(
                situation, dtype, ways, geometry, speed.attention, compiled=compiled
            )
        ),
        key=lambda entry: entry[:2],
    )
    packages = situation.facts.packages
    encoders = encoding.text_storage(ordered[0][2], geometry, packages, limit.bytes)
    skipped: list[Outcome] = []
    outcomes = _outcomes(situation, geometry, ordered, limit, encoders.kind)
    for outcome in outcomes:
        if outcome.peak_bytes <= limit.bytes:
            return _roomier(outcome, outcomes, limit), skipped
        skipped.append(outcome)
    recomputing = [one for one in skipped if one.storage.checkpointing and not one.storage.recomputed]
    if swap and recomputing:
        outcome = _swapped(geometry, recomputing, limit, speed)
        no_room = swapping.no_room(situation, outcome.storage, geometry)
        if not no_room and outcome.peak_bytes <= limit.bytes:
            return outcome, skipped
        no_more = "; ".join(filter(None, (no_more, no_room)))
        skipped += [] if no_room else [outcome]
    raise _does_not_fit(situation, skipped, limit, (no_more, encoders.no_more))


def _roomier(first: Outcome, others: Iterator[Outcome], limit: Budget) -> Outcome:
    """`first`, but where it nearly fills the budget one that does not and is predicted to be as fast, if any.

    A full budget costs CUDA graphs, which no predicted time counts.
    """
    alike = itertools.takewhile(
        lambda one: (one.tier, one.milliseconds) == (first.tier, first.milliseconds), others
    )
    room = limit.bytes * TIGHT
    fitting = [one for one in (first, *alike) if one.peak_bytes <= limit.bytes]
    roomy = (one for one in fitting if memory.total(one.train) <= room)
    return next((one for one in roomy if one.storage.tiling == first.storage.tiling), first)


def _swapped(geometry: Geometry, outcomes: Sequence[Outcome], limit: Budget, speed: Speed) -> Outcome:
    """The smallest setting of those that do not fit, with as few blocks in host memory as fit."""
    least = min(outcomes, key=lambda outcome: memory.total(outcome.train))
    storage = swapping.fewest(least.storage, geometry, limit.bytes)
    return dataclasses.replace(
        least,
        storage=storage,
        milliseconds=roofline.milliseconds(storage, geometry, speed),
        train=memory.train_rows(storage, geometry),
    )


def _outcomes(
    situation: Situation,
    geometry: Geometry,
    ordered: Sequence[tuple[int, float, Storage]],
    limit: Budget,
    encoders: str,
) -> Iterator[Outcome]:
    """What each setting needs, untiled and then tiled, with text encoders stored as `encoders`."""
    asked = situation.config.features.vae_tiling
    tilings = (False, True) if asked == "auto" else (asked,)
    # caching does not depend on how the base is stored
    first = dataclasses.replace(ordered[0][2], text_encoders=encoders)
    caching = {
        tiled: memory.cache_stages(dataclasses.replace(first, tiling=tiled), geometry) for tiled in tilings
    }
    if all(max(map(memory.total, stages.values())) > limit.bytes for stages in caching.values()):
        ordered = ordered[-1:]  # no setting of training helps
    for _, milliseconds, untiled in ordered:
        for tiled in tilings:
            stored = bool(geometry.stored_as)
            storage = dataclasses.replace(untiled, tiling=tiled, stored=stored, text_encoders=encoders)
            stages = caching[tiled]
            figures = ", then ".join(f"{name} {gib(memory.total(rows))}" for name, rows in stages.items())
            yield Outcome(
                storage=storage,
                milliseconds=milliseconds,
                train=memory.train_rows(storage, geometry),
                cache=max(stages.values(), key=memory.total),
                cache_note=f"{figures}; each is freed before the next" if len(stages) > 1 else figures,
            )


def _does_not_fit(
    situation: Situation, skipped: Sequence[Outcome], limit: Budget, no_more: tuple[str, str]
) -> DoesNotFitError:
    """The error with the smallest need; `no_more` says for training and encoding why it is not smaller."""
    least = min(skipped, key=lambda outcome: outcome.peak_bytes)
    in_training = memory.total(least.train) >= memory.total(least.cache)
    phase = "training" if in_training else "encoding captions and images"
    storage, reason = least.storage, no_more[0 if in_training else 1]
    hint = f"; {reason}" if reason else ""
    how = f"weights in {least.way.name}, activation checkpointing {on_off(storage.checkpointing)}"
    if storage.recomputed:
        how += f" for the first {storage.recomputed}"
    if not in_training:
        tiled = ", the VAE in tiles" if storage.tiling else ""
        how = f"text encoders in {storage.text_encoders or storage.dtype}{tiled}"
    elif storage.swapped:
        how += f", {storage.swapped} blocks in host memory"
    error = DoesNotFitError(
        f"the run does not fit: {phase} needs {gib(least.peak_bytes)} at least"
        f" ({how}), the budget is {gib(limit.bytes)} ({limit.reason}){hint}",
        where=f"plan for {situation.gpu}",
    )
    error.least_bytes = least.peak_bytes
    return error


def decisions(
    situation: Situation,
    geometry: Geometry,
    chosen: Outcome,
    skipped: Sequence[Outcome],
    compiling: Decision,
) -> tuple[Decision, ...]:
    """Rows for weights, their products, compiling, recomputing and tiling, with what was skipped and why."""
    features, storage = situation.config.features, chosen.storage
    within = f"fits: {gib(chosen.peak_bytes)}"
    fits = "the checkpoint is stored so" if storage.stored else within
    way = storage.way
    if way.compute and chosen.tier == 0:
        fits = f"predicted to be faster than bf16; {fits}"
    larger = [outcome for outcome in skipped if outcome.way.name != way.name]
    needs = _needs(larger, chosen.tier)
    if needs and way.modulation:
        needs += f"; with modulation in {way.modulation} {way.weights} {within}"
    rows = [_row(situation, "weights", way.weights, features.weights, needs or fits)]
    compute = way.compute or storage.dtype
    rows.append(_row(situation, "compute", compute, features.compute, _why(situation, geometry, chosen)))
    if way.compute:
        reason = "a transposed copy for backward" if way.copies == 2 else "transposed each time"
        rows.append(_row(situation, "weight_copies", str(way.copies), "auto", reason))
    if way.modulation or features.modulation != "auto":
        plain = [one.peak_bytes for one in skipped if one.way.name == "fp8"]
        reason = "half the bytes of bf16, and nearer to its values than FP8"
        if plain:
            reason += f"; with modulation in bf16 the run needs {gib(min(plain))} at least"
        value = way.modulation or "kept"
        rows.append(_row(situation, "modulation", value, features.modulation, reason))
    rows += [compiling, *_recomputing_rows(situation, geometry, chosen, skipped)]
    without = min((memory.total(one.train) for one in skipped), default=0)
    rows += swapping.rows(situation, storage, geometry, without)
    untiled = "images are encoded and decoded whole"
    if storage.tiling:
        whole = [one for one in skipped if dataclasses.replace(one.storage, tiling=True) == storage]
        named = (f"with whole images the run needs {gib(one.peak_bytes)}" for one in whole)
        untiled = next(named, "nothing larger fits")
    if memory.parameters(geometry, "vae"):
        rows.append(_row(situation, "vae_tiling", on_off(storage.tiling), features.vae_tiling, untiled))
    return (*rows, *encoding.rows(storage, geometry))


def _recomputing_rows(
    situation: Situation, geometry: Geometry, chosen: Outcome, skipped: Sequence[Outcome]
) -> Iterator[Decision]:
    """Activation checkpointing, and with compiled blocks the share of activations that is kept."""
    features, storage = situation.config.features, chosen.storage
    feature, value = "activation_checkpointing", on_off(storage.checkpointing)
    if storage.recomputed:
        value = f"{storage.recomputed} of {geometry.blocks} blocks"
    alike = chosen.way.name, storage.tiling
    same = [one for one in skipped if (one.way.name, one.storage.tiling) == alike]
    kept = "everything fits without, and the step is faster"
    if storage.activation_budget < 1.0:
        kept = "compiled blocks recompute their cheap part instead"
    reason = _kept(same) if storage.checkpointing else kept
    asked = features.activation_checkpointing
    yield _row(situation, feature, value, asked, reason or f"fits: {gib(chosen.peak_bytes)}")
    if storage.activation_budget < 1.0:
        share = f"{storage.activation_budget:g}"
        yield _row(situation, "activation_budget", share, features.activation_budget, _kept(same))


_HOST = "blocks that are not compiled wait for the host, which has more kernels to begin in FP8"


def _why(situation: Situation, geometry: Geometry, chosen: Outcome) -> str:
    """Why frozen linears are multiplied as they are."""
    storage, verdict = chosen.storage, fp8_verdict(situation, geometry)
    way, asked = storage.way, situation.config.features.weights
    if way.compute and asked == way.weights and not verdict.faster:
        return f"follows from features.weights: {asked}"
    if way.compute:
        return verdict.reason if verdict.faster or chosen.tier == 0 else "no bf16 base fits the budget"
    if not way.trains:
        return f"{way.weights} weights are unpacked for each product"
    if asked != "auto":
        return f"follows from features.weights: {asked}"
    if needs_whole_base(situation.config):
        return f"follows from lora.type: {situation.config.lora.type}"
    if situation.on_gpu and storage.method == "lora" and not storage.stored:
        obstacle = candidates.product_obstacle(situation, storage.dtype, WAYS["fp8"])
        host = f", but {_HOST}" if not obstacle and verdict.faster and not storage.compile else ""
        return f"FP8: {obstacle or verdict.reason}{host}"
    return "as the base is stored"


def _needs(outcomes: Sequence[Outcome], tier: int) -> str:
    """What each kind of base needs at least; of the chosen one's tier, what was predicted to be faster."""
    least: dict[tuple[str, str], int] = {}
    for outcome in outcomes:
        kind = outcome.way.name, "at least" if outcome.tier < tier else "to be faster"
        least[kind] = min(outcome.peak_bytes, least.get(kind, outcome.peak_bytes))
    return "; ".join(f"{kind} needs {gib(need)} {limit}" for (kind, limit), need in least.items())


def _kept(outcomes: Sequence[Outcome]) -> str:
    """What settings need that recompute less: those that recompute no block, and the one with the most."""
    least: dict[str, int] = {}
    recomputing = [one for one in outcomes if one.storage.checkpointing]
    for outcome in [*(one for one in outcomes if not one.storage.checkpointing), *recomputing[-1:]]:
        storage, label = outcome.storage, f"keeping {outcome.storage.activation_budget:.0%}"
        if storage.checkpointing:
            label = f"recomputing {storage.recomputed or 'all'} blocks"
        least[label] = min(outcome.peak_bytes, least.get(label, outcome.peak_bytes))
    return "; ".join(f"{label} needs {gib(need)}" for label, need in [*least.items()][:_MOST_NAMED])


def _row(situation: Situation, feature: str, value: str, asked: str | float, reason: str) -> Decision:
    if asked == "auto":
        return Decision(feature=feature, value=value, source="auto", reason=reason)
    return Decision(
        feature=feature, value=value, source=situation.source(f"features.{feature}"), reason="as written"
    )
