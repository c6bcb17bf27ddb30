"""Server-sent events of a run: lines of metrics.jsonl exactly once, and parts of the page when they change.

The id of an event is a place in the file, which a browser sends back when it connects again. A resume cuts
the file: then the id is a place of another one, and the browser is told to begin anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from trainer.errors import TrainerError
from trainer.ui.access import Access
from trainer.ui.looking import Look, Looks, period, until_next
from trainer.ui.studio import UnknownIdError

COLUMNS = (
    "step", "loss", "validation_loss", "learning_rate", "grad_norm", "seconds_per_step",
    "device_memory_reserved_bytes",
)  # fmt: skip
"""Values of a point, in their order; null where a line has none."""
MOST_STREAMS = 8
"""Streams of one session at a time."""
_MARK_BYTES = 256
_CHUNK_BYTES = 1 << 18
_ALIVE_SECONDS = 40.0
"""Silence after which a line says that the stream lives: proxies end one that is silent for a minute."""
_REST = 20
"""A page that took a while to look at and to render is not looked at again for this many times as long."""
_PLACE = re.compile(r"(\d{1,15})-([0-9a-f]{16})")


@dataclass(frozen=True)
class Place:
    """A place between two lines of a file that grows: bytes before it, and a hash of the last ones."""

    offset: int = 0
    mark: str = hashlib.sha256(b"").hexdigest()[:16]

    def __str__(self) -> str:
        return f"{self.offset}-{self.mark}"


START = Place()


def place_from(text: str) -> Place | None:
    """The place that a browser sent back; None for another text."""
    found = _PLACE.fullmatch(text)
    return Place(int(found[1]), found[2]) if found else None


def lines_after(path: Path, place: Place) -> tuple[list[bytes], Place, bool]:
    """Whole lines behind `place`, at most 256 KiB, the place behind them, and whether `place` is of another
    file: then the lines are the first ones. A file that does not exist is empty.
    """
    try:
        with path.open("rb") as file:
            cut = _mark(file.read, file.seek, place.offset) != place.mark
            offset = 0 if cut else place.offset
            file.seek(offset)
            text = file.read(_CHUNK_BYTES)
            # a full piece without an end is of a line that no run has written: it is passed over
            whole = text.rfind(b"\n") + 1 or (len(text) if len(text) == _CHUNK_BYTES else 0)
            mark = _mark(file.read, file.seek, offset + whole)
    except FileNotFoundError:
        return [], START, place != START
    return text[:whole].splitlines(), Place(offset + whole, mark), cut


def _mark(read: Callable[[int], bytes], seek: Callable[[int], int], offset: int) -> str:
    """Hash of the bytes before `offset`; empty where the file is shorter."""
    length = min(offset, _MARK_BYTES)
    seek(offset - length)
    before = read(length)
    return hashlib.sha256(before).hexdigest()[:16] if len(before) == length else ""


def points(lines: Sequence[bytes]) -> list[list[float | None]]:
    """COLUMNS of each line that is a record of a step; damaged lines have no point."""
    found: list[list[float | None]] = []
    for line in lines:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            values = (row.get(name) for name in COLUMNS)
            found.append([value if type(value) in (int, float) else None for value in values])
    return found


def event(data: str, *, name: str = "", place: Place | None = None) -> bytes:
    """One event as its bytes; without a name htmx swaps its data into the page."""
    head = [f"event: {name}"] * bool(name) + [f"id: {place}"] * (place is not None)
    return "".join(
        f"{line}\n" for line in [*head, *(f"data: {line}" for line in data.splitlines() or [""]), ""]
    ).encode()


class Seats:
    """Counts the open streams of each session: a browser that leaks them must not take all connections."""

    def __init__(self) -> None:
        self._taken: Counter[str] = Counter()
        self._lock = threading.Lock()

    def take(self, session: str) -> bool:
        """Take a seat; False where MOST_STREAMS are taken."""
        with self._lock:
            free = self._taken[session] < MOST_STREAMS
            self._taken[session] += free
            return free

    def leave(self, session: str) -> None:
        """Give a seat back."""
        with self._lock:
            self._taken[session] -= 1
            if not self._taken[session]:
                del self._taken[session]


async def events(
    *,
    part: Callable[[], str],
    look: Callable[[], Look],
    looks: Looks,
    metrics: Path | None = None,
    place: Place = START,
) -> AsyncIterator[bytes]:
    """Events until the browser leaves: `points` of `metrics` behind `place`, `anew` before points that begin
    anew, and the HTML of `part` when it is another one. `part` is asked when `look` gives other changes; how
    often that is called, `looking.period` says, and `looks` has it called now.
    """
    seen: object = None
    shown, rested, works = "", 0.0, False
    told = moved = time.monotonic()
    yield b"retry: 1000\n\n"
    while True:
        asked, now = looks.asked, time.monotonic()
        lines, place, cut, found = await run_in_threadpool(
            _looked, metrics, place, look if now >= rested else None
        )
        if cut:
            yield event("", name="anew", place=START)
        if lines:
            yield event(json.dumps(points(lines)), name="points", place=place)
        if cut or lines:
            told = moved = time.monotonic()
        if lines:
            continue  # with what is behind them
        if found is not None:
            works = found.works
            if found.changes != seen:
                try:
                    html = await run_in_threadpool(part)
                except (UnknownIdError, TrainerError):
                    return  # it was removed, or is damaged: the page says so when it is loaded again
                moved, seen = time.monotonic(), found.changes
                if html != shown:
                    yield event(html)
                    shown, told = html, moved
            rested = time.monotonic() + _REST * (time.monotonic() - now)
        if time.monotonic() - told > _ALIVE_SECONDS:
            yield b": alive\n\n"  # how a server learns that nobody is there
            told = time.monotonic()
        await looks.wait(until_next(period(time.monotonic() - moved, works=works)), asked)
        if looks.asked > asked:
            moved, rested = time.monotonic(), 0.0


def _looked(
    metrics: Path | None, place: Place, look: Callable[[], Look] | None
) -> tuple[list[bytes], Place, bool, Look | None]:
    """`lines_after`, and a look where there are none: in one call, since each one in a thread costs more than
    what it does.
    """
    lines, behind, cut = ([], place, False) if metrics is None else lines_after(metrics, place)
    return lines, behind, cut, None if lines or look is None else look()


class _EventResponse(StreamingResponse):
    """A stream that ends as soon as the browser leaves, or the studio is told to end: a silent one would be
    found out at its next event.
    """

    def __init__(
        self, content: AsyncIterator[bytes], left: Callable[[], None], ending: asyncio.Event
    ) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})
        self._left, self._ending = left, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        tasks = [
            asyncio.create_task(self.listen_for_disconnect(receive)),
            asyncio.create_task(self.stream_response(noting)),
            asyncio.create_task(self._ending.wait()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._left()  # before what a thread still renders: the next page asks for its seat at once
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()  # an error of the stream is told
        if begun and tasks[1].cancelled() and self._ending.is_set():
            await send({"type": "http.response.body", "body": b"", "more_body": False})


def streamed(request: Request, events: AsyncIterator[bytes]) -> Response:
    """A response of events, which takes a seat of the session until the browser leaves: 429 without one.
    None is sent after the session's end.
    """
    seats: Seats = request.app.state.seats
    access: Access = request.app.state.access
    session = request.state.session.key
    if not seats.take(session):
        return PlainTextResponse("too many pages of this studio are open\n", status_code=429)

    async def while_open() -> AsyncIterator[bytes]:
        async for one in events:
            if not access.is_open(session):
                return
            yield one

    return _EventResponse(while_open(), lambda: seats.leave(session), request.app.state.ending)
