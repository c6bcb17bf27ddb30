"""How many processes train a run, and on which GPUs: as many as were asked for, which share a step evenly.

Their number is a property of the machine: batch, accumulation, learning rate and steps are the whole run's,
whatever it is, and nothing is multiplied by it. All GPUs of a run are of one kind.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.schema import RunConfig, changed
from trainer.errors import ConfigError
from trainer.machine.facts import EXCHANGED_BYTES, Gpu
from trainer.planning.choose import batching, optimizers, swap_and_shard
from trainer.planning.choose.situation import Situation
from trainer.planning.cost import roofline, trained_time
from trainer.planning.cost.storage import Storage
from trainer.planning.plan import Decision
from trainer.ways.storages import VALUE_BYTES
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB, gib

KEY, STEPS = "parallel.gpus", "train.gradient_accumulation_steps"
_FP8_ROWS = 16
"""Rows of which every weight that FP8 products take has a multiple."""


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One way to spread a run over the machine."""

    situation: Situation
    """With the number of processes, and micro-batches that they share evenly."""
    profile_row: Decision
    kind: int
    """Place of the kind of GPU among the machine's kinds, the preferred first; 0 on a CPU."""
    alike: int
    """Visible GPUs of this kind."""
    largest: bool
    """Whether these GPUs have more memory than any other that is visible."""
    split: Decision | None
    """The row of a step's samples, where they are parted for it."""
    asked: RunConfig
    """The configuration with the micro-batches that the user wrote."""

    @property
    def automatic(self) -> bool:
        """True where the number was not written."""
        return self.situation.config.parallel.gpus == "auto"


def spreads(machines: Sequence[tuple[Situation, Decision]]) -> list[Spread]:
    """Every way to spread a run that may be tried, the preferred first.

    `machines` are the situations on each kind of GPU, the preferred kind first, with the rows of their
    profiles. A written number has one way a kind. `auto` tries the largest number of GPUs of one kind that
    share a step evenly, then smaller ones; of equal numbers those of the preferred kind. Of a full fine-tune,
    whose weights would have to travel, it tries the smallest number first. It is one on a CPU.
    Raises HardwareError for more GPUs than there are of any kind, ConfigError where a step cannot be shared
    by so many.
    """
    first, _ = machines[0]
    config, asked, hosts = first.config, first.config.parallel.gpus, first.hosts.count
    parted = [config, *(() if first.goes_on else batching.smaller(config))]
    if asked != "auto":
        _require(first, asked, [len(one.facts.gpus) for one, _ in machines], parted)
    found: list[Spread] = []
    for kind, (situation, row) in enumerate(machines):
        alike = len(situation.facts.gpus) if situation.on_gpu else 1
        for count in range(alike * hosts, 0, -hosts) if asked == "auto" else (asked,):
            if count > 1 and unshared_weights(situation, count):
                continue
            chosen = _shared(parted, count)
            if chosen is not None and (not situation.on_gpu or count <= alike * hosts):
                found.append(_spread(situation, row, kind, count, chosen))
    if not found and hosts > 1:
        raise _unshared_by_hosts(first, parted)
    fewest_first = config.method == "full"
    return sorted(found, key=lambda one: one.situation.ranks if fewest_first else -one.situation.ranks)


def unshared_weights(situation: Situation, count: int) -> str:
    """Why a full fine-tune is not spread over so many processes; empty where it may be, and for a LoRA."""
    config = situation.config
    if config.method == "lora":
        return ""
    if config.parallel.shard == "none":
        return "parallel.shard: none keeps trained weights whole, which one process alone does"
    if config.train.optimizer in optimizers.PACKAGES:
        return f"{config.train.optimizer} keeps its state for whole weights, not for rows of them"
    if config.features.compute == "fp8" and _FP8_ROWS % count:
        return f"features.compute: fp8 parts weights evenly, whose rows are multiples of {_FP8_ROWS}"
    return ""


