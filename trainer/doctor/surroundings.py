"""This environment, its packages and the machine as documents, from what was already read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata

from trainer.doctor.entries import Document, Entry
from trainer.machine.facts import Facts, version_text
from trainer.ways.storages import WAYS


def environment_document(environ: Mapping[str, str]) -> Document:
    """The variables of this process."""
    entries = tuple(Entry(path=("env", name), value=environ[name]) for name in sorted(environ))
    return Document(kind="environment", place="environment", entries=entries, is_ours=True)


def packages_document(facts: Facts) -> Document:
    """Packages of this Python; those of the facts where a recorded machine stands in."""
    found = {plain_name(name): version for name, version in facts.packages.items()}
    entries = tuple(Entry(path=(name,), value=found[name]) for name in sorted(found))
    return Document(kind="packages", place="packages", entries=entries)


def installed() -> dict[str, str]:
    """Versions of everything that is installed beside this program, from its metadata."""
    found = ((one.metadata["Name"], one.version) for one in metadata.distributions())
    return {name: version for name, version in found if name}


def plain_name(name: str) -> str:
    """A package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def machine_document(facts: Facts, place: str = "machine") -> Document:
    """The facts that rules may ask for."""
    values = {"gpus": str(len(facts.gpus)), "architecture": facts.architecture}
    if facts.gpus:
        gpu = facts.gpu
        values |= {"gpu": gpu.name, "capability": version_text(gpu.capability)}
        values["unified"] = "true" if gpu.integrated else "false"
    if facts.torch is not None:
        values["cuda"] = "none" if facts.torch.cuda is None else version_text(facts.torch.cuda)
    entries = tuple(Entry(path=(name,), value=value) for name, value in values.items())
    return Document(kind="machine", place=place, entries=entries)


def fp8_here(facts: Facts) -> str:
    """One line: does FP8 work on this machine, by what was recorded of it?"""
    least = WAYS["fp8"].least_capability
    if not facts.gpus:
        return f"FP8 here: no, there is no GPU{f' ({facts.gpu_problem})' if facts.gpu_problem else ''}"
    gpu = facts.gpu
    if gpu.capability < least:
        has, needs = version_text(gpu.capability), version_text(least)
        return f"FP8 here: no, {gpu.name} has compute capability {has}, and FP8 units begin with {needs}"
    rows = {(row.kernel, row.shape_class): row for row in facts.verdicts if row.gpu in ("", gpu.name)}
    fp8 = [row for row in rows.values() if row.kernel == WAYS["fp8"].verdict]
    if not fp8:
        return (
            f"FP8 here: not measured; {gpu.name} has the units. `trainer probe CONFIG` measures it at the"
            " shape of a run"
        )
    failing = [row for row in fp8 if not row.works]
    if failing:
        return f"FP8 here: no, the probe saw it failing at {failing[0].shape_class}: {failing[0].reason}"
    said = []
    for row in fp8:
        bf16 = rows.get(("matmul.bf16", row.shape_class))
        known = row.milliseconds is not None and bf16 is not None and bf16.milliseconds is not None
        beside = f", bf16 {bf16.milliseconds:.2f} ms" if known and bf16 is not None else ""
        speed = "" if row.milliseconds is None else f": {row.milliseconds:.2f} ms{beside}"
        said.append(f"{row.shape_class}{speed}")
    return f"FP8 here: works, as measured at {'; '.join(said)}"
