"""Runs beside the queue: of a job and a run by hand that want one GPU, one has it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.unit.queue.fakes import FakeLocal, FakeMachine, wanted
from trainer.errors import ConfigError, HardwareError
from trainer.queue import database, jobfiles
from trainer.queue.beside import kept_from_queue, require_free
from trainer.queue.database import Machine
from trainer.telemetry import locks

A, B = "GPU-a", "GPU-b"
ROUNDS = 40


def told(text: str) -> None:
    raise AssertionError(text)


def test_one_of_two_that_come_together_has_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together, done = threading.Barrier(2), threading.Barrier(2)

    def by_hand() -> bool:
        together.wait()
        try:
            with kept_from_queue([A], share=False, tell=told):
                done.wait()
                return True
        except HardwareError:
            done.wait()
            return False

    def by_queue(queue: FakeLocal) -> bool:
        together.wait()
        started = queue.start_due()
        done.wait()
        return bool(started)

    with ThreadPoolExecutor(2) as threads:
        for number in range(ROUNDS):
            folder = tmp_path / str(number)
            monkeypatch.setenv("TRAINER_QUEUE_DIR", str(folder))
            machine = FakeMachine((A, B), identity=Machine.here())
            queue = FakeLocal(folder, machine)
            queue.submit([wanted("cats", (A,))])
            run, job = threads.submit(by_hand), threads.submit(by_queue, queue)
            assert {run.result(timeout=60), job.result(timeout=60)} == {True, False}
            for started in machine.live():
                started.end(0)


def test_a_queue_whose_first_jobs_were_refused_keeps_gpus_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its database has no tables yet."""
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path))
    queue = FakeLocal(tmp_path, FakeMachine((A, B), identity=Machine.here()))
    with pytest.raises(ConfigError):
        queue.submit([wanted("cats"), wanted("cats")])
    assert not (tmp_path / database.DATABASE_FILE).stat().st_size
    require_free([A])
    with kept_from_queue([A], share=False, tell=told):
        assert locks.is_held(jobfiles.gpu_lock(tmp_path, A), shared=True)


def test_runs_by_hand_share_what_they_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of their memory the plan decides; the GPU is free for jobs once all have ended."""
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path))
    queue = FakeLocal(tmp_path, FakeMachine((A, B), identity=Machine.here()))
    queue.submit([wanted("cats", (A,))])
    with kept_from_queue([A, ""], share=False, tell=told):
        with kept_from_queue([A], share=True, tell=told):
            assert queue.start_due() == []
        assert queue.start_due() == []
    assert [job.name for job in queue.start_due()] == ["cats"]
    with pytest.raises(HardwareError, match=r"GPU-a is leased to cats \(job 1\)"):
        kept_from_queue([A], share=False, tell=told).__enter__()
    with kept_from_queue([A], share=True, tell=told):
        pass
