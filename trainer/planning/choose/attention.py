"""The attention kernel of a run: the one that was written, or the fastest that was seen working."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer.machine.facts import KernelVerdict, version_text
from trainer.planning.choose.situation import MEASURE_AGAIN, KernelsFailedError, Situation
from trainer.planning.choose.switches import compile_obstacle
from trainer.planning.plan import Decision
from trainer.ways.kernels import KERNELS, NOT_INSTALLED
from trainer.words import extras

KEY = "features.attention"


def attention(situation: Situation) -> Decision:
    """The attention kernel: the fastest that the probe saw working, else the profile's first safe one.

    Over packed rows a kernel that reads where samples end comes first where blocks may be compiled: with
    others they are compiled for each row anew. Raises KernelsFailedError for a kernel that was asked for and
    that the probe saw failing, or where none is left.
    """
    asked, verdicts = situation.config.features.attention, _verdicts(situation)
    if asked != "auto":
        seen = verdicts.get(asked)
        if seen is not None and not seen.works:
            raise situation.refuse_failed(KEY, asked, seen.reason)
        how = "not measured here" if seen is None else "works here"
        how = "torch chooses the kernel itself" if asked == "native" else how
        return situation.decide(KEY, asked, "", written=f"as written; {how}")
    order = situation.profile.attention
    measured = [
        (name, verdicts[name]) for name in order if name in verdicts and _is_installed(situation, name)
    ]
    skipped = [f"{name}: {row.reason}" for name, row in measured if not row.works]
    works = [(name, row) for name, row in measured if row.works and not _obstacle(situation, name)]
    working = {name: row.milliseconds or 0.0 for name, row in works}
    if not working:
        return _unmeasured(situation, [name for name in order if name not in verdicts], skipped)
    may_compile = situation.config.features.compile is not False and not compile_obstacle(situation)
    compiled_rows = situation.geometry.packed and may_compile
    by_rows = [name for name in working if compiled_rows and KERNELS[name].reads_ends]
    times = ", ".join(f"{name} {ms:.2f} ms" for name, ms in sorted(working.items(), key=lambda item: item[1]))
    first = "one call for any row; measured" if by_rows else "fastest measured"
    reason = "; ".join((f"{first} at {situation.geometry.attention_shape_class}: {times}", *skipped))
    best = min(by_rows or working, key=lambda name: working[name])
    return Decision("attention", best, "auto (measured)", reason)


def cannot_run(situation: Situation) -> str:
    """Why the kernel that was written cannot run on this device; empty where it can."""
    asked = situation.config.features.attention
    obstacle = "" if asked == "auto" else _obstacle(situation, asked)
    return f"{asked} cannot run here: {obstacle}" if obstacle else ""


def not_installed(situation: Situation) -> str:
    """Message that the package of the written kernel is missing; empty where none is."""
    asked = situation.config.features.attention
    absent = "" if asked == "auto" else situation.lacks(KERNELS[asked].package)
    return f"{asked} cannot run here: {absent} is not installed" if absent else ""


def installed_by(situation: Situation) -> str:
    """How the package of the kernel that was written is installed."""
    kernel = KERNELS[situation.config.features.attention]
    return f"{kernel.build or extras.remedy(kernel.extra)}; or leave {KEY} out"


def _verdicts(situation: Situation) -> Mapping[str, KernelVerdict]:
    """The probe's verdicts at the run's shape and in its type, by kernel.

    None on a package that was not installed then; whether it is installed now is a fact, not a verdict.
    """
    at = situation.geometry.attention_shape_class, situation.dtype
    return {
        row.kernel.removeprefix("attention."): row
        for row in situation.facts.verdicts
        if (row.shape_class, row.dtype) == at and row.reason != NOT_INSTALLED
    }


def _is_installed(situation: Situation, name: str) -> bool:
    """Whether the package of a kernel is there; True for a name that is no kernel's."""
    return name not in KERNELS or not situation.lacks(KERNELS[name].package)


def _unmeasured(situation: Situation, names: Sequence[str], skipped: Sequence[str]) -> Decision:
    """The first of `names` that is safe unseen; `skipped` are texts on kernels that were measured."""
    passed: dict[str, list[str]] = {}
    texts, best = [*skipped], ""
    for name in names:
        if not KERNELS[name].safe and not _is_installed(situation, name):
            continue
        unsafe = "" if KERNELS[name].safe else "not measured here (`trainer probe CONFIG`)"
        obstacle = _obstacle(situation, name) or unsafe
        if not obstacle:
            best = name
            break
        passed.setdefault(obstacle, []).append(name)
    texts += [f"{', '.join(group)}: {why}" for why, group in passed.items()]
    if not best:
        what = "no attention kernel works here: " + "; ".join(texts)
        remedy = f"{MEASURE_AGAIN}; features.attention: native lets torch choose, whatever was measured"
        raise KernelsFailedError(what, remedy=remedy)
    note = "first of the profile's order; not measured here"
    note = note if situation.on_gpu else "torch's only kernel on CPUs"
    source = f"profile {situation.profile.name}"
    return Decision("attention", best, source, "; ".join((note, *texts)))


def _obstacle(situation: Situation, name: str) -> str:
    """Why a kernel cannot run at all, whatever was measured; empty where it can."""
    kernel = KERNELS[name]
    if not situation.on_gpu:
        others = " and ".join(one.name for one in KERNELS.values() if one.on_cpu)
        return "" if kernel.on_cpu else f"a CPU has {others} only"
    capability, only = situation.facts.gpu.capability, kernel.only_capability
    if capability < kernel.least_capability:
        return f"needs compute capability {version_text(kernel.least_capability)}, this is {situation.gpu}"
    if only not in (None, capability):
        return f"is for compute capability {version_text(only)}, this is {situation.gpu}"
    wide = kernel.half and situation.dtype == "fp32"
    return f"needs bf16, the run computes in {situation.dtype}" if wide else ""
