"""Layers that get an adapter, the same for the planner and for training. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

from trainer.config.schema import LoraSection
from trainer.errors import ConfigError, Problem
from trainer.words.near import closest

TARGETS = "lora.target_modules"
_NOWHERE = -1.0
"""In the place of a rank or an alpha, where no key of a pattern matches."""


def target_pattern(
    lora: LoraSection,
    presets: Mapping[str, str],
    linears: Collection[str],
    sources: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Regular expression over the whole names of modules that get an adapter, of a preset or name suffixes.

    `linears` are the model's, `sources` says where keys were written. Raises ConfigError for an unknown
    preset, where nothing matches, and with every name in the targets and in the patterns of ranks and alphas
    that is no layer's.
    """
    requested = lora.target_modules
    problems: list[Problem] = []
    if not isinstance(requested, str):
        pattern = rf"(?:.*\.)?(?:{'|'.join(map(re.escape, requested))})"
        problems += _unknown_targets(requested, linears, sources)
    elif requested in presets:
        pattern = presets[requested]
    else:
        what = f"`{TARGETS}`: {requested!r} is no preset"
        remedy = f"use one of {', '.join(sorted(presets))}, or a list of module name suffixes"
        raise ConfigError(what, where=sources.get(TARGETS, ""), remedy=remedy)
    expression = re.compile(pattern)
    targets = [name for name in linears if expression.fullmatch(name)]
    if targets:
        problems += _unknown_in_patterns(lora, targets, sources)
    elif not problems:
        what, known = f"`{TARGETS}`: no layer of this model matches", ", ".join(_within_blocks(linears))
        problems.append(Problem(what=what, where=sources.get(TARGETS, ""), remedy=f"known: {known}"))
    if problems:
        raise ConfigError(problems)
    return pattern


def _unknown_targets(
    requested: Sequence[str], linears: Collection[str], sources: Mapping[str, str]
) -> Iterator[Problem]:
    for number, suffix in enumerate(requested):
        if not any(f".{name}".endswith(f".{suffix}") for name in linears):
            what = f"`{TARGETS}`: no linear layer is called {suffix!r}"
            where = sources.get(f"{TARGETS}.{number}", sources.get(TARGETS, ""))
            yield Problem(what=what, where=where, remedy=_meant(suffix, linears))


def _unknown_in_patterns(
    lora: LoraSection, targets: Collection[str], sources: Mapping[str, str]
) -> Iterator[Problem]:
    for key, values in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        for one in values:
            if not any(pattern_value({one: 1}, name, 0) for name in targets):
                what = f"`{key}`: no layer with an adapter is called '{one}'"
                where = sources.get(f"{key}.{one}", sources.get(key, ""))
                yield Problem(what=what, where=where, remedy=_meant(one, targets))


def _meant(suffix: str, names: Collection[str]) -> str:
    """Remedy for an unknown suffix: the nearest of `names`, and all of them."""
    known = _within_blocks(names)
    endings = sorted({name.partition(".")[2] for name in known if "." in name})
    near = closest(suffix, (*endings, *known))
    hint = f"did you mean {near!r}? " if near else ""
    return f"{hint}known: {', '.join(known)}"


def _within_blocks(names: Collection[str]) -> list[str]:
    """Names as they are within a block, each once."""
    return sorted({re.sub(r"^.*\.\d+\.", "", name) for name in names})


def pattern_value(pattern: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first key that a module's name ends with, as peft reads `rank_pattern`."""
    found = (value for key, value in pattern.items() if re.fullmatch(rf"(.*\.)?({key})", module))
    return next(found, default)


def in_any_order(pattern: Mapping[str, float], modules: Collection[str]) -> dict[str, float]:
    """A pattern with the same values for these modules in whatever order its keys are read: libraries write
    them to files in alphabetical order, and the first key that matches decides.
    """
    values = {name: pattern_value(pattern, name, _NOWHERE) for name in modules}
    sorted_by_key = dict(sorted(pattern.items()))
    if all(pattern_value(sorted_by_key, name, _NOWHERE) == value for name, value in values.items()):
        return dict(pattern)
    return {f"^{re.escape(name)}": value for name, value in values.items() if value != _NOWHERE}
