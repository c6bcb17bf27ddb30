"""Judgement of documents by the table of rules, and by what the room of configurations knows of variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trainer.config import elsewhere, fields, secrets
from trainer.doctor import conditions, rules
from trainer.doctor.conditions import Case
from trainer.doctor.entries import TRAINING, Document, Entry
from trainer.doctor.rules import SEVERITIES, Rule
from trainer.errors import ExitCode, Problem, one_line

_MOST_LETTERS = 60
_ORDER = {severity: place for place, severity in enumerate(SEVERITIES)}
FOREIGN_VARIABLE = "env-elsewhere"
"""Rule of variables that have a row in the table of other trainers' words and no rule of their own."""
MACHINE = "machine"
"""Rule of problems that a preflight or the plan has with this machine."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that a rule says about one entry."""

    severity: str
    rule: str
    place: str
    line: int
    key: str
    what: str
    why: str
    here: str
    source: str
    machine: bool = False


@dataclass(frozen=True, kw_only=True)
class Decided:
    """One wish that is written in several places: the place that decides, and those that do not."""

    wish: str
    winner: str
    losers: tuple[str, ...]
    why: str
    here: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Called:
    """The same wish in this trainer's words."""

    place: str
    line: int
    key: str
    ours: str
    note: str


def judge(documents: Iterable[Document]) -> tuple[Finding, ...]:
    """Findings of all rules about all documents, by place and line, the gravest first within one."""
    case = Case(documents=tuple(documents), known=rules.known())
    found = [one for document in case.documents for one in _of_document(document, case)]
    unique = {(one.rule, one.place, one.line, one.key): one for one in found}
    places = {document.place: place for place, document in reversed(list(enumerate(case.documents)))}
    order = sorted(unique.values(), key=lambda one: (places[one.place], one.line, _ORDER[one.severity]))
    return tuple(order)


def _of_document(document: Document, case: Case) -> Iterator[Finding]:
    told: set[tuple[str, ...]] = set()
    case = replace(case, judged=document)
    for rule in rules.rules():
        if document.kind not in rule.kinds:
            continue
        for entry, captured in conditions.found(rule.first, document, case):
            if all(conditions.holds(one, document, case, captured) for one in rule.when[1:]):
                told.add(entry.path)
                yield _finding(rule, document, entry)
    if document.is_ours:
        yield from _foreign(document, told)


def _foreign(document: Document, told: set[tuple[str, ...]]) -> Iterator[Finding]:
    """Variables of the trainer's own process for which a start of the trainer has an error or a warning."""
    environ = {entry.name: entry.value for entry in document.entries if entry.path not in told}
    lines = {entry.name: entry.line for entry in document.entries}
    for name, row in elsewhere.variables(environ):
        yield Finding(
            severity="error" if row.is_error else "unused",
            rule=FOREIGN_VARIABLE,
            place=document.place,
            line=lines[name],
            key=name,
            what=row.says,
            why="the trainer says so at every start",
            here=row.remedy,
            source="docs/coming-from.md, environment variables",
        )


def _finding(rule: Rule, document: Document, entry: Entry) -> Finding:
    words = {
        "value": shown_value(entry),
        "key": one_line(entry.name if "env" in entry.path[-2:] else ".".join(entry.path[-2:])),
        "first_line": str(entry.first_line),
        "near": "",
    }
    if rule.first.verb == "misspelt":
        words["near"] = conditions.near(entry, rules.known()[rule.first.operand[0]]) or ""
    what, why, here = (_filled(text, words) for text in (rule.what, rule.why, rule.here))
    return Finding(
        severity=rule.severity,
        rule=rule.id,
        place=document.place,
        line=entry.line,
        key=one_line(".".join(entry.path)),
        what=what,
        why=why,
        here=here,
        source=rule.source,
        machine=rule.machine,
    )


