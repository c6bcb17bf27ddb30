"""Where hardware decisions are made: a pure function from facts and wishes to a plan."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import RunConfig, changed
from trainer.errors import HardwareError, Problem
from trainer.machine.facts import Facts
from trainer.machine.profiles import Profile
from trainer.planning import plan_rows, torch_and_driver
from trainer.planning.choose import (
    allocator,
    batching,
    candidates,
    captions,
    fit,
    keeping,
    loading,
    optimizers,
    swapping,
    switches,
)
from trainer.planning.choose.budget import Budget, budget, fillable, least_imposed
from trainer.planning.choose.suggestions import nearest_fit
from trainer.planning.choose.switches import Situation
from trainer.planning.cost import memory, roofline
from trainer.planning.plan import Decision, MemoryRow, Plan
from trainer.planning.shapes.geometry import Geometry
from trainer.words.sizes import gib

# share of the time a sample that smaller micro-batches must come below
_CLEARLY = 0.95
_RARELY_FULL = 0.75
"""Micro-batches that a batch makes, as a share of its samples, beyond which these are taken one by one."""
GeometryOf = Callable[[RunConfig, str], Geometry]
"""Geometry of a changed configuration in a compute type, for suggestions."""
ChangedBy = Callable[[Mapping[str, Any]], RunConfig]
"""The run's configuration with other values by dotted key, as `--set` loads them; ConfigError where that is
refused."""


def resolve(
    config: RunConfig,
    facts: Facts,
    profile: Profile,
    geometry: Geometry,
    sources: Mapping[str, str],
    *,
    profile_row: Decision | None = None,
    geometry_of: GeometryOf | None = None,
    changed_by: ChangedBy | None = None,
    offload: bool = True,
    environ: Mapping[str, str] | None = None,
    disk: str = "",
    goes_on: bool = False,
) -> Plan:
    """Every decision of a run with its reason.

    What the user wrote is honoured or refused; only `auto` changes. `geometry` is that of the compute type
    that `dtype_of` gives. Raises HardwareError where torch, driver or memory do not suffice, with the
    nearest configuration that fits where `geometry_of` can size others; `changed_by` makes them. Without
    `offload` (DISABLE_CPU_OFFLOAD) no weights wait in host memory: ConfigError where a number of blocks was
    written.
    `environ` is the environment of the command, in which the user may have set what the profile sets; `disk`
    the file system of the base model, as `loading.disk_of` names it. A run that `goes_on` parts its samples
    as it began.
    """
    situation = Situation(
        config=config,
        facts=facts,
        profile=profile,
        sources=sources,
        environ=environ or {},
        disk=disk,
        goes_on=goes_on,
    )
    machine_rows = torch_and_driver.check(facts, profile)
    rows = (*([profile_row] if profile_row else []), *machine_rows)
    if geometry_of is None:
        situation = situation if offload else swapping.without(situation)
        return _decide(situation, geometry, swap=True).plan(rows)
    loaded = changed_by or functools.partial(changed, config)
    return _nearest_told(situation, geometry, rows, geometry_of, loaded, offload=offload)


def _nearest_told(
    situation: Situation,
    geometry: Geometry,
    rows: tuple[Decision, ...],
    sized: GeometryOf,
    changed_by: ChangedBy,
    *,
    offload: bool,
) -> Plan:
    """The plan, or a refusal that names what does fit."""

    def planned(config: RunConfig, geometry: Geometry, rows: tuple[Decision, ...]) -> Plan:
        other = dataclasses.replace(situation, config=config)
        other = other if offload else swapping.without(other)
        try:
            return _decide_whole_or_split(other, geometry, rows, sized, swap=False)
        except fit.DoesNotFitError:
            return _decide_whole_or_split(other, geometry, rows, sized, swap=True)

    def peak_of(values: Mapping[str, Any]) -> str:
        config = changed_by(values)
        other = dataclasses.replace(situation, config=config)
        return gib(planned(config, sized(config, switches.dtype(other).value), ()).peak_bytes)

    try:
        return planned(situation.config, geometry, rows)
    except fit.DoesNotFitError as error:
        remedy = nearest_fit(situation.config, peak_of, least_imposed(error.least_bytes))
        if not offload:
            remedy = _offloaded(situation, geometry, sized) + remedy
        raise HardwareError(
            [Problem(what=problem.what, where=problem.where, remedy=remedy) for problem in error.problems]
        ) from None


def _offloaded(situation: Situation, geometry: Geometry, sized: GeometryOf) -> str:
    """Whether the run fits where blocks may wait in host memory, as the beginning of a remedy."""
    try:
        peak = _decide_whole_or_split(situation, geometry, (), sized, swap=True).peak_bytes
    except fit.DoesNotFitError:
        return ""
    return f"fits without {swapping.NO_OFFLOAD} ({gib(peak)}); "


def _decide_whole_or_split(
    situation: Situation,
    geometry: Geometry,
    rows: tuple[Decision, ...],
    sized: GeometryOf,
    *,
    swap: bool,
) -> Plan:
    """The best plan with the written micro-batches or smaller ones, as many more a step.

    Smaller ones are taken where these do not fit, or fit only less precisely or clearly slower, and single
    samples where batches would rarely be full. Raises the smallest one's error.
    """
    whole, last = None, None
    try:
        whole = _decide(situation, geometry, swap=swap)
    except fit.DoesNotFitError as error:
        last = error
    # sums of many small gradients in bf16, as a full fine-tune has them, lose what they add up
    if whole is not None and situation.config.method == "full":
        return whole.plan(rows)
    best, dtype = whole, switches.dtype(situation).value
    if whole is not None and not whole.skipped:
        alone = _one_by_one(whole, sized, swap=swap)
        return whole.plan(rows) if alone is None else alone.plan(rows, alone.one_by_one(whole))
    for smaller in batching.smaller(situation.config):
        split = dataclasses.replace(situation, config=smaller)
        try:
            found = _decide(split, sized(smaller, dtype), swap=swap)
        except fit.DoesNotFitError as error:
            last = error
            continue
        if best is None or found.is_better_than(best):
            best = found
        if not found.skipped or situation.config.method == "full":
            break
    if best is None:
        assert last is not None
        raise last
    alone = _one_by_one(best, sized, swap=swap)
    if alone is not None:
        return alone.plan(rows, alone.one_by_one(best))
    if best is whole:
        return best.plan(rows)
    return best.plan(rows, batching.row(best.situation.config, situation.config, whole.how if whole else ""))


def _one_by_one(batched: _Decided, sized: GeometryOf, *, swap: bool) -> _Decided | None:
    """Single samples, where the pictures of a batch are rarely of one shape.

    They need less memory, and come in fewer sets of shapes, of which each is a CUDA graph. None where batches
    are often full or the pictures are not known, single samples fit only less precisely or clearly slower, or
    the machine's rates are not known.
    """
    situation, parts = batched.situation, batched.geometry.usual_parts.get("alike", ())
    rarely_full = len(parts) > 1 and sum(parts) > _RARELY_FULL * len(parts)
    fixed = situation.config.method == "full" or situation.goes_on
    if not (rarely_full and batched.geometry.pictures_known) or fixed or not batched.step_milliseconds:
        return None
    *_, config = batching.smaller(situation.config)
    single, geometry = dataclasses.replace(situation, config=config), sized(config, batched.dtype.value)
    try:
        several, alone = batched, _decide(single, geometry, swap=swap)
        found = alone
        shapes = {one.attention_shape_class for one in (batched.geometry, geometry)}
        if not shapes <= {row.shape_class for row in situation.facts.verdicts}:
            # on equal terms: what was measured of one size would count for it alone
            several = _decide(situation.unmeasured, batched.geometry, swap=swap)
            alone = _decide(single.unmeasured, geometry, swap=swap)
    except HardwareError:
        return None
    return None if several.is_better_than(alone) else found


def dtype_of(config: RunConfig, facts: Facts, profile: Profile, sources: Mapping[str, str]) -> str:
    """Compute type of the run, `bf16` or `fp32`; what geometry depends on. Raises as `resolve` does."""
    torch_and_driver.check(facts, profile)
    return switches.dtype(Situation(config=config, facts=facts, profile=profile, sources=sources)).value


@dataclass(frozen=True, kw_only=True)
class _Decided:
    """Every decision, before it becomes fields and rows."""

    situation: Situation
    geometry: Geometry
    dtype: Decision
    tf32: Decision
    attention: Decision
    compiling: Decision
    graphs: Decision
    text_padding: Decision
    optimizer: Decision
    loader: Decision
    variables: allocator.Variables
    limit: Budget
    chosen: fit.Outcome
    skipped: Sequence[fit.Outcome]
    step_milliseconds: float

    def is_better_than(self, other: _Decided) -> bool:
        """Whether it changes the base's precision less, or is clearly faster with as much of it."""
        if self.chosen.tier != other.chosen.tier:
            return self.chosen.tier < other.chosen.tier
        return self._sample_milliseconds < _CLEARLY * other._sample_milliseconds

    @property
    def _sample_milliseconds(self) -> float:
        return self.chosen.milliseconds / self.situation.config.train.train_batch_size

    @property
    def parts(self) -> tuple[float, ...]:
        """Micro-batches of one, two ... of a batch's samples, on average."""
        return roofline.usual_parts(self.chosen.storage, self.geometry, self.attention.value)

    def one_by_one(self, batched: _Decided) -> Decision:
        """The row of a step whose samples are taken one by one."""
        shapes, graphs = sum(batched.geometry.usual_parts["alike"]), self.graphs.value == "on"
        return batching.one_by_one(self.situation.config, batched.situation.config, shapes, graphs=graphs)

    @property
    def keeping(self) -> keeping.Keeping:
        """What encoded samples may take of host memory."""
        host = memory.total(memory.host_rows(self.chosen.storage, self.geometry))
        return keeping.keeping(self.situation, self.limit, self.chosen.peak_bytes, host)

    @property
    def how(self) -> str:
        """The storage of the base, and whether blocks are recomputed, in words."""
        storage = self.chosen.storage
        recomputed = f", {storage.recomputed or 'all'} blocks recomputed" if storage.checkpointing else ""
        return f"{self.chosen.way.name}{recomputed}"

    def plan(self, machine_rows: tuple[Decision, ...], split: Decision | None = None) -> Plan:
        """The plan with its table; `split` is the row of a step's samples, where they are parted."""
        rows = _rows(self.situation, self.geometry, self, split)
        return _plan(self.situation, self.geometry, self, (*machine_rows, *rows))


