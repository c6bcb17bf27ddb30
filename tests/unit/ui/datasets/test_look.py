"""A look at a data set finds what a run would, and what is to be mended."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.pictures import bomb, encoded, picture, write_pair, write_rows
from tests.unit.ui.datasets.sets import key_of, looked, make
from trainer.config.interpreter import python
from trainer.data.pictures import opened
from trainer.data.pictures.images import fit, read_image, to_pixels
from trainer.ui.datasets import snapshot, worker
from trainer.ui.datasets.places import Place
from trainer.ui.studio import Studio
from trainer.ui.views.dataset import dataset_view, datasets_view, look_view, picture_view


def test_every_picture_is_a_row_with_its_faults(studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee", copy="again")
    folder = place.folder
    (folder / "copy.png").write_bytes((folder / "a.png").read_bytes())
    (folder / "bare.png").write_bytes(encoded(picture(seed=5)))
    (folder / "broken.png").write_bytes(encoded(picture(seed=6))[:900])
    (folder / "broken.txt").write_text("half a picture")
    (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    found = looked(place)
    rows = {one.name: one for one in found.pictures}
    assert list(rows) == ["cats/a.png", "cats/b.png", "cats/bare.png", "cats/broken.png", "cats/copy.png"]
    assert rows["cats/a.png"].caption == "a cat" and not rows["cats/a.png"].problem
    assert rows["cats/copy.png"].copy_of == "cats/a.png"
    assert rows["cats/bare.png"].problem == "the image has no caption"
    assert "damaged" in rows["cats/broken.png"].problem and not rows["cats/broken.png"].sha256
    assert [name for name, _ in found.strays] == ["cats/drawing.svg"]
    view = dataset_view(studio, place.id)
    assert view.counts == {"all": 5, "problems": 2, "no-caption": 1, "small": 4, "copies": 1, "long": 0}
    for show, names in {"problems": ["bare.png", "broken.png"], "copies": ["copy.png"]}.items():
        assert [tile.name for tile in dataset_view(studio, place.id, show=show).tiles] == names
    (row,) = datasets_view(studio)
    assert (row.pictures, row.problems) == (5, 3)


@pytest.mark.parametrize(
    ("captioned", "copies"),
    [("abc", "bc"), ("c", "ab"), ("bc", "ac"), ("", "bc")],
)
def test_the_copy_is_the_one_without_a_caption(studio: Studio, captioned: str, copies: str) -> None:
    """Else the later one; who deletes copies keeps what was written."""
    place = make(studio, a="a cat", b="the cat", c="one cat")
    for stem in "abc":
        (place.folder / f"{stem}.png").write_bytes(encoded(picture(seed=1)))
        if stem not in captioned:
            (place.folder / f"{stem}.txt").unlink()
    (original,) = set("abc") - set(copies)
    found = {one.name: one.copy_of for one in looked(place).pictures if one.copy_of}
    assert found == {f"cats/{stem}.png": f"cats/{original}.png" for stem in copies}


def test_a_set_is_no_folder_of_its_own_masks(studio: Studio) -> None:
    place, other = make(studio, a="a cat"), make(studio, "masks")
    (place.folder / "inner").mkdir()
    assert sorted(dataset_view(studio, place.id).folders.values()) == ["cats/inner", "masks"]
    assert sorted(dataset_view(studio, other.id).folders.values()) == ["cats", "cats/inner"]


def test_masks_and_controls_lie_beside_their_picture(studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee")
    for name in ("masks", "edits"):
        (studio.data / name).mkdir()
    (studio.data / "masks/a.png").write_bytes(encoded(picture(seed=8)))
    for stem in ("a", "b"):
        (studio.data / f"edits/{stem}.png").write_bytes(encoded(picture(seed=9)))
    family = next(one for one in snapshot.picture_families() if one.control_counts[0] == 1)
    settings = snapshot.Settings(family=family.name, resolution=64, mask="masks", controls=("edits",))
    snapshot.keep(place, snapshot.SETTINGS_NAME, settings)
    first, second = looked(place).pictures
    assert (first.mask, first.controls, first.problem) == ("masks/a.png", ("edits/a.png",), "")
    assert second.mask == "" and "no mask b.*" in second.problem


def box_by_pixels(path: Path, bucket: tuple[int, int]) -> tuple[float, float, float, float]:
    """The part of a picture that is in a run's pixels, read from the pixels: red says across, green down."""
    values = to_pixels(fit(read_image(path), *bucket)).numpy()
    across, down = values[0].mean(axis=0), values[1].mean(axis=1)
    # away from the rims, where resampling has nothing beyond to read
    slope_x = (across[-9] - across[8]) / (len(across) - 17)
    slope_y = (down[-9] - down[8]) / (len(down) - 17)
    left, top = across[8] - 8.5 * slope_x, down[8] - 8.5 * slope_y
    return left, top, left + slope_x * len(across), top + slope_y * len(down)


