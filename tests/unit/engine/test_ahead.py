"""Work ahead of who takes its results: in turn, so many at a time, and no more once nobody takes them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator

import pytest

from trainer.engine.ahead import in_turn


class Pieces:
    """Numbered pieces of work, the odd ones done at once; records which were asked for, and which begun."""

    def __init__(self, count: int, fails: int = -1) -> None:
        self.count, self.fails = count, fails
        self.asked: list[int] = []
        self.begun: list[str] = []

    def work(self) -> Iterator[tuple[int, Callable[[], int] | None]]:
        for number in range(self.count):
            self.asked.append(number)
            yield number, functools.partial(self._do, number) if number % 2 == 0 else None

    def _do(self, number: int) -> int:
        self.begun.append(threading.current_thread().name)
        if number == self.fails:
            raise ValueError(number)
        return number * 10


def test_results_come_in_turn_and_so_many_are_begun_ahead() -> None:
    pieces, taken = Pieces(9), list[tuple[int, int | None]]()
    for number, result in in_turn(pieces.work(), threads=2, ahead=3, name="pieces"):
        taken.append((number, result))
        # this one and three more
        assert pieces.asked == list(range(min(9, number + 4)))
    assert taken == [(number, None if number % 2 else number * 10) for number in range(9)]
    assert len(pieces.begun) == 5 and all(name.startswith("pieces") for name in pieces.begun)


def test_an_error_is_raised_in_its_turn() -> None:
    found = in_turn(Pieces(9, fails=2).work(), threads=2, ahead=4, name="pieces")
    assert [next(found), next(found)] == [(0, 0), (1, None)]
    with pytest.raises(ValueError, match="2"):
        next(found)
    assert list(found) == []


def test_what_has_not_begun_is_left_out_once_it_is_closed() -> None:
    goes_on, begun = threading.Event(), list[int]()

    def wait(number: int) -> None:
        begun.append(number)
        if number == 1:
            goes_on.wait()

    found = in_turn(((n, functools.partial(wait, n)) for n in range(9)), threads=1, ahead=5, name="pieces")
    assert next(found)[0] == 0
    threading.Timer(0.1, goes_on.set).start()
    found.close()
    assert begun in ([0], [0, 1])
