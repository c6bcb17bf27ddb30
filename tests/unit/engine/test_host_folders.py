"""Folders of two hosts: what is shared is found out, and what a host lacks is sent whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import Workers
from trainer.engine.hosts import folders
from trainer.engine.ranks import Ranks
from trainer.errors import ConfigError, StorageError
from trainer.files import atomic

NAME = "checkpoints/step-000005"


def context_of(ranks: Ranks, run_dir: Path, cache: Path, *, in_rows: bool = False) -> Any:
    """The part of a context that folders ask for; one rank a host."""

    @dataclasses.dataclass(frozen=True)
    class Context:
        ranks: Ranks
        run_dir: Path
        cache_dir: Path
        plan: Any
        status: Any
        cache_ranks: tuple[int, ...] = ()
        shares_run_dir: bool = True

        def tell(self, text: str) -> None:
            pass

        def alive(self, phase: Any) -> None:
            pass

    status = SimpleNamespace(phase=None, beat=lambda phase: None)
    hosts = dataclasses.replace(ranks, hosts=ranks.size)
    return Context(hosts, run_dir, cache, SimpleNamespace(in_rows=in_rows), status)


def look(ranks: Ranks, root: Path, run: bool, cache: bool) -> tuple[bool, tuple[int, ...]]:
    """Folders as each rank finds them, its own or shared."""
    own = root / str(ranks.rank)
    run_dir, cache_dir = root / "run" if run else own / "run", root / "cache" if cache else own / "cache"
    patience = folders._SEEN_SECONDS
    folders._SEEN_SECONDS = 1.5  # no network is between them: what is there is seen at once
    try:
        found = folders.found(context_of(ranks, run_dir, cache_dir))
    finally:
        folders._SEEN_SECONDS = patience
    ranks.meet()
    assert not list(run_dir.iterdir()) and not list(cache_dir.iterdir())  # no mark is left
    return found.shares_run_dir, found.cache_ranks


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("run", [True, False])
def test_shared_and_own_folders_are_told_apart(run: bool, cache: bool, pool: Workers, tmp_path: Path) -> None:
    first, second = pool.call(look, 2, tmp_path, run, cache)
    assert (first[0], second[0]) == (True, run)
    assert (first[1], second[1]) == (((0, 1), (0, 1)) if cache else ((0,), (1,)))


def look_read_only(ranks: Ranks, root: Path, closed: tuple[int, ...], run: bool) -> Any:
    """Cache ranks as `look` gives them, where caches take no files on the hosts `closed`; with `run` the
    run's folder takes none either.
    """
    cache_dir, run_dir, touch = root / "cache", root / "run", Path.touch
    cache_dir.mkdir(exist_ok=True)

    def refused(path: Path) -> None:
        if ranks.rank in closed and (run or path.parent == cache_dir):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        touch(path)

    Path.touch = refused  # type: ignore[assignment,method-assign]
    try:
        if run:
            with pytest.raises(StorageError, match="while writing it"):
                folders._which_see(dataclasses.replace(ranks, hosts=ranks.size), run_dir)
            return None
        return folders.found(context_of(ranks, run_dir, cache_dir)).cache_ranks
    finally:
        Path.touch = touch  # type: ignore[method-assign]


def test_a_cache_that_takes_no_files_is_the_hosts_own(pool: Workers, tmp_path: Path) -> None:
    """A complete one is only read: two hosts were refused, though nothing has to be written."""
    assert pool.call(look_read_only, 2, tmp_path, (0, 1), False) == [(0,), (1,)]
    assert pool.call(look_read_only, 2, tmp_path, (1,), False) == [(0, 1), (0, 1)]
    assert (tmp_path / "cache").is_dir()
    pool.call(look_read_only, 2, tmp_path, (0, 1), True)


def hand(ranks: Ranks, root: Path, file: str, there: bytes | None) -> tuple[str, dict[str, bytes]]:
    """The files of each rank in its own folder after rank 0 handed out a folder."""
    folders.PIECE_BYTES = 1000
    run_dir = root / str(ranks.rank) / "run"
    target = run_dir / file
    if ranks.first:
        target.mkdir(parents=True)
        (target / "state.json").write_text("{}")
        (target / "weights").mkdir()
        (target / "weights" / "one.bin").write_bytes(bytes(range(256)) * 20)
        (target / "empty").touch()
    elif there is not None:
        target.mkdir(parents=True)
        (target / "state.json").write_bytes(there)
    context = dataclasses.replace(
        context_of(ranks, run_dir, root), shares_run_dir=ranks.first, cache_ranks=(ranks.rank,)
    )
    found = folders.handed(context, target if ranks.first else run_dir)
    files = {str(path.relative_to(found)): path.read_bytes() for path in found.rglob("*") if path.is_file()}
    return str(found.relative_to(run_dir)), files


@pytest.mark.parametrize("there", [None, b"{}", b"[]"], ids=["nothing", "a part", "another"])
def test_a_folder_is_sent_whole_in_pieces(there: bytes | None, pool: Workers, tmp_path: Path) -> None:
    first, second = pool.call(hand, 2, tmp_path, NAME, there)
    assert first == second and first[0] == NAME and len(first[1]) == 3


def hand_file(ranks: Ranks, root: Path) -> bytes:
    run_dir = root / str(ranks.rank)
    run_dir.mkdir(parents=True)
    path = run_dir / "lora" / "cats.safetensors"
    if ranks.first:
        path.parent.mkdir()
        path.write_bytes(b"weights" * 1000)
    context = dataclasses.replace(context_of(ranks, run_dir, root), shares_run_dir=ranks.first)
    return folders.handed(context, path).read_bytes()


def test_a_file_is_sent_to_the_same_place(pool: Workers, tmp_path: Path) -> None:
    assert pool.call(hand_file, 2, tmp_path) == [b"weights" * 1000] * 2
    assert (tmp_path / "1" / "lora" / "cats.safetensors").is_file()


def hand_to_two_a_host(ranks: Ranks, root: Path) -> bytes:
    """A file as each of a host's two ranks finds it; the first one is slow to write it."""
    folders.PIECE_BYTES = 1000  # as those have it that another test used
    hosts = dataclasses.replace(ranks, hosts=2)
    run_dir = root / str(hosts.host)
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "lora" / "cats.safetensors"
    if hosts.first:
        path.parent.mkdir()
        path.write_bytes(b"weights" * 1000)
    real = atomic.writing

    @contextlib.contextmanager
    def slow(target: Path) -> Iterator[Any]:
        with real(target) as file:
            yield file
            time.sleep(0.5)

    atomic.writing = slow
    context = dataclasses.replace(
        context_of(ranks, run_dir, root), ranks=hosts, shares_run_dir=hosts.host == 0
    )
    try:
        found = folders.handed(context, path)
    finally:
        atomic.writing = real
    return found.read_bytes() if found.is_file() else b""


def test_every_rank_of_a_host_is_given_a_file_that_is_there(pool: Workers, tmp_path: Path) -> None:
    assert pool.call(hand_to_two_a_host, 4, tmp_path) == [b"weights" * 1000] * 4


def test_a_later_checkpoint_that_waits_aside_on_another_host_is_told(tmp_path: Path) -> None:
    """A kill left it there, and the host would be sent an earlier one."""
    (tmp_path / "checkpoints" / ".step-000009.old").mkdir(parents=True)
    ranks: Any = SimpleNamespace(
        hosts=2, ranks_here=1, speaks=True, gathered=lambda own: [0, own], together=contextlib.nullcontext
    )
    said: list[str] = []
    own: Any = SimpleNamespace(ranks=ranks, run_dir=tmp_path, shares_run_dir=False, tell=said.append)
    start: Any = SimpleNamespace(found=None)
    with pytest.raises(ConfigError, match="host 1 has a checkpoint of step 9 in its own folder"):
        folders.with_checkpoint(own, start)
    assert said[0].startswith("checkpoints/step-000009 is here again")
