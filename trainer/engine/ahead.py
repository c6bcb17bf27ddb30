"""Work in threads, ahead of who takes its results in turn."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_turn(
    work: Iterable[tuple[Item, Callable[[], Result] | None]], *, threads: int, ahead: int, name: str
) -> Generator[tuple[Item, Result | None], None, None]:
    """Each item with the result of its work, in order, while threads called after `name` do that of the next
    `ahead` ones; None for an item without work, which waits for no thread.

    `work` is asked for its items in the caller's thread, in order. What a piece of work raises is raised in
    its turn. Work that has not begun when this is closed is left out.
    """
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix=name)
    begun = ((item, None if call is None else pool.submit(call)) for item, call in work)
    try:
        waiting = deque(itertools.islice(begun, ahead))
        while waiting:
            waiting.extend(itertools.islice(begun, 1))
            item, future = waiting.popleft()
            yield item, None if future is None else future.result()
    finally:
        pool.shutdown(cancel_futures=True)
