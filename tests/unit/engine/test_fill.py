"""Filling the cache: only what is missing, one kind of encoder at a time, resumable at every sample."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks import Workers
from tests.unit.data.pictures import encoded, record, twelve_bit_tiff
from trainer.config.schema import DataSet
from trainer.data.records import Control, ImageRecord, Mask, View
from trainer.data.sets.scan import scan_images
from trainer.engine.caching import fill
from trainer.engine.caching.entries import (
    Entry,
    LatentsEntry,
    TextEntry,
    data_fingerprint,
    latents_entry,
    text_entry,
)
from trainer.engine.caching.fill import FillReport, fill_cache
from trainer.engine.caching.pictures import Pictures
from trainer.engine.caching.store import Cache
from trainer.engine.ranks import ALONE, Ranks
from trainer.errors import DataError, DivergedError, StoppedError
from trainer.families.conversations import ConversationError
from trainer.telemetry.status import Phase

PARTS = {"encoder": "tiny", "dtype": "fp32"}
TEXTS = [text_entry(caption, PARTS) for caption in ("", "a cat", "a dog")]
IMAGES = [latents_entry(record(index), PARTS) for index in range(4)]
ENTRIES: list[Entry] = [*IMAGES, *TEXTS]


class Encoders:
    """Records which encoders were loaded, in which order, and what they encoded."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextlib.contextmanager
    def open(self, context: object, kind: str) -> Iterator[Encoders]:
        self.events.append(f"load {kind}")
        try:
            yield self
        finally:
            self.events.append(f"free {kind}")

    def __call__(self, entry: Entry, pictures: Pictures) -> Mapping[str, torch.Tensor]:
        self.events.append(entry.caption if isinstance(entry, TextEntry) else entry.record.identifier)
        return {"value": torch.full((3,), float(len(self.events)))}


def filled(
    cache: Cache,
    entries: list[Entry],
    opened: Callable[..., object],
    *,
    stop_check: Callable[[], None] = lambda: None,
    seen: list[tuple[str, int, int]] | None = None,
    verify: bool = False,
    ranks: Ranks = ALONE,
) -> FillReport:
    """Fill the cache with the encoders that `opened` gives; `seen` gets what status and bar are told."""
    told = [] if seen is None else seen

    def beat(phase: Phase, *, step: int, total: int) -> None:
        told.append((phase, step, total))

    @contextlib.contextmanager
    def bars() -> Iterator[Callable[[str, int, int], None]]:
        yield lambda what, done, total: told.append((what, done, total))

    context: Any = SimpleNamespace(
        status=SimpleNamespace(beat=beat),
        stop=SimpleNamespace(raise_if_requested=stop_check),
        say=lambda text: None,
        ranks=ranks,
        fills=tuple(range(ranks.size)),
        family=SimpleNamespace(control_size=None),
    )
    wanted: Any = SimpleNamespace(cache=cache, all=lambda: entries)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fill, "_encoders", opened)
        patch.setattr(fill, "read_pictures", lambda entry, control_size: Pictures())
        patch.setattr(fill, "bars", bars)
        return fill_cache(context, wanted, verify=verify)


def run(
    cache: Cache, entries: list[Entry], *, stop_after: int = 1000, verify: bool = False
) -> tuple[Encoders, FillReport]:
    encoders, left = Encoders(), [stop_after]

    def stop_check() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise StoppedError("asked to stop")

    return encoders, filled(cache, entries, encoders.open, stop_check=stop_check, verify=verify)


def test_conversations_that_all_fail_are_told_and_no_hang(cache: Cache) -> None:
    """Each beats: a large file with one fault would be killed as hung before it says which."""

    @contextlib.contextmanager
    def refusing(*_: object) -> Iterator[Callable[..., object]]:
        def encode(entry: Entry, pictures: Pictures) -> object:
            raise ConversationError("the template does not write a system message")

        yield encode

    seen: list[tuple[str, int, int]] = []
    with pytest.raises(DataError, match="does not write a system message"):
        filled(cache, TEXTS, refusing, seen=seen)
    beats = [row for row in seen if row[0] is Phase.CACHE]
    assert len(beats) >= len(TEXTS)
    told = [done for what, done, _ in seen if what == "caching text"]
    assert told == [*range(1, len(TEXTS) + 1)]  # and the bar ends at its end


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path, "family")


def test_texts_first_then_latents_never_both(cache: Cache) -> None:
    encoders, report = run(cache, ENTRIES)
    assert encoders.events == [
        "load text", "", "a cat", "a dog", "free text",
        "load latents", "0/0.png", "0/1.png", "0/2.png", "0/3.png", "free latents",
    ]  # fmt: skip
    assert report == FillReport(reused=0, encoded=7)


