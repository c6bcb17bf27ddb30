"""Pictures of every kind that is read come out upright, RGB and cut to the bucket."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.unit.data.pictures import encoded, picture, twelve_bit_tiff
from trainer.data.pictures.images import claimed_size, fit, measure, read_image, read_mask, to_pixels
from trainer.errors import DataError

ORIENTATION = 0x0112


def quadrants() -> Image.Image:
    """48x32 with a different grey in each quarter, so that every flip and turn shows."""
    values = np.zeros((32, 48), dtype=np.uint8)
    values[:16, 24:], values[16:, :24], values[16:, 24:] = 80, 160, 240
    return Image.fromarray(values).convert("RGB")


def saved(path: Path, image: Image.Image, image_format: str, **options: object) -> Path:
    image.save(path, image_format, **options)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_undone(tmp_path: Path, image_format: str, orientation: int) -> None:
    upright = quadrants()
    # what a camera held that way stores: the inverse of what the tag asks a viewer to do
    stored = {
        1: upright,
        2: upright.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: upright.transpose(Image.Transpose.ROTATE_180),
        4: upright.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: upright.transpose(Image.Transpose.TRANSPOSE),
        6: upright.transpose(Image.Transpose.ROTATE_90),
        7: upright.transpose(Image.Transpose.TRANSVERSE),
        8: upright.transpose(Image.Transpose.ROTATE_270),
    }[orientation]
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = saved(tmp_path / "a", stored, image_format, exif=exif.tobytes(), quality=100)
    read = np.asarray(read_image(path)).astype(int)
    assert read.shape == (32, 48, 3)
    corners = [read[y, x, 0] for y, x in ((4, 4), (4, 44), (28, 4), (28, 44))]
    assert corners == pytest.approx([0, 80, 160, 240], abs=8)
    measured = measure(path.read_bytes(), "a")
    assert (measured.width, measured.height) == (48, 32) == claimed_size(path)


def test_a_size_is_read_without_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path / "a.png", quadrants(), "PNG")
    (tmp_path / "b.png").write_bytes(path.read_bytes()[:200])
    (tmp_path / "c.png").write_bytes(b"<html>")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    assert claimed_size(path) == claimed_size(tmp_path / "b.png") == (48, 32)
    assert claimed_size(tmp_path / "c.png") is claimed_size(tmp_path / "none.png") is None


def test_no_large_file_is_read_whole_for_its_size(tmp_path: Path) -> None:
    """webp and avif get their size from PIL, which would read the whole file: a huge one is refused."""
    path = saved(tmp_path / "a.png", quadrants(), "WEBP")
    assert claimed_size(path) == (48, 32)
    with path.open("ab") as file:
        file.truncate(2**40)
    assert claimed_size(path) is None


def test_an_unknown_orientation_is_no_orientation(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 99
    path = saved(tmp_path / "a.jpg", quadrants(), "JPEG", exif=exif.tobytes())
    assert read_image(path).size == (48, 32)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_a_damaged_exif_block_is_told_as_one(tmp_path: Path, image_format: str) -> None:
    path = saved(tmp_path / "a", quadrants(), image_format, exif=b"Exif\0\0garbage and more")
    with pytest.raises(DataError, match="is whole, and the EXIF block in it is damaged") as told:
        read_image(path)
    assert "exiftool" in str(told.value)


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_transparency_is_laid_over_white(tmp_path: Path, mode: str) -> None:
    layer = Image.new(mode, (20, 20), (0, 0, 0, 0) if mode == "RGBA" else (0, 0))
    layer.paste((0, 0, 0, 128) if mode == "RGBA" else (0, 128), (10, 0, 20, 20))
    read = read_image(saved(tmp_path / "a.png", layer, "PNG"))
    assert read.mode == "RGB"
    assert read.getpixel((0, 0)) == (255, 255, 255)
    assert read.getpixel((15, 0)) == (127, 127, 127)


def test_a_transparent_palette_colour_becomes_white(tmp_path: Path) -> None:
    image = Image.new("P", (20, 20), 1)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(0, (0, 0, 10, 20))
    read = read_image(saved(tmp_path / "a.png", image, "PNG", transparency=0))
    assert (read.getpixel((0, 0)), read.getpixel((15, 0))) == ((255, 255, 255), (0, 0, 255))


@pytest.mark.parametrize(("mode", "stored", "shown"), [("L", 90, 90), ("1", 1, 255), ("P", 0, 0)])
def test_grey_black_and_white_and_palettes_become_rgb(
    tmp_path: Path, mode: str, stored: int, shown: int
) -> None:
    read = read_image(saved(tmp_path / "a.png", Image.new(mode, (20, 20), stored), "PNG"))
    assert (read.mode, read.getpixel((3, 3))) == ("RGB", (shown, shown, shown))


def test_sixteen_bit_grey_keeps_its_tones(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 400).reshape(20, 20).astype(np.uint16)
    read = np.asarray(read_image(saved(tmp_path / "a.png", Image.fromarray(values), "PNG")))
    np.testing.assert_array_equal(read[..., 0], (values >> 8).astype(np.uint8))


def test_twelve_bit_grey_keeps_its_tones(tmp_path: Path) -> None:
    values = np.linspace(0, 4095, 400).reshape(20, 20).astype(np.uint16)
    (tmp_path / "a.tif").write_bytes(twelve_bit_tiff(values))
    read = np.asarray(read_image(tmp_path / "a.tif"))
    np.testing.assert_array_equal(read[..., 0], (values >> 4).astype(np.uint8))


def test_cmyk_jpg_becomes_rgb(tmp_path: Path) -> None:
    red = Image.new("CMYK", (20, 20), (0, 255, 255, 0))
    pixel = read_image(saved(tmp_path / "a.jpg", red, "JPEG")).getpixel((5, 5))
    assert isinstance(pixel, tuple)
    assert pixel[0] > 240 and max(pixel[1:]) < 15


def test_a_phone_jpg_with_a_second_picture_is_its_first(tmp_path: Path) -> None:
    extra = Image.new("RGB", (10, 10))
    path = saved(tmp_path / "a.jpg", quadrants(), "MPO", save_all=True, append_images=[extra])
    assert read_image(path).size == (48, 32)


def test_the_content_tells_the_format(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encoded(picture(), "WEBP"))
    assert read_image(path).size == (40, 30)


def test_a_changed_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", picture(), "PNG")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    read_image(path, content_sha256=digest)
    saved(path, picture(seed=1), "PNG")
    with pytest.raises(DataError, match="has changed since"):
        read_image(path, content_sha256=digest)


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_no_cut_and_no_flipped_byte_ends_in_another_error(image_format: str) -> None:
    data = encoded(picture(), image_format)
    # the last bytes of a png are its end mark, without which the picture is whole
    cuts = range(1, len(data) - 12, max(1, len(data) // 60))
    for cut in cuts:
        with pytest.raises(DataError, match=r"^here: "):
            measure(data[:cut], "here")
    for place in range(0, len(data), max(1, len(data) // 200)):
        damaged = data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]
        try:
            measure(damaged, "here")
        except DataError as error:
            assert error.problems[0].remedy


def test_fit_keeps_the_middle_and_never_stretches() -> None:
    # a circle in the middle of a wide picture must stay a circle
    wide = Image.new("L", (300, 100), 0)
    y, x = np.ogrid[:100, :300]
    circle = ((x - 149.5) ** 2 + (y - 49.5) ** 2 < 40**2).astype(np.uint8) * 255
    wide = Image.fromarray(circle).convert("RGB")
    cut = np.asarray(fit(wide, 64, 64).convert("L")) > 127
    rows, columns = np.flatnonzero(cut.any(1)), np.flatnonzero(cut.any(0))
    assert abs((rows[-1] - rows[0]) - (columns[-1] - columns[0])) <= 1
    assert abs(rows[0] + rows[-1] - 63) <= 1 and abs(columns[0] + columns[-1] - 63) <= 1


@pytest.mark.parametrize("size", [(640, 480), (17, 900), (33, 33), (64, 48), (1000, 16)])
@pytest.mark.parametrize("bucket", [(64, 48), (48, 64), (64, 64)])
def test_fit_gives_the_bucket(size: tuple[int, int], bucket: tuple[int, int]) -> None:
    assert fit(Image.new("RGB", size), *bucket).size == bucket


def test_fit_changes_nothing_when_the_size_is_right() -> None:
    image = picture(64, 48)
    assert fit(image, 64, 48).tobytes() == image.tobytes()


def test_pixels_are_channels_first_from_minus_one_to_one() -> None:
    image = Image.new("RGB", (3, 2), (0, 255, 51))
    pixels = to_pixels(image)
    assert (
        tuple(pixels.shape) == (3, 2, 3) and pixels.is_contiguous() and str(pixels.dtype) == "torch.float32"
    )
    assert pixels[:, 0, 0].tolist() == pytest.approx([-1.0, 1.0, 51 / 127.5 - 1])


def test_the_original_colour_depth_survives() -> None:
    image = picture()
    buffer = io.BytesIO(encoded(image))
    assert Image.open(buffer).tobytes() == image.tobytes()


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_a_mask_whose_alpha_hides_nothing_is_its_grey(tmp_path: Path, mode: str) -> None:
    """Painters save masks with an alpha channel; one that is transparent in a pixel has no one meaning."""
    grey = quadrants().convert("L")
    layer = grey.convert(mode)
    opaque = read_mask(saved(tmp_path / "opaque.png", layer, "PNG"))
    assert opaque.mode == "L" and np.array_equal(np.array(opaque), np.array(grey))
    layer.putpixel((3, 3), (*layer.getpixel((3, 3))[:-1], 254))  # type: ignore[index]
    with pytest.raises(DataError, match="transparent in places"):
        read_mask(saved(tmp_path / "clear.png", layer, "PNG"))