def _spread(situation: Situation, row: Decision, kind: int, count: int, chosen: RunConfig) -> Spread:
    gpus, devices = situation.facts.gpus, situation.devices or tuple(range(len(situation.facts.gpus)))
    own = max((gpu.total_memory_bytes for gpu in gpus), default=0)
    rest = (*situation.others, *(gpu for _, gpu in situation.in_use))
    others = max((gpu.total_memory_bytes for gpu in rest), default=0)
    split, here = None, count // situation.hosts.count
    if chosen is not situation.config:
        split = batching.row(chosen, situation.config, f"cannot be shared by {count} processes")
    on_gpu = situation.on_gpu
    return Spread(
        situation=replace(
            situation,
            config=chosen,
            ranks=count,
            facts=situation.facts.on(range(here)) if on_gpu else situation.facts,
            devices=devices[:here] if on_gpu else (),
        ),
        profile_row=row,
        kind=kind,
        alike=len(gpus) if on_gpu else 0,
        largest=own > others,
        split=split,
        asked=situation.config,
    )


def _shared(parted: Sequence[RunConfig], count: int) -> RunConfig | None:
    """The first of these configurations whose steps so many processes share evenly."""
    return next((one for one in parted if one.train.gradient_accumulation_steps % count == 0), None)


def _require(situation: Situation, count: int, sizes: Sequence[int], parted: Sequence[RunConfig]) -> None:
    """Raise where the written number is more than there are of any kind, or does not share a step."""
    hosts = situation.hosts.count
    if count % hosts:
        what = f"{count} do not lie on {hosts} hosts ({situation.hosts.source}) evenly"
        raise _refused(situation, what, f"write a multiple of {hosts}, which counts over all hosts, or auto")
    if situation.on_gpu and count > max(sizes) * hosts:
        have = " and ".join(_counted((*situation.facts.gpus, *situation.others)))
        kinds = " of one kind" if situation.others else ""
        remedy = f"write {max(sizes) * hosts} or less, or auto"
        each = f" on each of {hosts} hosts" if hosts > 1 else ""
        raise situation.refuse(KEY, f"{count} GPUs{kinds} are asked for, visible are {have}{each}", remedy)
    if count > 1 and (why := unshared_weights(situation, count)):
        raise _refused(situation, why, f"leave it out, or write {KEY}: 1")
    if _shared(parted, count) is not None:
        return
    most = parted[-1].train.gradient_accumulation_steps
    divisors = ", ".join(str(one) for one in range(1, most + 1) if most % one == 0)
    began = "micro-batches of a step, in which the run began" if situation.goes_on else "samples of a step"
    other = "" if situation.goes_on else ", or other train.gradient_accumulation_steps"
    raise _refused(
        situation, f"{count} do not share the {most} {began} evenly", f"write one of {divisors}{other}"
    )


def row(spread: Spread, skipped: Sequence[str], worse: Sequence[str] = ()) -> Decision | None:
    """The row of the number, which says what would let more GPUs help, which were taken, why ways were
    `skipped` and which are `worse`. None where there is no choice.
    """
    situation, count = spread.situation, spread.situation.ranks
    visible = spread.alike + len(situation.others) + len(situation.in_use) if situation.on_gpu else 1
    if visible == 1 and count == 1:
        return None
    value = f"{situation.ranks_here} of {visible}" if situation.on_gpu else str(situation.ranks_here)
    value += f" on each of {situation.hosts.count} hosts" if situation.hosts.several else ""
    source = "auto" if spread.automatic else situation.source(KEY)
    place = _place(spread) if situation.others or situation.in_use else ""
    parts = [_use(spread, short=bool(skipped)), place, *skipped, *worse]
    return Decision("gpus", value, source, "; ".join(filter(None, parts)))


