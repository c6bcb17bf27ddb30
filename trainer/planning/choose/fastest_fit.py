"""The choice of a setting that fits: the fastest by prediction whose memory is within the budget."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.errors import HardwareError
from trainer.planning.choose import candidates, encoding, swap_and_shard
from trainer.planning.choose.budget import Budget
from trainer.planning.choose.optimizers import STOCHASTIC
from trainer.planning.choose.situation import Situation
from trainer.planning.choose.switches import TIGHT
from trainer.planning.cost import memory, roofline
from trainer.planning.cost.roofline import Speed
from trainer.planning.cost.storage import Storage, parameters
from trainer.planning.plan import Decision, MemoryRow, on_off
from trainer.planning.shapes.adapters import needs_whole_base
from trainer.ways.storages import WAYS, find
from trainer.words.plurals import numbered
from trainer.words.sizes import gib

_MOST_NAMED = 3
"""Settings that a reason names."""


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Changes of the configuration with which a run fits: dotted keys with the values to write."""

    changes: tuple[tuple[str, Any], ...]
    peak: str
    """The peak of memory that is then predicted, in words."""


class DoesNotFitError(HardwareError):
    """No combination that the user left open fits the budget; the smallest one needs `least_bytes`."""

    least_bytes = 0
    budget_bytes = 0
    """Bytes that the smallest one is compared with."""
    nearest: tuple[Nearest, ...] = ()
    """Changes that make it fit, of the plan's own error."""
    taken_bytes: int = 0
    """Host memory that other programs have, where the run fits without them; of the plan's own error."""


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
    instead: Outcome | None = None
    """Of blocks that are shared by themselves: the best setting that fits with a whole base on each GPU."""

    @property
    def peak_bytes(self) -> int:
        """The larger of training and caching."""
        return max(memory.total(self.train), memory.total(self.cache))


def described(storage: Storage) -> str:
    """The storage of the base, and what is recomputed, in words."""
    recomputed = f", {storage.recomputed or 'all'} blocks recomputed" if storage.checkpointing else ""
    kept = f", {storage.activation_budget:.0%} of activations kept" if storage.activation_budget < 1.0 else ""
    chance = ", rounded by chance" if storage.optimizer == STOCHASTIC else ""
    return f"{storage.way.name}{chance}{recomputed}{kept}"


def compile_gain(situation: Situation, speed: Speed) -> float:
    """Milliseconds that a batch is predicted to gain by compiled blocks, in the first setting."""
    ways, geometry = [find(situation.dtype)], situation.geometry
    eager = next(candidates.storages(situation, ways, speed.attention, compiled=False))
    compiled = dataclasses.replace(eager, compile=True)
    return roofline.milliseconds(eager, geometry, speed) - roofline.milliseconds(compiled, geometry, speed)


def choose(
    situation: Situation, limit: Budget, speed: Speed, *, compiled: bool, swap: bool
) -> tuple[Outcome, list[Outcome]]:
    """The first setting that fits, by precision and then by predicted time, and the better ones that do not.

    With `swap` blocks of the smallest setting may wait in host memory where none fits. Raises DoesNotFitError
    with the smallest need where nothing fits.
    """
    ways, no_more = candidates.ladder(situation)
    geometry, most = situation.geometry, limit.usable_bytes
    settings = list(candidates.storages(situation, ways, speed.attention, compiled=compiled))
    settings = [*settings, *swap_and_shard.shared(situation, settings, most)]
    timed = ((roofline.milliseconds(storage, geometry, speed), storage) for storage in settings)
    ordered = sorted(timed, key=lambda row: (row[1].way.tier, row[0]))
    packages = situation.facts.packages
    encoders, no_smaller = encoding.text_storage(ordered[0][1], geometry, packages, most)
    skipped: list[Outcome] = []
    outcomes = _outcomes(situation, ordered, limit, encoders)
    for outcome in outcomes:
        if outcome.peak_bytes <= most:
            if not outcome.storage.sharded or swap_and_shard.sharded(situation):
                return _roomier(outcome, outcomes, limit), skipped
            whole = (one for one in outcomes if not one.storage.sharded and one.peak_bytes <= most)
            return dataclasses.replace(outcome, instead=next(whole, None)), skipped
        skipped.append(outcome)
    recomputing = [
        one
        for one in skipped
        if one.storage.checkpointing and not one.storage.recomputed and not one.storage.sharded
    ]
    if swap and geometry.stacks and recomputing:
        # as few blocks in host memory as fit, of the smallest setting
        least = min(recomputing, key=lambda outcome: memory.total(outcome.train))
        storage = swap_and_shard.fewest(least.storage, geometry, most)
        time, train = roofline.milliseconds(storage, geometry, speed), memory.train_rows(storage, geometry)
        outcome = dataclasses.replace(least, storage=storage, milliseconds=time, train=train)
        no_room = swap_and_shard.no_room(situation, storage)
        if not no_room and outcome.peak_bytes <= most:
            return outcome, skipped
        no_more = "; ".join(filter(None, (no_more, no_room)))
        skipped += [] if no_room else [outcome]
    raise _does_not_fit(situation, skipped, limit, (no_more, no_smaller))


