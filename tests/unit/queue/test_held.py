"""Runs that stop with 75: which are held, and which go on by themselves."""

from __future__ import annotations

import pytest

from tests.unit.queue.fakes import FakeLocal, FakeMachine, wanted
from trainer.queue import jobfiles
from trainer.queue.launcher import State

A = "GPU-a"


@pytest.mark.parametrize("by", ["hold", "watcher"])
def test_a_stop_from_outside_is_held_where_somebody_wants_it_or_nobody_asked_for_it(
    by: str, queue: FakeLocal, machine: FakeMachine
) -> None:
    queue.submit([wanted("cats", (A,))])
    queue.start_due()
    (run,) = machine.live()
    if by == "hold":
        queue.hold("1")
        assert queue.state("1").state is State.RUNNING
    else:  # it notes that the run stopped by itself
        jobfiles.write_stop(run.folder, run.start.job.start)
    run.end(75)
    assert queue.state("1").state is State.HELD
    assert queue.start_due() == []
    queue.release("1")
    assert [job.id for job in queue.start_due()] == [1]


def test_a_job_that_is_forgotten_before_anybody_looked_gives_back_its_gpu(
    queue: FakeLocal, machine: FakeMachine
) -> None:
    queue.submit([wanted("cats", (A,))])
    queue.start_due()
    machine.live()[0].end(0)
    queue.forget("1")
    queue.submit([wanted("dogs", (A,))])
    assert [job.id for job in queue.start_due()] == [2]
    assert not machine.wrong
