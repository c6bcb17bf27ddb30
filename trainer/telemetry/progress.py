"""Progress for people: a live bar on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

_PLAIN_INTERVAL_SECONDS = 10.0


class Progress(Protocol):
    """Work of a known number of units."""

    def advance(self, n: int = 1, *, text: str = "") -> None:
        """Count `n` more units. A `text` is news: the bar shows it until the next, plain output prints it."""


_silent = False


def silence() -> None:
    """Show no progress in this process from now on: another one tells it."""
    global _silent
    _silent = True


@contextlib.contextmanager
def progress(total: int, description: str, *, start: int = 0) -> Iterator[Progress]:
    """A progress of `total` units of which `start` are done, on stderr: lines, on a terminal a rich bar.

    What is printed or logged to stderr meanwhile appears above the bar.
    """
    if _silent:
        yield _Silent()
        return
    if not sys.stderr.isatty():
        yield _Plain(total=total, description=description, done=start, printed=time.monotonic())
        return
    from rich import progress as rich

    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[news]}"),
    )
    with rich.Progress(*columns, console=_console()) as bar:
        yield _Live(bar=bar, task=bar.add_task(description, total=total, completed=start, news=""))


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


class _Silent:
    """Work that is not shown."""

    def advance(self, n: int = 1, *, text: str = "") -> None:
        pass


@dataclass(kw_only=True)
class _Plain:
    """Prints when there is news, when the last unit is done, and otherwise every ten seconds."""

    total: int
    description: str
    done: int
    printed: float

    def advance(self, n: int = 1, *, text: str = "") -> None:
        self.done += n
        now = time.monotonic()
        if not text and self.done < self.total and now - self.printed < _PLAIN_INTERVAL_SECONDS:
            return
        self.printed = now
        news = f"  {text}" if text else ""
        print(f"{self.description} {self.done}/{self.total}{news}", file=sys.stderr, flush=True)


@dataclass(frozen=True, kw_only=True)
class _Live:
    """One task of a rich bar."""

    bar: RichProgress
    task: TaskID

    def advance(self, n: int = 1, *, text: str = "") -> None:
        if text:
            self.bar.update(self.task, advance=n, news=text)
        else:
            self.bar.update(self.task, advance=n)


@functools.cache
def _console() -> Console:
    """One console for all bars: rich stacks bars of one console, and tears those of two."""
    from rich.console import Console

    return Console(stderr=True)