def _decide(situation: Situation, geometry: Geometry, *, swap: bool) -> _Decided:
    """The decisions for a configuration as it is; with `swap` blocks may wait in host memory where nothing
    else fits.
    """
    swapping.require(situation, geometry)
    candidates.require_blocks(situation, geometry)
    dtype, tf32 = switches.dtype(situation), switches.tf32(situation)
    optimizer = optimizers.choose(situation, dtype.value)
    at = geometry.attention_shape_class
    attention = switches.attention(situation, dtype.value, at, packed=geometry.packed)
    limit, loader = budget(situation), loading.loader(situation)
    gpu, verdicts = situation.facts.gpu if situation.on_gpu else None, situation.facts.verdicts
    speed = roofline.speed(gpu, verdicts, geometry, attention.value, dtype.value)
    gain = fit.compile_gain(situation, dtype.value, geometry, speed)
    compiling = switches.compiling(situation, gain, batching.micro_batches(situation.config))
    compiled = compiling.value == "on"
    target = fillable(situation, limit)
    chosen, skipped = fit.choose(
        situation,
        dtype.value,
        geometry,
        target,
        speed,
        compiled=compiled,
        swap=swap and swapping.may_swap(situation, geometry),
    )
    swapping.require_room(situation, chosen.storage, geometry)
    imposed = situation.config.features.memory_budget != "auto"
    filled = memory.total(chosen.train) / limit.bytes if imposed else 0.0
    return _Decided(
        situation=situation,
        geometry=geometry,
        dtype=dtype,
        tf32=tf32,
        attention=attention,
        compiling=candidates.compiling(situation, chosen.storage, compiling),
        graphs=switches.cuda_graphs(situation, geometry, chosen.storage, filled=filled),
        text_padding=captions.text_padding(situation, geometry, chosen.storage, attention.value),
        optimizer=optimizer,
        loader=loader,
        variables=allocator.variables(situation.profile, situation.environ),
        limit=dataclasses.replace(limit, reason=target.reason),
        chosen=chosen,
        skipped=skipped,
        step_milliseconds=chosen.milliseconds if speed.known else 0.0,
    )


