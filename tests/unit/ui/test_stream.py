"""Lines of a growing file reach a reader exactly once, whatever happens to the file and the connection."""

from __future__ import annotations

import asyncio
import json
import math
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer.errors import DataError
from trainer.telemetry.sinks.records import MetricsLog, read_metrics
from trainer.ui import looking, stream
from trainer.ui.looking import Look, Looks, until_next
from trainer.ui.stream import COLUMNS, START, Seats, events, lines_after, place_from, points
from trainer.ui.studio import Studio, UnknownIdError, identifier


def all_after(path: Path, place: stream.Place) -> tuple[list[bytes], stream.Place, bool]:
    found, cut = [], False
    while True:
        lines, place, again = lines_after(path, place)
        if again:
            found, cut = [], True
        found += lines
        if not lines:
            return found, place, cut


@pytest.mark.parametrize("seed", range(20))
def test_a_reader_that_comes_back_has_every_line_once(tmp_path: Path, seed: int) -> None:
    """Random appends of whole and torn lines, cuts and regrowth; the oracle is the file itself."""
    draw = random.Random(seed)
    path, have, place, count = tmp_path / "lines", list[bytes](), START, 0
    for _ in range(60):
        act = draw.choice(["append", "append", "torn", "cut", "read", "read"])
        if act == "append":
            with path.open("ab") as file:
                for _ in range(draw.randrange(1, 9)):
                    count += 1
                    file.write(b"line %d %s\n" % (count, b"x" * draw.randrange(300)))
        elif act == "torn":
            with path.open("ab") as file:
                file.write(b"half")
        elif act == "cut" and path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            new = tmp_path / "new"  # in place of the old one, as a resume does
            new.write_bytes(b"".join(lines[: draw.randrange(len(lines) + 1)]))
            new.replace(path)
        else:
            found, place, cut = all_after(path, place_from(str(place)) or START)
            have = found if cut else have + found
            whole = path.read_bytes().rpartition(b"\n")[0] if path.exists() else b""
            assert have == (whole.split(b"\n") if whole else [])


def test_a_file_of_another_content_and_the_same_length_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"a\nb\n")
    _, place, _ = lines_after(path, START)
    path.write_bytes(b"a\nc\nd\n")
    lines, _, cut = lines_after(path, place)
    assert cut and lines == [b"a", b"c", b"d"]


@pytest.mark.parametrize(
    "text",
    ["", "12", "-1-0123456789abcdef", "1-0123", "1e3-0123456789abcdef", "9" * 40 + "-0123456789abcdef"],
)
def test_another_text_is_no_place(text: str) -> None:
    assert place_from(text) is None


def test_points_are_the_rows_that_metrics_have(tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "run", done=200)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'not json\n[1]\n{"step": "3"}\n{"step": 201, "loss": null, "grad_norm": "wide"}\n')
    lines, _, _ = lines_after(folder / "metrics.jsonl", START)
    found = points(lines)
    rows = read_metrics(folder / "metrics.jsonl")
    assert found[:-1] == [[row.get(name) for name in COLUMNS] for row in rows]
    assert found[-1] == [201, *[None] * (len(COLUMNS) - 1)]