def _roomier(first: Outcome, others: Iterator[Outcome], limit: Budget) -> Outcome:
    """`first`, but where it nearly fills the budget one that does not and is predicted to be as fast, if any.

    A full budget costs CUDA graphs, which no predicted time counts.
    """
    rank = first.storage.way.tier, first.milliseconds
    alike = itertools.takewhile(lambda one: (one.storage.way.tier, one.milliseconds) == rank, others)
    fitting = [one for one in (first, *alike) if one.peak_bytes <= limit.usable_bytes]
    roomy = (one for one in fitting if memory.total(one.train) <= limit.usable_bytes * TIGHT)
    return next((one for one in roomy if one.storage.tiling == first.storage.tiling), first)


def _outcomes(
    situation: Situation, ordered: Sequence[tuple[float, Storage]], limit: Budget, encoders: str
) -> Iterator[Outcome]:
    """Memory and time of each setting, untiled and then tiled, with text encoders stored as `encoders`."""
    geometry, asked = situation.geometry, situation.config.features.vae_tiling
    tilings = (False, True) if asked == "auto" else (asked,)
    # caching does not depend on how the base is stored
    first = dataclasses.replace(ordered[0][1], text_encoders=encoders)
    caching = {
        tiled: memory.cache_stages(dataclasses.replace(first, tiling=tiled), geometry) for tiled in tilings
    }
    if all(max(map(memory.total, stages.values())) > limit.usable_bytes for stages in caching.values()):
        ordered = ordered[-1:]  # no setting of training helps
    for milliseconds, untiled in ordered:
        for tiled in tilings:
            storage = dataclasses.replace(untiled, tiling=tiled, text_encoders=encoders)
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
    storage, reason = least.storage, no_more[0]
    if memory.total(least.train) >= memory.total(least.cache):
        reason = "; ".join(filter(None, (reason, situation.geometry.larger_controls)))
        phase, how = "training", f"weights in {storage.way.name}"
        how += f", activation checkpointing {on_off(storage.checkpointing)}"
        how += f" for the first {storage.recomputed}" if storage.recomputed else ""
        how += f", {numbered(storage.swapped, 'block')} in host memory" if storage.swapped else ""
        how += f", {numbered(storage.sharded, 'block')} over {storage.group} GPUs" if storage.sharded else ""
    else:
        phase, reason = "encoding captions and images", no_more[1]
        tiled = ", the VAE in tiles" if storage.tiling else ""
        how = f"text encoders in {storage.text_encoders or storage.dtype}{tiled}"
    error = DoesNotFitError(
        f"the run does not fit: {phase} needs {gib(least.peak_bytes)} at least ({how}), the budget is"
        f" {gib(limit.usable_bytes)} ({limit.reason}){f'; {reason}' if reason else ''}",
        where=f"plan for {situation.gpu}",
    )
    error.least_bytes, error.budget_bytes = least.peak_bytes, limit.usable_bytes
    return error


def decisions(
    situation: Situation, chosen: Outcome, skipped: Sequence[Outcome], compiling: Decision
) -> Iterator[Decision]:
    """Rows for weights, their products, compiling, recomputing and tiling, with what was skipped and why."""
    features, storage, way = situation.config.features, chosen.storage, chosen.storage.way
    within = f"fits: {gib(chosen.peak_bytes)}"
    fits = "the checkpoint is stored so" if situation.geometry.stored_as else within
    if way.compute and way.tier == 0 and not way.trains:
        fits = f"predicted to be faster than bf16; {fits}"
    needs = _needs([outcome for outcome in skipped if outcome.storage.way.name != way.name], way.tier)
    if needs and way.modulation:
        needs += f"; with modulation in {way.modulation} {way.weights} {within}"
    yield situation.decide("features.weights", way.weights, needs or fits)
    yield situation.decide("features.compute", way.compute or storage.dtype, _product(situation, chosen))
    if way.compute:
        reason = "a transposed copy for backward" if way.copies == 2 else "transposed each time"
        yield Decision("weight_copies", str(way.copies), "auto", reason)
    if way.compute and way.trains:
        value = candidates.weight_gradient(situation, way)
        reason = "as the other products; bf16 is more exact, and slower"
        yield situation.decide("features.weight_gradient", value, reason)
    if way.modulation or features.modulation != "auto":
        plain = [one.peak_bytes for one in skipped if one.storage.way.name == way.weights]
        reason = "half the bytes of bf16, and nearer to its values than FP8"
        if plain:
            reason += f"; with modulation in bf16 the run needs {gib(min(plain))} at least"
        yield situation.decide("features.modulation", way.modulation or "kept", reason)
    if compiling.value == "on" and not storage.compile:
        reason = f"blocks with {way.weights} weights cannot be compiled on this GPU"
        compiling = dataclasses.replace(compiling, value="off", reason=reason)
    yield compiling
    yield from _recomputing(situation, chosen, skipped)
    without = min((memory.total(one.train) for one in skipped), default=0)
    yield from swap_and_shard.swap_rows(situation, storage, without)
    yield from filter(None, (_sharing(situation, chosen, skipped),))
    if parameters(situation.geometry, "vae"):
        reason = "images are encoded and decoded whole"
        if storage.tiling:
            whole = [one for one in skipped if dataclasses.replace(one.storage, tiling=True) == storage]
            named = (f"with whole images the run needs {gib(one.peak_bytes)}" for one in whole)
            reason = next(named, "nothing larger fits")
        yield situation.decide("features.vae_tiling", on_off(storage.tiling), reason)
    yield from encoding.rows(storage, situation.geometry)


