"""Whether encoded samples stay in memory once they were read, and how much of it they may take."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.planning.choose.budget import Budget
from trainer.planning.choose.switches import Situation
from trainer.planning.plan import Decision
from trainer.words.sizes import gib

KEY = "data.cache_in_memory"
_FEATURE = "cache_in_memory"
# entries of a run on which reading takes a large part of a step are small: this part holds them many times
_PART = 8


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """Host memory for encoded samples, and the row that says so."""

    bytes: int
    decision: Decision


def keeping(situation: Situation, limit: Budget, device_bytes: int, host_bytes: int) -> Keeping:
    """What `data.cache_in_memory` gets beside a run that takes so much of the device and of the host.

    Where the device's memory is the host's, no more than the budget leaves.
    """
    asked = situation.config.data.cache_in_memory
    shared = situation.profile.headroom_bytes is not None
    if shared:
        room = max(0, limit.bytes - device_bytes)
    else:
        room = max(0, situation.facts.memory.available_bytes - host_bytes)
    if asked is False:
        return _kept(situation.source(KEY), 0, "off", "as written: entries are read from the disk")
    if asked is True:
        reason = f"as written: all entries, and more than {gib(room)} of them end the run"
        return _kept(situation.source(KEY), room, "on", reason)
    if shared and situation.on_gpu:
        reason = "entries are read from the disk: this memory is the GPU's too"
        return _kept(situation.profile.memory_source, 0, "off", reason)
    part = room // _PART
    reason = f"entries that were read stay: up to an eighth of the {gib(room)} that the run leaves"
    return _kept("auto", part, f"{gib(part)} at most", reason)


def _kept(source: str, count: int, value: str, reason: str) -> Keeping:
    return Keeping(
        bytes=count, decision=Decision(feature=_FEATURE, value=value, source=source, reason=reason)
    )
