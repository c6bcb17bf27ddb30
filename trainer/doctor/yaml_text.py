"""YAML of others with the line of every key: several documents, anchors and tags are theirs to use."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from trainer.config.reading.strict_yaml import documents
from trainer.doctor.entries import MOST_DEPTH, MOST_ENTRIES, Entry
from trainer.errors import Problem

_NULL = "tag:yaml.org,2002:null"


class _TooLarge(Exception):
    """More keys, or deeper ones, than a configuration has; aliases count each time."""


def entries(text: str, place: str) -> tuple[list[list[Entry]], list[Problem]]:
    """Entries of each document of the text, and what is wrong with it; never raises."""
    roots, problems = documents(text, lambda line: f"{place}:{line}")
    found: list[list[Entry]] = []
    try:
        for root in roots:
            one: list[Entry] = []
            for entry in _below(root, (), root.start_mark.line + 1):
                one.append(entry)
                if len(one) > MOST_ENTRIES:
                    raise _TooLarge
            found.append(one)
    except _TooLarge:
        remedy = "give the configuration, not the data that it names"
        what = f"more than {MOST_ENTRIES} keys, or nested more than {MOST_DEPTH} deep"
        return [], [Problem(what=what, where=place, remedy=remedy)]
    return found, problems


def _below(node: yaml.Node, path: tuple[str, ...], line: int) -> Iterator[Entry]:
    """Entries of a node and of all below it; a value's line is its key's."""
    if len(path) > MOST_DEPTH:
        raise _TooLarge
    if isinstance(node, yaml.ScalarNode):
        yield Entry(path=path, value="" if node.tag == _NULL else str(node.value), line=line)
        return
    if path:
        yield Entry(path=path, value="", line=line, section=True)
    if isinstance(node, yaml.SequenceNode):
        for position, item in enumerate(node.value):
            yield from _below(item, (*path, str(position)), item.start_mark.line + 1)
        return
    assert isinstance(node, yaml.MappingNode)
    own = {key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue  # no key that a rule could name
        if key.value == "<<" and not isinstance(value, yaml.ScalarNode):
            yield from _merged(value, path, own)
        else:
            yield from _below(value, (*path, str(key.value)), key.start_mark.line + 1)


def _merged(value: yaml.Node, path: tuple[str, ...], own: set[str]) -> Iterator[Entry]:
    """Entries of the mappings that a merge key (<<) takes in: `own` keys, and those of earlier ones, win."""
    taken = set(own)
    for one in value.value if isinstance(value, yaml.SequenceNode) else (value,):
        if not isinstance(one, yaml.MappingNode):
            continue
        new = set[str]()
        for entry in _below(one, path, 0):
            if entry.path != path and entry.path[len(path)] not in taken:
                new.add(entry.path[len(path)])
                yield entry
        taken |= new
