"""Validation: a RunConfig from the merged tree, each mistake named at its place in the schema's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer.config import elsewhere, fields
from trainer.config.environment import CONFIG_PREFIX
from trainer.config.reading.layers import LENGTHS
from trainer.config.schema import RunConfig
from trainer.config.tree import KeyPath, Node, by_user, describe, leaves, walk
from trainer.config.value_types import NO_VARIABLES
from trainer.errors import Problem
from trainer.words.near import closest


def validate(
    tree: Node, merged: Sequence[Node] = ()
) -> tuple[RunConfig | None, frozenset[str], list[Problem]]:
    """The configuration that the tree is, its bad keys, and what is wrong with its types, bounds and names.

    `merged` are the layers that the tree is made of, lowest first: by them a message tells the value that
    holds once a bad one is left out.

    The configuration is None if nothing sensible could be built. It holds stand-ins for bad keys, so that the
    others can still be checked against each other; with any of them it must not be used to run.
    """
    plain = tree.plain()
    try:
        return RunConfig.model_validate(plain), frozenset(), []
    except ValidationError as error:
        faults = _faults(error)
    told = list(faults.items())[:_MOST_FAULTS]
    problems = [problem for path, fault in told for problem in _problems(tree, path, fault, merged)]
    if len(faults) > len(told):
        path = list(faults)[len(told)]
        what = f"... and {len(faults) - len(told)} more mistakes"
        remedy = "correct those above, or start from a file in train_configs/"
        problems.append(Problem(what=what, where=tree.source_of(path), remedy=remedy))
    assert isinstance(plain, dict)
    for path in faults:
        _repair(plain, path)
    bad = frozenset(".".join(path) for path in faults)
    try:
        return RunConfig.model_validate(plain), bad, problems
    except ValidationError:
        return None, bad, problems


_MOST_FAULTS = 100
"""Each is compared with every key that there is; a file with more of them is no configuration."""

_HOW_TO_ADD: dict[str, str] = {
    "family": "add `family: NAME`; `trainer families` lists them",
    "pretrained_model_name_or_path": "add a folder in diffusers' or transformers' layout, or a repository id",
    "sets": "add `sets: [{img_dir: DIR}]`, or `[{chat_file: FILE}]`, or pass --dataset DIR or --dataset FILE",
    "img_dir": "add `img_dir: DIR`",
    "output_dir": "add `output_dir: DIR`, or pass --output DIR",
}
_SET = {"img_dir": "-"}
_STAND_INS: dict[str, Any] = {
    **dict.fromkeys(_HOW_TO_ADD, "-"),
    "sets": [_SET],
    "model": {"pretrained_model_name_or_path": "-"},
    "data": {"sets": [_SET]},
}
"""Values of bad required keys, by name."""

_HINTS: dict[str, str] = {
    "model.dtype": "write bf16, fp16 or fp32",
    "data.caption_dropout_rate": "it is a share: 0.05 means 5 %",
    "train.learning_rate": "write for example 1e-4",
    "train.optimizer": "write adamw, adamw_stochastic_bf16, adamw_8bit or prodigy, or leave it out",
}


@dataclass(frozen=True)
class _Fault:
    """Mistake in one value."""

    kind: str
    """Type of pydantic's first error."""
    said: str
    """Words of the check that refused it, for a path; else empty."""


def _faults(error: ValidationError) -> dict[KeyPath, _Fault]:
    """Path of each bad value -> what is wrong there. Tags of unions are cut from the path."""
    faults: dict[KeyPath, _Fault] = {}
    for detail in error.errors(include_url=False, include_context=False, include_input=False):
        kind, keys = detail["type"], tuple(str(key) for key in detail["loc"])
        known = 0
        while known < len(keys) and fields.field_at(keys[: known + 1]) is not None:
            known += 1
        # the name of a layer may be wrong, and not what it is mapped to
        known -= keys[known : known + 1] == ("[key]",)
        path = keys if kind == "extra_forbidden" else keys[:known]
        if kind == "missing" and fields.is_section(path):
            # a whole section is missing: name the key that it is there for
            path = (*path, next(key for key in _HOW_TO_ADD if fields.field_at((*path, key)) is not None))
        said = detail["msg"].removeprefix("Value error, ") if kind == "value_error" else ""
        before = faults.get(path, _Fault(kind, ""))
        faults[path] = _Fault(before.kind, before.said or (said if fields.takes(path, Path) else ""))
    # a list whose items are bad is reported as too short as well: the items say it better
    above = {path[:depth] for path in faults for depth in range(len(path))}
    return {path: fault for path, fault in faults.items() if path not in above}


