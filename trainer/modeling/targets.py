"""Floor 4: LoRA targets as a pattern, the same for the planner and for training. Imports no torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from trainer.errors import ConfigError, Problem
from trainer.hardware.adapters import pattern_value

TARGETS = "lora.target_modules"


def target_pattern(
    requested: str | Sequence[str],
    presets: Mapping[str, str],
    linears: Collection[str],
    *,
    where: str = "",
) -> str:
    """Regular expression over whole module names for a preset or for name suffixes.

    Raises ConfigError for an unknown preset and for suffixes that none of `linears` has, listing what exists;
    `where` says what was written where.
    """
    if isinstance(requested, str):
        if requested not in presets:
            raise ConfigError(
                f"`{TARGETS}`: {requested!r} is no preset",
                where=where,
                remedy=f"use one of {', '.join(sorted(presets))}, or a list of module name suffixes",
            )
        return presets[requested]
    missing = [one for one in requested if not any(f".{name}".endswith(f".{one}") for name in linears)]
    if missing:
        raise ConfigError([_no_layer(suffix, linears, where) for suffix in missing])
    return suffix_pattern(requested)


def _no_layer(suffix: str, linears: Collection[str], where: str) -> Problem:
    known = _without_numbers(linears)
    endings = sorted({name.partition(".")[2] for name in known if "." in name})
    close = difflib.get_close_matches(suffix, [*endings, *known], n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    what = f"`{TARGETS}`: no linear layer is called {suffix!r}"
    return Problem(what=what, where=where, remedy=f"{hint}known: {', '.join(known)}")


def suffix_pattern(suffixes: Sequence[str]) -> str:
    """Regular expression over whole module names that end with one of `suffixes`."""
    return rf"(?:.*\.)?(?:{'|'.join(re.escape(suffix) for suffix in suffixes)})"


def require_matches(
    pattern: Mapping[str, float], targets: Collection[str], key: str, *, where: str = ""
) -> None:
    """Raise ConfigError for names in a peft pattern, written under `key`, that no target's name ends with."""
    missing = [one for one in pattern if not any(pattern_value({one: 1}, name, 0) for name in targets)]
    if missing:
        remedy = f"known: {', '.join(_without_numbers(targets))}"
        whats = [f"`{key}`: no layer with an adapter is called {one!r}" for one in missing]
        raise ConfigError([Problem(what=what, where=where, remedy=remedy) for what in whats])


def _without_numbers(names: Collection[str]) -> list[str]:
    """Names as they are within a block."""
    return sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names})
