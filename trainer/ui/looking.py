"""When the streams of open tabs look for changes: each second while something works or has just changed,
seldom at rest, and at once where a page asks, since somebody turned to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

RESTING_SECONDS = 15.0
"""Time between two wakes of a process that nobody asks anything."""
_LOOK_SECONDS = 1.0
_STILL = ((120.0, RESTING_SECONDS), (30.0, 5.0))
"""Seconds without a change, and how often is looked from there on, the longest first."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at all that a page shows."""

    changes: object
    """A value that is another one whenever the page would be."""
    works: bool = False
    """Whether something works there, so that a change is to be seen within a second."""


class Looks:
    """The demands for a look by all streams of a studio at once. For the thread of its event loop alone."""

    def __init__(self) -> None:
        self.asked = 0
        """Number of demands so far."""
        self._event = asyncio.Event()

    def ask(self) -> None:
        """Have every stream look now."""
        self.asked += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seconds: float, asked: int) -> None:
        """Wait so long, or until there were more than `asked` demands."""
        if self.asked > asked:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._event.wait()


def period(still_seconds: float, *, works: bool) -> float:
    """Seconds between two looks of a tab in which nothing has changed for so long."""
    if works:
        return _LOOK_SECONDS
    return next((often for still, often in _STILL if still_seconds > still), _LOOK_SECONDS)


def until_next(every_seconds: float) -> float:
    """Seconds until a moment that all who wait for this period share, so that they wake the process once."""
    return every_seconds - time.monotonic() % every_seconds if every_seconds else 0.0