def test_a_full_cache_loads_nothing(cache: Cache) -> None:
    run(cache, ENTRIES)
    encoders, report = run(cache, ENTRIES)
    assert encoders.events == []
    assert report == FillReport(reused=7, encoded=0)


def test_equal_entries_are_encoded_once(cache: Cache) -> None:
    encoders, report = run(cache, [*TEXTS, *TEXTS])
    assert encoders.events.count("a cat") == 1
    assert report.encoded == 3


@pytest.mark.parametrize("stop_after", range(14))
def test_stopped_anywhere_the_next_run_encodes_the_rest(cache: Cache, stop_after: int) -> None:
    # seven entries are looked at once, and each of them asked for once more before it is encoded
    with pytest.raises(StoppedError):
        run(cache, ENTRIES, stop_after=stop_after)
    there = {entry.key for entry in ENTRIES if cache.has(entry.kind, entry.key)}
    _, report = run(cache, ENTRIES)
    assert report == FillReport(reused=len(there), encoded=7 - len(there))
    assert all(cache.has(entry.kind, entry.key) for entry in ENTRIES)


def test_a_stop_frees_the_encoders(cache: Cache) -> None:
    encoders = Encoders()
    calls = iter(range(100))

    def stop_check() -> None:
        if next(calls) == 4:
            raise StoppedError("asked to stop")

    with pytest.raises(StoppedError):
        filled(cache, ENTRIES, encoders.open, stop_check=stop_check)
    assert encoders.events == ["load text", "", "free text"]


def test_progress_counts_every_entry_of_a_kind(cache: Cache) -> None:
    run(cache, [TEXTS[1]])
    seen: list[tuple[str, int, int]] = []
    filled(cache, ENTRIES, Encoders().open, seen=seen)
    steps = [("text", n, 3) for n in (1, 2, 3)] + [("latents", n, 4) for n in (1, 2, 3, 4)]
    assert seen == [
        row for kind, n, of in steps for row in ((Phase.CACHE, n, of), (f"caching {kind}", n, of))
    ]