def exchange_row(situation: Situation, storage: Storage) -> Decision | None:
    """The row of what travels for the gradients of a step; None for one process."""
    ranks, count = situation.ranks, situation.geometry.lora_parameters
    if ranks == 1:
        return None
    if storage.in_rows:
        return _rows_exchanged(situation, storage)
    rounds, others = situation.config.train.gradient_accumulation_steps // ranks, (ranks - 1) / ranks
    size = others * count * (rounds * storage.value_bytes + VALUE_BYTES["fp32"])
    link = situation.facts.link if situation.on_gpu and not situation.hosts.several else None
    source, took = "auto", ""
    if situation.hosts.several:
        took = "; the way between hosts is measured once they have met"
    if link is not None and link.exchange_ms:
        # the probe exchanged as many bytes in two, and as sums of twice as many
        took = f", in about {link.exchange_ms * size / (others * 3 * EXCHANGED_BYTES):.1f} ms"
        source = "auto (measured)"
    times = numbered(rounds, "round")
    reason = f"each receives slices of gradients in {times}, and their sums once{took}"
    return Decision("exchange", f"{size / 2**20:.0f} MiB a step", source, reason)


def _rows_exchanged(situation: Situation, storage: Storage) -> Decision:
    """The row of what travels of weights in rows."""
    rounds = situation.config.train.gradient_accumulation_steps // situation.ranks
    size = rounds * trained_time.travelling_bytes(storage, situation.geometry)
    times = numbered(rounds, "round")
    reason = f"each receives weights for both passes of {times}, and sums of its gradients in fp32"
    reason = "; ".join(filter(None, (reason, travel_counted(situation))))
    return Decision("exchange", f"{gib(int(size))} a step", "auto", reason)


def travel_counted(situation: Situation) -> str:
    """The rate that predicted times count for weights in rows on their way, in words, and where it is from;
    empty on a CPU, of which no time is predicted.
    """
    if not situation.on_gpu:
        return ""
    if situation.hosts.several:
        return "no time is counted for what travels: the way between hosts is not known"
    link = situation.facts.link
    rate = f"{roofline.gathered_bytes(link) / 1e9:.0f} GB/s"
    if link is None or not (link.gib_per_second or link.exchange_ms):
        return f"what travels is guessed at {rate}, as over two H200's NVLink: no rate was measured here"
    if roofline.gathered_bytes(link) == roofline.GATHERED_BYTES:
        return f"what travels is counted at {rate}, as over two H200's NVLink: the probe found no slower way"
    by = "exchange" if roofline.gathered_bytes(link) == roofline.exchanged_bytes(link) else "copies"
    return f"what travels is counted at {rate}, of the probe's {by}"


def _use(spread: Spread, *, short: bool) -> str:
    """The share of each process, or what would make more of these GPUs useful, unless memory is `short`, or
    the run goes on, whose checkpoint refuses another step.
    """
    situation, count, train = spread.situation, spread.situation.ranks, spread.situation.config.train
    is_lora, fixed = situation.config.method == "lora", short or situation.goes_on
    if count == 1 and spread.automatic and situation.config.method == "full":
        why = unshared_weights(situation, 2) or f"with {KEY}: N as many share a step's micro-batches"
        return f"the fewest on which a full fine-tune fits: {why}"
    if not spread.automatic and count == 1:
        return "as written"
    all_alike = spread.alike * situation.hosts.count
    if situation.on_gpu and count < all_alike and spread.automatic and not fixed and is_lora:
        return _larger_step(spread, all_alike)
    if count == 1:
        return ""
    each = train.gradient_accumulation_steps // count
    return f"each takes {each} of a step's {each * count} micro-batches; batch and rate are the whole run's"


def _larger_step(spread: Spread, alike: int) -> str:
    """The step that so many GPUs share, as it may be written into the user's configuration."""
    batch, count = spread.asked.train.train_batch_size, spread.situation.ranks
    size, steps = spread.asked.train.gradient_accumulation_steps * batch, _steps(spread.asked, alike)
    larger = steps * batch
    text = (
        f"a step has {numbered(size, 'sample')}: train.gradient_accumulation_steps:"
        f" {steps} makes a step of {larger} on {alike} GPUs"
    )
    return f"{text}, which takes about as long" if larger * count <= size * alike else text


