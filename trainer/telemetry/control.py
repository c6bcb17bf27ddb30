"""Requests to a run that trains, as files in its runtime folder, and its answers. Standard library only.

    control/save.json        asked: a checkpoint of the next step, training goes on
    control/sample.json      asked: previews after the next step, training goes on
    control/stop.json        asked: as SIGTERM, save and end with 75
    control/save.taken.json  the run has read it, and is about to do it
    control/save.done.json   the answer to the last one: step, and what was done

A file is put in its place in one rename and taken by another, so that no request is lost or done twice. The
training process looks between two steps for `save` and `sample`, its supervisor every second for `stop`.
"""

from __future__ import annotations

import contextlib
import enum
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError, Problem, StorageError
from trainer.files import atomic
from trainer.files.json_object import is_finite, read_object
from trainer.telemetry.run_folder import process

_FOLDER = "control"
_MOST_BYTES = 1 << 16
_LOOK_SECONDS = 0.2


class Order(enum.StrEnum):
    """A thing that a run can be asked for."""

    SAVE = "save"
    SAMPLE = "sample"
    STOP = "stop"


BETWEEN_STEPS = (Order.SAVE, Order.SAMPLE)
"""Orders that the training process carries out, in this order."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request and its answer: open where `step` is None, unless the run ends before it comes to it."""

    order: Order
    asked_unix_seconds: float
    step: int | None = None
    """Optimizer steps done when it was carried out."""
    done: str = ""
    """Result in words, such as the checkpoint's name."""


def ask(run_dir: Path, order: Order) -> Request:
    """Ask the run that trains in `run_dir`.

    Raises ConfigError where none does, or where its runtime folder is not seen from here, StorageError where
    that takes no file.
    """
    found = process.read_process(run_dir)
    if (problem := obstacle(run_dir, found)) is not None:
        raise ConfigError([problem])
    assert found is not None
    return put(Path(found.runtime_dir), order)


def obstacle(run_dir: Path, found: process.Process | None) -> Problem | None:
    """The reason why the run whose folder has this record cannot be asked now; None where it can."""
    if not process.is_running(run_dir, found):
        what, remedy = "no run trains in this folder now", "start it, or look at `trainer runs list`"
        return Problem(what=what, where=str(run_dir), remedy=remedy)
    if found is None or found.exit_code is not None:
        what = "the run that has this folder has not begun"
        return Problem(what=what, where=str(run_dir), remedy="ask again in a moment")
    if process.is_supervised(found):
        return None
    remedy = (
        "ask where the run was started, of compose's service by `docker compose -f FILE exec trainer trainer"
        " runs control RUN save` (or sample, or stop), where RUN is mostly below /output; or share its"
        " TRAINER_RUNTIME_DIR with this place"
    )
    what = "the run's runtime folder is not seen from here"
    return Problem(what=what, where=found.runtime_dir, remedy=remedy)


def answered(run_dir: Path, asked: Request) -> Request | None:
    """Wait for the answer to a request, or to a later one of its order; None where the run ends before.

    What a stop asks for is the end: of it that is waited for.
    """
    while True:
        found = process.read_process(run_dir)
        runs = found is not None and process.is_supervised(found)
        done = (
            [] if found is None else requests(Path(found.runtime_dir))
        )  # its last answers are looked at too
        for one in done:
            late = one.asked_unix_seconds >= asked.asked_unix_seconds
            if one.order is asked.order and one.step is not None and late and one.order is not Order.STOP:
                return one
        if not runs:
            return None
        time.sleep(_LOOK_SECONDS)


def put(runtime_dir: Path, order: Order) -> Request:
    """Leave a request in the runtime folder of a run, later than all before it: also where the clock was set
    back since, an answer to one of these is none to it. Raises StorageError.
    """
    before = max((one.asked_unix_seconds for one in requests(runtime_dir)), default=0.0)
    asked = max(time.time(), math.nextafter(before, math.inf))
    folder, request = runtime_dir / _FOLDER, Request(order=order, asked_unix_seconds=asked)
    with atomic.no_space_told(folder):
        folder.mkdir(exist_ok=True)
    text = json.dumps({"asked_unix_seconds": request.asked_unix_seconds})
    atomic.write_text(folder / f"{order}.json", text, sync=False)
    return request


def take(runtime_dir: Path, orders: Sequence[Order]) -> tuple[Order, ...]:
    """The orders that were asked for since the last call, in the order of `orders`; each is then taken.

    Costs the question for one folder where nothing was ever asked.
    """
    folder = runtime_dir / _FOLDER
    if not folder.is_dir():
        return ()
    taken: list[Order] = []
    for order in orders:
        with contextlib.suppress(OSError):  # mostly: nothing was asked
            (folder / f"{order}.json").replace(folder / f"{order}.taken.json")
            taken.append(order)
    return tuple(taken)


def answer(runtime_dir: Path, order: Order, *, step: int, done: str) -> None:
    """Say that an order that was taken is carried out. What cannot be written does not end the run."""
    folder = runtime_dir / _FOLDER
    asked = read_object(folder / f"{order}.taken.json", _MOST_BYTES).get("asked_unix_seconds", 0.0)
    text = json.dumps({"asked_unix_seconds": asked, "step": step, "done": done})
    with contextlib.suppress(OSError, StorageError):
        atomic.write_text(folder / f"{order}.done.json", text, sync=False)
        (folder / f"{order}.taken.json").unlink(missing_ok=True)


def requests(runtime_dir: Path) -> tuple[Request, ...]:
    """The last answered request of each order, and open ones, oldest first."""
    folder = runtime_dir / _FOLDER
    names = ((order, f"{order}{state}.json") for order in Order for state in (".done", ".taken", ""))
    read = (_request(order, read_object(folder / name, _MOST_BYTES)) for order, name in names)
    return tuple(sorted(filter(None, read), key=lambda one: one.asked_unix_seconds))


def not_drawn(runtime_dir: Path) -> tuple[Problem, ...]:
    """The problem of a run that ends before it has drawn previews that it was asked for; none without."""
    if all(one.order is not Order.SAMPLE or one.step is not None for one in requests(runtime_dir)):
        return ()
    what = "the previews that it was asked for were not drawn: it ended before"
    return (Problem(what=what, remedy="resume the run, and ask again"),)


def forget(runtime_dir: Path) -> None:
    """Remove all requests and answers of a run that has ended."""
    shutil.rmtree(runtime_dir / _FOLDER, ignore_errors=True)


def _request(order: Order, raw: dict[str, Any]) -> Request | None:
    """A request from its file; None for one that is missing, or was not written by us."""
    asked, step, done = raw.get("asked_unix_seconds"), raw.get("step"), raw.get("done", "")
    if not isinstance(asked, int | float) or not is_finite(asked):
        return None
    if not isinstance(done, str) or not isinstance(step, int | None):
        return None
    return Request(order=order, asked_unix_seconds=asked, step=step, done=done)
