"""Bad data sets: each problem is told with its place and a remedy, exit code 65, never with a traceback."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.pictures import bomb, encoded, picture, scan, write_pair, write_rows
from trainer.config.schema import DataSet
from trainer.data.caption_text import MAX_CAPTION_BYTES
from trainer.data.records import Scan
from trainer.data.sets import listing
from trainer.data.sets.scan import scan_images
from trainer.errors import DataError, ExitCode

FORMATS = "png, jpg, jpeg, webp, bmp, tif, tiff and avif are read"


@dataclass(frozen=True, kw_only=True)
class Bad:
    """One bad data set: how to spoil a folder that has one good pair, and every problem that must be told."""

    spoil: Callable[[Path], object]
    problems: tuple[tuple[str, str, str], ...]
    """Place within the folder (empty: the folder), words of what is wrong, words of the remedy."""
    masks: bool = False
    """True for a set with masks, in the folder `masks` beside it."""


def bad(spoil: Callable[[Path], object], *problems: tuple[str, str, str], masks: bool = False) -> Bad:
    return Bad(spoil=spoil, problems=problems, masks=masks)


def content(name: str, data: bytes) -> Callable[[Path], object]:
    """A captioned file with these bytes."""

    def spoil(folder: Path) -> None:
        write_pair(folder, "x.png").rename(folder / name)
        (folder / name).write_bytes(data)

    return spoil


def caption(data: bytes) -> Callable[[Path], object]:
    """An image whose caption file has these bytes."""

    def spoil(folder: Path) -> None:
        write_pair(folder, "x.png").with_suffix(".txt").write_bytes(data)

    return spoil


def stray(name: str) -> Callable[[Path], object]:
    """A file that should not be there."""
    return lambda folder: (folder / name).write_bytes(b"x")


def image_only(folder: Path, name: str = "x.png") -> None:
    """An image without a caption of its own."""
    (folder / name).write_bytes(encoded(picture()))


def rows(*lines: object) -> Callable[[Path], object]:
    """A metadata.jsonl that should caption x.png."""

    def spoil(folder: Path) -> None:
        image_only(folder)
        write_rows(folder, lines)

    return spoil


def rows_only(*lines: object) -> Callable[[Path], object]:
    """A metadata.jsonl in a folder whose images are captioned already."""
    return lambda folder: write_rows(folder, lines)


def animated(name: str, image_format: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        write_pair(folder, name)
        picture().save(folder / name, image_format, save_all=True, append_images=[picture(seed=1)])

    return spoil


def outside(folder: Path, name: str = "x.png") -> Path:
    """A good pair beside the folder, for links to lead to."""
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    write_pair(elsewhere, name)
    return elsewhere / name


def link_out(folder: Path) -> None:
    target = outside(folder)
    (folder / "x.png").symlink_to(target)
    (folder / "x.txt").write_text("a thing")


def caption_link_out(folder: Path) -> None:
    target = outside(folder)
    image_only(folder)
    (folder / "x.txt").symlink_to(target.with_suffix(".txt"))


def empty_the_folder(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def replace_by_file(folder: Path) -> None:
    empty_the_folder(folder)
    folder.rmdir()
    folder.write_text("not a folder")


def remove(folder: Path) -> None:
    empty_the_folder(folder)
    folder.rmdir()


def deep(folder: Path) -> Path:
    """A folder in a folder with a good pair, which is no mistake."""
    below = folder / "a" / "b"
    below.mkdir(parents=True)
    write_pair(below, "good.png")
    return below


def table(text: str) -> Callable[[Path], object]:
    """A metadata.csv in a folder whose images are captioned already."""
    return lambda folder: (folder / CSV).write_text(text, encoding="utf-8")


def mask(folder: Path, name: str, *, value: int = 255, size: tuple[int, int] = (40, 30)) -> Path:
    """A mask beside the set."""
    masks = folder.parent / "masks"
    masks.mkdir(exist_ok=True)
    Image.new("L", size, value).save(masks / name)
    return masks / name


def sixteen_bits_with_a_hole(folder: Path) -> None:
    grey = Image.fromarray(np.full((30, 40), 1000, np.uint16))
    grey.save(write_pair(folder, "x.png"), transparency=1000)


def link_mask_out(folder: Path) -> None:
    (folder.parent / "masks" / "good.png").symlink_to(outside(folder))


PNG, JPG, WEBP, BMP, TIFF, AVIF = (
    encoded(picture(), name) for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF")
)
GOOD_ROW = {"file_name": "x.png", "text": "a thing"}
NFC, NFD = "caf\u00e9", "cafe\u0301"
META, CSV = "metadata.jsonl", "metadata.csv"

CASES: dict[str, Bad] = {
    # the folder
    "no folder": bad(remove, ("", "the folder does not exist", "check its name")),
    "a file, not a folder": bad(replace_by_file, ("", "a file, not a folder", "check its name")),
    "empty folder": bad(empty_the_folder, ("", f"no image; {FORMATS}", "put images")),
    "link to a folder above": bad(
        lambda folder: (deep(folder) / "up").symlink_to(folder),
        ("a/b/up", "leads to a folder that is read already", "remove the link"),
    ),
    "link to a folder around the set": bad(
        lambda folder: (folder / "up").symlink_to(folder.parent),
        ("up", "leads to a folder around this one", "remove the link"),
    ),
    "one folder twice by a link": bad(
        lambda folder: (folder / "twice").symlink_to(deep(folder)),
        ("twice", "leads to a folder that is read already", "remove the link"),
    ),
    "a folder of a folder without captions": bad(
        lambda folder: image_only(deep(folder)), ("a/b/x.png", "no caption", "write x.txt beside it")
    ),
    # files that do not belong
    "raw": bad(stray("x.dng"), ("x.dng", f".dng files are not read; {FORMATS}", "convert it to png")),
    "heic": bad(stray("x.HEIC"), ("x.HEIC", ".heic files are not read", "convert it to png")),
    "icon, gif and a video": bad(
        lambda folder: [stray(name)(folder) for name in ("x.ico", "y.gif", "z.mp4")],
        ("x.ico", ".ico files are not read", "convert"),
        ("y.gif", ".gif files are not read", "convert"),
        ("z.mp4", ".mp4 files are not read", "convert"),
    ),
    "caption without an image": bad(
        stray("x.txt"), ("x.txt", "without an image of the same name", "rename it")
    ),
    "captions in another format": bad(
        stray("captions.json"), ("captions.json", "captions are not read from this file", META)
    ),
    "unknown file": bad(
        stray("weights.bin"), ("weights.bin", "neither an image nor a caption", "move it away")
    ),
    "kohya's captions": bad(
        stray("cat.caption"), ("cat.caption", ".caption files are not read", "rename it to cat.txt")
    ),
    "two images of one stem": bad(
        lambda folder: write_pair(folder, "good.jpg"),
        ("good.png", "a second image with the stem of good.jpg", "rename one"),
    ),
    "link out of the set": bad(link_out, ("x.png", "leads out of the folder", "copy the file")),
    "caption link out of the set": bad(
        caption_link_out,
        ("x.txt", "leads out of the folder", "copy the file"),
    ),
    "broken link": bad(
        lambda folder: (folder / "x.png").symlink_to("gone.png"), ("x.png", "leads nowhere", "remove it")
    ),
    "link in a circle": bad(
        lambda folder: (folder / "x.png").symlink_to("x.png"), ("x.png", "leads nowhere", "remove it")
    ),
    "pipe": bad(lambda folder: os.mkfifo(folder / "x.png"), ("x.png", "not a regular file", "move it away")),
    "name that is not UTF-8": bad(
        lambda folder: (folder / os.fsdecode(b"caf\xe9.png")).write_bytes(PNG),
        ("caf\\udce9.png", "not valid UTF-8", "rename it"),
    ),
    # captions
    "no caption": bad(image_only, ("x.png", "no caption", "write x.txt beside it")),
    "empty caption": bad(caption(b""), ("x.txt", "the caption is empty", "describe")),
    "blank caption": bad(caption(b" \n\t\r\n"), ("x.txt", "the caption is empty", "describe")),
    "latin-1 caption": bad(caption(b"caf\xe9"), ("x.txt", "not UTF-8 (byte 3)", "save it as UTF-8")),
    "utf-16 caption": bad(caption("a cat".encode("utf-16")), ("x.txt", "UTF-16", "save it as UTF-8")),
    "huge caption": bad(
        caption(b"a" * (MAX_CAPTION_BYTES + 1)), ("x.txt", f"{MAX_CAPTION_BYTES + 1} bytes", "shorten it")
    ),
    "binary caption": bad(caption(b"a\x00b"), ("x.txt", "a NUL character", "remove it")),
    "folder as caption": bad(
        lambda folder: (image_only(folder), (folder / "x.txt").mkdir()),
        ("x.txt", "the caption is a folder", "text file of this name"),
    ),
    "two names that look alike": bad(
        lambda folder: (write_pair(folder, f"{NFD}.png"), write_pair(folder, f"{NFC}.png")),
        (f"{NFC}.png", "accents are encoded in another way", "rename one"),
        (f"{NFC}.txt", "accents are encoded in another way", "rename one"),
    ),
    # metadata.jsonl
    "caption in both places": bad(
        lambda folder: write_rows(folder, [{"file_name": "good.png", "text": "again"}]),
        ("good.png", f"a caption in good.txt and in {{folder}}/{META}:1", "remove one"),
    ),
    "image not in the metadata": bad(
        lambda folder: (image_only(folder, "y.png"), rows(GOOD_ROW)(folder)),
        ("y.png", "not named in metadata.jsonl", "add a line"),
    ),
    "metadata names a missing file": bad(
        rows(GOOD_ROW, {"file_name": "z.png", "text": "a"}),
        (f"{META}:2", "z.png is not in the folder", "correct"),
    ),
    "metadata names something else": bad(
        rows(GOOD_ROW, {"file_name": ".hidden.png", "text": "a"}),
        (f"{META}:2", ".hidden.png is not in the folder", "correct"),
    ),
    "metadata names a caption": bad(
        rows(GOOD_ROW, {"file_name": "good.txt", "text": "a"}),
        (f"{META}:2", "good.txt is not an image", "correct"),
    ),
    "named twice": bad(
        rows(GOOD_ROW, "", GOOD_ROW), (f"{META}:3", "a second time, first on line 1", "keep one")
    ),
    "invalid JSON": bad(
        rows(GOOD_ROW, '{"file_name": "y.png",}'), (f"{META}:2", "not valid JSON", '{"file_name": "cat.png"')
    ),
    "one JSON list": bad(rows_only("[]"), (f"{META}:1", "not a JSON object", '{"file_name"')),
    "endless brackets": bad(rows_only("[" * 100_000), (f"{META}:1", "not valid JSON", '{"file_name"')),
    "endless number": bad(rows_only("1" * 10_000), (f"{META}:1", "not valid JSON", '{"file_name"')),
    "a key twice in one line": bad(
        rows_only('{"file_name": "x.png", "text": "a", "text": "b"}'),
        (f"{META}:1", "the key 'text' is there twice", "keep one"),
    ),
    "no text": bad(rows({"file_name": "x.png"}), (f"{META}:1", "`text` is missing", '"text": "a cat"')),
    "no file name": bad(rows_only({"text": "a"}), (f"{META}:1", "`file_name` is missing", "cat.png")),
    "text is a number": bad(rows({"file_name": "x.png", "text": 3}), (f"{META}:1", "not a text: 3", "")),
    "empty text": bad(
        rows({"file_name": "x.png", "text": " "}), (f"{META}:1", "caption is empty", "describe")
    ),
    "half a character": bad(
        rows({"file_name": "x.png", "text": "\ud83d"}), (f"{META}:1", "surrogate", "write the character")
    ),
    "huge text": bad(
        rows({"file_name": "x.png", "text": "a" * 20_000}), (f"{META}:1", "20000", "shorten it")
    ),
    "unknown key": bad(
        rows_only({"file_name": "x.png", "caption": "a"}),
        (f"{META}:1", "unknown key 'caption'", "did you mean `text`?"),
    ),
    "misspelt key": bad(
        rows_only({"filename": "x.png", "text": "a"}),
        (f"{META}:1", "unknown key 'filename'", "did you mean `file_name`?"),
    ),
    "path into a sub-folder": bad(
        rows_only({"file_name": "train/x.png", "text": "a"}),
        (f"{META}:1", "train/x.png is not in the folder", "correct the name"),
    ),
    "path out of the set": bad(
        rows_only({"file_name": "../x.png", "text": "a"}),
        (f"{META}:1", "'../x.png' points out", "into a folder there"),
    ),
    "absolute path": bad(
        rows_only({"file_name": "/etc/passwd", "text": "a"}),
        (f"{META}:1", "points out", "into a folder there"),
    ),
    "metadata in latin-1": bad(
        lambda folder: (folder / META).write_bytes(b'{"file_name": "x.png", "text": "caf\xe9"}\n'),
        (f"{META}:1", "not UTF-8", "save it as UTF-8"),
    ),
    "path out of the set by a detour": bad(
        rows_only({"file_name": "a/../../x.png", "text": "a"}), (f"{META}:1", "points out", "into a folder")
    ),
    # metadata.csv
    "semicolons": bad(
        table("file_name;text\nx.png;a"), (f"{CSV}:1", "not separated by commas", "file_name,text")
    ),
    "no header": bad(table("x.png,a thing"), (f"{CSV}:1", "unknown key 'x.png'", "only `file_name`")),
    "misspelt column": bad(
        table("filename,text\nx.png,a"), (f"{CSV}:1", "unknown key 'filename'", "did you mean `file_name`?")
    ),
    "no column of texts": bad(
        table("file_name\nx.png"), (f"{CSV}:1", "the column `text` is missing", "file_name,text")
    ),
    "a column twice": bad(
        table("file_name,text,text\nx.png,a,b"), (f"{CSV}:1", "a column is there twice", "keep one")
    ),
    "empty table": bad(table(""), (f"{CSV}:1", "the file is empty", "file_name,text")),
    "commas without quotes": bad(
        table('file_name,text\ny.png,"a\nb"\nx.png,a cat, a mat'),
        (f"{CSV}:4", "the row has 3 cells, the header 2", "double quotes"),
        (f"{CSV}:2", "y.png is not in the folder", "correct the name"),
    ),
    "open quotes": bad(table('file_name,text\nx.png,"a'), (f"{CSV}:2", "not valid CSV", "cat.png")),
    "empty cell": bad(
        table("file_name,text\nx.png,"),
        (f"{CSV}:2", "caption is empty", "describe"),
        (f"{CSV}:2", "x.png is not in the folder", "correct the name"),
    ),
    "table in latin-1": bad(
        lambda folder: (folder / CSV).write_bytes(b"file_name,text\nx.png,caf\xe9\n"),
        (f"{CSV}:2", "not UTF-8", "save it as UTF-8"),
    ),
    "table in utf-16": bad(
        lambda folder: (folder / CSV).write_bytes("file_name,text\n".encode("utf-16")),
        (f"{CSV}:1", "UTF-16", "save it as UTF-8"),
    ),
    "path out of the table's folder": bad(
        table("file_name,text\n../x.png,a"), (f"{CSV}:2", "'../x.png' points out", "into a folder there")
    ),
    "two files of metadata": bad(
        lambda folder: (table("file_name,text\n")(folder), write_rows(folder, [])),
        (META, "captions are in metadata.csv already", "keep one"),
    ),
    # masks
    "no folder of masks": bad(
        lambda folder: None, ("../masks", "the folder does not exist", "mounted"), masks=True
    ),
    "no mask": bad(
        lambda folder: (mask(folder, "good.png"), write_pair(folder, "x.png")),
        ("x.png", "no mask x.*", "add it"),
        masks=True,
    ),
    "mask without an image": bad(
        lambda folder: (mask(folder, "good.png"), mask(folder, "x.png")),
        ("../masks/x.png", "a mask without an image", "remove this"),
        masks=True,
    ),
    "black mask": bad(
        lambda folder: mask(folder, "good.png", value=0),
        ("../masks/good.png", "black everywhere", "paint white"),
        masks=True,
    ),
    "mask of ones": bad(
        lambda folder: mask(folder, "good.png", value=1),
        ("../masks/good.png", "nowhere brighter than 1 of 255", "paint white (255)"),
        masks=True,
    ),
    "transparent mask": bad(
        lambda folder: Image.new("LA", (40, 30), (255, 0)).save(mask(folder, "good.png")),
        ("../masks/good.png", "transparent in places", "without transparency"),
        masks=True,
    ),
    "images as their own masks": bad(
        lambda folder: (folder.parent / "masks").symlink_to(folder),
        ("good.png", "the image is its own mask", "name a folder of masks"),
        masks=True,
    ),
    "mask link out of its folder": bad(
        lambda folder: (mask(folder, "good.png").unlink(), link_mask_out(folder)),
        ("../masks/good.png", "leads out of the folder", "copy the file"),
        ("good.png", "no mask good.*", "add it"),
        masks=True,
    ),
    "mask of another shape": bad(
        lambda folder: mask(folder, "good.png", size=(30, 40)),
        ("../masks/good.png", "the mask has 30x40 pixels, its image 40x30", "the image's size"),
        masks=True,
    ),
    "damaged mask": bad(
        lambda folder: mask(folder, "good.png").write_bytes(PNG[:-200]),
        ("../masks/good.png", "damaged or cut off", "download it again"),
        masks=True,
    ),
    # image contents
    "two pages": bad(animated("x.tiff", "TIFF"), ("x.tiff", "several pages", "save the page")),
    "animated avif": bad(animated("x.avif", "AVIF"), ("x.avif", "animated", "save the frame")),
    "floating point": bad(
        content("x.tiff", encoded(Image.new("F", (40, 30), 0.5), "TIFF")),
        ("x.tiff", "floating point values", "8 or 16 bits"),
    ),
    "32 bits": bad(
        content("x.tiff", encoded(Image.new("I", (40, 30), 100_000), "TIFF")),
        ("x.tiff", "values of 32 bits", "8 or 16 bits"),
    ),
    "32 bits, small values": bad(
        content("x.tiff", encoded(Image.new("I", (40, 30), 200), "TIFF")),
        ("x.tiff", "values of 32 bits", "8 or 16 bits"),
    ),
    "16 bits with a transparent value": bad(
        sixteen_bits_with_a_hole,
        ("x.png", "16 bits, of which one value means transparent", "8 or 16 bits"),
    ),
    "cut bmp": bad(content("x.bmp", BMP[:-200]), ("x.bmp", "damaged or cut off", "download it again")),
    "cut tiff": bad(content("x.tif", TIFF[:-200]), ("x.tif", "", "download it again")),
    "cut avif": bad(content("x.avif", AVIF[:-200]), ("x.avif", "", "download it again")),
    "zero bytes": bad(content("x.png", b""), ("x.png", "empty (0 bytes)", "copy it again")),
    "cut png": bad(content("x.png", PNG[:-200]), ("x.png", "damaged or cut off", "download it again")),
    "cut jpg": bad(content("x.jpg", JPG[:-100]), ("x.jpg", "damaged or cut off", "download it again")),
    "cut webp": bad(content("x.webp", WEBP[:-100]), ("x.webp", "damaged or cut off", "download it again")),
    "text as png": bad(content("x.png", b"hello " * 9), ("x.png", "not a picture", "download it again")),
    "web page as jpg": bad(content("x.jpg", b"<!DOCTYPE html>"), ("x.jpg", "holds a web page", "remove it")),
    "gif as png": bad(
        content("x.png", encoded(picture(), "GIF")),
        ("x.png", f"holds a GIF image; {FORMATS}", "convert it to png"),
    ),
    "heic as jpg": bad(
        content("x.jpg", b"\0\0\0\x18ftypheic" + bytes(40)),
        ("x.jpg", "holds a HEIC image", "convert it to png"),
    ),
    "git lfs pointer": bad(
        content("x.png", b"version https://git-lfs.github.com/spec/v1\noid"), ("x.png", "Git LFS pointer", "")
    ),
    "animated webp": bad(animated("x.webp", "WEBP"), ("x.webp", "animated", "save the frame")),
    "animated png": bad(animated("x.png", "PNG"), ("x.png", "animated", "save the frame")),
    "decompression bomb": bad(content("x.png", bomb()), ("x.png", "decompression bomb", "scale it down")),
    "too small": bad(
        content("x.png", encoded(picture(15, 300))),
        ("x.png", "15x300 pixels, less than 16", "a larger picture"),
    ),
    "too long": bad(
        content("x.png", encoded(picture(20, 70))), ("x.png", "20x70 pixels, more than 3 times", "crop it")
    ),
}


def scan_set(folder: Path, *, masks: bool) -> Scan:
    one = DataSet(img_dir=folder, mask_dir=folder.parent / "masks" if masks else None)
    return scan_images((one,), resolution=64, multiple=16, trigger_word=None)


def test_there_are_more_than_forty() -> None:
    assert len(CASES) >= 40


@pytest.mark.parametrize("name", CASES)
def test_the_problem_its_place_and_its_remedy_are_told(tmp_path: Path, name: str) -> None:
    case, folder = CASES[name], tmp_path / "set"
    folder.mkdir()
    write_pair(folder, "good.png")
    assert len(scan(folder)) == 1
    case.spoil(folder)
    with pytest.raises(DataError) as caught:
        scan_set(folder, masks=case.masks)
    error = caught.value
    assert error.exit_code == ExitCode.BAD_DATA == 65
    assert [problem.where for problem in error.problems] == [
        os.path.normpath(f"{folder}/{place}") for place, _, _ in case.problems
    ], str(error)
    for problem, (_, what, remedy) in zip(error.problems, case.problems, strict=True):
        assert what.replace("{folder}", str(folder)) in problem.what
        assert problem.remedy and remedy in problem.remedy
    str(error).encode("utf-8")


@contextlib.contextmanager
def nobody(folder: Path) -> Iterator[None]:
    """Read `folder` as a user whom permissions stop; root is stopped by none."""
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("within", [".", "below"])
def test_a_folder_that_may_be_listed_but_not_entered(within: str) -> None:
    """After `chmod -R 644`."""
    with tempfile.TemporaryDirectory() as name:  # that of pytest is closed to others
        folder = Path(name)
        write_pair(folder, "good.png")
        assert len(scan(folder)) == 1
        closed = folder / within
        closed.mkdir(exist_ok=True)
        write_pair(closed, "more.png")
        with nobody(folder), pytest.raises(DataError) as caught:
            closed.chmod(0o644)
            try:
                scan(folder)
            finally:
                closed.chmod(0o755)
    (problem,) = caught.value.problems
    assert (problem.where, problem.what) == (str(closed), "the folder may be listed, but not entered")
    assert "chmod -R u+rwX" in problem.remedy


def test_a_path_beyond_what_the_system_takes(tmp_path: Path) -> None:
    write_pair(tmp_path, "good.png")
    here, name = os.open(tmp_path, os.O_RDONLY), "d" * 250
    for _ in range(17):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    with pytest.raises(DataError) as caught:
        scan(tmp_path)
    (problem,) = caught.value.problems
    assert problem.where.startswith(f"{tmp_path}/ddd")
    assert problem.what == "its path is too long for this system"
    assert "shorter names" in problem.remedy


def test_a_name_beyond_what_the_system_takes_beside_a_set(tmp_path: Path) -> None:
    """A folder of masks whose configured name is too long is a DataError."""
    write_pair(tmp_path, "good.png")
    with pytest.raises(DataError, match="File name too long"):
        scan_images(
            (DataSet(img_dir=tmp_path, mask_dir=tmp_path / ("m" * 300)),),
            resolution=64,
            multiple=16,
            trigger_word=None,
        )


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # tests may run as root, whom no permission stops
    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(listing.os, "scandir", refuse)
    with pytest.raises(DataError, match=r"cannot be read: Permission denied\n.*readable for its user"):
        scan(tmp_path)


@pytest.mark.parametrize("name", ["good.png", "good.txt", "metadata.jsonl"])
def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_pair(tmp_path, "good.png")
    write_rows(tmp_path, [])
    read_bytes = Path.read_bytes

    def refuse(path: Path) -> bytes:
        if path.name == name:
            raise PermissionError(13, "Permission denied")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError) as caught:
        scan(tmp_path)
    (problem,) = caught.value.problems
    assert (problem.where, problem.what[-17:]) == (str(tmp_path / name), "Permission denied")
    assert "permissions" in problem.remedy
