"""The loader of the base model's files: the one asked for, or the one measured to be faster."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trainer.machine.facts import Facts
from trainer.machine.host import read_text
from trainer.machine.mounts import holding, parse_mounts
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision
from trainer.words.sizes import GIB

KEY, PACKAGE = "features.loader", "fastsafetensors"
OURS = "parallel"
"""Parallel reads of our own, which `auto` takes without a measurement."""
STATES = ("cold", "cached")
MOST_BYTES = GIB // 2
"""Bytes of a file that are read to measure."""
LEAST_HOST_BYTES = 4 * GIB
"""Host memory that must be available: the process that measures loads torch, and the page cache takes what
is read."""
_CLEARLY = 1.1
"""How much faster fastsafetensors must be: it holds up to 1 GiB more of the device's memory."""


def loader(situation: Situation) -> Decision:
    """Decision on the loader of the base model's files.

    Its value is `safetensors`, `fastsafetensors`, `auto` (parallel reads of our own), or `fastsafetensors-`
    and a state of STATES: files in that state are read by it, others as by `auto`.
    """
    asked, seen = situation.config.features.loader, _seen(situation.facts, situation.disk)
    if asked != "auto" or not situation.on_gpu:
        mapped = "safetensors" if asked == "auto" else asked
        return situation.decide(KEY, mapped, "files are mapped into memory")
    if not seen or not_here(situation) or situation.facts.gpu.integrated:
        reason = "parallel reads, past the page cache for files that are not in it"
        return situation.decide(KEY, "auto", reason)
    if situation.ranks_here > 1:
        reason = (
            f"parallel reads: each of {situation.ranks_here} processes reads its share, {PACKAGE} whole files"
        )
        return situation.decide(KEY, "auto", reason)
    faster = [one for one in STATES if seen.get((PACKAGE, one), 0) > _CLEARLY * seen.get((OURS, one), 1e9)]
    value = {0: "auto", 1: f"{PACKAGE}-{''.join(faster)}", 2: PACKAGE}[len(faster)]
    return Decision("loader", value, "auto (measured)", _reason(seen, situation))


def not_here(situation: Situation) -> str:
    """Why fastsafetensors cannot be had; empty where it can."""
    if not situation.on_gpu:
        return "it reads into GPU memory, and there is none"
    return "" if PACKAGE in situation.facts.packages else f"{PACKAGE} is not installed"


def unmeasured(facts: Facts, disk: str) -> str:
    """Why loaders are not measured on this machine; empty where they may be."""
    if PACKAGE not in facts.packages:
        return f"{PACKAGE} is not installed"
    if facts.gpu.integrated:
        return "CPU and GPU share one memory: only our own reader gives the page cache back"
    if not disk:
        return "the base model is not on this disk yet"
    if facts.memory.available_bytes < LEAST_HOST_BYTES:
        return f"less than {LEAST_HOST_BYTES // GIB} GiB of host memory are available"
    return ""


def disk_of(folder: Path | None, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The file system that a folder lies on, as its kind and mount point; empty where that cannot be told."""
    if folder is None:
        return ""
    # files of the hub's cache are links to where they are kept
    mount = holding(str(folder.resolve()), parse_mounts(read_text(mountinfo)))
    return "" if mount is None else f"{mount.kind} {mount.path}"


def _seen(facts: Facts, disk: str) -> Mapping[tuple[str, str], float]:
    """GiB a second by loader and state."""
    return {
        (row.loader, row.state): row.gib_per_second for row in facts.readings if disk and row.disk == disk
    }


def _reason(seen: Mapping[tuple[str, str], float], situation: Situation) -> str:
    """The rates that were measured; 0 is what was not reached in the time for it."""
    rates = []
    for state in STATES:
        found = [
            f"{name} {f'{rate:.2f}' if rate else 'not reached in time'}"
            for one, name in ((OURS, "parallel reads"), (PACKAGE, PACKAGE))
            if (rate := seen.get((one, state))) is not None
        ]
        rates += [f"{state}: {', '.join(found)}"] if found else []
    return f"GiB/s measured on {situation.disk}, {'; '.join(rates)}"
