"""The hardware decisions: a pure function from facts and configuration to a plan."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import RunConfig
from trainer.errors import HardwareError
from trainer.planning import torch_and_driver
from trainer.planning.choose import batching, gpus, swap_and_shard
from trainer.planning.choose.budget import least_imposed
from trainer.planning.choose.fastest_fit import DoesNotFitError
from trainer.planning.choose.situation import KernelsFailedError, Situation
from trainer.planning.choose.suggestions import nearest_fits, sentence
from trainer.planning.decided import Decided, decide, host_bytes, plan_of
from trainer.planning.plan import Decision, Plan
from trainer.words.sizes import gib

_RARELY_FULL = 0.75
"""Micro-batches that a batch makes, as a share of its samples, beyond which these are taken one by one."""
ChangedBy = Callable[[Mapping[str, Any]], RunConfig]
"""The run's configuration with other values by dotted key, as `--set` loads them; ConfigError where that is
refused."""
Parted = tuple[Decided, Decision | None]
"""Decisions, and the row of a step's samples where they are not taken as they were written."""


def resolve(machines: Sequence[tuple[Situation, Decision]], changed_by: ChangedBy, *, offload: bool) -> Plan:
    """Every decision of a run with its reason.

    `machines` are the situations on each kind of GPU, the preferred kind first, with the rows of their
    profiles. What the user wrote is honoured or refused; only `auto` changes. Raises HardwareError where
    torch, driver or memory do not suffice; of memory it names the nearest configuration that fits. Without
    `offload` (DISABLE_CPU_OFFLOAD) no weights wait in host memory: ConfigError where a number of blocks was
    written.
    """
    found = _tried(machines, offload=offload)
    if found.ways:
        return _planned(found.ways, found.skipped)
    last, told = found.nearest
    if isinstance(told, DoesNotFitError):
        raise _with_nearest(machines, last.situation, told, changed_by, offload=offload) from None
    raise told


def _tried(machines: Sequence[tuple[Situation, Decision]], *, offload: bool) -> _Tried:
    """Every way to spread a run that may be taken, and those that may not; raises as `gpus.spreads`."""
    tried: list[tuple[gpus.Spread, HardwareError]] = []
    skipped: list[str] = []
    ways: list[_Way] = []
    for one in gpus.spreads(machines):
        try:
            rows = torch_and_driver.check(one.situation.facts, one.situation.profile)
            decided, split = _best(_obeying(one.situation, offload=offload))
        except KernelsFailedError:
            raise  # measured again, they may work
        except HardwareError as error:
            tried.append((one, error))
            skipped.append(_why_skipped(one, error))
            continue
        needed, available = host_bytes(decided), one.situation.facts.memory.available_bytes
        if one.automatic and one.situation.ranks_here > 1 and needed > available:
            who = f"{one.situation.ranks_here} training processes need {gib(needed)} of host memory"
            skipped.append(f"{who}, {gib(available)} are available")
            continue
        ways.append(_Way(spread=one, decided=decided, rows=rows, split=split or one.split))
        if decided.is_ideal and len(machines) == 1:
            break  # fewer GPUs would only be slower, and of a full fine-tune more send more
    if ways and machines[0][0].config.method == "full":
        # the fewest on which it fits at its best precision
        least = min(way.decided.precision for way in ways)
        count = next(way.spread.situation.ranks for way in ways if way.decided.precision == least)
        fewer = [way for way in ways if way.spread.situation.ranks < count]
        skipped += [way.why_skipped for way in fewer]
        ways = [way for way in ways if way.spread.situation.ranks == count]
    return _Tried(ways=ways, skipped=skipped, refused=tried)


def _preferred(ways: Sequence[_Way]) -> _Way:
    """The best of ways that may be taken, the first of equal ones."""
    best = ways[0]
    for way in ways[1:]:
        best = way if way.decided.is_preferred_to(best.decided) else best
    return best


