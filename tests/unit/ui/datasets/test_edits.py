"""Changes of files: none is lost between two writers, and each has a way back to the byte."""

from __future__ import annotations

import dataclasses
import os
import shutil
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.data.pictures import write_pair, write_rows
from tests.unit.ui.datasets.sets import looked, make, tree
from trainer.data.caption_text import clean_caption, read_sidecar
from trainer.errors import DataError, NoSpaceError
from trainer.files import atomic
from trainer.ui.datasets import edits
from trainer.ui.datasets.places import Place, held
from trainer.ui.datasets.snapshot import SETTINGS_NAME, keep, pictures_by_id, read_settings
from trainer.ui.studio import Studio


def test_no_edit_of_two_writers_is_lost(studio: Studio) -> None:
    """S15: each adds words of its own, and begins again where another was first."""
    place = make(studio, a="words")
    words = [[f"{writer}-{count}" for count in range(8)] for writer in range(4)]

    def add(own: list[str]) -> None:
        for word in own:
            while True:
                now = edits.caption_now(place, "cats/a.txt")
                try:
                    edits.write_captions(place, {"cats/a.txt": (f"{now.text} {word}", now.etag)}, word)
                except edits.ConflictError:
                    continue
                break

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add, words))
    written = (place.folder / "a.txt").read_text().split()
    assert sorted(written) == sorted(["words", *(word for own in words for word in own)])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.binary(max_size=60) | st.none(), text=st.text(max_size=60))
def test_an_edit_is_undone_to_the_byte(studio: Studio, before: bytes | None, text: str) -> None:
    """Whatever the file held, and as training reads what was written."""
    place = make(studio)
    path = place.folder / "a.txt"
    path.unlink(missing_ok=True)
    if before is not None:
        path.write_bytes(before)
    etag = edits.caption_now(place, "cats/a.txt").etag
    try:
        edits.write_captions(place, {"cats/a.txt": (text, etag)}, "edit")
    except DataError:
        assert not text.split() or "\x00" in text or not text.isprintable()
    else:
        assert read_sidecar(path) == clean_caption(text)
        assert edits.undo(place) == []
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_caption_keeps_who_may_read_and_write_it(studio: Studio) -> None:
    place = make(studio, a="a cat")
    path = place.folder / "a.txt"
    path.chmod(0o664)
    edits.write_captions(place, {"cats/a.txt": ("x", edits.caption_now(place, "cats/a.txt").etag)}, "edit")
    assert stat.S_IMODE(path.stat().st_mode) == 0o664
    path.chmod(0o600)
    edits.undo(place)
    assert (path.read_text(), stat.S_IMODE(path.stat().st_mode)) == ("a cat", 0o600)


