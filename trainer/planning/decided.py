"""Every decision of a configuration on a machine, and the plan that is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.judging.rules import keeps_best
from trainer.machine.host import WSL_SPILLS
from trainer.planning import rules
from trainer.planning.choose import (
    attention,
    batching,
    fastest_fit,
    gpus,
    loading,
    optimizers,
    swap_and_shard,
    switches,
)
from trainer.planning.choose.budget import Budget, budget, kept_samples
from trainer.planning.choose.situation import Situation
from trainer.planning.cost import disk, memory, roofline
from trainer.planning.cost.storage import parameters
from trainer.planning.plan import Decision, MemoryRow, Plan, on_off
from trainer.planning.variables import Variables, variables
from trainer.words.plurals import numbered
from trainer.words.sizes import gib

# share of the time a sample that another setting must come below
_CLEARLY = 0.95


@dataclass(frozen=True, kw_only=True)
class Decided:
    """The decisions for one situation."""

    situation: Situation
    limit: Budget
    chosen: fastest_fit.Outcome
    skipped: Sequence[fastest_fit.Outcome]
    """Better settings that do not fit."""
    made: Mapping[str, Decision]
    """Decisions that are rows of their own, by feature."""
    variables: Variables
    step_milliseconds: float
    """Predicted for a batch; 0 where the machine's rates are unknown, as the next two."""
    optimizer_milliseconds: float
    """Predicted for the optimizer's step, of which a batch has its share; 0 of a LoRA's."""
    peak_tflops: float
    """bf16 peak of one GPU by its maker's data sheet."""

    @property
    def how(self) -> str:
        """The storage of the base, and whether blocks are recomputed, in words."""
        return fastest_fit.described(self.chosen.storage)

    def is_better_than(self, other: Decided) -> bool:
        """True if this plan changes the base's precision less, or equally and is clearly faster."""
        tier, others = self.chosen.storage.way.tier, other.chosen.storage.way.tier
        return tier < others or (tier == others and self._sample_ms < _CLEARLY * other._sample_ms)

    def is_preferred_to(self, other: Decided) -> bool:
        """True if this plan, on other GPUs, changes the base's precision less, else keeps all blocks on them,
        else takes clearly less time a sample. Predicted times count where both are known.
        """
        own, others = self._cost, other._cost
        if own != others or not (self.step_milliseconds and other.step_milliseconds):
            return own < others
        time, its = (one._sample_ms / one.situation.ranks for one in (self, other))
        return time < _CLEARLY * its

    @property
    def is_ideal(self) -> bool:
        """True where nothing had to be given up for memory but time."""
        return self._cost == (0, False)

    @property
    def precision(self) -> int:
        """Steps down from the most precise way to store weights; 0 where none was taken."""
        return self.chosen.storage.way.tier

    @property
    def _cost(self) -> tuple[int, bool]:
        storage = self.chosen.storage
        return storage.way.tier, storage.swapped > 0

    @property
    def _sample_ms(self) -> float:
        return self.chosen.milliseconds / self.situation.config.train.train_batch_size


def decide(situation: Situation, *, swap: bool) -> Decided:
    """The decisions for a configuration as it is; with `swap` blocks may wait in host memory where nothing
    else fits.

    Raises HardwareError for what was asked for and cannot be had, DoesNotFitError where nothing fits.
    """
    rules.require(situation)
    kernel, limit = attention.attention(situation), budget(situation)
    speed = _speed(situation, kernel.value)
    compiling = switches.compiling(situation, fastest_fit.compile_gain(situation, speed), known=speed.known)
    swap = (
        swap
        and situation.config.features.block_swap == "auto"
        and not swap_and_shard.swap_obstacle(situation)
    )
    chosen, skipped = fastest_fit.choose(situation, limit, speed, compiled=compiling.value == "on", swap=swap)
    what = swap_and_shard.no_room(situation, chosen.storage)
    if what:
        raise situation.refuse(swap_and_shard.SWAP, what, f"write less, or leave {swap_and_shard.SWAP} out")
    filled = memory.total(chosen.train) / limit.bytes if limit.imposed else 0.0
    made = (
        compiling,
        switches.cuda_graphs(situation, chosen.storage, filled=filled),
        switches.text_padding(situation, chosen.storage),
        kernel,
        switches.tf32(situation),
        optimizers.optimizer(
            situation,
            chosen=chosen.storage.optimizer,
            others=min(
                (memory.total(one.train) for one in skipped if one.storage.optimizer == optimizers.SPLIT),
                default=0,
            ),
        ),
        loading.loader(situation),
    )
    return Decided(
        situation=situation,
        limit=limit,
        chosen=chosen,
        skipped=skipped,
        made={one.feature: one for one in made},
        variables=variables(situation),
        step_milliseconds=chosen.milliseconds if speed.known else 0.0,
        optimizer_milliseconds=(
            roofline.optimizer_ms(chosen.storage, situation.geometry, speed) if speed.known else 0.0
        ),
        peak_tflops=speed.rates.bf16 if speed.known else 0.0,
    )


