"""Folders that one run holds: refused while its supervisor lives, waited for when it is gone."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer.errors import ConfigError, Problem, StoppedError
from trainer.telemetry import locks


def hold(path: Path, said: list[str], *, patience: float = 30.0, supervisor: int | None = None) -> Any:
    return locks.holding(
        path,
        supervisor=supervisor or os.getpid(),
        taken=Problem(what="taken", where="here", remedy="wait"),
        on_wait=said.append,
        patience_seconds=patience,
    )


def ended_pid() -> int:
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    return done.pid


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(locks, "_PROBE_SECONDS", 0.05)


def test_a_living_run_is_not_waited_for(tmp_path: Path) -> None:
    said: list[str] = []
    with (
        hold(tmp_path / "lock", said),
        pytest.raises(ConfigError, match="here: taken"),
        hold(tmp_path / "lock", said),
    ):
        pass
    assert not said
    with hold(tmp_path / "lock", said):
        assert locks.is_held(tmp_path / "lock") is True
    assert locks.is_held(tmp_path / "lock") is False
    assert locks.is_held(tmp_path / "absent") is None


def test_a_container_that_gets_the_number_of_one_before_is_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel gives numbers of sets of processes again; names may hold brackets and spaces."""
    first, here = tmp_path / "stat", locks.place()
    monkeypatch.setattr(locks, "_FIRST", first)
    fields = " ".join(str(number) for number in range(4, 22))
    first.write_text(f"1 (tini) 0) S {fields} 4711 23 24\n")
    one = locks.place()
    assert one["processes"] == f"{here['processes'].partition(' ')[0]} since 4711"
    first.write_text(f"1 (tini) S {fields} 4712 23 24\n")
    assert locks.place() != one
    first.unlink()
    assert locks.place()["processes"] == here["processes"].partition(" ")[0]


def test_the_holder_is_the_one_that_holds_it_now(tmp_path: Path) -> None:
    path, before = tmp_path / "lock", {**locks.place(), "supervisor": 123456789}
    with hold(path, [], supervisor=123456789):
        assert locks.is_held_by(path, before)
    assert not locks.is_held_by(path, before)
    shorter = {**locks.place(), "supervisor": 1}
    with hold(path, [], supervisor=1):
        assert locks.is_held_by(path, shorter) and not locks.is_held_by(path, before)
        there = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(9):
            locks.is_held_by(path, shorter)
        assert len(list(Path("/proc/self/fd").iterdir())) == there


def test_a_lock_that_says_nothing_is_a_living_runs(tmp_path: Path) -> None:
    with hold(tmp_path / "lock", []) as descriptor:
        os.ftruncate(descriptor, 0)  # as 0.1.0 left it
        with pytest.raises(ConfigError, match="taken"), hold(tmp_path / "lock", []):
            pass


@pytest.mark.parametrize("where", ["its supervisor is gone", "another machine", "another container"])
def test_a_run_that_ends_is_waited_for(tmp_path: Path, where: str) -> None:
    path, said, let_go = tmp_path / "lock", [], threading.Event()
    entered = threading.Event()

    def orphan() -> None:
        with hold(path, []) as descriptor:
            holder = json.loads(os.pread(descriptor, 4096, 0))
            if where == "its supervisor is gone":
                holder["supervisor"] = ended_pid()
            else:
                holder["boot" if where == "another machine" else "processes"] = "other"
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            entered.set()
            let_go.wait(30)

    thread = threading.Thread(target=orphan)
    thread.start()
    entered.wait(30)
    with pytest.raises(StoppedError, match="taken, and has not ended within"), hold(path, said, patience=0.2):
        pass

    class Telling(list[str]):
        def append(self, text: str) -> None:
            super().append(text)
            if text:
                let_go.set()

    told = Telling()
    with hold(path, told):
        pass
    thread.join()
    assert [text for text in told if text] == ["taken, which is about to end: waiting for it"]


def test_who_asks_for_a_moment_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    path.touch()
    asked = os.open(path, os.O_RDONLY)
    locks.fcntl.flock(asked, locks.fcntl.LOCK_SH)
    monkeypatch.setattr(locks.time, "sleep", lambda seconds: os.close(asked))
    with hold(path, []):
        pass


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(ConfigError, match="is a link, and is not followed"), hold(tmp_path / "lock", []):
        pass
    assert precious.read_text() == "mine"


def test_a_full_disk_does_not_keep_a_run_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with hold(tmp_path / "lock", []):
        assert locks.is_held(tmp_path / "lock") is True


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_locks_is_told_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", without)
    said: list[str] = []
    with hold(tmp_path / "lock", said):
        pass
    (text,) = said
    assert "without locks" in text


def test_another_failure_of_the_lock_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(locks.fcntl, "flock", broken)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)), hold(tmp_path / "lock", []):
        pass