@pytest.mark.parametrize("more", [0, 1 << 18, 600_000])
def test_points_behind_a_long_damaged_line_come(tmp_path: Path, more: int) -> None:
    """A hole that a machine left when it went down: the curves stopped before it for good."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.0}\n' + b"\0" * more + b'\n{"step": 2, "loss": 1.0}\n')
    found = points(all_after(path, START)[0])
    assert [row[:2] for row in found] == [[1, 2.0], [2, 1.0]]
    assert [row[0] for row in found] == [row["step"] for row in read_metrics(path)]


def same() -> Look:
    return Look(changes=1)


async def collected(count: int, **asked: object) -> list[bytes]:
    found: list[bytes] = []
    async for one in events(**{"looks": Looks(), **asked}):  # type: ignore[arg-type]
        found.append(one)
        if len(found) == count:
            break
    return found


def test_events_are_points_with_their_place_then_the_part(tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "run", done=30)
    metrics = folder / "metrics.jsonl"
    found = asyncio.run(collected(3, part=lambda: "<p>two\nlines</p>", look=same, metrics=metrics))
    size = metrics.stat().st_size
    assert found[0] == b"retry: 1000\n\n"
    head, name, data = found[1].decode().rstrip("\n").split("\n")
    assert (head, name.partition("-")[0]) == ("event: points", f"id: {size}")
    assert [row[0] for row in json.loads(data.removeprefix("data: "))] == [10, 20, 30]
    assert found[2] == b"data: <p>two\ndata: lines</p>\n\n"


@pytest.mark.parametrize("error", [DataError("the settings are damaged"), UnknownIdError("x")])
def test_a_part_that_cannot_be_shown_ends_the_stream(error: Exception) -> None:
    """Its page says why when it is loaded again; it was a traceback every second."""

    def part() -> str:
        raise error

    assert asyncio.run(collected(9, part=part, look=same)) == [b"retry: 1000\n\n"]


def test_a_place_of_another_file_is_told_before_its_points(tmp_path: Path) -> None:
    folder = made.make_run(tmp_path / "run", done=30)
    metrics = folder / "metrics.jsonl"
    _, place, _ = lines_after(metrics, START)
    log = MetricsLog(metrics)
    log.truncate_after(10)
    log.close()
    found = asyncio.run(collected(3, part=lambda: "", look=same, metrics=metrics, place=place))
    assert found[1].startswith(b"event: anew\n") and found[2].startswith(b"event: points\n")
    assert b"[[10, " in found[2] and b"[20, " not in found[2]


def test_a_part_is_sent_again_only_when_it_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(stream, "_REST", 0)
    changes, texts = iter([1, 1, 2, 3, 4]), iter(["one", "one", "two", "three"])
    asked: list[str] = []

    def part() -> str:
        asked.append(next(texts))
        return asked[-1]

    look: Callable[[], Look] = lambda: Look(changes=next(changes, 4))  # noqa: E731
    found = asyncio.run(collected(4, part=part, look=look))
    assert found[1:] == [b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"]
    assert asked == ["one", "one", "two", "three"], "not asked where nothing changed"


def clocked(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Periods of a stream's looks, whose clock is as far on at once as it would have waited."""
    now, periods = [100.0], list[float]()

    def until(period: float) -> float:
        periods.append(period)
        now[0] += period
        return 0.0

    monkeypatch.setattr(stream, "until_next", until)
    monkeypatch.setattr(stream, "_ALIVE_SECONDS", math.inf)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return periods


def test_a_tab_where_nothing_changes_is_looked_after_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    periods, values, texts = clocked(monkeypatch), iter([1] * 54 + [2] * 3), iter(["one", "two"])
    look: Callable[[], Look] = lambda: Look(changes=next(values))  # noqa: E731
    found = asyncio.run(collected(3, part=lambda: next(texts), look=look))
    assert found[1:] == [b"data: one\n\n", b"data: two\n\n"]
    assert periods == [1.0] * 31 + [5.0] * 18 + [15.0] * 5, "a change is seen after 15 s at most"


def test_while_something_works_a_tab_is_looked_after_each_second(monkeypatch: pytest.MonkeyPatch) -> None:
    periods, values, texts = clocked(monkeypatch), iter([1] * 500 + [2]), iter(["one", "two"])
    look: Callable[[], Look] = lambda: Look(changes=next(values), works=True)  # noqa: E731
    asyncio.run(collected(3, part=lambda: next(texts), look=look))
    assert periods == [1.0] * 500


def test_a_demand_has_a_resting_tab_looked_after_at_once_and_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream would wait for hours; a demand that comes while it looks counts as well."""
    periods, looks, values = list[float](), Looks(), iter([1, 2, 2, 3])
    texts = iter(["one", "two", "three"])

    def until(period: float) -> float:
        periods.append(period)
        return 9999.0

    async def asked() -> list[bytes]:
        loop = asyncio.get_running_loop()

        def look() -> Look:
            value = next(values)
            if value == 1:  # in the thread that looks
                loop.call_soon_threadsafe(looks.ask)
            return Look(changes=value)

        found = list[bytes]()
        async for one in events(part=lambda: next(texts), look=look, looks=looks):
            found.append(one)
            if b"two" in one:
                loop.call_later(0.01, looks.ask)  # it waits by then, or looks: it is not lost
                loop.call_later(0.05, looks.ask)
            if b"three" in one:
                return found
        raise AssertionError("the stream ended")

    monkeypatch.setattr(stream, "until_next", until)
    found = asyncio.run(asyncio.wait_for(asked(), 60))
    assert found[1:] == [b"data: one\n\n", b"data: two\n\n", b"data: three\n\n"]
    assert set(periods) == {1.0}


def test_a_look_that_takes_a_while_is_not_repeated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 times as long passes before the next, which on a slow disk may be of a thousand runs."""
    periods, begun = clocked(monkeypatch), list[float]()

    def look() -> Look:
        begun.append(time.monotonic())
        stream.until_next(0.5)  # the time that it takes
        return Look(changes=len(begun), works=True)

    asyncio.run(collected(3, part=lambda: str(len(begun)), look=look))
    assert begun[1] - begun[0] == 10.5, "half a second, and ten of rest"
    assert periods.count(1.0) == 10, "lines of metrics are still looked at"