def _planned(ways: Sequence[_Way], skipped: Sequence[str]) -> Plan:
    """The plan of the best way; of each other kind of GPU the first one is named."""
    best = _preferred(ways)
    worse = [way for way in reversed(ways) if way.spread.kind != best.spread.kind]
    others = {way.spread.kind: way.why_skipped for way in worse}
    made = gpus.row(best.spread, skipped, tuple(others.values()))
    machines = gpus.hosts_row(best.spread.situation)
    rows = (best.spread.profile_row, *best.rows, *filter(None, (machines, made)))
    return dataclasses.replace(
        plan_of(best.decided, rows, best.split), hosts=best.spread.situation.hosts.count
    )


@dataclass(frozen=True, kw_only=True)
class _Way:
    """A way to spread the run over the machine, with its decisions."""

    spread: gpus.Spread
    decided: Decided
    rows: Sequence[Decision]
    split: Decision | None

    @property
    def why_skipped(self) -> str:
        count, name = self.spread.situation.ranks, self.spread.situation.facts.gpu.name
        return f"on {count} {name} with weights in {self.decided.how}, which is less precise or slower"


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """Ways to spread a run that may be taken, and others that were tried."""

    ways: Sequence[_Way]
    skipped: Sequence[str]
    """Why others are not taken, in words."""
    refused: Sequence[tuple[gpus.Spread, HardwareError]]

    @property
    def nearest(self) -> tuple[gpus.Spread, HardwareError]:
        """Of those refused, of the preferred kind, what needs least; of equal ones the last one tried."""
        return min(reversed(self.refused), key=lambda one: (one[0].kind, _least(one[1])))


def _least(error: HardwareError) -> int:
    return error.least_bytes if isinstance(error, DoesNotFitError) else 0


def _why_skipped(one: gpus.Spread, error: HardwareError) -> str:
    count, name = one.situation.ranks, one.situation.facts.gpu.name if one.situation.on_gpu else "CPU"
    if isinstance(error, DoesNotFitError):
        return f"on {count} {name} the run does not fit: it needs {gib(error.least_bytes)} of each at least"
    return f"not on {count} {name}: {error.problems[0].what}"


def _obeying(situation: Situation, *, offload: bool) -> Situation:
    return situation if offload else swap_and_shard.without(situation)


def _with_nearest(
    machines: Sequence[tuple[Situation, Decision]],
    situation: Situation,
    error: DoesNotFitError,
    changed_by: ChangedBy,
    *,
    offload: bool,
) -> DoesNotFitError:
    """The error of the situation that needs least, with the nearest configuration that fits as its remedy."""

    def peak_of(values: Mapping[str, Any]) -> str:
        config = changed_by(values)
        found = _tried(
            [(dataclasses.replace(one, config=config), row) for one, row in machines], offload=offload
        )
        if not found.ways:
            raise found.nearest[1]
        return gib(_preferred(found.ways).decided.chosen.peak_bytes)

    goes_on = situation.goes_on
    nearest = nearest_fits(
        situation.config,
        peak_of,
        least_imposed(situation, error.least_bytes),
        elsewhere=gpus.elsewhere(machines),
        larger_steps=gpus.larger_steps(machines),
        goes_on=goes_on,
    )
    remedy = sentence(nearest, goes_on=goes_on)
    if not offload:
        with contextlib.suppress(DoesNotFitError):
            peak = gib(_parted(situation, swap=True)[0].chosen.peak_bytes)
            remedy = f"fits without {swap_and_shard.NO_OFFLOAD} ({peak}); {remedy}"
    (problem,), taken = error.problems, _taken_bytes(situation, offload=offload)
    if taken:
        total = gib(situation.facts.memory.total_bytes)
        once = f"other programs have {gib(taken)} of the host's {total}: it fits once they end"
        remedy = f"{once}, or {remedy}" if nearest else once
    told = DoesNotFitError(problem.what, where=problem.where, remedy=remedy)
    told.least_bytes, told.budget_bytes, told.nearest = error.least_bytes, error.budget_bytes, nearest
    told.taken_bytes = taken
    return told