def _problems(tree: Node, path: KeyPath, fault: _Fault, merged: Sequence[Node]) -> Iterator[Problem]:
    name, source, node = ".".join(path), tree.source_of(path), tree.get(path)
    if fault.kind == "extra_forbidden":
        remedy, foreign = fields.suggest_key(path), [*_foreign(node)]
        if source.startswith(CONFIG_PREFIX) and len(path) == 1 and (meant := fields.joined(path[0])):
            remedy = f"did you mean {_variable(meant)}?"
        if foreign and not elsewhere.key(path[-1]) and remedy.startswith("did you mean"):
            # a section of ours that is misspelt: one mistake
            inside = (f"Below it, `{key}`: {row.remedy}" for key, _, row in foreign if key != "name")
            yield Problem(what=f"unknown key `{name}`", where=source, remedy=" ".join((remedy, *inside)))
            return
        yield Problem(what=f"unknown key `{name}`", where=source, remedy=remedy)
        # keys of other trainers below one of their sections: each is told what it is here
        for below, where, row in foreign:
            yield Problem(what=f"unknown key `{name}.{below}`", where=where, remedy=row.remedy)
    elif fault.kind == "missing":
        where = source if by_user(source) else tree.source
        yield Problem(what=f"`{name}` is missing", where=where, remedy=_HOW_TO_ADD[path[-1]])
    else:
        got = "nothing" if node is None else describe(node)
        what = f"`{name}`: expected {fields.expected(path)}, got {got}"
        what += f": {fault.said}" if fault.said else ""
        remedy = _of_written(path, node, fault) if node is not None else ""
        yield Problem(what=what, where=source, remedy=remedy or _remedy(path, node, merged))


def _variable(name: str) -> str:
    """The variable of a dotted key."""
    return CONFIG_PREFIX + name.upper().replace(".", "__")


def _of_written(path: KeyPath, node: Node, fault: _Fault) -> str:
    """Remedy by the way in which a value was written; empty where that does not tell it."""
    if fault.said == NO_VARIABLES:
        name = ".".join(path)
        ways = ["write the path itself"]
        ways += [f"or set {_variable(name)} to it"] if name in fields.dotted_keys() else []
        ways += ["or pass --output DIR"] if name == "output_dir" else []
        return ", ".join(ways)
    if fields.takes(path[:-1], dict):
        return _of_layer(path, node)
    text = fields.takes(path, str) and not fields.takes(path, tuple)
    if text and isinstance(node.value, dict):
        return 'quote a text that holds `: `, as in "a cat: sitting"'
    return ""


def _of_layer(path: KeyPath, node: Node) -> str:
    """Remedy for what a layer is mapped to: dots in its name may have made parts of it."""
    found = [*walk(node)]
    if not isinstance(node.value, dict) or len(found) != 1:
        return "correct it or remove it"
    (below, leaf), (*keys, layer) = found[0], path
    written = f"{{{'.'.join((layer, *below))}: {leaf.value}}}"
    if node.source.startswith("--set "):
        return f"write --set '{'.'.join(keys)}={written}'"
    return f"write the name of a layer as one key: {written}"


def _foreign(node: Node | None) -> Iterator[tuple[str, str, elsewhere.Row]]:
    """Keys of other trainers below an unknown one: name, place, and what it is here."""
    for below, where in leaves(node).items() if node is not None else ():
        row = elsewhere.key(below.rpartition(".")[2]) if below else None
        if row is not None:
            yield below, where, row


def _remedy(path: KeyPath, node: Node | None, merged: Sequence[Node]) -> str:
    name = ".".join(path)
    words = fields.choices(path)
    near = closest(node.value, words) if node is not None and isinstance(node.value, str) else None
    if near is not None:
        return f"did you mean `{near}`?"
    if name in _HINTS:
        return _HINTS[name]
    if path[-1] in _HOW_TO_ADD:
        return _HOW_TO_ADD[path[-1]]
    if fields.takes(path, tuple):
        return "write each item as `- ...` on a line of its own, or all as [a, b]"
    if fields.is_section(path):
        return f"indent the keys of `{name}:` below it, one on a line"
    field = fields.field_at(path)
    if path[-1].isdecimal() or field is None:
        return "correct it or remove it"
    below = _left_out(path, merged, field.default)
    return f"correct it, or leave it out{below and f' for {below}'}"


def _left_out(path: KeyPath, merged: Sequence[Node], default: object) -> str:
    """The value that holds once the highest layer leaves `path` out, in words; empty where unknown."""
    lower = [node.value for node in (tree.get(path) for tree in merged) if node is not None][:-1]
    rivals = [other for other in LENGTHS if path in LENGTHS and other != path]
    nodes = (tree.get(other) for tree in merged for other in rivals)
    if any(node is not None and node.value is not None for node in nodes):
        return ""  # without this length the other one may hold
    # lists are replaced whole: an item of a lower one holds only where it was written again
    if lower and (any(part.isdecimal() for part in path) or isinstance(lower[-1], dict | list)):
        return ""
    value = lower[-1] if lower else default
    return "nothing" if value is None else str(value)


def _repair(plain: dict[str, Any], path: KeyPath) -> None:
    """Take the value at `path` out of `plain`, or put a stand-in where the schema wants one."""
    parent: Any = plain
    for depth, key in enumerate(path[:-1]):
        if isinstance(parent, dict):
            if key not in parent and path[depth + 1].isdecimal():
                return  # the list went with another item of it
            parent = parent.setdefault(key, {})
        elif int(key) < len(parent):
            parent = parent[int(key)]
        else:
            return  # a stand-in took the place of the list
        if not isinstance(parent, dict | list):
            _repair(plain, path[: depth + 1])
            return
    field = None if fields.takes(path[:-1], dict) else fields.field_at(path)
    if isinstance(parent, list):
        _repair(plain, path[:-1])
    elif field is not None and field.is_required():
        parent[path[-1]] = _STAND_INS[path[-1]]
    else:
        parent.pop(path[-1], None)
