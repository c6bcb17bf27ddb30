"""Does the installed torch run on this GPU and driver? Refusals say what helps, passes say why."""

from __future__ import annotations

import re

from trainer.errors import HardwareError, Problem
from trainer.machine.facts import Facts, Gpu, TorchBuild, Version, driver_text, version_text
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
    if facts.torch is None:
        raise HardwareError("torch is not installed", remedy=extras.remedy())
    if profile.device == "cpu":
        return (_row("torch", _build(facts.torch), _cpu_reason(facts)),)
    gpu = facts.gpu
    if facts.torch.cuda is None:
        raise HardwareError(
            f"a CPU-only build, but this machine has a GPU ({gpu.name})",
            where=f"torch {version_text(facts.torch.version)}",
            remedy=f"install the CUDA build of torch; as a container: the image for {profile.name} instead of"
            f" the one for cpu; {ON_PURPOSE}",
        )
    driver_problem, driver_reason = _driver(facts, facts.torch.cuda)
    arch_problem, arch_reason = _architecture(facts, facts.torch, gpu)
    problems = [problem for problem in (driver_problem, arch_problem) if problem is not None]
    if problems:
        raise HardwareError(problems)
    return (
        _row(
            "driver", f"{driver_text(facts.driver)} (CUDA {version_text(facts.driver_cuda)})", driver_reason
        ),
        _row("torch", _build(facts.torch), arch_reason),
    )


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


def _driver(facts: Facts, built_for: Version) -> tuple[Problem | None, str]:
    known, cuda = driver_text(facts.driver), facts.driver_cuda
    if cuda is None:
        return Problem(
            what="libcuda reports no CUDA version", where="driver", remedy="install the NVIDIA driver"
        ), ""
    if cuda[0] < built_for[0]:
        needed = FIRST_DRIVER.get(built_for[0])
        upgrade = f"upgrade the driver to {needed} or newer" if needed else "upgrade the driver"
        image = f"; as a container: docs/cuda13.md has the arguments of an image for CUDA {cuda[0]},"
        image += " which nobody has built yet"
        problem = Problem(
            what=f"runs CUDA {version_text(cuda)} and older, torch was built for {version_text(built_for)}",
            where=f"driver {known}",
            remedy=f"{upgrade}, or use a build of torch for CUDA {cuda[0]}{image}"
            if cuda[0] >= OLDEST_CUDA
            else upgrade,
        )
        return problem, ""
    if cuda < built_for:
        return None, (
            f"runs CUDA {version_text(built_for)} by minor version compatibility within CUDA {cuda[0]}"
            f" (driver >= {FIRST_DRIVER.get(cuda[0], 'of that major')})"
        )
    return None, f"runs CUDA {version_text(built_for)}"


def _architecture(facts: Facts, torch: TorchBuild, gpu: Gpu) -> tuple[Problem | None, str]:
    own = f"sm_{gpu.capability[0]}{gpu.capability[1]}"
    if not torch.arch_list:
        return None, "its list of architectures is not known"
    compile_ptx = torch.cuda is not None and facts.driver_cuda is not None and facts.driver_cuda >= torch.cuda
    entry = covering(torch.arch_list, gpu.capability, compile_ptx=compile_ptx)
    if entry is None:
        problem = Problem(
            what=f"carries no code for {gpu.name} ({own}), only {' '.join(torch.arch_list)}",
            where=f"torch {version_text(torch.version)}",
            remedy=f"use a build of torch whose list covers {own}, or another GPU; {ON_PURPOSE}",
        )
        return problem, ""
    if entry == own:
        return None, f"carries code for {own}"
    if entry.startswith("sm_"):
        return None, f"{own} runs the {entry} code that it carries"
    return None, f"the driver compiles its {entry} code for {own} at the first start"


def _cpu_reason(facts: Facts) -> str:
    if facts.gpus:
        return f"{facts.gpu.name} stays unused"
    if facts.torch is not None and facts.torch.cuda is not None:
        return "a CUDA build, which runs on the CPU too"
    return "a CPU build"


def _build(torch: TorchBuild) -> str:
    cuda = "CPU only" if torch.cuda is None else f"CUDA {version_text(torch.cuda)}"
    return f"{version_text(torch.version)} ({cuda})"


def _row(feature: str, value: str, reason: str) -> Decision:
    return Decision(feature=feature, value=value, source="facts", reason=reason)


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
