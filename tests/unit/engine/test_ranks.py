"""Talk of the processes of one run with each other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import Workers
from trainer.engine import waits as waits_module
from trainer.engine.caching.store import DamagedEntryError
from trainer.engine.ranks import ALONE, Ranks, joined
from trainer.engine.waits import Waits
from trainer.errors import (
    DataError,
    EndedTogether,
    OutOfMemoryError,
    PeerLostError,
    Problem,
    StoppedError,
    TrainerError,
)
from trainer.telemetry.status import Phase, StatusWriter, read_status
from trainer.telemetry.stop import StopFlag

PROBLEMS = (Problem(what="bad", where="a.png", remedy="look"), Problem(what="worse"))


def one_fails(ranks: Ranks, failing: int) -> list[int] | tuple[str, list[Problem]]:
    def make() -> int:
        if ranks.rank == failing:
            raise DamagedEntryError(PROBLEMS)
        return 10 * ranks.rank

    try:
        return ranks.agreed(make)
    except EndedTogether as ended:
        error = ended.__cause__
        assert ranks.rank > 0
    except TrainerError as raised:
        error = raised
        assert ranks.rank == 0
    assert isinstance(error, TrainerError)
    return type(error).__name__, list(error.problems)


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_of_one_rank_is_raised_on_all(pool: Workers, failing: int) -> None:
    answers = pool.call(one_fails, 3, failing)
    assert answers == [("DamagedEntryError", list(PROBLEMS))] * 3


def test_what_all_ranks_make_is_given_to_each(pool: Workers) -> None:
    assert pool.call(one_fails, 3, 3) == [[0, 10, 20]] * 3


def stopped(ranks: Ranks) -> int:
    """Rank 1 alone is asked to end, as by a signal to it alone."""
    flag = StopFlag()
    if ranks.rank == 1:
        flag.requested = StoppedError.exit_code
    try:
        ranks.agreed(flag.raise_if_requested)
    except StoppedError as error:
        return int(error.exit_code)
    except EndedTogether:
        return -1
    return 0


def test_a_request_to_one_rank_ends_all(pool: Workers) -> None:
    """Rank 0 says why."""
    assert pool.call(stopped, 2) == [75, -1]


@pytest.mark.parametrize(
    ("count", "shares"),
    [(4, [[0, 3], [1, 3], [2, 3]]), (3, [[0], [1], [2]]), (1, [[0], [0], [0]]), (0, [[], [], []])],
)
def test_ranks_in_lockstep_take_as_few_rounds_as_there_have_to_be(
    count: int, shares: list[list[int]]
) -> None:
    assert [Ranks(rank=rank, size=3).in_lockstep(count) for rank in range(3)] == shares


def test_one_process_raises_its_own_error() -> None:
    with pytest.raises(DataError, match="bad"):
        ALONE.agreed(lambda: (_ for _ in ()).throw(DataError(PROBLEMS)))


def gathered_rows(ranks: Ranks) -> list[list[int]]:
    rows = torch.zeros(ranks.size, 3, dtype=torch.int64)
    ranks.all_gather(rows, torch.full((3,), ranks.rank))
    found: list[list[int]] = rows.tolist()
    return found


def test_rows_come_in_the_ranks_order(pool: Workers) -> None:
    assert pool.call(gathered_rows, 3) == [[[0] * 3, [1] * 3, [2] * 3]] * 3


def test_a_lost_connection_has_a_name_of_its_own_and_lost_memory_keeps_its_own() -> None:
    with pytest.raises(PeerLostError, match="Connection closed by peer"), Ranks(size=2).waiting():
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"), Ranks(size=2).waiting():
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(OutOfMemoryError), Ranks(size=2).waiting():
        raise OutOfMemoryError("ours")


@pytest.mark.parametrize("name", ["plain", "a#b", "a?b=c", "a b%20"])
def test_ranks_meet_in_a_folder_of_any_name(pool: Workers, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert pool.call(gathered_rows, 2, place=folder / "meeting") == [[[0] * 3, [1] * 3]] * 2


def test_only_long_waits_are_told_and_none_counts_as_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits_module, "_TOLD_SECONDS", 0.4)
    writer = StatusWriter(tmp_path, interval_seconds=0.0)
    writer.beat(Phase.TRAIN, step=1)
    waits = Waits(writer)

    def told() -> bool:
        status = read_status(tmp_path)
        return status is not None and status.waits

    for _ in range(20):
        with waits:
            assert not told()
    with waits:
        end = time.monotonic() + 20
        while not told() and time.monotonic() < end:
            time.sleep(0.05)
        assert told()
        beat = read_status(tmp_path)
        time.sleep(1.0)
        assert read_status(tmp_path) == beat  # silent from then on: ranks that wait for each other are found
    assert not told()
    writer.beat(Phase.TRAIN, step=2, item_done=True)
    writer.beat(Phase.TRAIN, step=3, item_done=True)
    waits.end()
    status = read_status(tmp_path)
    assert status is not None and status.median_step_seconds is not None
    assert status.median_step_seconds < 0.5  # the second that it waited is not a step's


def test_a_rank_that_waits_for_one_that_never_comes_can_be_ended(tmp_path: Path) -> None:
    """Its supervisor may be gone by then: nobody else would end it."""
    looked: list[int] = []

    def look() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise StoppedError("stopped on request")

    with pytest.raises(StoppedError), joined(0, 2, tmp_path / "meet", look=look):
        pytest.fail("the other rank never came")
    assert len(looked) == 3


def test_a_rank_that_is_to_end_does_not_wait_for_one_that_was_there_and_ended(tmp_path: Path) -> None:
    """A supervisor that was killed has both end: one while it waits for the other, which comes later."""
    dist.FileStore(str(tmp_path / "meet"), 3).set("here 0", "")  # type: ignore[attr-defined]

    def look() -> None:
        raise StoppedError("stopped on request")

    with pytest.raises(StoppedError), joined(1, 2, tmp_path / "meet", look=look):
        pytest.fail("the other rank is gone")


def test_a_rank_that_is_to_end_does_not_look_for_a_folder_that_is_gone(tmp_path: Path) -> None:
    """The library would wait for it for minutes, and see no signal."""

    def look() -> None:
        raise StoppedError("stopped on request")

    with pytest.raises(StoppedError), joined(1, 2, tmp_path / "gone" / "meet", look=look):
        pytest.fail("there is no folder to meet in")