def _steps(config: RunConfig, count: int) -> int:
    """The accumulation, no smaller than the configuration's, with which so many GPUs share a step."""
    batch = config.train.train_batch_size
    least = math.lcm(batch, count)
    return -(-config.train.gradient_accumulation_steps * batch // least) * least // batch


def elsewhere(machines: Sequence[tuple[Situation, Decision]]) -> list[dict[str, Any]]:
    """Changes that leave open what was written of the machine's GPUs, the fewest first; on a CPU, whose
    memory its processes part, the one to the fewest of these.
    """
    first, _ = machines[0]
    parallel, hosts = first.config.parallel, first.hosts.count
    if not first.on_gpu:
        return [] if parallel.gpus in ("auto", hosts) else [{KEY: hosts}]
    if hosts == max(len(one.facts.gpus) for one, _ in machines) == 1:
        return []
    number = {} if parallel.gpus == "auto" else {KEY: "auto"}
    shard = {swap_and_shard.SHARD: "auto"} if parallel.shard == "none" else {}
    return [one for one in (number, shard, {**number, **shard} if number and shard else {}) if one]


def larger_steps(machines: Sequence[tuple[Situation, Decision]]) -> list[dict[str, Any]]:
    """Changes to steps that more of the machine's GPUs share than may share one now, the smallest first; none
    where each of more GPUs would need as much.
    """
    first, _ = machines[0]
    hosts, most = first.hosts.count, max(len(one.facts.gpus) for one, _ in machines)
    several = (swap_and_shard.unshared(replace(one, ranks=2 * hosts)) for one, _ in machines)
    if not first.on_gpu or (first.config.method == "lora" and all(several)):
        return []
    opened = {key: value for changes in elsewhere(machines) for key, value in changes.items()}
    situation = replace(first, config=changed(first.config, opened))
    parted, counts = [first.config, *batching.smaller(first.config)], range(hosts, most * hosts + 1, hosts)
    shared = max((count for count in counts if _shared(parted, count)), default=0)
    more = (count for count in counts if count > shared and not unshared_weights(situation, count))
    return [{**opened, STEPS: steps} for steps in sorted({_steps(first.config, count) for count in more})]


def _place(spread: Spread) -> str:
    """The GPUs that were taken, and those that were not: of another kind, or in use by others."""
    situation = spread.situation
    places = " and ".join(str(place) for place in situation.devices)
    taken = f"on GPU {places}, {situation.facts.gpu.name}"
    if len(situation.devices) == 1 and spread.largest:
        taken += ", with the most memory"
    parts = [taken]
    if situation.in_use:
        used = (
            f"GPU {place} ({(gpu.total_memory_bytes - (gpu.free_memory_bytes or 0)) / GIB:.1f} of"
            f" {gib(gpu.total_memory_bytes)})"
            for place, gpu in situation.in_use
        )
        parts.append(f"left out, in use by other programs: {' and '.join(used)}")
    if situation.others:
        parts.append(f"left out, of another kind: {' and '.join(_counted(situation.others))}")
    return "; ".join(parts)


def _counted(gpus: Sequence[Gpu]) -> list[str]:
    """The names of GPUs, each once, with their number."""
    return [f"{number} {name}" for name, number in Counter(gpu.name for gpu in gpus).items()]


def _unshared_by_hosts(situation: Situation, parted: Sequence[RunConfig]) -> ConfigError:
    """The error for a step that not even one process a host share evenly."""
    hosts, most = situation.hosts, parted[-1].train.gradient_accumulation_steps
    why = unshared_weights(situation, hosts.count)
    if why:
        return _refused(situation, f"{hosts.count} hosts ({hosts.source}): {why}", "train on one host")
    what = f"the {most} micro-batches of a step are not shared evenly by {hosts.count} hosts ({hosts.source})"
    remedy = (
        f"write train.gradient_accumulation_steps as a multiple of {hosts.count}, or train on fewer hosts"
    )
    return _refused(situation, what, remedy)


def hosts_row(situation: Situation) -> Decision | None:
    """The row of the machines that train together; None for one."""
    hosts = situation.hosts
    if not hosts.several:
        return None
    where = f"all meet at {hosts.meeting} ({hosts.master_source})"
    reason = f"this is host {hosts.number}; {where}; it ends with 76 where another one is lost"
    return Decision("hosts", str(hosts.count), hosts.source, reason)


def _refused(situation: Situation, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{KEY}: {what}", where=situation.source(KEY), remedy=remedy)