def test_all_captions_are_written_or_none(studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee")
    etags = {name: edits.caption_now(place, f"cats/{name}.txt").etag for name in "ab"}
    (place.folder / "b.txt").write_text("changed")
    before = tree(place.folder)
    with pytest.raises(edits.ConflictError) as raised:
        edits.write_captions(place, {f"cats/{name}.txt": ("x", etags[name]) for name in "ab"}, "both")
    assert {name: one.text for name, one in raised.value.now.items()} == {"cats/b.txt": "changed"}
    with pytest.raises(DataError, match="empty"):
        edits.write_captions(place, {"cats/a.txt": ("x", etags["a"]), "cats/b.txt": (" ", "")}, "both")
    assert tree(place.folder) == before and not edits.last_change(place)


def test_a_change_that_was_cut_off_is_undone(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills after the first of two captions: undo brings both back."""
    place = make(studio, a="a cat", b="a bee")
    before, plain, done = tree(place.folder), edits._write, []

    def fails(*arguments: object) -> None:
        if done:
            raise NoSpaceError("the disk is full")
        done.append(plain(*arguments))  # type: ignore[arg-type, func-returns-value]

    texts = {f"cats/{name}.txt": ("x", edits.caption_now(place, f"cats/{name}.txt").etag) for name in "ab"}
    monkeypatch.setattr(edits, "_write", fails)
    with pytest.raises(NoSpaceError):
        edits.write_captions(place, texts, "both")
    monkeypatch.setattr(edits, "_write", plain)
    assert tree(place.folder) != before
    assert edits.undo(place) == [] and tree(place.folder) == before


def test_deleting_one_of_two_pictures_of_a_name(studio: Studio) -> None:
    """Two files of one name of different folders both come back."""
    place = make(studio)
    for folder in ("one", "two"):
        (place.folder / folder).mkdir()
        for end in ("png", "txt"):
            (place.folder / folder / f"a.{end}").write_bytes(f"{folder} {end}".encode())
    before = tree(place.folder)
    edits.delete(place, looked(place).pictures)
    assert not tree(place.folder)
    assert edits.undo(place) == [] and tree(place.folder) == before


def test_the_caption_of_two_pictures_goes_with_the_last_of_them(studio: Studio) -> None:
    """a.png and a.jpg share a.txt: deleting the duplicate leaves it, deleting both moves it once."""
    place = make(studio, a="a cat")
    write_pair(place.folder, "a.jpg", "a cat", seed=1)
    before = tree(place.folder)
    pictures = looked(place).pictures
    edits.delete(place, [one for one in pictures if one.name == "cats/a.jpg"])
    assert set(tree(place.folder)) == {"a.png", "a.txt"}
    assert edits.undo(place) == [] and tree(place.folder) == before
    edits.delete(place, pictures)
    assert not tree(place.folder)
    assert edits.undo(place) == [] and tree(place.folder) == before


@pytest.mark.parametrize("writable", [True, False])
def test_masks_and_controls_go_with_their_picture(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    """A run refuses a mask without a picture; where one cannot be moved, the picture still can."""
    place, beside = make(studio, a="a cat", b="a bee"), [make(studio, name) for name in ("masks", "before")]
    for other in beside:
        for name in "ab":
            write_pair(other.folder, f"{name}.png").with_suffix(".txt").unlink()
    chosen = dataclasses.replace(read_settings(place), mask="masks", controls=("before",))
    keep(place, SETTINGS_NAME, chosen)
    before = tree(studio.data)
    if not writable:
        monkeypatch.setattr(os, "access", lambda path, _: Path(path) == place.folder)
    edits.delete(place, [one for one in looked(place).pictures if one.name == "cats/a.png"])
    gone = {"cats/a.png", "cats/a.txt", *(("masks/a.png", "before/a.png") if writable else ())}
    assert set(before) - set(tree(studio.data)) == gone
    assert edits.undo(place) == [] and tree(studio.data) == before


def test_a_folder_of_masks_that_was_removed_blocks_no_undo(studio: Studio) -> None:
    """Of what was deleted before the picture and its caption come back, and the changes before it can too."""
    place, other = make(studio, a="a cat", b="a bee"), make(studio, "masks")
    write_pair(other.folder, "a.png").with_suffix(".txt").unlink()
    keep(place, SETTINGS_NAME, dataclasses.replace(read_settings(place), mask="masks"))
    before = tree(place.folder)
    edits.write_captions(place, {"cats/b.txt": ("x", edits.caption_now(place, "cats/b.txt").etag)}, "first")
    edits.delete(place, [one for one in looked(place).pictures if one.name == "cats/a.png"])
    shutil.rmtree(other.folder)
    assert edits.undo(place) == ["masks/a.png"]
    assert (change := edits.last_change(place)) and change[1] == "first"
    assert edits.undo(place) == [] and tree(place.folder) == before


def test_a_caption_whose_folder_was_removed_blocks_no_undo(studio: Studio) -> None:
    place = make(studio, a="a cat")
    (place.folder / "inner").mkdir()
    write_pair(place.folder / "inner", "b.png", "a bee")
    for name in ("cats/a.txt", "cats/inner/b.txt"):
        edits.write_captions(place, {name: ("x", edits.caption_now(place, name).etag)}, name)
    shutil.rmtree(place.folder / "inner")
    assert edits.undo(place) == ["cats/inner/b.txt"] and edits.undo(place) == []
    assert (place.folder / "a.txt").read_text() == "a cat"


def test_a_second_press_deletes_nothing_and_is_no_change(studio: Studio) -> None:
    """Also from another tab, whose page still shows the picture."""
    place = make(studio, a="a cat", b="a bee")
    before, pictures = tree(place.folder), looked(place).pictures
    edits.delete(place, pictures[:1])
    first = edits.last_change(place)
    edits.delete(place, pictures[:1])
    assert edits.last_change(place) == first
    edits.delete(place, pictures)
    assert not tree(place.folder)
    assert edits.undo(place) == edits.undo(place) == [] and tree(place.folder) == before


def test_the_last_change_is_the_last_one_after_a_clock_was_set_back(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, plain = make(studio, a="a cat", b="a bee"), time.time_ns
    before, pictures = tree(place.folder), looked(place).pictures
    edits.write_captions(place, {"cats/a.txt": ("x", edits.caption_now(place, "cats/a.txt").etag)}, "first")
    monkeypatch.setattr(edits.time, "time_ns", lambda: plain() - 3600 * 10**9)
    monkeypatch.setattr(edits, "_MOST_CHANGES", 1)
    edits.delete(place, pictures[1:])
    assert (change := edits.last_change(place)) and change[1] == "b.png deleted"
    assert edits.undo(place) == []
    assert tree(place.folder) == before | {"a.txt": b"x\n"}


def test_a_picture_does_not_leave_its_row_behind(studio: Studio) -> None:
    place = make(studio, a="x", b="y")
    rows_of(place, a="row a", b="row b")
    before = tree(place.folder)
    with pytest.raises(DataError, match=r"(?s)in cats/metadata.jsonl:1.*\.txt files first"):
        edits.delete(place, looked(place).pictures[:1])
    assert tree(place.folder) == before and not edits.last_change(place)


def test_captions_of_two_pictures_do_not_become_one_file(studio: Studio) -> None:
    place = make(studio, a="x")
    write_pair(place.folder, "a.jpg", seed=1).with_suffix(".txt").unlink()
    write_rows(place.folder, [{"file_name": "a.png", "text": "cat"}, {"file_name": "a.jpg", "text": "dog"}])
    before = tree(place.folder)
    with pytest.raises(DataError, match=r"cats/a\.txt: .*several pictures"):
        edits.captions_to_files(place)
    assert tree(place.folder) == before and not edits.last_change(place)


def test_errors_name_the_file_and_not_its_descriptor(studio: Studio) -> None:
    place = make(studio, a="a cat")
    with (
        pytest.raises(NoSpaceError) as raised,
        held(place, "cats/a.txt") as path,
        atomic.no_space_told(path),
    ):
        raise OSError(28, "No space left on device")
    assert [one.where for one in raised.value.problems] == [str(place.folder / "a.txt")]


def rows_of(place: Place, **texts: str) -> None:
    """Metadata with a row for each picture, whose .txt goes."""
    for name in texts:
        (place.folder / f"{name}.txt").unlink(missing_ok=True)
    write_rows(place.folder, [{"file_name": f"{name}.png", "text": text} for name, text in texts.items()])


def test_rows_become_files_as_they_are_now(studio: Studio) -> None:
    """Not as they were when the data set was looked at."""
    place = make(studio, a="x", b="y")
    rows_of(place, a="old", b="same")
    looked(place)
    rows_of(place, a="new", b="same")
    before = tree(place.folder)
    edits.captions_to_files(place)
    assert {name: data for name, data in tree(place.folder).items() if name.endswith("txt")} == {
        "a.txt": b"new\n", "b.txt": b"same\n",
    }  # fmt: skip
    assert edits.undo(place) == [] and tree(place.folder) == before


@pytest.mark.parametrize("reason", ["written meanwhile", "no caption", "named twice"])
def test_rows_that_cannot_become_files_stay(studio: Studio, reason: str) -> None:
    """All of them, and the metadata too: each is told by its picture."""
    place = make(studio, a="x", b="y")
    rows_of(place, a="row a", b="row b")
    looked(place)
    if reason == "written meanwhile":
        (place.folder / "a.txt").write_text("mine")
    else:
        texts = ["\x00"] if reason == "no caption" else ["row a", "row a"]
        write_rows(place.folder, [{"file_name": "a.png", "text": text} for text in texts])
    before = tree(place.folder)
    with pytest.raises(DataError) as raised:
        edits.captions_to_files(place)
    assert [one.where for one in raised.value.problems] == ["cats/a.png"]
    assert tree(place.folder) == before and not edits.last_change(place)


def test_a_file_that_came_meanwhile_is_not_replaced(studio: Studio) -> None:
    """Between the choice of an upload's names and their use, by another program."""
    place = make(studio, a="a cat")
    staged = place.folder / ".upload-1"
    staged.mkdir()
    (staged / "a.png").write_bytes(b"new")
    before = tree(place.folder)
    with pytest.raises(DataError, match="of this name"):
        edits.add(place, {staged / "a.png": "cats/a.png"}, [], "1 file added")
    assert tree(place.folder) == before and not edits.last_change(place)


def test_data_sets_of_another_root_have_their_own_past(studio: Studio, tmp_path: Path) -> None:
    """Two starts with one folder of runs, and a `cats` in each folder of data sets."""
    other = dataclasses.replace(studio, data=tmp_path / "elsewhere")
    first, second = make(studio, a="a cat"), make(other, a="a dog")
    looked(first)
    edits.delete(first, looked(first).pictures)
    assert not pictures_by_id(second) and not edits.last_change(second)
    assert edits.undo(second) == [] and not (first.folder / "a.png").exists()
    # found again at the next start
    assert edits.undo(make(studio)) == [] and (first.folder / "a.png").exists()
