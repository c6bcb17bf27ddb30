"""Whose turn it is and when: predictions against what the same machine then does, hour by hour."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.queue.database import Job
from trainer.queue.launcher import CPU
from trainer.queue.turns import Due, about, starts, turns

UUIDS = ("GPU-a", "GPU-b", "GPU-c")


def job(number: int, gpus: tuple[str, ...] = (), count: int = 1, seconds: float | None = 1.0) -> Job:
    return Job(
        id=number,
        name=f"run-{number}",
        group="",
        run=Path(f"/runs/{number}"),
        working_folder=Path("/"),
        gpus=gpus,
        count=len(gpus) or count,
        seconds=seconds,
        held=False,
        start=1,
        leases=(),
    )


WANTED = st.one_of(
    st.sets(st.sampled_from(UUIDS), min_size=1).map(lambda found: (tuple(sorted(found)), 0)),
    st.integers(1, 3).map(lambda count: ((), count)),
    st.just(((CPU,), 0)),
)


@settings(max_examples=200)
@given(
    wants=st.lists(WANTED, min_size=1, max_size=7),
    numbers=st.permutations(range(10)),
)
def test_starts_are_when_the_machine_gets_there(
    wants: list[tuple[tuple[str, ...], int]], numbers: list[int]
) -> None:
    """Runs that take as long as predicted start when it was said; two GPUs are busy to begin with."""
    # powers of two: no two ends are at one moment
    times = [float(2**number) for number in numbers]
    waiting = [job(k, gpus, count, times[k]) for k, (gpus, count) in enumerate(wants)]
    busy = {UUIDS[0]: times[8], UUIDS[1]: times[9]}
    predicted = starts(waiting, UUIDS, dict(busy))
    clock, began, on = 0.0, dict[int, float](), dict[int, set[str]]()
    while waiting:
        for number, turn in turns(waiting, UUIDS, dict.fromkeys(busy, "busy"), {}).items():
            if turn.gpus:
                began[number], on[number] = clock, set(turn.gpus)
                length = next(one.seconds for one in waiting if one.id == number)
                assert length is not None
                busy |= dict.fromkeys(turn.gpus, clock + length)
        waiting = [one for one in waiting if one.id not in began]
        if waiting:
            clock = min(busy.values())
            busy = {uuid: end for uuid, end in busy.items() if end > clock}
    assert {number: due and due.seconds for number, due in predicted.items()} == pytest.approx(began)
    assert {number: set(due.gpus) for number, due in predicted.items() if due} == on


def test_a_time_that_nobody_knows_makes_later_ones_unknown() -> None:
    waiting = [job(1, ("GPU-a",), seconds=None), job(2, ("GPU-a",)), job(3, ("GPU-b",)), job(4, count=5)]
    known = {1: Due(seconds=0.0, gpus=("GPU-a",)), 2: None, 3: Due(seconds=7.0, gpus=("GPU-b",)), 4: None}
    assert starts(waiting, UUIDS, {"GPU-b": 7.0}) == known
    assert starts([job(1, ("GPU-a",))], UUIDS, {"GPU-a": None}) == {1: None}


def test_a_start_behind_a_run_that_does_not_train_yet_is_the_earliest() -> None:
    """Plans have no time to load a base, to encode and to compile: neither of a run nor of a job before."""
    waiting = [job(1, ("GPU-a",)), job(2, ("GPU-b",)), job(3, ("GPU-b",)), job(4), job(5, (CPU,))]
    left = {"GPU-a": 4.0, "GPU-b": 8.0, "GPU-c": 2.0}
    found = starts(waiting, UUIDS, left, {"GPU-a"})
    assert {number: (due.seconds, due.at_the_earliest) for number, due in found.items() if due} == {
        1: (4.0, True), 2: (8.0, False), 3: (9.0, True), 4: (2.0, False), 5: (0.0, False)
    }  # fmt: skip
    # of two GPUs it keeps the one that is free first until the other is
    both = starts([job(1, count=2), job(2, ("GPU-c",))], UUIDS, left, {"GPU-a"})
    assert both == {1: Due(seconds=4.0, at_the_earliest=True, gpus=("GPU-a", "GPU-c")),
                    2: Due(seconds=5.0, at_the_earliest=True, gpus=("GPU-c",))}  # fmt: skip
    assert (Due(seconds=60.0).words, Due(seconds=60.0, at_the_earliest=True).words) == (
        "about 60 s", "about 60 s at the earliest"
    )  # fmt: skip


def test_who_is_waited_for_is_said() -> None:
    waiting = [job(1, ("GPU-a", "GPU-b")), job(2, ("GPU-b",)), job(3, count=3), job(4), job(5, count=4)]
    names = {"GPU-a": "GPU 0", "GPU-b": "GPU 1", "GPU-c": "GPU 2"}
    found = turns(waiting, UUIDS, {"GPU-a": "held by cats (job 9)"}, names)
    assert found[1].why == "waits for GPU 0, held by cats (job 9)"
    assert found[2].why == "waits for GPU 1, wanted before by run-1 (job 1)"
    assert found[3].why.endswith("GPU 1, wanted before by run-1 (job 1)")
    assert "GPU 2, wanted before by run-3 (job 3)" in found[4].why
    assert found[5].why == "wants 4 GPUs, and 3 are there"
    assert not any(turn.gpus for turn in found.values())


def test_a_job_of_more_gpus_than_there_are_blocks_nobody() -> None:
    waiting = [job(1, count=4), job(2)]
    assert turns(waiting, UUIDS, {}, {})[2].gpus == ("GPU-a",)
    assert starts(waiting, UUIDS, {}) == {1: None, 2: Due(seconds=0.0, gpus=("GPU-a",))}


def test_a_gpu_that_is_kept_for_a_job_which_may_start_later_is_free_at_the_earliest_then() -> None:
    """If GPU-a is late, the first job takes GPU-c beside GPU-b."""
    found = starts([job(1, count=2), job(2, ("GPU-c",))], UUIDS, dict.fromkeys(UUIDS, 4.0), {"GPU-a"})
    assert found[2] == Due(seconds=4.0, at_the_earliest=True, gpus=("GPU-c",))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "about 1 s"),
        (89, "about 89 s"),
        (2400, "about 40 min"),
        (5400, "about 1.5 h"),
        (180000, "about 2.1 days"),
    ],
)
def test_times_in_words(seconds: float, words: str) -> None:
    assert about(seconds) == words
