"""List the functions of `trainer` that a run enters, from a picture to the saved LoRA: a reader follows them.

    python -m bench hops
    python -m bench hops train_configs/llama_lora.yaml --set model.pretrained_model_name_or_path=BASE --list

The training process runs as it is, for a few steps, with a profiler in each of its threads. Counted are
distinct functions and lambdas by the room that they are in; comprehensions and generated methods are not. The
way is what lies on the stack when the training loop calls the model.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench import arguments as types
from bench import jobs
from bench.processes import REPOSITORY

ROOT = REPOSITORY / "trainer"
LOOP = ROOT / "engine" / "training" / "loop.py"
# every kind of work that a run has: two previews, checkpoints and held-out losses
_SHORT = (
    *("train.max_train_steps=4", "train.lr_warmup_steps=0", "validation.every_steps=2"),
    *("validation.num_inference_steps=2", "checkpoint.checkpointing_steps=2"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan here, run in a child that has the plan's environment; print a line a room, a sum, and the way."""
    parser = types.command_parser("hops", __doc__)
    parser.add_argument("config", type=Path, nargs="?", default=Path("train_configs/quickstart.yaml"))
    parser.add_argument("--list", action="store_true", help="print every function too")
    types.add_common(parser, "--set")
    options = parser.parse_args(arguments)
    overrides = (*_SHORT, *options.overrides)
    ended = jobs.call_run(measure, options.config, overrides, {}, quiet=True)
    if ended.answer is None or ended.answer["code"]:
        print(ended.said[-2000:], file=sys.stderr)
        return 1
    print(table(ended.answer["entered"], ended.answer["way"]))
    if options.list:
        print("\n".join(["", *ended.answer["entered"]]))
    return 0


def measure(spec: str) -> dict[str, Any]:
    """Follow the real run in the child; gives its exit code, the functions and the way to the model."""
    import torch

    from trainer.engine import __main__ as engine

    def is_model(code: CodeType) -> bool:
        return code.co_name == "forward" and "/models/" in code.co_filename

    followed = Followed(ROOT, LOOP, is_model, torch.is_grad_enabled)
    code = followed.through(lambda: engine.main(spec))
    return {"code": code, "entered": sorted(set(followed.entered)), "way": followed.way}


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

    def through(self, work: Callable[[], Any]) -> Any:
        """Follow `work`; gives what it returns."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)
        try:
            return work()
        finally:
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


def table(entered: Sequence[str], way: Sequence[str]) -> str:
    """A line a room with its functions and files, the sum, and the way."""
    files = [name.partition(": ")[0] for name in entered]
    rooms = [file.rpartition("/")[0] or "(top)" for file in files]
    lines = [f"{'room':<24}{'functions':>10}{'files':>7}"]
    for room in sorted(set(rooms)):
        inside = [file for file, of in zip(files, rooms, strict=True) if of == room]
        lines.append(f"{room:<24}{len(inside):>10}{len(set(inside)):>7}")
    lines += [f"{'in all':<24}{len(files):>10}{len(set(files)):>7}", ""]
    way_files = {name.partition(": ")[0] for name in way}
    lines.append(f"from the loop to the model: {len(way)} functions in {len(way_files)} files")
    return "\n".join([*lines, *(f"  {one}" for one in way)])
