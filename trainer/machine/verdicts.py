"""Verdicts of the kernel probe, kept per GPU, driver and torch in the cache folder."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import HardwareError
from trainer.files import codec
from trainer.files.cachefile import read_entries, update_entries
from trainer.machine.facts import (
    Facts,
    KernelVerdict,
    LinkVerdict,
    ReadVerdict,
    driver_text,
    version_text,
)

FILE_NAME = "verdicts.json"
Row = TypeVar("Row", KernelVerdict, ReadVerdict, LinkVerdict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineVerdicts:
    """All verdicts of one machine."""

    verdicts: tuple[KernelVerdict, ...] = ()
    readings: tuple[ReadVerdict, ...] = ()
    links: tuple[LinkVerdict, ...] = ()


def machine_key(facts: Facts) -> str:
    """Everything that a verdict depends on besides its shape: GPU name, driver, torch and its CUDA."""
    gpu = facts.gpu.name if facts.gpus else "cpu"
    torch = facts.torch
    build = f"torch {version_text(torch.version)} CUDA {version_text(torch.cuda)}" if torch else "no torch"
    return f"{gpu} | driver {driver_text(facts.driver)} | {build}"


def read_kept_of_all(path: Path, facts: Facts) -> MachineVerdicts:
    """Verdicts of every kind of GPU of the machine, as `read_kept`; with their names where it has several."""
    if len(facts.kinds) < 2:
        return read_kept(path, facts)
    verdicts, readings = dict[str, Sequence[KernelVerdict]](), dict[str, Sequence[ReadVerdict]]()
    links = dict[str, Sequence[LinkVerdict]]()
    for kind in facts.kinds:  # of one name there may be several: with other memory they compute alike
        here = facts.on(kind)
        found = read_kept(path, here)
        verdicts[here.gpu.name] = named(found.verdicts, facts, here)
        readings[here.gpu.name] = named(found.readings, facts, here)
        links[here.gpu.name] = named(found.links, facts, here)
    return MachineVerdicts(
        verdicts=tuple(itertools.chain(*verdicts.values())),
        readings=tuple(itertools.chain(*readings.values())),
        links=tuple(itertools.chain(*links.values())),
    )


def named(rows: Sequence[Row], facts: Facts, here: Facts) -> tuple[Row, ...]:
    """Rows measured on `here`, one kind of the machine's GPUs; with its name where there are several."""
    name = here.gpu.name if len(facts.kinds) > 1 else ""
    return tuple(dataclasses.replace(row, gpu=name) for row in rows)


def read_kept(path: Path, facts: Facts) -> MachineVerdicts:
    """This machine's verdicts in the file; empty where nothing was measured or the file is broken.

    Verdicts of versions that did not write down their type are left out: nobody can tell what they are of.
    """
    return _kept(read_entries(path).get(machine_key(facts)))


def keep(
    path: Path,
    facts: Facts,
    *,
    verdicts: Sequence[KernelVerdict] = (),
    readings: Sequence[ReadVerdict] = (),
    links: Sequence[LinkVerdict] = (),
) -> bool:
    """Merge verdicts into the file, newest wins, and write rates of each disk in place of its old ones.

    False where the file cannot be written.
    """
    machine, disks = machine_key(facts), {row.disk for row in readings}

    def change(entries: dict[str, Any]) -> None:
        old = _kept(entries.get(machine))
        others = tuple(row for row in old.readings if row.disk not in disks)
        new = MachineVerdicts(
            verdicts=merged(old.verdicts, verdicts),
            readings=(*others, *readings),
            links=tuple({_between(row): row for row in (*old.links, *links)}.values()),
        )
        entries[machine] = json.loads(codec.to_json(new))

    return update_entries(path, change)


def _between(row: LinkVerdict) -> tuple[tuple[int, ...], str]:
    return row.places, row.visible


def merged(old: Sequence[KernelVerdict], new: Sequence[KernelVerdict]) -> tuple[KernelVerdict, ...]:
    """One verdict for each kernel, shape class, type and kind of GPU, the new one where there are two."""
    rows = {(row.kernel, row.shape_class, row.dtype, row.gpu): row for row in (*old, *new)}
    return tuple(rows[key] for key in sorted(rows))


def untyped(path: Path, facts: Facts) -> bool:
    """True if the file has verdicts of this machine that `read_kept` leaves out for want of a type."""
    rows = _rows(read_entries(path).get(machine_key(facts)), "verdicts")
    return len(_with(rows, "dtype")) < len(rows)


def _kept(entry: object) -> MachineVerdicts:
    # each kind by itself: one of them that is broken is no reason to lose the other
    verdicts = _parsed({"verdicts": _with(_rows(entry, "verdicts"), "dtype")}).verdicts
    readings = _parsed({"readings": _rows(entry, "readings")}).readings
    # without their places they are of a version that read one other GPU's memory only
    links = _parsed({"links": _with(_rows(entry, "links"), "places")}).links
    return MachineVerdicts(verdicts=verdicts, readings=readings, links=links)


def _parsed(entry: dict[str, Any]) -> MachineVerdicts:
    try:
        return codec.from_json(MachineVerdicts, json.dumps(entry), FILE_NAME)
    except HardwareError:
        return MachineVerdicts()


def _rows(entry: object, name: str) -> list[Any]:
    rows = entry.get(name) if isinstance(entry, dict) else None
    return rows if isinstance(rows, list) else []


def _with(rows: list[Any], key: str) -> list[Any]:
    return [row for row in rows if isinstance(row, dict) and key in row]
