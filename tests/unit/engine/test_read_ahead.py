"""Pictures are read ahead of the encoders: in order, few at a time, and what fails fails in its turn."""

from __future__ import annotations

import hashlib
import itertools
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.data.pictures import encoded, picture, record
from trainer.data.records import Control, Mask
from trainer.engine.caching import pictures
from trainer.engine.caching.entries import ControlView, Entry, latents_entry, text_entry
from trainer.engine.caching.pictures import Pictures, read_ahead, read_pictures
from trainer.errors import DataError

ENTRIES: list[Entry] = [latents_entry(record(number), {}) for number in range(12)]


def same(*size: int) -> tuple[int, int]:
    return size[0], size[1]


def test_pictures_come_in_order_though_the_first_takes_longest() -> None:
    def read(entry: Entry) -> Pictures:
        time.sleep(0.2 if entry is ENTRIES[0] else 0.0)
        return Pictures(pixels=torch.tensor(float(ENTRIES.index(entry))))

    found = [(entry, one.pixels) for entry, one in read_ahead(ENTRIES, read, threads=3)]
    assert [entry for entry, _ in found] == ENTRIES
    assert [pixels for _, pixels in found] == list(map(float, range(12)))


def test_others_are_read_meanwhile_and_no_more_than_threads_ahead() -> None:
    begun: list[Entry] = []

    def read(entry: Entry) -> Pictures:
        begun.append(entry)
        return Pictures()

    ahead = read_ahead(ENTRIES, read, threads=3)
    for number in range(1, 4):
        next(ahead)
        _wait(lambda wanted=number + 3: len(begun) == wanted)
    ahead.close()
    assert begun == ENTRIES[:6]


def _wait(true: Callable[[], bool]) -> None:
    for _ in range(500):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not become true")


def test_a_picture_that_cannot_be_read_fails_in_its_turn() -> None:
    def read(entry: Entry) -> Pictures:
        if entry is ENTRIES[2]:
            raise DataError("damaged", where="x", remedy="y")
        return Pictures()

    ahead = read_ahead(ENTRIES, read)
    assert [entry for entry, _ in itertools.islice(ahead, 2)] == ENTRIES[:2]
    with pytest.raises(DataError, match="damaged"):
        next(ahead)


def test_captions_alone_are_not_read() -> None:
    texts = [text_entry(caption, {}) for caption in ("a", "b")]
    assert list(read_ahead(texts, pytest.fail)) == [(one, Pictures()) for one in texts]


def test_filters_of_warnings_are_as_they_were() -> None:
    """Though threads leave them changed, as two that set them aside at one time do."""

    def read(entry: Entry) -> Pictures:
        warnings.simplefilter("ignore", UserWarning)
        return Pictures()

    before = warnings.filters[:]
    assert len(list(read_ahead(ENTRIES, read))) == len(ENTRIES)
    assert warnings.filters == before


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_everything_of_an_entry_is_read_as_it_is_cut(tmp_path: Path) -> None:
    """Against Pillow's own picture: the sample's, a control image's beside it and as it is seen, a mask's."""
    whole = picture(64, 48)
    (tmp_path / "a.png").write_bytes(encoded(whole))
    (tmp_path / "mask.png").write_bytes(encoded(Image.new("L", (64, 48), 255)))
    control = Control(path=tmp_path / "a.png", width=64, height=48, content_sha256=_hash(tmp_path / "a.png"))
    one = replace(
        record(0),
        path=tmp_path / "a.png",
        content_sha256=_hash(tmp_path / "a.png"),
        width=64,
        height=48,
        bucket_width=32,
        bucket_height=32,
        controls=(control,),
        mask=Mask(path=tmp_path / "mask.png", content_sha256=_hash(tmp_path / "mask.png")),
    )
    found = read_pictures(latents_entry(one, {}), same)
    middle = whole.resize((32, 32), Image.Resampling.LANCZOS, box=(8, 0, 56, 48))
    cut = torch.from_numpy(np.asarray(middle) / np.float32(127.5) - np.float32(1)).permute(2, 0, 1)
    assert found.pixels is not None and torch.equal(found.pixels, cut)
    assert len(found.controls) == 1 and torch.equal(found.controls[0], cut)
    assert found.mask is not None and torch.equal(found.mask, torch.ones(1, 32, 32))
    seen = read_pictures(text_entry("a", {}, [ControlView(control=control)]), same)
    assert seen.pixels is None and [image.tobytes() for image in seen.seen] == [whole.tobytes()]


@pytest.mark.parametrize(("limit", "most"), [(0, 1), (10**9, 3)])
def test_large_pictures_are_decoded_one_at_a_time(
    limit: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen = 0, list[int]()
    lock, meet = threading.Lock(), threading.Barrier(3)

    def slow(path: Path, *, content_sha256: str) -> Image.Image:
        nonlocal now
        with lock:
            now += 1
            seen.append(now)
        if limit:  # all three are there at once
            meet.wait(10)
        with lock:
            now -= 1
        return picture()

    monkeypatch.setattr(pictures, "read_image", slow)
    monkeypatch.setattr(pictures.opened, "LARGE_PIXELS", limit)
    monkeypatch.setattr(pictures.os, "cpu_count", lambda: 8)
    list(read_ahead(ENTRIES[:3], lambda one: read_pictures(one, same), threads=3))
    assert max(seen) == most