@pytest.mark.parametrize("size", [(300, 200), (200, 300), (256, 256), (500, 180)])
def test_the_frame_is_where_the_pixels_of_the_run_come_from(studio: Studio, size: tuple[int, int]) -> None:
    """A11: a picture whose colours are its coordinates shows what was cut."""
    width, height = size
    across = np.tile((np.arange(width) + 0.5) / width * 255, (height, 1))
    down = np.tile(((np.arange(height) + 0.5) / height * 255)[:, None], (1, width))
    place = make(studio, a="a ramp")
    values = np.stack([across, down, np.zeros_like(down)], -1).round().astype(np.uint8)
    Image.fromarray(values).save(place.folder / "a.png")
    family = snapshot.picture_families()[0].name
    snapshot.keep(place, snapshot.SETTINGS_NAME, snapshot.Settings(family=family, resolution=256))
    (row,) = looked(place).pictures
    seen = [
        (value + 1) / 2 * side
        for value, side in zip(
            box_by_pixels(place.folder / "a.png", row.bucket), (width, height, width, height), strict=True
        )
    ]
    assert row.crop == pytest.approx(seen, abs=2.0)
    # and it is no frame around everything
    assert (row.crop[2] - row.crop[0]) / (row.crop[3] - row.crop[1]) == pytest.approx(
        row.bucket[0] / row.bucket[1], rel=0.01
    )
    assert row.enlarged == pytest.approx(row.bucket[1] / (row.crop[3] - row.crop[1]), rel=0.01)


