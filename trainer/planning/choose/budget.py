"""The device and host memory that a run may fill, and the sources of these figures."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from trainer.config.schema import changed
from trainer.planning.choose import allocator
from trainer.planning.choose.situation import Situation
from trainer.planning.cost.memory import HOST_BYTES
from trainer.planning.plan import Decision
from trainer.words.sizes import GIB, gib, size_bytes

KEY, KEEP_KEY = "features.memory_budget", "data.cache_in_memory"
_LEAST_WRITTEN = GIB // 10
"""A budget of less is no advice."""
_AS_GOOD_AS = 0.99
"""A card of 24 GB has 23.99 GiB: who writes 24GiB means all of it."""
# of a budget; measured peaks were up to 2.4 % above predicted ones
_FILLED, _FILLED_IMPOSED = 0.97, 0.98
# entries of a run on which reading takes a large part of a step are small: this part holds them many times
_KEPT_PART = 8


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Device memory that the run may fill."""

    bytes: int
    usable_bytes: int
    """Bytes that a prediction may reach: more of an imposed budget, which is the user's word; beyond `bytes`
    the allocator fails.
    """
    imposed: bool
    """Whether the user wrote the budget."""
    source: str
    reason: str


def budget(situation: Situation) -> Budget:
    """The budget that the user imposes, else the profile's share of the device's memory.

    It is less where that memory is the host's and others use it, or where the user's own allocator variable
    has a smaller share. Raises HardwareError for an imposed budget that is not there.
    """
    profile, host = situation.profile, situation.facts.memory
    asked, imposed = situation.config.features.memory_budget, situation.asked(KEY) != "auto"
    total = host.total_bytes
    if situation.on_gpu:
        # of GPUs of one kind a display or ECC may take some: every process keeps within the least
        total = min(gpu.total_memory_bytes for gpu in situation.facts.gpus)
    spelling, share = allocator.cap(situation.environ) if situation.on_gpu else ("", 1.0)
    cap, most, source = int(share * total), total, profile.memory_source
    size, reason = int(profile.budget_share * total), f"{profile.budget_share:.0%} of {gib(total)}"
    if profile.headroom_bytes is not None:
        # the process takes its part beside what the device holds; on a CPU the plan's rows have it
        beside = situation.ranks_here * HOST_BYTES if situation.on_gpu else 0
        rest = max(0, host.available_bytes - profile.headroom_bytes - beside)
        # beyond its share a machine whose memory is the host's can stop answering
        most, reason = min(rest, size), f"{reason}, the allocator's cap"
        if rest < size:
            reason = f"{gib(host.available_bytes)} available now, less {gib(profile.headroom_bytes)} headroom"
            size, reason = rest, reason + (f" and {gib(beside)} of {_processes(situation)}" if beside else "")
    if imposed:
        source, most, wanted = situation.source(KEY), min(most, cap), size_bytes(asked)
        if most < wanted * _AS_GOOD_AS:
            why = f" ({reason})" if profile.headroom_bytes is not None else ""
            what = f"{asked} is more than {situation.gpu} has to give, {most / GIB:.2f} GiB{why}"
            less = f", or write at most {most * 10 // GIB / 10}GiB" if most >= _LEAST_WRITTEN else ""
            raise situation.refuse(KEY, what, f"leave {KEY} out{less}")
        size, reason = min(wanted, most), f"imposed, of {gib(total)}"
        if most < wanted:
            reason = f"imposed: of the {asked} that were written {most / GIB:.2f} GiB are there"
    if cap < size:
        size, source, reason = cap, spelling, f"the allocator may take {share:.0%}; {reason}"
    if situation.ranks_here > 1 and profile.headroom_bytes is not None:
        size, reason = size // situation.ranks_here, f"of {situation.ranks_here} processes each; {reason}"
    filled = _FILLED_IMPOSED if imposed else _FILLED
    return Budget(
        bytes=size,
        usable_bytes=int(size * filled),
        imposed=imposed,
        source=source,
        reason=f"{reason}; {1 - filled:.0%} is left for what predictions miss",
    )


def _processes(situation: Situation) -> str:
    return "the process" if situation.ranks_here == 1 else f"{situation.ranks_here} processes"


def least_imposed(situation: Situation, peak_bytes: int) -> str:
    """The smallest budget, as it may be written, within which a run of this predicted peak fits; empty where
    it is more than `auto` would take of the device, of which other programs may need the rest.
    """
    least = f"{math.ceil(peak_bytes / _FILLED_IMPOSED / GIB * 10) / 10}GiB"
    by_itself = replace(situation, config=changed(situation.config, {KEY: "auto"}))
    return least if size_bytes(least) <= budget(by_itself).bytes else ""


def kept_samples(
    situation: Situation, limit: Budget, device_bytes: int, host_bytes: int
) -> tuple[int, Decision]:
    """Bytes in which encoded samples of each process may stay once they were read, and the row on
    `data.cache_in_memory`, beside a run that takes so much of a device, and of the host by all processes.

    Where the device's memory is the host's, no more than the budget leaves.
    """
    asked, shared = situation.config.data.cache_in_memory, situation.profile.headroom_bytes is not None
    available = (situation.facts.memory.available_bytes - host_bytes) // situation.ranks_here
    room = max(0, limit.bytes - device_bytes if shared else available)
    if asked is True:
        written = f"as written: all entries, and more than {gib(room)} of them end the run"
        return room, situation.decide(KEEP_KEY, "on", "", written=written)
    if asked is False:
        written = "as written: entries are read from the disk"
        return 0, situation.decide(KEEP_KEY, "off", "", written=written)
    if shared and situation.on_gpu:
        reason = "entries are read from the disk: this memory is the GPU's too"
        return 0, Decision("cache_in_memory", "off", situation.profile.memory_source, reason)
    part = room // _KEPT_PART
    reason = f"entries that were read stay: up to an eighth of the {gib(room)} that the run leaves"
    reason += f" to each of {situation.ranks_here} processes" if situation.ranks_here > 1 else ""
    return part, situation.decide(KEEP_KEY, f"{gib(part)} at most", reason)
