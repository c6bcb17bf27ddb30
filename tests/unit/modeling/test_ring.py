"""Limits of reading ahead: memory, threads, descriptors, page cache; and errors of a failing disk."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from tests.unit.modeling.test_reading import SMALL, WAYS, assert_same, raw, read, reader, write_model
from trainer.files.safetensors import read_header
from trainer.modeling.base import reading
from trainer.modeling.base.reading import Choice, page_cache_share
from trainer.modeling.base.ring import Ring, RingSize


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("way", WAYS[2:], ids=str)
def test_a_file_that_shrinks_while_it_is_read_is_told(path: Path, way: Choice) -> None:
    with (
        reader(way) as ways,
        pytest.raises(SafetensorError, match="within its tensors"),
        ways.open(path) as file,
    ):
        # the ring has read 256 KiB of it at most
        os.truncate(path, 400 * 1024)
        for name in file.ends:
            file.get_tensor(name)


def test_a_disk_that_fails_is_told(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with (
        reader(WAYS[2]) as ways,
        pytest.raises(SafetensorError, match="Input/output error"),
        ways.open(path) as file,
    ):
        file.get_tensor("layer.0")


def test_direct_reads_that_are_refused_go_through_the_page_cache(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    refused: list[int] = []

    def refuse(name: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            refused.append(flags)
            raise OSError(22, "Invalid argument")
        return real(name, flags)

    monkeypatch.setattr(os, "open", refuse)
    found = read(path, WAYS[3])
    monkeypatch.undo()
    assert refused
    assert_same(found, path)


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_no_more_than_the_ring_is_read_ahead(
    path: Path, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock, offsets = os.preadv, threading.Lock(), []

    def watched(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        with lock:
            offsets.append(offset + sum(len(buffer) for buffer in buffers))
        return real(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", watched)
    size = RingSize(piece_bytes=64 * 1024, pieces=pieces, threads=3)
    with reader(WAYS[2], size) as ways, ways.open(path) as file:
        for name, end in file.ends.items():
            file.get_tensor(name)
            # pieces before the one that this tensor ends in are free, and as many were read behind them
            assert max(offsets) <= ((end - 1) // size.piece_bytes + pieces) * size.piece_bytes
    assert max(offsets) >= path.stat().st_size


@pytest.mark.parametrize("way", WAYS[2:], ids=str)
def test_of_the_file_around_what_was_selected_no_page_is_read(
    path: Path, way: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes that read one half each read the file once."""
    real, lock, pages = os.preadv, threading.Lock(), set[int]()

    def watched(descriptor: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        count = real(descriptor, buffers, offset, flags)
        with lock:
            pages.update(range(offset // 4096, -(-(offset + count) // 4096)))
        return count

    header = read_header(path)
    places = {name: one["data_offsets"] for name, one in header.tensors.items()}
    largest = max(places, key=lambda name: places[name][1] - places[name][0])
    start, end = (header.start + one for one in places[largest])
    monkeypatch.setattr(os, "preadv", watched)
    with reader(way) as ways, ways.open(path, lambda sizes: [largest]) as file:
        found = file.get_tensor(largest)
    assert pages == set(range(start // 4096, -(-end // 4096)))
    assert raw(found) == path.read_bytes()[start:end]


def test_the_ring_is_all_the_memory_and_threads_there_are(path: Path) -> None:
    before = threading.active_count()
    with reader(WAYS[2]) as ways:
        for _ in range(3):
            with ways.open(path) as file:
                for name in file.ends:
                    file.get_tensor(name)
        ring = ways._ring
        assert ring is not None
        assert ring._whole.numel() == SMALL.pieces * SMALL.piece_bytes
        assert threading.active_count() - before <= SMALL.threads
    assert threading.active_count() == before


def test_a_reader_that_stops_early_leaves_no_descriptor(path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    with reader(WAYS[3]) as ways:
        for _ in range(5):
            with pytest.raises(KeyError), ways.open(path) as file:
                file.get_tensor(next(iter(file.ends)))
                raise KeyError
    assert descriptors() == before


def test_dropped_pages_leave_the_page_cache(path: Path) -> None:
    """On unified memory the page cache would take memory from the model."""
    require_eviction(path)
    path.read_bytes()
    ring = Ring(torch.device("cpu"), SMALL)
    target = torch.empty(path.stat().st_size, dtype=torch.uint8)
    with ring.reading(path, [(0, target.numel())], direct=False, drop=True) as copy:
        copy(0, target)
    ring.close()
    assert page_cache_share(path) == pytest.approx(0.0, abs=0.2)
    assert raw(target) == path.read_bytes()


def evict(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def require_eviction(path: Path) -> None:
    """Skip where the file system keeps pages whatever it is told, as tmpfs does."""
    evict(path)
    share = page_cache_share(path)
    if share is None or share > 0.5:
        pytest.skip("this file system does not let go of cached pages, or does not say")


def test_share_of_a_file_in_the_page_cache(path: Path) -> None:
    assert page_cache_share(path) == pytest.approx(1.0, abs=0.05)
    require_eviction(path)
    assert page_cache_share(path) == pytest.approx(0.0, abs=0.05)
    with path.open("rb") as file:
        # not what lies behind
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        os.pread(file.fileno(), path.stat().st_size // 2, 0)
    assert page_cache_share(path) == pytest.approx(0.5, abs=0.3)
    path.read_bytes()
    assert page_cache_share(path) == pytest.approx(1.0, abs=0.05)


def test_share_of_a_file_of_someone_else(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mincore would say that all of it is there."""
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1)
    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(reading, "_resident_share", lambda path: pytest.fail("mincore was asked"))
    share = page_cache_share(path)
    if share is None:
        pytest.skip("this file system has no reads without waiting")
    assert share == 1.0
    require_eviction(path)
    assert page_cache_share(path) == pytest.approx(0.0, abs=0.3)
