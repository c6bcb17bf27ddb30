"""Progress for people: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_INTERVAL_SECONDS = 10.0


class Progress(Protocol):
    """Work of a known number of units. Use it in a `with` block."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def advance(self, n: int = 1, *, text: str = "") -> None:
        """Count `n` more units. A `text` is news: the bar shows it until the next, plain output prints it."""


def progress(total: int, description: str, *, start: int = 0) -> Progress:
    """A progress of `total` units of which `start` are done, on stderr: live on a terminal, else lines."""
    if sys.stderr.isatty():
        return _Live(total, description, start)
    return _Plain(total, description, start)


@contextlib.contextmanager
def bars() -> Iterator[Callable[[str, int, int], None]]:
    """Progress of several kinds of work: a function to call after each unit with (kind, done, total)."""
    opened: dict[str, Progress] = {}
    with contextlib.ExitStack() as stack:

        def advance(kind: str, done: int, total: int) -> None:
            if kind not in opened:
                opened[kind] = stack.enter_context(progress(total, kind, start=done - 1))
            opened[kind].advance()

        yield advance


class _Plain:
    """Prints when there is news, when the last unit is done, and otherwise every ten seconds."""

    def __init__(
        self, total: int, description: str, start: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._description, self._done, self._clock = total, description, start, clock
        self._printed = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def advance(self, n: int = 1, *, text: str = "") -> None:
        self._done += n
        now = self._clock()
        if not text and self._done < self._total and now - self._printed < _PLAIN_INTERVAL_SECONDS:
            return
        self._printed = now
        news = f"  {text}" if text else ""
        print(f"{self._description} {self._done}/{self._total}{news}", file=sys.stderr, flush=True)


class _Live:
    """A rich bar; what is printed or logged to stderr meanwhile appears above it."""

    def __init__(self, total: int, description: str, start: int) -> None:
        from rich import progress as bars

        self._bar = bars.Progress(
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TimeElapsedColumn(),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[news]}"),
            console=_console(),
        )
        self._task = self._bar.add_task(description, total=total, completed=start, news="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, n: int = 1, *, text: str = "") -> None:
        if text:
            self._bar.update(self._task, advance=n, news=text)
        else:
            self._bar.update(self._task, advance=n)


@functools.cache
def _console() -> Console:
    """One console for all bars: rich stacks bars of one console, and tears those of two."""
    from rich.console import Console

    return Console(stderr=True)
