"""Floor 2: what the kernel probe measured, kept per GPU, driver and torch in the cache folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from trainer.errors import HardwareError
from trainer.hardware import codec
from trainer.hardware.cachefile import read_entries, write_entries
from trainer.hardware.facts import Facts, KernelVerdict, driver_text, version_text

FILE_NAME = "verdicts.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MachineVerdicts:
    """All verdicts of one machine."""

    verdicts: tuple[KernelVerdict, ...]


def machine_key(facts: Facts) -> str:
    """What a verdict depends on besides its shape: GPU name, driver, torch and the CUDA it was built for."""
    gpu = facts.gpus[0].name if facts.gpus else "cpu"
    torch = facts.torch
    build = f"torch {version_text(torch.version)} CUDA {version_text(torch.cuda)}" if torch else "no torch"
    return f"{gpu} | driver {driver_text(facts.driver)} | {build}"


def read_verdicts(path: Path, facts: Facts) -> tuple[KernelVerdict, ...]:
    """Verdicts of this machine; empty where none were measured or the file is broken."""
    entry = read_entries(path).get(machine_key(facts))
    if entry is None:
        return ()
    try:
        return codec.from_json(MachineVerdicts, json.dumps(entry), str(path)).verdicts
    except HardwareError:
        return ()


def write_verdicts(path: Path, facts: Facts, verdicts: Sequence[KernelVerdict]) -> bool:
    """Merge into the file by kernel and shape class, newest wins; False where the file cannot be written."""
    merged = {(verdict.kernel, verdict.shape_class): verdict for verdict in read_verdicts(path, facts)}
    merged.update({(verdict.kernel, verdict.shape_class): verdict for verdict in verdicts})
    ordered = tuple(merged[key] for key in sorted(merged))
    entries = read_entries(path)
    entries[machine_key(facts)] = json.loads(codec.to_json(MachineVerdicts(verdicts=ordered)))
    return write_entries(path, entries)
