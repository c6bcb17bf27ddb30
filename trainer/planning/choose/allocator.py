"""Variables that the profile sets for the training process, and the user's own values of them."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.errors import ConfigError
from trainer.machine.profiles import Profile
from trainer.planning.plan import Decision

NAME = "PYTORCH_ALLOC_CONF"
OTHER_SPELLINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_CAP = "per_process_memory_fraction"
_CAPPED = re.compile(rf"\b{_CAP}\s*:\s*([^,\s]*)")


Variables = tuple[dict[str, str], tuple[str, ...], list[Decision]]
"""Variables that the training process gets before it imports torch, other spellings that it must not see, and
rows of the plan."""


def variables(profile: Profile, environ: Mapping[str, str]) -> Variables:
    """The profile's variables; a value of the user's own stays, but for what keeps a whole machine alive.

    `environ` is the environment in which the command was called. Raises ConfigError for two spellings that
    differ, and for an allocator that goes beyond the cap of a machine whose memory is the host's.
    """
    values, rows = dict[str, str](), list[Decision]()
    for name, ours in profile.environment.items():
        spelling, written = _written(name, environ)
        value, source = ours, profile.memory_source
        reason = "set before the training process starts"
        if written and written != ours:
            value, source = _capped(spelling, written, ours), spelling
            reason = f"yours, in place of {ours}"
            if value != written:
                reason = f"yours, with the cap that this machine needs ({profile.memory_source})"
        values[name] = value
        rows.append(Decision("environment", name, source, f"{value}, {reason}"))
    unset = tuple(one for one in OTHER_SPELLINGS if NAME in values and one in environ)
    return values, unset, rows


def cap(environ: Mapping[str, str]) -> tuple[str, float]:
    """(variable, share) of the device's memory that the user lets the allocator take at most; ("", 1.0)
    without. `variables` says whether a machine takes it.
    """
    spelling, written = _written(NAME, environ)
    shares = [float(share) for share in _CAPPED.findall(written) if _is_share(share) and float(share) > 0]
    return (spelling, min(shares)) if shares else ("", 1.0)


def _written(name: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """How the user spelled a variable, and its value; both empty where it is not set."""
    spellings = (NAME, *OTHER_SPELLINGS) if name == NAME else (name,)
    found = [(one, environ[one].strip()) for one in spellings if environ.get(one, "").strip()]
    if len({value for _, value in found}) > 1:
        raise ConfigError(
            "they are spellings of one variable, and differ: " + ", ".join(value for _, value in found),
            where=" and ".join(spelling for spelling, _ in found),
            remedy=f"keep {NAME}, and unset the others",
        )
    return found[0] if found else ("", "")


def _capped(spelling: str, written: str, ours: str) -> str:
    """The user's value with the profile's cap, where that has one and the user wrote none."""
    most = _CAPPED.search(ours)
    if most is None:
        return written
    asked = _CAPPED.findall(written)
    if not asked:
        return f"{written},{most[0]}"
    above = [share for share in asked if not _is_share(share) or float(share) > float(most[1])]
    if above:
        raise ConfigError(
            f"{_CAP}:{above[0]} is refused: CPU and GPU share one memory here, and beyond {most[1]} of it"
            " the whole machine may stop answering, without an error",
            where=spelling,
            remedy=f"write {most[0]} or less, or leave it out; features.memory_budget limits memory too",
        )
    return written


def _is_share(text: str) -> bool:
    return re.fullmatch(r"(0?\.\d+|[01](\.\d*)?|\d(\.\d*)?e-\d+)", text) is not None
