"""Whatever stands in a caption, a file of captions or a picture: a value or a DataError, nothing else."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.unit.data.pictures import encoded
from trainer.config.schema import DataSet
from trainer.data.caption_text import read_sidecar
from trainer.data.pictures.images import measure, read_image, read_mask
from trainer.data.sets.metadata_files import read_metadata
from trainer.data.sets.scan import scan_images
from trainer.errors import DataError, TrainerError

EXAMPLES = settings(max_examples=2_000)
SEEDS = st.integers(0, 2**32 - 1)
"""Where hypothesis would draw many small values of an example, which takes longer than what is tested."""
TINY = Image.new("RGB", (20, 16), (200, 30, 90))
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "AVIF")
FILES = {name: encoded(TINY, name) for name in FORMATS}

text_like = st.text(max_size=30) | st.text(alphabet="\x00\ufeff\u2028 \t\r\nab\"'é", max_size=20)
caption_bytes = st.binary(max_size=40) | text_like.map(lambda text: text.encode("utf-8", "surrogatepass"))
CELLS = (
    ["a.png", "../a.png", "b/a.png", "/a.png", ".", "", " ", '"', ",", ";", "\n", "\r", "\t", "\x00", "text",
     "file_name", "control_file_name", "{", "}", "[", "]", ":", "null", "1e999", "\\ud83d", '"file_name"',
     '"text"', '"a.png"', "file_name,text\n", "a.png,a\n", "\ufeff", "\u2028"]
)  # fmt: skip


def cells(most: int) -> st.SearchStrategy[str]:
    """Up to so many cells in a row."""

    def row(seed: int) -> str:
        chooser = random.Random(seed)
        return "".join(chooser.choices(CELLS, k=chooser.randint(0, most)))

    return SEEDS.map(row)


metadata_bytes = (
    st.binary(max_size=40)
    | cells(12).map(str.encode)
    | cells(8).map(lambda text: f"file_name,text\n{text}".encode())
    | text_like.map(lambda text: f'{{"file_name": "a.png", "text": "{text}"}}'.encode("utf-8", "replace"))
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One picture without a caption; what is only worth knowing is not logged two thousand times."""
    logger = logging.getLogger("trainer.data")
    logger.setLevel(logging.ERROR)
    home = tmp_path_factory.mktemp("fuzz") / "set"
    home.mkdir()
    (home / "a.png").write_bytes(FILES["PNG"])
    yield home
    logger.setLevel(logging.NOTSET)


def write_anew(path: Path, data: bytes) -> None:
    """A new file every time: file systems write one that is cut and filled again to the disk at once."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def survives(work: Callable[[], object]) -> None:
    try:
        work()
    except TrainerError as error:
        assert isinstance(error, DataError) and error.problems
        assert all(problem.where and problem.what and problem.remedy for problem in error.problems)
        str(error).encode()


def scan(folder: Path) -> object:
    one = DataSet(img_dir=folder)
    return scan_images((one,), resolution=32, multiple=16, trigger_word="zwx", on_bad_file="error")


@pytest.mark.slow
@EXAMPLES
@given(raw=caption_bytes)
def test_any_caption(folder: Path, raw: bytes) -> None:
    path = folder.parent / "caption.txt"
    write_anew(path, raw)
    survives(lambda: read_sidecar(path).encode())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metadata.jsonl", "metadata.csv"])
def test_any_metadata(folder: Path, name: str) -> None:
    path, numbers = folder / name, itertools.count()

    @EXAMPLES
    @given(raw=metadata_bytes)
    def survive(raw: bytes) -> None:
        write_anew(path, raw)
        metadata, problems = read_metadata((path,), folder)
        assert metadata.rows.keys() <= metadata.named.keys()
        assert all(one.where.startswith(f"{path}:") and one.what and one.remedy for one in problems)
        if next(numbers) % 10 == 0:  # opening pictures takes longer
            survives(lambda: scan(folder))

    try:
        survive()
    finally:
        path.unlink()


def damaged(chooser: random.Random) -> bytes:
    """A picture of any format with bytes of its start replaced, cut away or put in."""
    data = bytearray(FILES[chooser.choice(FORMATS)])
    for _ in range(chooser.randint(1, 4)):
        place = chooser.randint(0, min(len(data), 400))
        what = chooser.choice(("replace", "cut", "insert", "end"))
        some = chooser.randbytes(chooser.randint(1, 8))
        piece = chooser.choice((some, b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
        if what == "replace":
            data[place : place + len(piece)] = piece
        elif what == "cut":
            del data[place : place + len(piece)]
        elif what == "insert":
            data[place:place] = piece
        else:
            del data[max(place, 1) :]
    return bytes(data) or b"x"


def picture_like(seed: int) -> bytes:
    """A damaged picture, or now and then bytes alone."""
    chooser = random.Random(seed)
    return damaged(chooser) if seed % 5 else chooser.randbytes(chooser.randint(1, 60))


@pytest.mark.slow
@EXAMPLES
@given(raw=SEEDS.map(picture_like))
def test_any_picture(folder: Path, raw: bytes) -> None:
    path = folder.parent / "picture"
    write_anew(path, raw)
    survives(lambda: measure(raw, str(path)))
    survives(lambda: read_image(path))
    survives(lambda: read_mask(path))


@pytest.mark.slow
@EXAMPLES
@given(seed=SEEDS)
def test_any_colour_profile(folder: Path, seed: int) -> None:
    chooser = random.Random(seed)
    icc = chooser.randbytes(chooser.randint(1, 200))
    mode = chooser.choice(("RGB", "L", "CMYK", "LAB", "P", "RGBA"))
    path = folder.parent / "profiled.tiff"
    path.unlink(missing_ok=True)
    Image.new(mode, (16, 16)).save(path, icc_profile=icc)
    survives(lambda: read_image(path).load())