def test_a_second_look_opens_changed_files_only(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make(studio, a="a cat", b="a bee", c="a cow")
    first = looked(place)
    read: list[str] = []
    plain = opened.read_bytes
    monkeypatch.setattr(opened, "read_bytes", lambda path: read.append(path.name) or plain(path))
    write_pair(place.folder, "b.png", "another bee", seed=77)
    second = looked(place)
    assert read == ["b.png"]
    assert [one.caption for one in second.pictures] == ["a cat", "another bee", "a cow"]
    assert second.pictures[0] == first.pictures[0]
    assert second.pictures[1].sha256 != first.pictures[1].sha256


def test_thumbnails_are_small_and_bare(studio: Studio) -> None:
    place = make(studio, a="a cat")
    image = picture(600, 400)
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "taken at home"
    image.save(place.folder / "a.png", exif=exif)
    (row,) = looked(place).pictures
    with Image.open(worker.thumbnail_path(studio.folder, row.sha256)) as small:
        assert (small.format, small.size) == ("WEBP", (171, 256))
        assert not small.getexif() and not {"exif", "xmp", "icc_profile"} & set(small.info)


def test_buckets_are_counted_and_lonely_pictures_told(studio: Studio) -> None:
    place = make(studio, a="one", b="two", c="three", d="four")
    picture(90, 46).save(place.folder / "d.png")
    looked(place)
    view = dataset_view(studio, place.id)
    assert list(view.buckets.values()) == [3, 1] and view.alone == 1
    width, height = list(view.buckets)[-1]
    only = dataset_view(studio, place.id, bucket=f"{width}x{height}")
    assert [tile.name for tile in only.tiles] == ["d.png"]


def test_search_pages_and_neighbours(studio: Studio) -> None:
    place = make(studio, **{f"p{number:03}": f"thing {number}" for number in range(130)})
    looked(place)
    last = dataset_view(studio, place.id, page=99)
    assert (last.page, last.pages, len(last.tiles)) == (3, 3, 10)
    assert [tile.name for tile in dataset_view(studio, place.id, search="THING 12").tiles] == [
        "p012.png", *(f"p{number}.png" for number in range(120, 130)),
    ]  # fmt: skip
    shown = picture_view(studio, place.id, key_of(place, "cats/p001.png"))
    assert (shown.before, shown.after) == (
        key_of(place, "cats/p000.png"),
        key_of(place, "cats/p002.png"),
    )


def test_the_trigger_word_is_shown_as_training_puts_it(studio: Studio) -> None:
    place = make(studio, a="a cat", b="a zwx cat")
    family = snapshot.picture_families()[0].name
    snapshot.keep(place, snapshot.SETTINGS_NAME, snapshot.Settings(family=family, trigger_word="zwx"))
    looked(place)
    shown = [picture_view(studio, place.id, key_of(place, f"cats/{name}.png")) for name in "ab"]
    assert [one.trained_caption for one in shown] == ["zwx, a cat", "a zwx cat"]
    assert [one.tile.caption for one in shown] == ["a cat", "a zwx cat"]


def test_an_empty_folder_and_no_folder_are_told(studio: Studio) -> None:
    place = make(studio)
    found = looked(place)
    assert found.complete and not found.pictures and "holds no image" in found.strays[0][1]


def test_hostile_files_are_told_and_harm_nothing(studio: Studio, tmp_path: Path) -> None:
    secret = tmp_path / "secret.png"
    secret.write_bytes(encoded(picture(seed=3)))
    place = make(studio, a="a cat")
    (place.folder / "bomb.png").write_bytes(bomb())
    (place.folder / "bomb.txt").write_text("boom")
    (place.folder / "svg.png").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script/></svg>")
    (place.folder / "link.png").symlink_to(secret)
    (place.folder / "out").symlink_to(studio.models)
    os.mkfifo(place.folder / "pipe.png")
    found = looked(place)
    rows = {one.name: one.problem for one in found.pictures}
    assert "178 million" in rows["cats/bomb.png"] and "an SVG drawing" in rows["cats/svg.png"]
    strays = dict(found.strays)
    assert "leads out" in strays["cats/link.png"] and "leads out" in strays["cats/out"]
    assert "not a regular file" in strays["cats/pipe.png"]
    assert not any("secret" in name for name in rows)


def test_a_data_set_is_looked_at_by_a_process_of_its_own(studio: Studio) -> None:
    """Names come by its input, never as arguments, and no second look runs beside the first."""
    place = make(studio, name="--help $(touch x)", a="a cat")
    worker.note_request(place)
    task = {"task": "look", "root": str(place.root), "studio": str(place.studio), "name": place.name}
    command = python("-m", "trainer.ui.datasets.worker")
    subprocess.run(command, input=json.dumps(task).encode(), check=True, capture_output=True)
    found = snapshot.read_snapshot(place)
    assert found is not None and [one.caption for one in found.pictures] == ["a cat"]
    assert not worker.is_looking(place)
    data = worker.ask("preview", place, found.pictures[0].name)
    assert data[8:12] == b"WEBP"


def test_a_request_during_a_look_is_answered_by_it(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    place, plain = make(studio, a="a cat"), worker.open_images

    def asked_again(found: object, **options: object) -> None:
        if not (place.folder / "b.png").exists():
            assert worker.is_looking(place)
            write_pair(place.folder, "b.png", "a bee", seed=4)
            worker.ask_for_look(place)  # starts no process, as one looks
        plain(found, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "open_images", asked_again)
    monkeypatch.setattr(worker.subprocess, "Popen", None)
    assert [one.name for one in looked(place).pictures] == ["cats/a.png", "cats/b.png"]


def test_metadata_is_a_source_that_is_told(studio: Studio) -> None:
    place: Place = make(studio, a="a cat")
    (place.folder / "a.txt").unlink()
    write_rows(place.folder, [{"file_name": "a.png", "text": "from a row"}])
    (row,) = looked(place).pictures
    assert (row.caption, row.caption_from) == ("from a row", "cats/metadata.jsonl:1")
    view = dataset_view(studio, place.id)
    assert view.in_metadata == 1 and "metadata.jsonl:1" in view.tiles[0].locked


def test_a_look_that_ended_early_is_told(studio: Studio) -> None:
    place = make(studio, a="a cat")
    looked(place)
    assert not look_view(studio, place.id).failed and not look_view(studio, place.id).is_old
    worker.note_request(place)
    assert look_view(studio, place.id).is_looking
    # a minute later, with no worker
    (place.state / "asked").write_text(str(time.time_ns() - 60 * 10**9))
    (snapshot_file := place.state / "snapshot.json").write_text(
        snapshot_file.read_text().replace('"asked": 1', '"asked": -1')
    )
    found = look_view(studio, place.id)
    assert found.failed and not found.is_looking
    looked(place)
    assert not look_view(studio, place.id).failed


def test_a_folder_of_tomorrow_is_looked_at_once(studio: Studio) -> None:
    """A clock that was wrong, or a share's: its pages asked for looks for ever."""
    place = make(studio, a="a cat")
    os.utime(place.folder, (time.time() + 9999,) * 2)
    looked(place)
    assert not look_view(studio, place.id).is_old
    (place.folder / "b.txt").write_text("a bee")
    assert look_view(studio, place.id).is_old


def test_what_was_deleted_a_week_ago_and_cut_off_a_day_ago_goes(studio: Studio, tmp_path: Path) -> None:
    place = make(studio, a="a cat", b="a bee")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    ages = {"old": 8, "new": 6}
    for name, days in ages.items():
        trash, staged = studio.folder / "trash/data" / name, place.folder / f".upload-{name}"
        for folder, age in ((trash, days), (staged, days - 6.5)):
            folder.mkdir(parents=True)
            (folder / "x").write_text("x")
            os.utime(folder, (time.time() - age * 86400,) * 2)
    (place.folder / ".upload-link").symlink_to(outside)
    looked(place)
    assert [path.name for path in (studio.folder / "trash/data").iterdir()] == ["new"]
    assert sorted(path.name for path in place.folder.glob(".upload*")) == [".upload-link", ".upload-new"]
    assert (outside / "kept").exists()


def test_a_clock_that_was_set_back_delays_no_look(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its page asked for looks without end, each with a process, and showed the old pictures."""
    place = make(studio, a="a cat")
    looked(place)
    plain = time.time_ns
    monkeypatch.setattr(worker.time, "time_ns", lambda: plain() - 3600 * 10**9)
    write_pair(place.folder, "b.png", "a bee", seed=4)
    worker.note_request(place)
    view = look_view(studio, place.id)
    assert (view.is_looking, view.is_old) == (True, True)
    worker.look_at(place)
    view = look_view(studio, place.id)
    assert (view.is_looking, view.failed, view.is_old) == (False, False, False)
    found = snapshot.read_snapshot(place)
    assert found is not None and [one.name for one in found.pictures] == ["cats/a.png", "cats/b.png"]


def test_what_cannot_be_removed_ends_no_look(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of another user, or on a disk that takes no writes now."""
    place, plain = make(studio, a="a cat"), os.unlink
    for folder in (studio.folder / "trash/data/old", place.folder / ".upload-old"):
        folder.mkdir(parents=True)
        (folder / "x").write_text("x")
        os.utime(folder, (time.time() - 9 * 86400,) * 2)

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None:  # as folders are removed
            raise OSError(errno.EROFS, "Read-only file system", path)
        plain(path)

    monkeypatch.setattr(os, "unlink", unlink)
    assert looked(place).complete and (place.folder / ".upload-old/x").exists()


def test_an_upload_that_ends_during_a_look_ends_no_look(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its folder goes between the listing and the question for its age; so does what another look empties."""
    place, plain = make(studio, a="a cat"), Path.glob
    trash = studio.folder / "trash/data"
    trash.mkdir(parents=True)

    def glob(folder: Path, pattern: str) -> list[Path]:
        gone = [folder / ".upload-gone"] if folder in (place.folder, trash) else []
        return [*gone, *plain(folder, pattern)]

    monkeypatch.setattr(Path, "glob", glob)
    assert looked(place).complete
