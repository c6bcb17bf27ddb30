"""Memory of decoding: large pictures in strips and one at a time, and a host that has too little memory."""

from __future__ import annotations

import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from tests.unit.data.pictures import scan, write_pair
from trainer.config.schema import DataSet
from trainer.data.pictures import colour, opened
from trainer.data.pictures.images import Measured, measure
from trainer.data.sets.scan import scan_images
from trainer.errors import OutOfMemoryError


def wide_png(side: int) -> bytes:
    """A png of 16 bits a channel with transparency, which PIL reads and does not write."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixels = zlib.compress((b"\0" + b"\x80\0" * 4 * side) * side, 1)
    header = struct.pack(">IIBBBBB", side, side, 16, 6, 0, 0, 0)
    signature = b"\x89PNG\r\n\x1a\n"
    return signature + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def test_a_large_picture_takes_no_more_memory_than_itself_and_its_result(tmp_path: Path) -> None:
    side = 3000
    (tmp_path / "a.png").write_bytes(wide_png(side))
    program = (
        "import resource, sys; from pathlib import Path; from trainer.data.pictures.images import read_image;"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024;"
        "read_image(Path(sys.argv[1])); before = peak();"
        "image = read_image(Path(sys.argv[2])); print(peak() - before, image.getpixel((9, 9)))"
    )
    small = tmp_path / "small.png"
    small.write_bytes(wide_png(8))
    command = [sys.executable, "-c", program, str(small), str(tmp_path / "a.png")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, _, pixel = done.stdout.partition(" ")
    # half transparent grey of 128 over white
    assert pixel.strip() == "(191, 191, 191)"
    # four bytes a pixel each: what is decoded, and the result; six copies before
    assert int(grown) < 3.5 * 4 * side**2


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA", "P", "1", "I;16", "CMYK", "LAB"])
def test_strips_give_the_pixels_of_the_whole(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(3).integers(0, 256, (31, 40, 4), dtype=np.uint8)
    image = Image.fromarray(values)
    if mode == "I;16":
        image = Image.fromarray(values[..., 0].astype(np.uint16) * 257)
    elif mode in ("CMYK", "LAB"):
        image = Image.frombytes(
            mode, (40, 31), values[..., : len(Image.new(mode, (1, 1)).getbands())].tobytes()
        )
    elif mode in ("P", "L", "1"):
        image = image.convert("RGB").convert(mode)
    else:
        image = image.convert(mode)
    if mode == "P":
        image.info["transparency"] = 3
    whole = colour.to_rgb(image)
    monkeypatch.setattr(colour, "_STRIP_PIXELS", 90)
    assert np.array_equal(np.asarray(colour.to_rgb(image)), np.asarray(whole))


def test_large_pictures_are_decoded_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        write_pair(tmp_path, f"{number}.png", seed=number)
    at_once: list[int] = []
    running: list[int] = []

    def measured(data: bytes, where: str) -> Measured:
        running.append(1)
        at_once.append(len(running))
        time.sleep(0.01)
        running.pop()
        return measure(data, where)

    monkeypatch.setattr(opened, "measure", measured)
    monkeypatch.setattr(opened, "LARGE_PIXELS", 40 * 30 - 1)
    assert len(scan(tmp_path)) == 6
    assert max(at_once) == 1


def test_a_host_short_of_memory_leaves_no_picture_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path, "a.png")
    write_pair(tmp_path, "b.png")

    def load(self: Image.Image) -> None:
        raise MemoryError

    monkeypatch.setattr(PngImageFile, "load", load)
    sets = [DataSet(img_dir=tmp_path)]
    with pytest.raises(OutOfMemoryError, match="host's memory does not suffice"):
        scan_images(sets, resolution=64, multiple=16, trigger_word=None, on_bad_file="skip")