def _plan(situation: Situation, geometry: Geometry, decided: _Decided, rows: tuple[Decision, ...]) -> Plan:
    profile, train = situation.profile, situation.config.train
    chosen, storage = decided.chosen, decided.chosen.storage
    host = memory.host_rows(storage, geometry)
    kept = decided.keeping.bytes
    if host and kept:
        host += (MemoryRow(name="data", bytes=kept, detail="encoded samples that were read, at most"),)
    return Plan(
        profile=profile.name,
        device=profile.device,
        dtype=decided.dtype.value,
        weights=storage.way.weights,
        compute=storage.way.compute or storage.dtype,
        weight_copies=storage.way.copies,
        modulation=storage.way.modulation,
        text_encoder_weights=storage.text_encoders or storage.dtype,
        compile=storage.compile,
        activation_budget=storage.activation_budget,
        cuda_graphs=decided.graphs.value == "on",
        text_padding=decided.text_padding.value == "on",
        attention=decided.attention.value,
        activation_checkpointing=storage.checkpointing,
        recomputed_blocks=storage.recomputed,
        swapped_blocks=storage.swapped,
        micro_batch_size=train.train_batch_size,
        accumulation_steps=train.gradient_accumulation_steps,
        vae_tiling=storage.tiling,
        tf32=decided.tf32.value == "on",
        pin_memory=profile.pin_memory,
        keep_bytes=kept,
        loader=decided.loader.value,
        optimizer=decided.optimizer.value,
        environment=decided.variables.values,
        unset=decided.variables.unset,
        train_memory=chosen.train,
        cache_memory=chosen.cache,
        host_memory=host,
        step_milliseconds=round(decided.step_milliseconds, 1),
        budget_bytes=decided.limit.bytes,
        disk_bytes=plan_rows.disk(situation.config, chosen, geometry)[1],
        decisions=rows,
        warnings=tuple(plan_rows.warnings(situation, memory.total(host))),
    )


