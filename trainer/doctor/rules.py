"""The table of rules, rules.yaml beside this file, read once by a strict reader."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from trainer.config import elsewhere
from trainer.doctor.conditions import VERBS, Condition, Group, Test
from trainer.doctor.entries import KINDS, TRAINING

SEVERITIES = {
    "error": "the program stops, or the machine cannot do it",
    "wrong": "it runs, and does something else than what is written",
    "slow": "it does what is written, and takes longer than it must",
    "unused": "nothing reads it, or it is what happens anyway",
    "note": "worth knowing; nothing is wrong",
}
"""Severities, the gravest first."""
NO_CHOICE = ("", "auto", "false", "0")
"""Values that leave a wish to other places."""
_TABLE = Path(__file__).with_name("rules.yaml")
_GROUPS = {
    "training": TRAINING,
    "variables": ("script", "dockerfile", "compose", "kubernetes", "environment"),
    "trees": ("deepspeed", "accelerate", *TRAINING, "compose", "kubernetes"),
}
"""Words for several kinds at once."""
_RULE_KEYS = {"id", "in", "severity", "when", "what", "why", "here", "source", "machine", "elsewhere"}


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row: what is looked for where, and what is said about it."""

    id: str
    kinds: tuple[str, ...]
    severity: str
    when: tuple[Condition, ...]
    """The first one is a test of the judged document: its line is the finding's."""
    what: str
    """`{value}`, `{key}`, `{first_line}` and `{near}` are the found entry's."""
    why: str
    here: str
    source: str
    machine: bool = False
    """True where the machine cannot do it: exit code 69."""

    @property
    def first(self) -> Test:
        """The condition that finds."""
        assert isinstance(self.when[0], Test)
        return self.when[0]


@dataclass(frozen=True, kw_only=True)
class Place:
    """One place of a wish: the kinds of documents, and the test of their keys."""

    kinds: tuple[str, ...]
    test: Test
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Wish:
    """A wish that may be written in several places: the first of them that has it decides."""

    name: str
    places: tuple[Place, ...]
    why: str
    here: str
    source: str


@cache
def rules() -> tuple[Rule, ...]:
    """All rules in the order of the table."""
    return tuple(_rule(row) for row in _document(0)["rules"])


@cache
def known() -> Mapping[str, tuple[str, ...]]:
    """Keys that programs know, by the list's name."""
    return {name: tuple(words.split()) for name, words in _document(0)["known"].items()}


@cache
def wishes() -> tuple[Wish, ...]:
    """The table of who decides."""
    return tuple(
        Wish(
            name=row["wish"],
            places=tuple(
                Place(kinds=_kinds(one["of"]), test=_asked(one), note=one.get("note", ""))
                for one in row["places"]
            ),
            why=row["why"],
            here=row["here"],
            source=row["source"],
        )
        for row in _document(1)
    )


def _asked(place: Mapping[str, Any]) -> Test:
    """The test of one place of a wish: a value that chooses something, or the one that is meant."""
    keys = tuple(place["keys"].split())
    if "is" in place:
        return Test(keys=keys, verb="is", operand=_texts(place["is"]))
    return Test(keys=keys, verb="none_of", operand=NO_CHOICE)


def _rule(row: Mapping[str, Any]) -> Rule:
    """A row as a rule; a word that is not in the vocabulary is a bug of ours."""
    assert set(row) <= _RULE_KEYS, f"{row['id']}: {set(row) - _RULE_KEYS}"
    assert row["severity"] in SEVERITIES, row["id"]
    conditions = [_condition(one) for one in row.get("when", ())]
    what, here = row.get("what", ""), row.get("here", "")
    if "elsewhere" in row:
        name = row["elsewhere"]
        foreign = next(one for one in elsewhere.foreign() if name in one.names)
        keys = tuple(f"**.env.{one.replace('.*', '*')}" for one in foreign.names)
        conditions.insert(0, Test(keys=keys, verb="matches", operand=(foreign.value,)))
        what, here = what or foreign.says, here or foreign.remedy
    first = conditions[0]
    assert isinstance(first, Test) and not first.of and first.verb != "absent", row["id"]
    return Rule(
        id=row["id"],
        kinds=_kinds(row["in"]),
        severity=row["severity"],
        when=tuple(conditions),
        what=what,
        why=row["why"],
        here=here,
        source=row["source"],
        machine=row.get("machine", False),
    )


def _condition(row: Mapping[str, Any]) -> Condition:
    if "is_true" in row:
        return _condition(_document(0)["conditions"][row["is_true"]])
    for how in ("any", "all", "none"):
        if how in row:
            assert set(row) == {how}, row
            return Group(how=how, conditions=tuple(_condition(one) for one in row[how]))
    verbs = set(row) - {"key", "of"}
    assert len(verbs) <= 1 and verbs <= set(VERBS), row
    verb = next(iter(verbs), "present")
    operand = row.get(verb, ())
    if verb == "matches":
        re.compile(operand)
    return Test(
        keys=tuple(str(row["key"]).split()),
        of=_kinds(row["of"]) if "of" in row else (),
        verb=verb,
        operand=() if operand is True and verb in ("repeats", "absent") else _texts(operand),
    )


def _texts(operand: Any) -> tuple[str, ...]:
    """Operands as text: true in the table is the word in a file."""
    many: Sequence[Any] = operand if isinstance(operand, list | tuple) else (operand,)
    return tuple(str(one).lower() if isinstance(one, bool) else str(one) for one in many)


def _kinds(words: str) -> tuple[str, ...]:
    found = tuple(kind for word in words.split() for kind in _GROUPS.get(word, (word,)))
    assert set(found) <= set(KINDS), words
    return found


@cache
def _document(number: int) -> Any:
    """One document of the table."""
    loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
    with _TABLE.open(encoding="utf-8") as rows:
        return list(yaml.load_all(rows, loader))[number]