def _filled(text: str, words: dict[str, str]) -> str:
    """The text with its words in their places; other braces stay."""
    return re.sub(r"\{(\w+)\}", lambda found: words.get(found[1], found[0]), text)


def shown_value(entry: Entry) -> str:
    """A value for people: one line, not long, and nothing of a secret."""
    if any(secrets.names_secret(part) for part in (*entry.path, *re.split(r"[^\w-]+", entry.value))):
        return secrets.HIDDEN
    text = one_line(secrets.redacted(entry.value))
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 3]}..."


def of_machine(problems: Iterable[Problem]) -> Iterator[Finding]:
    """Problems that a preflight has with this machine, as findings."""
    for one in problems:
        yield Finding(
            severity="error",
            rule=MACHINE,
            place=MACHINE,
            line=0,
            key=one.where,
            what=one.what,
            why="no run can start on this machine",
            here=one.remedy,
            source="trainer preflight",
            machine=True,
        )


def decided(documents: Sequence[Document]) -> tuple[Decided, ...]:
    """Wishes that the documents have in several places, and who decides."""
    case = Case(documents=tuple(documents))
    found = []
    for wish in rules.wishes():
        by_place = [
            dict.fromkeys(
                _chosen(document, entry, place.note)
                for document in case.of(place.kinds)
                for entry, _ in conditions.found(place.test, document, case)
            )
            for place in wish.places
        ]
        # files of one place are of several runs, each of which reads its own
        winners, *later = [one for one in by_place if one] or [{}]
        losers = tuple(dict.fromkeys(text for one in later for text in one if text not in winners))
        if losers:
            one = Decided(
                wish=wish.name,
                winner=" or ".join(winners),
                losers=losers,
                why=wish.why,
                here=wish.here,
                source=wish.source,
            )
            found.append(one)
    return tuple(found)


def _chosen(document: Document, entry: Entry, note: str) -> str:
    """A place that has a choice, in words."""
    key = one_line(".".join(entry.path[-2:]))
    noted = f" ({note})" if note else ""
    return f"{one_line(document.where(entry.line))} {key}: {shown_value(entry)}{noted}"


def called(documents: Iterable[Document]) -> Iterator[Called]:
    """Keys of others that have a row in the table of other trainers' words, or our key's name."""
    for document in documents:
        if document.kind not in (*TRAINING, "accelerate", "deepspeed"):
            continue
        seen: set[str] = set()
        for entry in document.entries:
            # what stands below a key with a row is that key's: ZeRO's `stage` is not LLaMA-Factory's
            below = any(elsewhere.key(section) is not None for section in entry.path[:-1])
            row = None if below else elsewhere.key(entry.name) or _same_name(entry)
            if row is not None and entry.name not in seen:
                seen.add(entry.name)
                yield Called(
                    place=document.place, line=entry.line, key=entry.name, ours=row.ours, note=row.note
                )


def _same_name(entry: Entry) -> elsewhere.Row | None:
    """A row for a key outside of sections that has the name of one of ours; None for others."""
    ours = next((key for key in fields.dotted_keys() if key.rpartition(".")[2] == entry.name), None)
    if ours is None or entry.section or len(entry.path) > 1:
        return None
    path = tuple(ours.split("."))
    words, takes = fields.choices(path), fields.expected(path)
    differs = set(words) == set(re.split(r", | or ", takes)) and entry.value.lower() not in words
    note = f"the same name here, which takes {takes}" if differs else "the same name here"
    return elsewhere.Row(names=(entry.name,), ours=ours, note=note)


def exit_code(findings: Iterable[Finding], problems: Sequence[Problem], *, strict: bool) -> ExitCode:
    """78 for an error in a file, 69 where only the machine is in the way, else 0.

    `strict` counts everything above a note.
    """
    counted = [one for one in findings if one.severity == "error" or (strict and one.severity != "note")]
    if problems or any(not one.machine for one in counted):
        return ExitCode.BAD_CONFIG
    return ExitCode.HARDWARE if counted else ExitCode.OK