def _taken_bytes(situation: Situation, *, offload: bool) -> int:
    """Host memory in bytes that other programs have, where the run fits once they end; else 0."""
    facts, idle = situation.facts, situation.facts.memory.idle()
    if idle == facts.memory:
        return 0
    alone = dataclasses.replace(situation, facts=dataclasses.replace(facts, memory=idle))
    try:
        _best(_obeying(alone, offload=offload))
    except HardwareError:
        return 0
    return idle.available_bytes - facts.memory.available_bytes


def _best(situation: Situation) -> Parted:
    """The decisions of `_parted`, with blocks in host memory only where nothing fits without."""
    try:
        return _parted(situation, swap=False)
    except DoesNotFitError:
        return _parted(situation, swap=True)


def _parted(situation: Situation, *, swap: bool) -> Parted:
    """The best decisions with the written micro-batches or smaller ones, as many more a step.

    Smaller ones are taken where these do not fit, or fit only less precisely or clearly slower, and single
    samples where batches would rarely be full; of a run that goes on none, whose checkpoint refuses them.
    Raises the smallest one's error.
    """
    asked, best, whole = situation.config, None, None
    last: DoesNotFitError | None = None
    for config in (asked, *(() if situation.goes_on else batching.smaller(asked))):
        try:
            other = situation if config is asked else dataclasses.replace(situation, config=config)
            found = decide(other, swap=swap)
        except DoesNotFitError as error:
            last = error
            continue
        whole = found if config is asked else whole
        if best is None or found.is_better_than(best):
            best = found
        # sums of many small gradients in bf16, as a full fine-tune has them, lose what they add up
        if not found.skipped or asked.method == "full":
            break
    if best is None:
        assert last is not None
        raise last
    alone = _one_by_one(best, swap=swap)
    if alone is not None:
        shapes = sum(best.situation.geometry.usual_parts["alike"])
        graphs = " and fewer CUDA graphs" if alone.made["cuda_graphs"].value == "on" else ""
        as_long = f"one by one takes about as long, in less memory{graphs}"
        why = f"are pictures of {shapes:.1f} shapes on average: {as_long}"
        return alone, batching.row(alone.situation.config, best.situation.config, why)
    if best is whole:
        return best, None
    why = f"fit only in {whole.how}" if whole else "do not fit"
    return best, batching.row(best.situation.config, asked, why)


def _one_by_one(batched: Decided, *, swap: bool) -> Decided | None:
    """Single samples, where the pictures of a batch are rarely of one shape.

    They need less memory, and come in fewer sets of shapes, of which each is a CUDA graph. None where batches
    are often full or the pictures are not known, single samples fit only less precisely or clearly slower, or
    the machine's rates are not known.
    """
    situation = batched.situation
    parts = situation.geometry.usual_parts.get("alike", ())
    rarely_full = len(parts) > 1 and sum(parts) > _RARELY_FULL * len(parts)
    fixed = situation.config.method == "full" or situation.goes_on
    if not (rarely_full and situation.geometry.pictures_known) or fixed or not batched.step_milliseconds:
        return None
    *_, config = batching.smaller(situation.config)
    single = dataclasses.replace(situation, config=config)
    try:
        several, alone = batched, decide(single, swap=swap)
        found = alone
        shapes = {one.geometry.attention_shape_class for one in (situation, single)}
        if not shapes <= {row.shape_class for row in situation.facts.verdicts}:
            # on equal terms: what was measured of one size would count for it alone
            facts = dataclasses.replace(situation.facts, verdicts=())
            several, alone = (
                decide(dataclasses.replace(one, facts=facts), swap=swap) for one in (situation, single)
            )
    except HardwareError:
        return None
    return None if several.is_better_than(alone) else found
