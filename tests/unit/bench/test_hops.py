"""bench hops: which functions of a program are entered, by room, and the way from its loop to the model."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.following import Followed
from bench.hops import table

FILES = {
    "hopping/__init__.py": "",
    "hopping/loop.py": """
from hopping.room.step import Step, unused
import model

def train():
    first = [number for number in range(2)]
    for _ in first:
        after(Step(scale=2).run())

def after(loss):
    return (lambda: loss)()
""",
    "hopping/room/__init__.py": "",
    "hopping/room/step.py": """
from dataclasses import dataclass
import model

@dataclass
class Step:
    scale: int

    def run(self):
        return inner(self.scale)

def inner(scale):
    model.forward(scale)
    return scale

def unused():
    pass

def of_a_thread():
    pass
""",
    "model.py": "def forward(number):\n    return number\n",
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A program of two files in two rooms, and a model that is none of its own."""
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] in ("hopping", "model")]:
        del sys.modules[name]


def test_functions_that_are_entered_are_counted_once_and_the_way_is_told(program: Path) -> None:
    root, due = program / "hopping", [False, True]
    followed = Followed(root, root / "loop.py", lambda code: code.co_name == "forward", lambda: due.pop(0))

    followed.begin()
    try:
        loop, step = (importlib.import_module(f"hopping.{name}") for name in ("loop", "room.step"))
        loop.train()
        thread = threading.Thread(target=step.of_a_thread)
        thread.start()
        thread.join()
    finally:
        followed.end()
    assert sys.getprofile() is None and threading.getprofile() is None
    # neither modules, classes and comprehensions, nor the method that the dataclass has made
    assert sorted(followed.entered) == [
        "loop.py: after",
        "loop.py: after.<locals>.<lambda>",
        "loop.py: train",
        "room/step.py: Step.run",
        "room/step.py: inner",
        "room/step.py: of_a_thread",
    ]
    assert followed.way == ["loop.py: train", "room/step.py: Step.run", "room/step.py: inner"]
    assert due == [], "the first call of the model was not the one that was waited for"


def test_the_table_has_a_line_a_room() -> None:
    text = table(["a.py: f", "b/c.py: g", "b/c.py: h", "b/d.py: g"], {"a.py: f", "b/d.py: g"}, ["b/c.py: g"])
    rows = [line.split() for line in text.splitlines() if line]
    assert rows[1:4] == [["(top)", "1", "1", "1"], ["b", "3", "1", "2"], ["in", "all", "4", "2", "3"]]
    assert "1 functions in 1 files\n  b/c.py: g" in text