def _rows(
    situation: Situation, geometry: Geometry, decided: _Decided, split: Decision | None
) -> Iterator[Decision]:
    """The table below the machine's rows, in its order."""
    config, limit, chosen = situation.config, decided.limit, decided.chosen
    checkpoints, disk = plan_rows.disk(config, chosen, geometry)
    yield plan_rows.row("memory_budget", gib(limit.bytes), limit.source, limit.reason)
    yield decided.dtype
    yield from filter(None, (split,))
    yield from fit.decisions(situation, geometry, chosen, decided.skipped, decided.compiling)
    yield decided.graphs
    if geometry.captions_vary:
        yield decided.text_padding
    yield from (decided.attention, decided.tf32, decided.optimizer, decided.loader)
    yield from optimizers.rows(situation, decided.optimizer.value)
    yield from plan_rows.policies(situation.profile)
    yield from decided.variables.rows
    yield decided.keeping.decision
    yield batching.time_row(
        decided.step_milliseconds,
        config,
        situation.gpu,
        geometry=geometry,
        parts=sum(decided.parts),
    )
    yield plan_rows.row("caching", gib(memory.total(chosen.cache)), "auto", chosen.cache_note)
    yield plan_rows.row("disk", gib(disk), "auto", f"{checkpoints} in output_dir, and the final files")
    sources = "; ".join(sorted({component.source for component in geometry.components}))
    yield plan_rows.row("sizes", plan_rows.parameters(geometry), "facts", sources)
