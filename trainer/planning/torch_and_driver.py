"""Does the installed torch run on this GPU and driver? Refusals say what helps, passes say why."""

from __future__ import annotations

import re

from trainer.errors import HardwareError, Problem
from trainer.machine.facts import Facts, TorchBuild, Version, driver_text, version_text
from trainer.machine.profiles import ON_PURPOSE, Profile
from trainer.planning.plan import Decision
from trainer.words import extras

OLDEST_CUDA = 12
"""CUDA majors for which there is a torch that the project runs on."""
# first driver branch of each CUDA major (CUDA release notes, minor version compatibility)
FIRST_DRIVER: dict[int, int] = {11: 450, 12: 525, 13: 580}
BF16_CAPABILITY = (8, 0)


def check(facts: Facts, profile: Profile) -> tuple[Decision, ...]:
    """Rows for driver and torch; raises HardwareError with every reason why they do not fit the profile."""
    torch = facts.torch
    if torch is None:
        raise HardwareError("torch is not installed", remedy=extras.remedy())
    cuda = "CPU only" if torch.cuda is None else f"CUDA {version_text(torch.cuda)}"
    build = f"{version_text(torch.version)} ({cuda})"
    if profile.device == "cpu":
        reason = "a CPU build" if torch.cuda is None else "a CUDA build, which runs on the CPU too"
        reason = f"{facts.gpu.name} stays unused" if facts.gpus else reason
        return (Decision("torch", build, "facts", reason),)
    if torch.cuda is None:
        raise HardwareError(
            f"a CPU-only build, but this machine has a GPU ({facts.gpu.name})",
            where=f"torch {version_text(torch.version)}",
            remedy=f"install the CUDA build of torch; as a container: the image for {profile.name} instead of"
            f" the one for cpu; {ON_PURPOSE}",
        )
    runs, carries = _driver(facts, torch.cuda), _architecture(facts, torch, torch.cuda)
    problems = [one for one in (runs, carries) if isinstance(one, Problem)]
    if problems:
        raise HardwareError(problems)
    driver = f"{driver_text(facts.driver)} (CUDA {version_text(facts.driver_cuda)})"
    return Decision("driver", driver, "facts", str(runs)), Decision("torch", build, "facts", str(carries))


def covering(arch_list: tuple[str, ...], capability: tuple[int, int], *, compile_ptx: bool) -> str | None:
    """The entry of a wheel's architecture list that runs on `capability`, or None.

    Machine code (sm_XY) runs on the same major with an equal or higher minor: sm_121 runs sm_120.
    Intermediate code (compute_XY) is compiled by the driver for anything newer, unless the driver is older
    than the wheel's CUDA. Suffix a is for one exact GPU, f for its family.
    """
    best: str | None = None
    for entry in arch_list:
        found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", entry)
        if found is None:
            continue
        kind, suffix = found[1], found[4]
        built = (int(found[2]), int(found[3]))
        same_major = built[0] == capability[0] and built[1] <= capability[1]
        exact = suffix != "a" or built == capability
        if kind == "sm" and same_major and exact:
            best = entry
        if kind == "compute" and compile_ptx and not suffix and built <= capability and best is None:
            best = entry
    return best


def _driver(facts: Facts, built_for: Version) -> Problem | str:
    """Why the driver does not run what torch was built for, or how it does."""
    cuda = facts.driver_cuda
    if cuda is None:
        what = "libcuda reports no CUDA version"
        return Problem(what=what, where="driver", remedy="install the NVIDIA driver")
    first = FIRST_DRIVER.get(built_for[0])
    if cuda[0] < built_for[0]:
        remedy = f"upgrade the driver to {first} or newer" if first else "upgrade the driver"
        if cuda[0] >= OLDEST_CUDA:
            remedy += f", or use a build of torch for CUDA {cuda[0]}; as a container: docs/cuda13.md has the"
            remedy += f" arguments of an image for CUDA {cuda[0]}, which nobody has built yet"
        what = f"runs CUDA {version_text(cuda)} and older, torch was built for {version_text(built_for)}"
        return Problem(what=what, where=f"driver {driver_text(facts.driver)}", remedy=remedy)
    compatible = (
        f" by minor version compatibility within CUDA {cuda[0]} (driver >= {first or 'of that major'})"
    )
    return f"runs CUDA {version_text(built_for)}{compatible if cuda < built_for else ''}"


def _architecture(facts: Facts, torch: TorchBuild, built_for: Version) -> Problem | str:
    """Why torch carries no code for the GPU, or which it does."""
    own = f"sm_{facts.gpu.capability[0]}{facts.gpu.capability[1]}"
    if not torch.arch_list:
        return "its list of architectures is not known"
    compile_ptx = facts.driver_cuda is not None and facts.driver_cuda >= built_for
    entry = covering(torch.arch_list, facts.gpu.capability, compile_ptx=compile_ptx)
    if entry is None:
        return Problem(
            what=f"carries no code for {facts.gpu.name} ({own}), only {' '.join(torch.arch_list)}",
            where=f"torch {version_text(torch.version)}",
            remedy=f"use a build of torch whose list covers {own}, or another GPU; {ON_PURPOSE}",
        )
    if entry.startswith("sm_"):
        return f"carries code for {own}" if entry == own else f"{own} runs the {entry} code that it carries"
    return f"the driver compiles its {entry} code for {own} at the first start"


def require_memory_kind(facts: Facts, profile: Profile, unified: bool | None) -> None:
    """Raise HardwareError where UNIFIED_MEMORY says another kind of memory than the run's GPU has."""
    if unified is None:
        return
    gpu = facts.gpu if profile.device == "cuda" else None
    setting = f"UNIFIED_MEMORY={'true' if unified else 'false'}"
    shared = gpu is not None and gpu.integrated
    if unified and not shared:
        why = f"{gpu.name} has memory of its own" if gpu is not None else f"the profile is {profile.name}"
        on_purpose = profile.device == "cpu" and any(one.integrated for one in facts.gpus)
        instead = "set TRAINER_PROFILE to auto, or " if on_purpose else ""
        raise HardwareError(
            f"it requires a GPU that shares its memory with the CPU: {why}",
            where=setting,
            remedy=f"{instead}unset UNIFIED_MEMORY",
        )
    if not unified and gpu is not None and gpu.integrated:
        raise HardwareError(
            f"it excludes {gpu.name}, which shares its memory with the CPU (profile {profile.name})",
            where=setting,
            remedy="unset UNIFIED_MEMORY, or set it to true",
        )
