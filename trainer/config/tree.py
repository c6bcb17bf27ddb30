"""Configuration values before they have types. A tree that knows where each value was written."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from trainer.errors import Problem, TrainerError

KeyPath = tuple[str, ...]
"""Keys and list positions from the root: `("data", "sets", "0", "img_dir")`."""
Scalar = str | int | float | bool | None
Plain = Scalar | dict[str, "Plain"] | list["Plain"]
"""A tree without its sources: the input of pydantic."""


@dataclass(frozen=True, kw_only=True)
class Node:
    """One value with its source: `file:line`, a variable, an option, or the family.

    Texts from files, variables and options stay texts; the declared type of a field decides what they mean.
    """

    value: Scalar | dict[str, Node] | list[Node]
    source: str
    whole: bool = False
    """A mapping that replaces the one below it, as a list does."""

    def get(self, path: KeyPath) -> Node | None:
        """The node at `path` below this one, or None."""
        node: Node | None = self
        for key in path:
            node = None if node is None else dict(_children(node)).get(key)
        return node

    def source_of(self, path: KeyPath) -> str:
        """Source of the value at `path`, or of the nearest one above it that was written."""
        above = (self.get(path[:depth]) for depth in range(len(path), -1, -1))
        return next(node.source for node in above if node is not None)

    def plain(self) -> Plain:
        """The tree as nested dicts and lists."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


def _children(node: Node) -> Iterable[tuple[str, Node]]:
    """Key, or position in a list, and node of everything directly below `node`."""
    if isinstance(node.value, dict):
        return node.value.items()
    return ((str(index), one) for index, one in enumerate(node.value if isinstance(node.value, list) else ()))


def describe(node: Node) -> str:
    """A value in words for a message."""
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list" if node.value else "an empty list"
    if node.value is None:
        return "nothing"
    text = str(node.value)
    return f'"{text}"' if len(text) <= 60 else f'"{text[:57]}..."'


def from_plain(value: object, source: str) -> Node:
    """A tree of Python values that all come from one place."""
    if isinstance(value, Mapping):
        children = {str(key): from_plain(child, source) for key, child in value.items()}
        return Node(value=children, source=source)
    if isinstance(value, list | tuple):
        return Node(value=[from_plain(child, source) for child in value], source=source)
    assert value is None or isinstance(value, str | int | float | bool), f"{source}: {value!r}"
    return Node(value=value, source=source)


def by_user(source: str) -> bool:
    """True if a source was written by the user, in whatever layer."""
    return source != "default" and not source.startswith(("family ", "preset "))


def placed(problem: Problem, sources: Mapping[str, str]) -> Problem:
    """The problem with the place, by `sources`, where its key was written: for one that names a key alone."""
    place = sources.get(problem.where, "default")
    if not by_user(place):
        return problem
    # an option names its key
    where = place if place.endswith(f" {problem.where}") else f"{place}: {problem.where}"
    return dataclasses.replace(problem, where=where)


@contextlib.contextmanager
def placing(sources: Mapping[str, str]) -> Iterator[None]:
    """Have every error that is raised within say where its keys were written, as `placed` does."""
    try:
        yield
    except TrainerError as error:
        error.problems = tuple(placed(one, sources) for one in error.problems)
        error.args = ("\n".join(map(str, error.problems)),)
        raise


def at(path: KeyPath, node: Node) -> Node:
    """A tree that holds `node` at `path` and nothing else."""
    for key in reversed(path):
        node = Node(value={key: node}, source=node.source)
    return node


def merge(low: Node, high: Node) -> Node:
    """`high` over `low`: mappings merge key by key but for `whole` ones, all else, lists too, is replaced."""
    if high.whole or not (isinstance(low.value, dict) and isinstance(high.value, dict)):
        return high
    value = dict(low.value)
    for key, child in high.value.items():
        value[key] = merge(value[key], child) if key in value else child
    return Node(value=value, source=high.source, whole=low.whole)


def without(node: Node, path: KeyPath) -> Node:
    """`node` without the value at `path`; as it is where there is none."""
    if not isinstance(node.value, dict) or path[0] not in node.value:
        return node
    kept = {key: child for key, child in node.value.items() if key != path[0]}
    if len(path) > 1:
        kept = {key: kept.get(key, without(child, path[1:])) for key, child in node.value.items()}
    return Node(value=kept, source=node.source, whole=node.whole)


def walk(node: Node, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Path and node of every scalar and every list in the tree; what a list holds comes after it."""
    if not isinstance(node.value, dict):
        yield path, node
    for key, child in _children(node):
        yield from walk(child, (*path, key))


def leaves(node: Node) -> dict[str, str]:
    """Dotted key -> source, for every scalar and every list in the tree."""
    return {".".join(path): leaf.source for path, leaf in walk(node)}