def _speed(situation: Situation, attention: str) -> roofline.Speed:
    """The rates and verdicts for a run that uses this attention kernel."""
    return roofline.speed(
        situation.facts.gpu if situation.on_gpu else None,
        situation.facts.verdicts,
        situation.geometry,
        attention,
        situation.dtype,
        link=situation.facts.link if situation.on_gpu else None,
        way_known=not situation.hosts.several,
    )


def host_bytes(decided: Decided) -> int:
    """Host memory that all training processes need beside their devices."""
    return memory.total(memory.host_rows(decided.chosen.storage, decided.situation.geometry))


def plan_of(decided: Decided, machine_rows: Sequence[Decision], split: Decision | None) -> Plan:
    """The plan with its table; `split` is the row of a step's samples, where they are parted."""
    situation, chosen, made = decided.situation, decided.chosen, decided.made
    storage, profile, train = chosen.storage, situation.profile, situation.config.train
    (host, kept, keeping), (disk_bytes, disk) = _host(decided), _disk(situation, chosen)
    return Plan(
        profile=profile.name,
        device=profile.device,
        dtype=storage.dtype,
        weights=storage.way.weights,
        compute=storage.way.compute or storage.dtype,
        weight_gradient=storage.weight_gradient,
        weight_copies=storage.way.copies,
        modulation=storage.way.modulation,
        text_encoder_weights=storage.text_encoders or storage.dtype,
        compile=storage.compile,
        activation_budget=storage.activation_budget,
        cuda_graphs=made["cuda_graphs"].value == "on",
        text_padding=made["text_padding"].value == "on",
        attention=storage.attention,
        activation_checkpointing=storage.checkpointing,
        recomputed_blocks=storage.recomputed,
        swapped_blocks=storage.swapped,
        sharded_blocks=storage.sharded,
        shard_group=storage.group,
        in_rows=storage.in_rows,
        micro_batch_size=train.train_batch_size,
        accumulation_steps=train.gradient_accumulation_steps,
        ranks=situation.ranks,
        devices=situation.devices or ((0,) if situation.on_gpu else ()),
        vae_tiling=storage.tiling,
        tf32=made["tf32"].value == "on",
        pin_memory=profile.pin_memory,
        keep_bytes=kept,
        loader=made["loader"].value,
        optimizer=made["optimizer"].value,
        environment=decided.variables.of_all,
        rank_environment=decided.variables.of_ranks,
        unset=decided.variables.unset,
        train_memory=chosen.train,
        cache_memory=chosen.cache,
        host_memory=host,
        step_milliseconds=round(decided.step_milliseconds, 1),
        optimizer_milliseconds=round(decided.optimizer_milliseconds, 1),
        peak_tflops=decided.peak_tflops,
        budget_bytes=decided.limit.bytes,
        disk_bytes=disk_bytes,
        decisions=(*machine_rows, *_rows(decided, split, keeping, disk)),
        warnings=tuple(_warnings(situation, memory.total(host))),
    )


