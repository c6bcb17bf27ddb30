"""Good sets become records; the order, captions and identifiers are what a run builds on."""

from __future__ import annotations

import hashlib
import logging
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.unit.data.pictures import encoded, picture, scan, write_pair, write_rows
from trainer.config.schema import DataSet
from trainer.data.caption_text import clean_caption, with_trigger_word
from trainer.data.leftout import MAX_PROBLEMS_SHOWN
from trainer.data.sets.scan import scan_images
from trainer.errors import DataError, StoppedError

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_example_sets_are_sound() -> None:
    records = scan(EXAMPLES / "style", EXAMPLES / "style-held-out", resolution=128)
    assert len(records) == 24 + 12
    assert {(record.width, record.height) for record in records} == {(128, 128)}
    assert (
        len({record.content_sha256 for record in records})
        == len({record.caption for record in records})
        == 36
    )
    assert all(record.caption.endswith(", cyanotype style") for record in records)
    assert sum(path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file()) < 500_000


def test_records_of_two_sets(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    write_pair(first, "b.png", "a bee")
    path = write_pair(first, "a.JPG", "an\tant\r\n on  a leaf\n")
    write_pair(second, "a.webp", "\ufeffan ape")
    records = scan(first, second, trigger_word="zwx")
    assert [(record.identifier, record.caption, record.repeats) for record in records] == [
        ("0/a.JPG", "zwx, an ant on a leaf", 1),
        ("0/b.png", "zwx, a bee", 1),
        ("1/a.webp", "zwx, an ape", 2),
    ]
    assert records[0].path == path
    assert records[0].content_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (records[0].width, records[0].height) == (40, 30)
    assert (records[0].bucket_width, records[0].bucket_height) == (80, 48)


def test_metadata_and_sidecars_may_share_a_folder(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png", "from the sidecar")
    (tmp_path / "b.png").write_bytes(encoded(picture()))
    (tmp_path / "c d.png").write_bytes(encoded(picture()))
    rows = [{"file_name": "b.png", "text": "from the metadata"}, "", '{"text": "é", "file_name": "c d.png"}']
    write_rows(tmp_path, rows)
    assert [record.caption for record in scan(tmp_path)] == ["from the sidecar", "from the metadata", "é"]


@pytest.mark.parametrize("format", ["jsonl", "csv"])
def test_images_of_one_stem_are_told_apart_by_rows_that_name_them(tmp_path: Path, format: str) -> None:
    for name in ("a.png", "a.jpg", "a.webp"):
        write_pair(tmp_path, name, seed=len(name)).with_suffix(".txt").unlink()
    rows = [{"file_name": name, "text": f"the {name}"} for name in ("a.webp", "a.png", "a.jpg")]
    path = write_rows(tmp_path, rows)
    if format == "csv":
        path.unlink()
        lines = ["file_name,text", *(f"{row['file_name']},{row['text']}" for row in rows)]
        (tmp_path / "metadata.csv").write_text("\n".join(lines))
    assert [(one.identifier, one.caption) for one in scan(tmp_path)] == [
        ("0/a.jpg", "the a.jpg"),
        ("0/a.png", "the a.png"),
        ("0/a.webp", "the a.webp"),
    ]


def test_images_of_one_stem_stay_refused_where_something_goes_by_the_stem(tmp_path: Path) -> None:
    """A caption beside them, a mask, and one that no row names."""
    told, masks = "a second image with the stem of a.jpg", tmp_path / "masks"
    masks.mkdir()
    (masks / "a.png").write_bytes(encoded(picture()))
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.png", "a.jpg"):
        write_pair(folder, name).with_suffix(".txt").unlink()
    rows = [{"file_name": name, "text": "one"} for name in ("a.png", "a.jpg")]
    write_rows(folder, rows)
    assert len(scan(folder)) == 2
    with pytest.raises(DataError, match=told):
        scan_images([DataSet(img_dir=folder, mask_dir=masks)], resolution=64, multiple=16, trigger_word=None)
    write_rows(folder, rows[:1])
    with pytest.raises(DataError, match=told):
        scan(folder)
    write_rows(folder, rows)
    (folder / "a.txt").write_text("two")
    with pytest.raises(DataError, match=told):
        scan(folder)


def test_metadata_may_start_with_a_byte_order_mark_and_end_lines_as_windows_does(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    line = b'\xef\xbb\xbf{"file_name": "a.png", "text": "a"}\r\n\r\n'
    (tmp_path / "metadata.jsonl").write_bytes(line)
    assert scan(tmp_path)[0].caption == "a"


@pytest.mark.parametrize(("image", "other"), [("caf\u00e9", "cafe\u0301"), ("cafe\u0301", "caf\u00e9")])
def test_names_are_equal_however_their_accents_are_encoded(tmp_path: Path, image: str, other: str) -> None:
    """Archives of a Mac spell them in another way than most programs."""
    folder, masks = tmp_path / "set", tmp_path / "masks"
    folder.mkdir(), masks.mkdir()
    write_pair(folder, f"{image}.png", "a cup").with_suffix(".txt").rename(folder / f"{other}.txt")
    Image.new("L", (40, 30), 255).save(masks / f"{other}.png")
    write_pair(folder, f"{image} 2.png", seed=1).with_suffix(".txt").unlink()
    write_rows(folder, [{"file_name": f"{other} 2.png", "text": "two cups"}])
    Image.new("L", (40, 30), 255).save(masks / f"{other} 2.png")
    one = DataSet(img_dir=folder, mask_dir=masks)
    records = scan_images((one,), resolution=64, multiple=16, trigger_word=None).records
    assert sorted(record.caption for record in records) == ["a cup", "two cups"]
    assert {record.path.name for record in records} == {f"{image}.png", f"{image} 2.png"}
    assert all(record.mask is not None for record in records)


def test_clutter_is_passed_over(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png")
    for name in (".DS_Store", "Thumbs.db", "README.md", "readme.txt", "LICENSE", ".hidden.png", "a_flux.npz"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    assert len(scan(tmp_path)) == 1


def test_a_picture_named_readme_keeps_its_caption(tmp_path: Path) -> None:
    write_pair(tmp_path, "readme.png", "a sheet of paper")
    assert scan(tmp_path)[0].caption == "a sheet of paper"


def test_links_within_the_set_are_followed(tmp_path: Path) -> None:
    # as Kubernetes mounts a ConfigMap
    (tmp_path / "..2026").mkdir()
    write_pair(tmp_path / "..2026", "a.png")
    for name in ("a.png", "a.txt"):
        (tmp_path / name).symlink_to(Path("..2026") / name)
    assert len(scan(tmp_path)) == 1


def test_a_linked_set_folder_is_a_set_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    write_pair(tmp_path / "real", "a.png")
    (tmp_path / "link").symlink_to("real")
    assert len(scan(tmp_path / "link")) == 1


def test_the_size_is_the_upright_one(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture(40, 30).save(tmp_path / "a.jpg", exif=exif.tobytes())
    (tmp_path / "a.txt").write_text("a")
    record = scan(tmp_path)[0]
    assert (record.width, record.height) == (30, 40)
    assert record.bucket_width < record.bucket_height


def test_progress_counts_every_image_and_may_stop_the_scan(tmp_path: Path) -> None:
    for index in range(6):
        write_pair(tmp_path, f"{index}.png", seed=index)
    seen: list[tuple[int, int]] = []
    scan(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(index, 6) for index in range(1, 7)]

    def stop(done: int, total: int) -> None:
        raise StoppedError("asked to stop")

    with pytest.raises(StoppedError):
        scan(tmp_path, progress=stop)


def test_every_problem_of_every_set_is_told_at_once(tmp_path: Path) -> None:
    first, second = tmp_path / "one", tmp_path / "two"
    first.mkdir()
    second.mkdir()
    write_pair(first, "a.png", "")
    write_pair(first, "b.png").write_bytes(b"")
    write_pair(second, "c.png")
    (second / "d.gif").write_bytes(b"GIF89a")
    with pytest.raises(DataError) as caught:
        scan(first, second, tmp_path / "three")
    assert {Path(problem.where).name for problem in caught.value.problems} == {
        "a.txt",
        "b.png",
        "d.gif",
        "three",
    }
    assert all(problem.remedy for problem in caught.value.problems)


def test_a_long_list_is_cut_and_counted(tmp_path: Path) -> None:
    for index in range(MAX_PROBLEMS_SHOWN + 7):
        (tmp_path / f"{index}.gif").touch()
    with pytest.raises(DataError) as caught:
        scan(tmp_path)
    assert len(caught.value.problems) == MAX_PROBLEMS_SHOWN + 1
    assert "... and 7 more problems" in str(caught.value)


def test_small_images_are_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pair(tmp_path, "a.png", seed=1)
    write_pair(tmp_path, "b.png", seed=2)
    with caplog.at_level(logging.WARNING):
        scan(tmp_path, resolution=64)
    assert len(caplog.records) == 1
    assert "2 of 2 images are smaller than what they" in caplog.text and "40x30" in caplog.text
    # more pixels than its bucket, most of which are cut off, and too few down
    picture(240, 48).resize((130, 46)).save(tmp_path / "a.png")
    picture(200, 200).save(tmp_path / "b.png")
    caplog.clear()
    (wide, _) = scan(tmp_path, resolution=64)
    assert wide.width * wide.height > wide.bucket_width * wide.bucket_height
    assert wide.height < wide.bucket_height
    assert "1 of 2 images is smaller than what it is" in caplog.text and "130x46" in caplog.text
    caplog.clear()
    scan(tmp_path, resolution=32)
    assert not caplog.records


def test_moving_a_set_changes_no_identifier(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    write_pair(tmp_path / "here", "a.png")
    before = scan(tmp_path / "here")[0]
    shutil.move(tmp_path / "here", tmp_path / "there")
    after = scan(tmp_path / "there")[0]
    assert (before.identifier, before.content_sha256) == (after.identifier, after.content_sha256)


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("a cat", "sks, a cat"),
        ("a sks cat", "a sks cat"),
        ("sks", "sks"),
        ("masks, a cat", "sks, masks, a cat"),
        ("(sks) cat", "(sks) cat"),
    ],
)
def test_the_trigger_word_is_put_before_captions_without_it(caption: str, expected: str) -> None:
    assert with_trigger_word(caption, "sks") == expected
    assert with_trigger_word(caption, None) == caption


def test_a_trigger_word_is_no_pattern() -> None:
    assert with_trigger_word("a cat", "a.cat (x") == "a.cat (x, a cat"


@given(st.text(min_size=1).filter(lambda text: text.split() and "\x00" not in text))
def test_captions_become_one_line(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    caption = clean_caption(text)
    assert caption == caption.strip() and len(caption.splitlines()) == 1
    assert caption.split() == text.split()
