"""Verdicts of the kernel probe, kept per GPU, driver and torch in the cache folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.errors import HardwareError
from trainer.files import codec
from trainer.files.cachefile import read_entries, update_entries
from trainer.machine.facts import Facts, KernelVerdict, ReadVerdict, driver_text, version_text

FILE_NAME = "verdicts.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineVerdicts:
    """All verdicts of one machine."""

    verdicts: tuple[KernelVerdict, ...] = ()
    readings: tuple[ReadVerdict, ...] = ()


def machine_key(facts: Facts) -> str:
    """Everything that a verdict depends on besides its shape: GPU name, driver, torch and its CUDA."""
    gpu = facts.gpu.name if facts.gpus else "cpu"
    torch = facts.torch
    build = f"torch {version_text(torch.version)} CUDA {version_text(torch.cuda)}" if torch else "no torch"
    return f"{gpu} | driver {driver_text(facts.driver)} | {build}"


def read_verdicts(path: Path, facts: Facts) -> tuple[KernelVerdict, ...]:
    """Verdicts of this machine; empty where none were measured or the file is broken.

    Those of versions that did not write down a verdict's type are left out: nobody can tell what they are of.
    """
    return _verdicts(read_entries(path).get(machine_key(facts)), path)


def write_verdicts(path: Path, facts: Facts, verdicts: Sequence[KernelVerdict]) -> bool:
    """Merge into the file, newest wins; False where the file cannot be written."""
    return _change(path, facts, verdicts, ())


def read_readings(path: Path, facts: Facts) -> tuple[ReadVerdict, ...]:
    """Rates of loaders on this machine, from the same file."""
    return _readings(read_entries(path).get(machine_key(facts)), path)


def write_readings(path: Path, facts: Facts, readings: Sequence[ReadVerdict]) -> bool:
    """Write rates of each disk in place of its old ones; False where the file cannot be written."""
    return _change(path, facts, (), readings)


def _change(
    path: Path, facts: Facts, verdicts: Sequence[KernelVerdict], readings: Sequence[ReadVerdict]
) -> bool:
    machine, disks = machine_key(facts), {row.disk for row in readings}

    def change(entries: dict[str, Any]) -> None:
        entry = entries.get(machine)
        old = tuple(row for row in _readings(entry, path) if row.disk not in disks)
        kept = MachineVerdicts(verdicts=merged(_verdicts(entry, path), verdicts), readings=(*old, *readings))
        entries[machine] = json.loads(codec.to_json(kept))

    return update_entries(path, change)


def merged(old: Sequence[KernelVerdict], new: Sequence[KernelVerdict]) -> tuple[KernelVerdict, ...]:
    """One verdict for each kernel, shape class and type, the new one where there are two."""
    rows = {(row.kernel, row.shape_class, row.dtype): row for row in (*old, *new)}
    return tuple(rows[key] for key in sorted(rows))


def untyped(path: Path, facts: Facts) -> bool:
    """Whether the file has verdicts of this machine that `read_verdicts` leaves out for want of a type."""
    rows = _rows(read_entries(path).get(machine_key(facts)))
    return len(_typed(rows)) < len(rows)


def _verdicts(entry: object, path: Path) -> tuple[KernelVerdict, ...]:
    return _parsed({"verdicts": _typed(_rows(entry))}, path).verdicts


def _readings(entry: object, path: Path) -> tuple[ReadVerdict, ...]:
    return _parsed({"readings": _rows(entry, "readings")}, path).readings


def _parsed(entry: dict[str, Any], path: Path) -> MachineVerdicts:
    try:
        return codec.from_json(MachineVerdicts, json.dumps(entry), str(path))
    except HardwareError:
        return MachineVerdicts()


def _rows(entry: object, name: str = "verdicts") -> list[Any]:
    rows = entry.get(name) if isinstance(entry, dict) else None
    return rows if isinstance(rows, list) else []


def _typed(rows: list[Any]) -> list[Any]:
    return [row for row in rows if isinstance(row, dict) and "dtype" in row]