def _host(decided: Decided) -> tuple[tuple[MemoryRow, ...], int, Decision]:
    """Rows of host memory; of it the bytes of samples that each process may keep, and the row of these."""
    situation, chosen = decided.situation, decided.chosen
    host = memory.host_rows(chosen.storage, situation.geometry)
    kept, keeping = kept_samples(situation, decided.limit, chosen.peak_bytes, memory.total(host))
    if host and kept:
        each = f", of {situation.ranks_here} processes" if situation.ranks_here > 1 else ""
        detail = f"encoded samples that were read, at most{each}"
        host += (MemoryRow("data", situation.ranks_here * kept, detail),)
    return host, kept, keeping


def _rows(decided: Decided, split: Decision | None, keeping: Decision, disk: Decision) -> Iterator[Decision]:
    """The table below the machine's rows, in its order."""
    situation, limit, chosen, made = decided.situation, decided.limit, decided.chosen, decided.made
    geometry, profile, notes = situation.geometry, situation.profile, dict(situation.profile.notes)
    yield Decision("memory_budget", gib(limit.bytes), limit.source, limit.reason)
    yield situation.type_row
    yield from filter(None, (split,))
    yield from fastest_fit.decisions(situation, chosen, decided.skipped, made["compile"])
    yield from filter(None, (gpus.exchange_row(situation, chosen.storage),))
    yield made["cuda_graphs"]
    if geometry.captions_vary or geometry.packed:
        yield made["text_padding"]
    yield from (made[name] for name in ("attention", "tf32", "optimizer", "loader"))
    yield from optimizers.rows(situation)
    pinned = "faster copies to the GPU" if profile.pin_memory else "there is no GPU to copy to"
    reason = notes.pop("pin_memory", pinned)
    yield Decision("pin_memory", on_off(profile.pin_memory), profile.memory_source, reason)
    yield from (Decision(feature, "off", profile.memory_source, why) for feature, why in notes.items())
    yield from decided.variables.rows
    yield keeping
    parts = sum(roofline.usual_parts(chosen.storage, geometry, chosen.storage.attention))
    beside = gpus.travel_counted(situation) if chosen.storage.in_rows else ""
    yield batching.time_row(situation, decided.step_milliseconds, parts, beside)
    yield from batching.optimizer_rows(situation, decided.optimizer_milliseconds, chosen.storage)
    yield Decision("caching", gib(memory.total(chosen.cache)), "auto", chosen.cache_note)
    yield disk
    count = parameters(geometry, "trained")
    size = f"{count / 1e9:.1f} B parameters" if count >= 10**8 else f"{count / 1e6:.2f} M parameters"
    sources = sorted({component.source for component in geometry.components})
    yield Decision("sizes", size, "facts", "; ".join(sources))


def _disk(situation: Situation, chosen: fastest_fit.Outcome) -> tuple[int, Decision]:
    """Bytes of all checkpoints that exist at one time and of the final files, and their row."""
    config = situation.config
    steps, every = config.train.max_train_steps, config.checkpoint.checkpointing_steps
    saved = steps // every
    # the last step is saved too, but not by a full fine-tune that was told to write no checkpoints
    if steps % every and (config.method == "lora" or saved):
        saved += 1
    count = min(config.checkpoint.checkpoints_total_limit + 1, saved)
    # the best one's, and what is to take its place
    copies = 3 if keeps_best(config) else 1
    copies += count if config.method == "lora" and config.checkpoint.lora_files else 0
    size = disk.disk_bytes(chosen.storage, situation.geometry, checkpoints=count, copies=copies)
    each = ", each with its LoRA," if config.checkpoint.lora_files else ","
    reason = f"{numbered(count, 'checkpoint')} in output_dir{each} and the final files"
    return size, Decision("disk", gib(size), "auto", reason)


def _warnings(situation: Situation, needed: int) -> Iterator[str]:
    """Warnings about things that work, but deserve to be known; `needed` are bytes of host memory."""
    facts, available = situation.facts, situation.facts.memory.available_bytes
    several = situation.ranks_here > 1
    if needed > available:
        who = (
            f"the {situation.ranks_here} training processes need" if several else "the training process needs"
        )
        yield f"{who} {gib(needed)} of host memory, {gib(available)} are available"
    if facts.wsl and situation.on_gpu:
        yield WSL_SPILLS
    if facts.gpus and not situation.on_gpu:
        yield f"{facts.gpu.name} is not used: TRAINER_PROFILE is cpu"
