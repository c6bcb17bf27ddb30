"""The doctor's findings as text for people, and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from trainer.doctor.entries import KINDS, Document
from trainer.doctor.judge import Called, Decided, Finding
from trainer.doctor.rules import SEVERITIES
from trainer.errors import Problem, one_line

_WIDTH = 110
_INDENT = " " * 10


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that is said in one answer."""

    documents: tuple[Document, ...]
    problems: tuple[Problem, ...]
    findings: tuple[Finding, ...]
    decided: tuple[Decided, ...]
    called: tuple[Called, ...]
    fp8: str = ""
    """One line; empty where the machine cannot be read."""


def as_json(report: Report) -> str:
    """The report as JSON; values that may be secret are not in it."""
    kinds = {f"{one.place}: {one.kind}": {"place": one.place, "kind": one.kind} for one in report.documents}
    tree = {
        "documents": list(kinds.values()),
        "problems": [asdict(one) for one in report.problems],
        "findings": [asdict(one) for one in report.findings],
        "who_decides": [asdict(one) for one in report.decided],
        "called_here": [asdict(one) for one in report.called],
        "fp8": report.fp8,
    }
    return json.dumps(tree, indent=2)


def lines(report: Report, *, translated: bool) -> Iterator[str]:
    """Lines for a terminal: each place with its findings, who decides, names here, and FP8's line."""
    places = dict.fromkeys(document.place for document in report.documents)
    for place in places:
        kinds = dict.fromkeys(one.kind for one in report.documents if one.place == place)
        said = [one for one in report.findings if one.place == place]
        yield from _place(place, tuple(kinds), said)
    yield from _decided(report.decided)
    if translated:
        yield from _called(report.called)
    elif report.called:
        yield f"\n{len(report.called)} of these keys have names here: add --names to see them"
    yield f"\n{_summary(report.findings)}"
    if report.fp8:
        yield report.fp8


def _place(place: str, kinds: Sequence[str], said: Sequence[Finding]) -> Iterator[str]:
    """One file and what was found in it."""
    words = " and ".join(KINDS[kind] for kind in kinds)
    place = one_line(place)
    if "unknown" in kinds and not said:
        yield f"{place}: {words}, left alone"
        return
    yield f"{place}: {words}{'' if said else ', nothing wrong'}"
    for one in said:
        where = f"line {one.line}: " if one.line else f"{one.key}: " if one.key else ""
        yield from _wrapped(f"  {one.severity:<6}  {where}{one.what}")
        yield from _wrapped(f"{_INDENT}why: {one.why}")
        if one.here:
            yield from _wrapped(f"{_INDENT}here: {one.here}")
        yield from _wrapped(f"{_INDENT}{one.rule} ({one.source})")


def _decided(rows: Sequence[Decided]) -> Iterator[str]:
    """Wishes that are written in several places."""
    if not rows:
        return
    yield "\nwho decides"
    for one in rows:
        yield from _wrapped(f"  {one.wish}: {one.winner}")
        for loser in one.losers:
            yield from _wrapped(f"{_INDENT}not {loser}")
        yield from _wrapped(f"{_INDENT}why: {one.why}")
        yield from _wrapped(f"{_INDENT}here: {one.here} ({one.source})")


def _called(rows: Sequence[Called]) -> Iterator[str]:
    """Keys of others in our words."""
    place = ""
    for one in rows:
        if one.place != place:
            place = one.place
            yield f"\n{one_line(place)} in this trainer's words"
        ours = one.ours or "none"
        note = f": {one.note}" if one.note else ""
        yield from _wrapped(f"  {one.line:>4}  {one.key} -> {ours}{note}")


def _summary(findings: Sequence[Finding]) -> str:
    """Findings counted by severity."""
    counts = {name: sum(one.severity == name for one in findings) for name in SEVERITIES}
    said = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return f"found: {said}" if said else "nothing found"


def _wrapped(line: str) -> list[str]:
    """The line in the terminal's width, with later lines below its text."""
    inner = len(line) - len(line.lstrip(" "))
    indent = _INDENT if inner < len(_INDENT) else " " * inner
    wrapped = textwrap.wrap(
        line.strip(),
        _WIDTH,
        initial_indent=" " * inner,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return wrapped or [""]
