"""Conditions of rules: a small fixed vocabulary over keys and values of documents."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from trainer.doctor.entries import Document, Entry
from trainer.machine.facts import version_from
from trainer.words.near import closest

Found = tuple[Entry, tuple[str, ...]]
"""An entry, and the keys that stood where the pattern has `*`."""
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false", "none": "", "null": "", "~": ""}
_MOST_LETTERS = 20_000
"""Letters of a value that expressions look at."""
_NEAR = 0.85
"""Likeness from which a key is a misspelt one."""


@dataclass(frozen=True, kw_only=True)
class Test:
    """Keys that a pattern names, and what one of their values must be.

    In `keys`, `*` is any one key, `**` any number of them, `a|b` one of two. `$1` in keys and values is the
    key that stood for the first `*` of the rule's first condition.
    """

    keys: tuple[str, ...]
    of: tuple[str, ...] = ()
    """Kinds of the documents that are asked; empty: the one that is judged."""
    verb: str = "present"
    operand: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Group:
    """Conditions of which `any`, `all` or `none` must hold."""

    how: str
    conditions: tuple[Condition, ...]


Condition = Test | Group


@dataclass(frozen=True, kw_only=True)
class Case:
    """All documents that are judged together, and lists of keys that programs know."""

    documents: tuple[Document, ...]
    judged: Document | None = None
    """The document whose entries a rule looks at."""
    known: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def of(self, kinds: Sequence[str]) -> Iterator[Document]:
        """Documents of some kinds."""
        return (document for document in self.documents if document.kind in kinds)


def normal(value: str) -> str:
    """A value as it is compared: without capitals, the words for true and false as those."""
    plain = value.strip().lower()
    return _WORDS.get(plain, plain)


def found(test: Test, document: Document, case: Case, captured: Sequence[str] = ()) -> Iterator[Found]:
    """Entries of one document that pass a test."""
    texts = _texts(test, captured)
    passes, operand = VERBS[test.verb], tuple(_put(one, texts) for one in test.operand)
    for key in test.keys:
        for entry, stars in _named(_put(key, captured), document):
            if passes(entry, operand, case):
                yield entry, stars


def holds(condition: Condition, document: Document, case: Case, captured: Sequence[str] = ()) -> bool:
    """True where a condition holds for a document among the others of its case."""
    if isinstance(condition, Group):
        results = (holds(one, document, case, captured) for one in condition.conditions)
        if condition.how == "all":
            return all(results)
        return any(results) is (condition.how == "any")
    asked = case.of(condition.of) if condition.of else (document,)
    if condition.verb == "absent":
        return not any(
            True for one in asked for key in condition.keys for _ in _named(_put(key, captured), one)
        )
    if condition.verb == "product_not_multiple_of":
        return any(_product(condition, one) for one in asked)
    return any(True for one in asked for _ in found(condition, one, case, captured))


def _texts(test: Test, captured: Sequence[str]) -> Sequence[str]:
    """Captured keys for an operand: in a regular expression as plain text, where `_` may stand for a dot."""
    if test.verb != "matches":
        return captured
    return [re.escape(key).replace("_", "[._]") for key in captured]


def _put(key: str, captured: Sequence[str]) -> str:
    for place, text in enumerate(captured, 1):
        key = key.replace(f"${place}", text)
    return key


def _named(key: str, document: Document) -> Iterator[Found]:
    """Entries whose path the pattern names."""
    pattern, last = _pattern(key), key.rpartition(".")[2]
    plain = re.fullmatch(r"[\w/-]+", last) is not None
    for entry in document.by_last.get(last, []) if plain else document.entries:
        match = pattern.fullmatch(entry.dotted)
        if match:
            yield entry, match.groups()


@functools.lru_cache(maxsize=2048)
def _pattern(key: str) -> re.Pattern[str]:
    """A key pattern as a regular expression over dotted paths."""
    parts = key.split(".")
    text = ""
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        if part == "**":
            text += r"[^\n]*" if is_last else r"(?:[^.\n]+\.)*"
            continue
        if part == "*":
            text += r"([^.\n]+)"
        else:
            options = (re.escape(one).replace(r"\*", r"[^.\n]*") for one in part.split("|"))
            text += f"(?:{'|'.join(options)})"
        text += "" if is_last else r"\."
    return re.compile(text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _compared(entry: Entry, operand: tuple[str, ...], sign: int) -> bool:
    value, bound = _number(entry.value), _number(operand[0])
    return value is not None and bound is not None and (value - bound) * sign > 0


def _version(entry: Entry, operand: tuple[str, ...], *, below: bool) -> bool:
    value = version_from(entry.value.strip())
    return bool(value) and (value < version_from(operand[0])) is below


def _is_in(entry: Entry, operand: tuple[str, ...]) -> bool:
    return not entry.section and normal(entry.value) in {normal(one) for one in operand}


def _differs(entry: Entry, operand: tuple[str, ...], case: Case) -> bool:
    """True where a run that names this DeepSpeed file has another value of one of these keys; where no run
    names it, where those that name none have a value, and none like this one.

    `operand` is kinds and keys, a comma between two, and the keys' value in a configuration or a command of
    HF's Trainer that has none of them. What is `auto`, or holds a variable, agrees with all.
    """
    own = _comparable(entry.value)
    if own is None or entry.section or case.judged is None:
        return False
    keys, default = operand[1].split(","), tuple(operand[2:])
    file = PurePath(case.judged.place).name
    own_runs, others = list[Document](), list[Document]()
    for one in case.of(operand[0].split(",")):
        files = {PurePath(said.value).name for said, _ in _named("deepspeed", one) if not said.section}
        if file in files:
            own_runs.append(one)
        elif not any(name.endswith(".json") for name in files):
            others.append(one)
    if own_runs:
        # what a command says beside the file of its run is said for that run
        is_said = any(_values(one, keys) for one in others if not one.has_defaults)
        found = [_values(one, keys, default if one.has_defaults and not is_said else ()) for one in own_runs]
    else:
        found = [[value for one in others for value in _values(one, keys)]]
    return any(values and own not in values for values in found)


def _values(document: Document, keys: Sequence[str], default: tuple[str, ...] = ()) -> list[str | float]:
    """Values of keys that can be compared; of a key that is not there at all its default."""
    said = [entry.value for key in keys for entry, _ in _named(key, document) if not entry.section]
    return [value for text in said or default if (value := _comparable(text)) is not None]


def _comparable(value: str) -> str | float | None:
    plain = normal(value)
    if plain in ("auto", "") or "$" in plain:
        return None
    number = _number(plain)
    return plain if number is None else number


def _product(test: Test, document: Document) -> bool:
    """True where the keys' product is no multiple of the operand; False where one of them is missing."""
    result = 1
    for key in test.keys:
        values = [entry.value for entry, _ in _named(key, document)]
        if not values or not values[-1].isdecimal() or len(values[-1]) > 9:
            return False
        result *= int(values[-1])
    return result % int(test.operand[0]) != 0


