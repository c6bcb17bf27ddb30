"""Clocks of a GPU under load and why its driver holds them back, by nvidia-smi. No torch."""

from __future__ import annotations

import csv
from dataclasses import dataclass

from trainer.errors import HardwareError
from trainer.machine import idle

_FIELDS = "clocks_event_reasons.active,clocks.sm,clocks.max.sm,memory.used"
POWER_CAP = "power cap"
"""Usual under full load, and no sign that something is wrong."""
REASONS = {
    0x4: POWER_CAP,
    0x8: "hardware slowdown",
    0x10: "kept in step with another GPU",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "power brake",
}
"""Bits of nvml.h's nvmlClocksEventReason* by which a GPU is slower than it could be. Left out: idle (0x1)
and clocks that somebody has set (0x2, 0x100), which are the same for every run."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """A GPU at one moment; a figure that nvidia-smi does not know is None."""

    reasons: tuple[str, ...]
    """Why its clocks are held back; empty where they are not."""
    mhz: int | None
    most_mhz: int | None
    used_mib: int | None


def parse(text: str) -> Look:
    """The one line of nvidia-smi's answer. Raises HardwareError for anything else."""
    rows = [row for row in csv.reader(text.splitlines(), skipinitialspace=True) if row]
    if len(rows) != 1 or len(rows[0]) != len(_FIELDS.split(",")):
        raise HardwareError(f"nvidia-smi answered {text.strip()!r}", where="nvidia-smi --query-gpu")
    bits, *figures = rows[0]
    active = int(bits, 16) if bits.lower().startswith("0x") else 0
    mhz, most, used = map(idle.number, figures)
    reasons = tuple(name for bit, name in REASONS.items() if active & bit)
    return Look(reasons=reasons, mhz=mhz, most_mhz=most, used_mib=used)


def look(name: str) -> Look | None:
    """The GPU as it is now; None where there is no nvidia-smi. Raises HardwareError where it fails."""
    try:
        return parse(idle.ask(name, f"--query-gpu={_FIELDS}"))
    except FileNotFoundError:
        return None
