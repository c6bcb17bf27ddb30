"""Entries that a live run may read, which a prune of the same cache leaves alone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.engine.caching import in_use
from trainer.engine.caching.in_use import LOCK_FILE, prune_unused, reading
from trainer.engine.caching.store import Cache, entry_key
from trainer.errors import StoppedError
from trainer.telemetry import locks

OURS, THEIRS = (entry_key("text", {"caption": caption}) for caption in ("a cat", "a dog"))


class Used:
    """A context, and the entries of a run that uses `OURS` alone."""

    def __init__(self, folder: Path) -> None:
        self.said: list[str] = []
        self.beats = 0
        self.cache = Cache(folder, "tiny")
        self.context: Any = SimpleNamespace(
            cache_dir=folder, family=SimpleNamespace(name="tiny"), say=self.said.append, alive=self.alive
        )
        self.entries: Any = SimpleNamespace(cache=self.cache, all=lambda: [SimpleNamespace(key=OURS)])

    def alive(self, phase: object) -> None:
        self.beats += 1
        if self.beats > 3:
            raise StoppedError("asked to stop")

    def prune(self) -> str:
        prune_unused(self.context, self.entries)
        return self.said.pop()


@pytest.fixture
def used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Used:
    monkeypatch.setattr(locks, "_LOOK_SECONDS", 0.01)
    made = Used(tmp_path / "cache")
    for key in (OURS, THEIRS):
        made.cache.write("text", key, {"a": torch.ones(3)})
    return made


def test_a_prune_removes_nothing_while_another_run_reads(used: Used) -> None:
    with reading(used.context), reading(used.context):
        told = used.prune()
    assert told.startswith("1 entry that this run does not use stays: another run uses this cache now")
    assert told.endswith("prune again once it has ended") and used.cache.has("text", THEIRS)
    assert used.prune().startswith("pruned 1 file, ")
    assert used.cache.has("text", OURS) and not used.cache.has("text", THEIRS)
    with reading(used.context):
        assert used.prune() == "pruned 0 files, 0.00 GiB", "all that is there is used"


def test_what_a_run_writes_during_a_prune_stays(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    (used.cache.path("text", THEIRS)).unlink()

    def none_yet(*_: object) -> list[Path]:
        used.cache.write("text", THEIRS, {"a": torch.ones(3)})
        return []

    monkeypatch.setattr(in_use, "unused", none_yet)
    with reading(used.context):
        assert used.prune() == "pruned 0 files, 0.00 GiB"
    assert used.cache.has("text", THEIRS)


def test_a_run_that_was_killed_keeps_no_entry(used: Used) -> None:
    code = (
        "import fcntl, sys; file = open(sys.argv[1], 'r+'); fcntl.flock(file, fcntl.LOCK_SH);"
        " print(flush=True); sys.stdin.read()"
    )
    with reading(used.context):
        pass
    command = [sys.executable, "-c", code, str(used.cache.folder / LOCK_FILE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        assert "another run uses this cache now" in used.prune()
        child.kill()
    assert used.prune().startswith("pruned 1 file, ")


def test_a_run_waits_for_a_prune_and_may_be_stopped(used: Used) -> None:
    with locks.alone(used.cache.folder / LOCK_FILE) as held:
        assert held is True
        with pytest.raises(StoppedError), reading(used.context):
            pytest.fail("the prune is at work")
    with reading(used.context):
        assert used.beats == 4


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_and_told_of(
    used: Used, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    def without(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(locks.fcntl, "flock", without)
    with reading(used.context):
        assert used.prune().startswith("pruned 1 file, ")
    assert "its lock cannot be taken" in caplog.text


def test_a_cache_that_cannot_be_written_is_read(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(locks.os, "open", refused)
    with reading(used.context):
        pass
    assert used.beats == 0


def test_another_user_s_lock_is_held_for_reading(used: Used, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def of_another(path: Path, flags: int, mode: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, mode)

    with reading(used.context):
        pass
    monkeypatch.setattr(locks.os, "open", of_another)
    with reading(used.context):
        assert "another run uses this cache now" in used.prune()