def _misspelt(entry: Entry, operand: tuple[str, ...], case: Case) -> bool:
    """True for a key that a program does not know, and that is like one that it knows."""
    known = case.known[operand[0]]
    return entry.name not in known and near(entry, known) is not None


def _unknown(entry: Entry, operand: tuple[str, ...], case: Case) -> bool:
    """True for a key that a program does not know, and that is like none that it knows."""
    known = case.known[operand[0]]
    return entry.name not in known and near(entry, known) is None


def near(entry: Entry, known: Iterable[str]) -> str | None:
    """The known key that the entry's was meant to be."""
    return closest(entry.name[:60], known, cutoff=_NEAR) if len(entry.name) > 3 else None


VERBS: Mapping[str, Callable[[Entry, tuple[str, ...], Case], bool]] = {
    "present": lambda entry, operand, case: True,
    "absent": lambda entry, operand, case: False,
    "is": lambda entry, operand, case: _is_in(entry, operand),
    "one_of": lambda entry, operand, case: _is_in(entry, operand),
    "none_of": lambda entry, operand, case: not entry.section and not _is_in(entry, operand),
    "matches": lambda entry, operand, case: (
        not entry.section
        and re.fullmatch(operand[0], entry.value.strip()[:_MOST_LETTERS], re.DOTALL | re.IGNORECASE)
        is not None
    ),
    "above": lambda entry, operand, case: _compared(entry, operand, 1),
    "below": lambda entry, operand, case: _compared(entry, operand, -1),
    "version_below": lambda entry, operand, case: _version(entry, operand, below=True),
    "version_from": lambda entry, operand, case: _version(entry, operand, below=False),
    "differs_from": _differs,
    "repeats": lambda entry, operand, case: entry.first_line > 0,
    "misspelt": _misspelt,
    "unknown": _unknown,
    "product_not_multiple_of": lambda entry, operand, case: False,
}
"""Words for what a value must be; `absent` is about keys, `product_not_multiple_of` about several."""