def _sharing(situation: Situation, chosen: Outcome, skipped: Sequence[Outcome]) -> Decision | None:
    """Where blocks lie, for a run of several processes over a frozen base."""
    storage, other = chosen.storage, chosen.instead
    whole = [
        one.peak_bytes
        for one in skipped
        if dataclasses.replace(one.storage, tiling=storage.tiling)
        == dataclasses.replace(storage, sharded=0, group=1)
    ]
    instead = ""
    if other is not None:
        times = f"{other.milliseconds:.0f} ms a micro-batch predicted, this {chosen.milliseconds:.0f}"
        instead = f"whole on each GPU it fits in {described(other.storage)}: {times}"
    return swap_and_shard.shard_row(situation, storage, min(whole, default=0), instead)


def _recomputing(situation: Situation, chosen: Outcome, skipped: Sequence[Outcome]) -> Iterator[Decision]:
    """Activation checkpointing, and with compiled blocks the share of activations that is kept."""
    storage, value = chosen.storage, on_off(chosen.storage.checkpointing)
    if storage.recomputed:
        value = f"{storage.recomputed} of {situation.geometry.blocks} blocks"

    def kind(one: Storage) -> tuple[str, bool, str]:
        return one.way.name, one.tiling, one.optimizer

    kept = _kept([one for one in skipped if kind(one.storage) == kind(storage)])
    reason = kept or f"fits: {gib(chosen.peak_bytes)}"
    if not storage.checkpointing:
        reason = "everything fits without, and the step is faster"
    if storage.activation_budget < 1.0 and not storage.checkpointing:
        reason = "compiled blocks recompute their cheap part instead"
    yield situation.decide("features.activation_checkpointing", value, reason)
    if storage.activation_budget < 1.0:
        yield situation.decide("features.activation_budget", f"{storage.activation_budget:g}", kept)


_HOST = "blocks that are not compiled wait for the host, which has more kernels to begin in FP8"


def _product(situation: Situation, chosen: Outcome) -> str:
    """Why linears are multiplied as they are."""
    storage, way, asked = chosen.storage, chosen.storage.way, situation.config.features.weights
    if way.trains and way.compute:
        return "written for trained weights"
    faster, reason = candidates.product_verdict(situation, way.compute or WAYS["fp8"].compute)
    if way.compute and (asked != way.weights or faster):
        return reason if faster or way.tier == 0 else "no bf16 base fits the budget"
    if not way.compute and not way.trains:
        return f"{way.weights} weights are unpacked for each product"
    if asked != "auto":
        return f"follows from features.weights: {asked}"
    if needs_whole_base(situation.config):
        return f"follows from lora.type: {situation.config.lora.type}"
    if situation.on_gpu and storage.method == "lora" and not situation.geometry.stored_as:
        obstacle = candidates.no_product(situation, WAYS["fp8"])
        host = f", but {_HOST}" if not obstacle and faster and not storage.compile else ""
        return f"FP8: {obstacle or reason}{host}"
    return "as the base is stored"


def _needs(outcomes: Sequence[Outcome], tier: int) -> str:
    """Least memory of each kind of base; of the chosen one's tier, of settings predicted to be faster."""
    least: dict[tuple[str, str], int] = {}
    for outcome in outcomes:
        kind = outcome.storage.way.name, "at least" if outcome.storage.way.tier < tier else "to be faster"
        least[kind] = min(outcome.peak_bytes, least.get(kind, outcome.peak_bytes))
    return "; ".join(f"{kind} needs {gib(need)} {limit}" for (kind, limit), need in least.items())


def _kept(outcomes: Sequence[Outcome]) -> str:
    """Memory of settings that recompute less: those that recompute no block, and the one with the most."""
    least: dict[str, int] = {}
    recomputing = [one for one in outcomes if one.storage.checkpointing]
    for outcome in [*(one for one in outcomes if not one.storage.checkpointing), *recomputing[-1:]]:
        storage, label = outcome.storage, f"keeping {outcome.storage.activation_budget:.0%}"
        if storage.checkpointing:
            label = f"recomputing {storage.recomputed or 'all'} blocks"
        least[label] = min(outcome.peak_bytes, least.get(label, outcome.peak_bytes))
    return "; ".join(f"{label} needs {gib(need)}" for label, need in [*least.items()][:_MOST_NAMED])