def test_a_cut_entry_is_named_and_encoded_again(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    run(cache, ENTRIES)
    path = cache.path("text", TEXTS[1].key)
    path.write_bytes(path.read_bytes()[:-3])
    with caplog.at_level(logging.WARNING):
        encoders, report = run(cache, ENTRIES)
    assert encoders.events == ["load text", "a cat", "free text"]
    assert report == FillReport(reused=6, encoded=1)
    assert str(path) in caplog.text and "caption 'a cat'" in caplog.text
    assert cache.read("text", TEXTS[1].key)["value"].tolist() == [2.0] * 3


def test_verify_finds_changed_tensors(cache: Cache) -> None:
    run(cache, ENTRIES)
    path = cache.path("latents", IMAGES[2].key)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert run(cache, ENTRIES)[0].events == []
    encoders, _ = run(cache, ENTRIES, verify=True)
    assert encoders.events == ["load latents", "0/2.png", "free latents"]


def test_values_that_are_not_finite_are_never_cached(cache: Cache) -> None:
    @contextlib.contextmanager
    def broken(context: object, kind: str) -> Iterator[object]:
        yield lambda entry, pictures: {"mean": torch.tensor([1.0, float("nan")])}

    with pytest.raises(DivergedError, match=r"0\.png.*`mean`"):
        filled(cache, list(IMAGES), broken)
    assert not any(cache.has(entry.kind, entry.key) for entry in IMAGES)


def test_keys_follow_the_content_and_not_the_name() -> None:
    first = record(0)
    renamed = replace(first, path=Path("/elsewhere/b.png"), identifier="1/b.png", caption="other", repeats=5)

    def key(item: object) -> str:
        return latents_entry(item, PARTS).key  # type: ignore[arg-type]

    assert key(renamed) == key(first)
    assert key(replace(first, content_sha256="f" * 64)) != key(first)
    assert key(replace(first, bucket_width=80)) != key(first)
    assert latents_entry(first, {**PARTS, "dtype": "bf16"}).key != key(first)
    assert text_entry("a", PARTS).key != text_entry("a", {**PARTS, "dtype": "bf16"}).key
    assert isinstance(IMAGES[0], LatentsEntry) and IMAGES[0].name == "/set/0.png"


def filled_by_ranks(ranks: Ranks, folder: Path, least: int) -> tuple[list[str], FillReport, list[int]]:
    """Entries that this rank encoded, its report, and the numbers of texts that its bar was told of."""
    fill.LEAST_ENTRIES = least
    encoders, seen = Encoders(), list[tuple[str, int, int]]()
    report = filled(Cache(folder, "family"), ENTRIES, encoders.open, seen=seen, ranks=ranks)
    assert all(Cache(folder, "family").has(entry.kind, entry.key) for entry in ENTRIES), "all is there now"
    told = [done for what, done, _ in seen if what == "caching text"]
    return [event for event in encoders.events if not event.startswith(("load", "free"))], report, told


def test_ranks_share_what_is_missing_and_none_does_it_twice(pool: Workers, tmp_path: Path) -> None:
    run(Cache(tmp_path, "family"), [TEXTS[1]])
    answers = pool.call(filled_by_ranks, 3, tmp_path, 1)
    encoded = [entry for entries, *_ in answers for entry in entries]
    assert sorted(encoded) == sorted(["", "a dog", "0/0.png", "0/1.png", "0/2.png", "0/3.png"])
    assert [len(entries) for entries, *_ in answers] == [3, 2, 1]
    assert {report for _, report, _ in answers} == {FillReport(reused=1, encoded=6)}
    assert answers[0][2] == [1, 2, 3]  # of which it encoded one


def test_ranks_load_no_encoders_for_little_work(pool: Workers, tmp_path: Path) -> None:
    answers = pool.call(filled_by_ranks, 2, tmp_path, 4)
    assert [len(entries) for entries, *_ in answers] == [7, 0]


def rest_filled(ranks: Ranks, folder: Path) -> FillReport:
    """Fill what an earlier run has left."""
    fill.LEAST_ENTRIES = 1
    return filled(Cache(folder, "family"), ENTRIES, Encoders().open, ranks=ranks)


@pytest.mark.parametrize("stop_after", [3, 9, 12])
def test_ranks_go_on_where_one_process_was_stopped(pool: Workers, tmp_path: Path, stop_after: int) -> None:
    with pytest.raises(StoppedError):
        run(Cache(tmp_path, "family"), ENTRIES, stop_after=stop_after)
    there = sum(Cache(tmp_path, "family").has(entry.kind, entry.key) for entry in ENTRIES)
    assert pool.call(rest_filled, 2, tmp_path) == [FillReport(reused=there, encoded=7 - there)] * 2


def test_keys_of_what_was_read_well_stay_as_they_were() -> None:
    """Encoding a data set again takes hours, and a checkpoint refuses other data: goldens of both."""
    plain = record(0)
    decked = replace(
        plain,
        colour="icc 1",
        mask=Mask(path=Path("m.png"), content_sha256="e" * 64),
        controls=(Control(path=Path("c.png"), width=5, height=7, content_sha256="c" * 64, colour="icc 1"),),
        view=View(flip=True),
    )
    assert [(latents_entry(one, PARTS).key, data_fingerprint([one])) for one in (plain, decked)] == [
        ("02dc4be72b9c45e2d3f5fd3a217b41eb90b728af3f337c67285a0dba7ab0f333", "087c6893f4760705"),
        ("f5ad61def3ddad605a617ee860ead92b04d6f5f61dcd6b86829b09f8561a3ff8", "8a63753662188a58"),
    ]


@pytest.mark.parametrize("folder", ["set", "masks", "controls"])
def test_entries_of_pictures_that_were_read_as_black_are_encoded_anew(tmp_path: Path, folder: str) -> None:
    """An earlier version read 12 bits as 16; the file's hash is the same."""
    grey = np.linspace(0, 4095, 64 * 64).reshape(64, 64).astype(np.uint16)
    sixteen = encoded(Image.fromarray(grey * 16), "TIFF")
    for name in ("set", "masks", "controls"):
        (tmp_path / name).mkdir()
        for number in range(2):
            is_twelve = (name, number) == (folder, 1)
            (tmp_path / name / f"{number}.tif").write_bytes(twelve_bit_tiff(grey) if is_twelve else sixteen)
            (tmp_path / "set" / f"{number}.txt").write_text("a thing")
    one = DataSet(img_dir=tmp_path / "set", mask_dir=tmp_path / "masks", control_dir=(tmp_path / "controls",))
    scanned = scan_images([one], resolution=64, multiple=16, trigger_word=None, controls=(1, 1)).records
    kept = [_as_earlier(record) for record in scanned if isinstance(record, ImageRecord)]
    for number, (now, before) in enumerate(zip(scanned, kept, strict=True)):
        assert isinstance(now, ImageRecord)
        same = latents_entry(now, PARTS).key == latents_entry(before, PARTS).key
        assert same is (number == 0)
        assert (data_fingerprint([now]) == data_fingerprint([before])) is same


def _as_earlier(record: ImageRecord) -> ImageRecord:
    """The record as a version had it that did not tell 12 bits from 16."""
    assert record.mask is not None
    controls = tuple(replace(one, colour="") for one in record.controls)
    return replace(record, colour="", mask=replace(record.mask, depth=""), controls=controls)
