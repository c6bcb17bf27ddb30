"""Functions of a folder that a process enters, in all of its threads. Standard library only: it starts before
everything else, in processes of any version of the trainer.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType


def follow(root: str, start: str, answers: str) -> None:
    """Follow this process from now on; at its end its command, functions and way are a file in `answers`."""
    followed = Followed(Path(root), Path(start), _is_model, _has_gradients)
    followed.begin()

    def write() -> None:
        followed.end()
        told = {"command": sys.argv, "entered": sorted(set(followed.entered)), "way": followed.way}
        Path(answers, f"{os.getpid()}.json").write_text(json.dumps(told))

    atexit.register(write)


def _is_model(code: CodeType) -> bool:
    return code.co_name == "forward" and "/models/" in code.co_filename


def _has_gradients() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


class Followed:
    """The functions of a folder that work enters, in all threads, and the way from a file of it to a goal."""

    def __init__(
        self, root: Path, start: Path, is_goal: Callable[[CodeType], bool], is_due: Callable[[], bool]
    ) -> None:
        """The way is taken at the first call of a goal, a function outside of `root`, while it is due."""
        self.entered: list[str] = []
        self.way: list[str] = []
        """Functions on the stack from the first one of `start` to the last one before the goal."""
        self._root, self._start, self._is_goal, self._is_due = f"{root}/", str(start), is_goal, is_due
        # by identity, which is cheap to ask at each call; kept, so that no other object gets the same
        self._seen: dict[int, CodeType] = {}
        self._goals: set[int] = set()

    def begin(self) -> None:
        """Follow this thread and those that start from now on."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def end(self) -> None:
        """Follow nothing any more."""
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        key = id(code)
        if key not in self._seen:
            self._seen[key] = code
            if name := self._name(code):
                self.entered.append(name)
            elif self._is_goal(code):
                self._goals.add(key)
        if key in self._goals and not self.way and self._is_due():
            self.way = self._from_start(frame)

    def _name(self, code: CodeType) -> str:
        """`engine/training/loop.py: train`; empty for what is no function of the folder."""
        if not code.co_filename.startswith(self._root):
            return ""
        if code.co_name.startswith("<") and code.co_name != "<lambda>":
            return ""  # a module, or a comprehension
        is_class = not code.co_flags & 1
        return "" if is_class else f"{code.co_filename.removeprefix(self._root)}: {code.co_qualname}"

    def _from_start(self, frame: FrameType | None) -> list[str]:
        stack: list[CodeType] = []
        while frame is not None:
            stack.insert(0, frame.f_code)
            frame = frame.f_back
        while stack and stack[0].co_filename != self._start:
            stack.pop(0)
        return [name for code in stack if (name := self._name(code))]
