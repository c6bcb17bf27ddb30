"""How much device memory a run may fill, and where that figure comes from."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from trainer.planning.choose import allocator
from trainer.planning.choose.switches import Situation
from trainer.planning.cost.memory import HOST_BYTES
from trainer.words.sizes import GIB, gib, size_bytes

KEY = "features.memory_budget"
_AS_GOOD_AS = 0.99
"""A card of 24 GB has 23.99 GiB: who writes 24GiB means all of it."""


# of a budget; measured peaks were up to 2.4 % above predicted ones
_FILLED, _FILLED_IMPOSED = 0.97, 0.98


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Device memory that the run may fill, and where the figure comes from."""

    bytes: int
    source: str
    reason: str


def budget(situation: Situation) -> Budget:
    """What the user imposes, else the profile's share of the device's memory; less where that is the host's
    and others use it, or where the user's own allocator variable has a smaller share. Raises HardwareError
    for an imposed budget that is not there.
    """
    spelling, share = allocator.cap(situation.environ) if situation.on_gpu else ("", 1.0)
    cap = int(share * situation.facts.gpu.total_memory_bytes) if spelling else None
    found = _of_machine(situation, cap)
    if cap is None or cap >= found.bytes:
        return found
    return Budget(bytes=cap, source=spelling, reason=f"the allocator may take {share:.0%}; {found.reason}")


def _of_machine(situation: Situation, cap: int | None) -> Budget:
    """The same; `cap` is what the user's variable leaves of an imposed budget."""
    profile, host = situation.profile, situation.facts.memory
    total = situation.facts.gpu.total_memory_bytes if situation.on_gpu else host.total_bytes
    share, asked = int(total * profile.budget_share), situation.config.features.memory_budget
    headroom = profile.headroom_bytes
    if headroom is None:
        if asked != "auto":
            return _imposed(situation, asked, total if cap is None else min(total, cap), total)
        return Budget(
            bytes=share, source=profile.memory_source, reason=f"{profile.budget_share:.0%} of {gib(total)}"
        )
    # the process takes its part beside what the device holds; on a CPU the plan's rows have it
    beside = HOST_BYTES if situation.on_gpu else 0
    rest = max(0, host.available_bytes - headroom - beside)
    if asked != "auto":
        # beyond its share a machine whose memory is the host's can stop answering
        return _imposed(situation, asked, min(rest, share, cap or share), total)
    if rest < share:
        reason = f"{gib(host.available_bytes)} available now, less {gib(headroom)} headroom"
        reason += f" and {gib(beside)} of the process" if beside else ""
        return Budget(bytes=rest, source=profile.memory_source, reason=reason)
    reason = f"{profile.budget_share:.0%} of {gib(total)}, the allocator's cap"
    return Budget(bytes=share, source=profile.memory_source, reason=reason)


def _imposed(situation: Situation, asked: str, most: int, total: int) -> Budget:
    """The budget that the user wrote, or `most` where that is nearly as much; else HardwareError."""
    source, wanted = situation.source(KEY), size_bytes(asked)
    if wanted <= most:
        return Budget(bytes=wanted, source=source, reason=f"imposed, of {gib(total)}")
    if most < wanted * _AS_GOOD_AS:
        what = f"{asked} is more than {situation.gpu} has to give, {most / GIB:.2f} GiB"
        remedy = f"leave {KEY} out, or write at most {_whole_tenths(most)}"
        raise situation.refuse(KEY, what, remedy)
    reason = f"imposed: of the {asked} that were written {most / GIB:.2f} GiB are there"
    return Budget(bytes=most, source=source, reason=reason)


def fillable(situation: Situation, limit: Budget) -> Budget:
    """What a prediction may reach. More of an imposed budget, which is the user's word; beyond it the
    allocator fails.
    """
    share = _FILLED if situation.config.features.memory_budget == "auto" else _FILLED_IMPOSED
    reason = f"{limit.reason}; {1 - share:.0%} is left for what predictions miss"
    return dataclasses.replace(limit, bytes=int(limit.bytes * share), reason=reason)


def least_imposed(peak_bytes: int) -> str:
    """The smallest budget, as it may be written, within which a run of this predicted peak fits."""
    return f"{math.ceil(peak_bytes / _FILLED_IMPOSED / GIB * 10) / 10}GiB"


def _whole_tenths(count: int) -> str:
    """Bytes as a size that may be written, rounded down."""
    return f"{count * 10 // GIB / 10}GiB"