def test_a_page_that_somebody_turns_to_has_all_streams_look(client: TestClient, app: Starlette) -> None:
    assert client.get("/look").status_code == 200 and app.state.looks.asked == 1
    client.cookies.clear()
    assert client.get("/look").status_code == 401 and app.state.looks.asked == 1


def test_those_who_wait_wake_together(monkeypatch: pytest.MonkeyPatch) -> None:
    for now in (10.0, 12.0, 13.5, 14.75):
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        assert now + until_next(5.0) == 15.0
        assert until_next(0.0) == 0.0


def test_a_session_has_its_seats_and_no_more() -> None:
    seats = Seats()
    assert all(seats.take("a") for _ in range(stream.MOST_STREAMS))
    assert not seats.take("a")
    assert seats.take("b"), "another session has its own"
    seats.leave("a")
    assert seats.take("a") and not seats.take("a")


def test_seats_are_counted_whichever_threads_take_them() -> None:
    seats, interval = Seats(), sys.getswitchinterval()

    def sit(_: int) -> None:
        for _ in range(30_000):
            if seats.take("a"):
                seats.leave("a")

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(sit, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert not seats._taken


def test_a_stream_ends_and_leaves_its_seat_when_the_browser_does(
    client: TestClient, app: Starlette, studio: Studio
) -> None:
    """S12: a silent stream too, at once: its server has nothing to send for a while."""
    folder = made.make_run(studio.runs / "cats", done=30)
    path = f"/runs/{identifier(studio.runs, folder)}/stream"
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    headers = [(b"host", b"127.0.0.1"), (b"cookie", cookie.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers,
             "http_version": "1.1", "scheme": "http", "asgi": {"spec_version": "2.4"}}  # fmt: skip

    async def asked() -> list[int]:
        """Take every seat and one more, then leave all of them."""
        left, sent = asyncio.Event(), list[dict[str, Any]]()
        full = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            if len([one for one in sent if one["type"] == "http.response.start"]) == stream.MOST_STREAMS:
                full.set()

        streams = [asyncio.create_task(app(dict(scope), receive, send)) for _ in range(stream.MOST_STREAMS)]  # type: ignore[arg-type]
        await full.wait()
        await app(dict(scope), receive, send)  # type: ignore[arg-type]
        left.set()
        await asyncio.gather(*streams)
        return [one["status"] for one in sent if one["type"] == "http.response.start"]

    assert asyncio.run(asked()) == [200] * stream.MOST_STREAMS + [429]
    assert not app.state.seats._taken


def test_a_stream_says_nothing_after_the_end_of_its_session(
    client: TestClient, app: Starlette, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later step of the run would be the next event: then the browser leaves, so that the test ends."""
    monkeypatch.setattr(looking, "_LOOK_SECONDS", 0.0)
    folder = made.make_run(studio.runs / "cats", done=30)
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    headers = [(b"host", b"127.0.0.1"), (b"cookie", cookie.encode())]
    path = f"/runs/{identifier(studio.runs, folder)}/stream"
    scope = {"type": "http", "method": "GET", "path": path, "query_string": b"", "headers": headers,
             "http_version": "1.1", "scheme": "http", "asgi": {"spec_version": "2.4"}}  # fmt: skip
    said = list[bytes]()

    async def asked() -> None:
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            said.append(message.get("body", b""))
            if b"[30, " in said[-1]:
                app.state.access.rotate()
                made.write_metrics(folder, [40])
            if b"[40, " in said[-1]:
                left.set()

        await app(scope, receive, send)  # type: ignore[arg-type]

    asyncio.run(asked())
    assert b"[30, " in b"".join(said) and b"[40, " not in b"".join(said)
    assert not app.state.seats._taken
