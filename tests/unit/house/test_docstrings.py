"""Docstrings begin with their noun or verb (house rule 13): a plain line is no longer than a riddle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.house.sources import modules, name, parse

FOLDERS = ("trainer", "bench", "scripts", "tests", "assets")
RIDDLE = re.compile(r"(?:What|As|Those|Whether what)\b")


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring, and of each string below an attribute."""
    for node in ast.walk(parse(path)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text


def riddles(path: Path) -> list[str]:
    return [
        f"{name(path)}:{line} begins with {found[0]!r}: begin with the noun that the string is about"
        ' ("Bytes of ...", "Verdicts on ..."), with a verb ("Join ..."), or with "True if ..."'
        for line, text in strings(path)
        if (found := RIDDLE.match(text.lstrip()))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_their_noun(folder: str) -> None:
    found = [message for path in modules(folder) for message in riddles(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "riddle"),
    [
        ("What a run keeps.", True),
        ("As peft's.", True),
        ("Those of the text.", True),
        ("Whether what is written fits.", True),
        ("Whether the run has begun.", False),
        ("Whatever the run keeps.", False),
        ("Assets of the tiny base.", False),
    ],
)
def test_words_are_told_apart(text: str, riddle: bool) -> None:
    assert (RIDDLE.match(text) is not None) is riddle
