"""A set of 200 pictures of every format, mode, orientation and profile gives the pixels of a second loader.

That loader knows what each picture shows from how it was made: it does its own arithmetic for modes, alpha,
orientation, profiles and the cut, and asks neither the trainer nor a colour engine.

Tolerances, in steps of 1/255: none for lossless files; 1 where alpha or inks are reckoned in integers; 2 with
a profile, where the engine rounds in other places; 2 on average for lossy files. Cutting to the bucket adds
3, because Lanczos overshoots.
"""

from __future__ import annotations

import io
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.unit.data import profiles
from tests.unit.data.pictures import bomb, encoded, picture, write_pair
from tests.unit.data.profiles import Profile
from trainer.config.schema import DataSet
from trainer.data.leftout import report_left_out
from trainer.data.pictures.images import fit, read_image, to_pixels
from trainer.data.records import ImageRecord, Scan
from trainer.data.sets.scan import scan_images
from trainer.errors import DataError

Array = NDArray[Any]
WIDTH, HEIGHT = 48, 32
ORIENTATION = 0x0112
COUNT = 200
LOSSLESS_STEPS, ARITHMETIC_STEPS, PROFILE_STEPS, CUT_STEPS = 0, 1, 2, 3
LOSSY_MEAN = 2.0
FORMATS = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "BMP": "bmp", "TIFF": "tiff", "AVIF": "avif"}
MODES: dict[str, tuple[str, ...]] = {
    "PNG": ("RGB", "RGBA", "L", "LA", "P", "PA", "1", "I;16"),
    "JPEG": ("RGB", "L", "CMYK"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("RGB", "L", "P", "1"),
    "TIFF": ("RGB", "RGBA", "L", "P", "1", "I;16", "CMYK", "LAB", "white is 0"),
    "AVIF": ("RGB", "RGBA"),
}
LOSSLESS = {"PNG", "BMP", "TIFF", "WEBP"}
ORIENTED = {"PNG", "JPEG", "WEBP", "TIFF", "AVIF"}
PROFILES: dict[str, tuple[Profile | None, ...]] = {
    "RGB": (None, profiles.rgb("adobe"), profiles.rgb("prophoto")),
    "RGBA": (None, profiles.rgb("prophoto")),
    "P": (None, profiles.rgb("adobe")),
    "L": (None, profiles.grey()),
    "CMYK": (None, profiles.cmyk()),
}


@dataclass(frozen=True, kw_only=True)
class Made:
    """A picture file and what it shows: RGB (H, W, 3) in [0, 255], upright."""

    data: bytes
    name: str
    shown: Array
    steps: float | None
    """Largest difference that is allowed; None for lossy files, whose mean is bounded."""


def stored(upright: Array, orientation: int) -> Array:
    """Pixels that a camera stores for an upright picture, by its EXIF orientation."""
    turns: dict[int, Callable[[Array], Array]] = {
        1: lambda x: x,
        2: lambda x: x[:, ::-1],
        3: lambda x: x[::-1, ::-1],
        4: lambda x: x[::-1],
        5: lambda x: x.swapaxes(0, 1),
        6: lambda x: x.swapaxes(0, 1)[::-1],
        7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
        8: lambda x: x.swapaxes(0, 1)[:, ::-1],
    }
    return np.ascontiguousarray(turns[orientation](upright))


def smooth(seed: int, channels: int) -> Array:
    """Values (H, W, channels) in [0, 255] that change slowly, so that lossy formats keep them."""
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    draw = np.random.default_rng(seed)
    waves = [
        127.5
        + 120 * np.sin(x / WIDTH * draw.uniform(1, 4) + y / HEIGHT * draw.uniform(1, 4) + draw.uniform(0, 6))
        for _ in range(channels)
    ]
    return np.rint(np.stack(waves, -1)).clip(0, 255)


def over_white(colour: Array, alpha: Array) -> Array:
    return colour * (alpha / 255) + 255 * (1 - alpha / 255)


def shown_by(profile: Profile | None, values: Array) -> Array:
    """Values in [0, 255] as sRGB in [0, 255]; without a profile they are sRGB already."""
    if profile is None:
        return np.broadcast_to(values, (*values.shape[:-1], 3)).astype(float)
    return np.rint(profile.shown(values / 255) * 255)


def picture_of(
    mode: str, profile: Profile | None, seed: int, turn: Callable[[Array], Array]
) -> tuple[Image.Image, Array]:
    """A picture of a mode as it is stored, and what it shows upright."""
    eight = lambda values: turn(values).astype(np.uint8)  # noqa: E731
    if mode in ("RGB", "L"):
        values = smooth(seed, len(mode))
        return Image.fromarray(np.squeeze(eight(values))), shown_by(profile, values)
    if mode in ("RGBA", "LA"):
        values = smooth(seed, len(mode))
        colour = shown_by(profile, values[..., :-1])
        return Image.fromarray(eight(values), mode), over_white(colour, values[..., -1:])
    if mode in ("P", "PA"):
        return palette(mode, profile, seed, turn)
    if mode == "1":
        values = (smooth(seed, 1) > 128) * 255.0
        return Image.fromarray(np.squeeze(eight(values))).convert("1"), shown_by(None, values)
    if mode in ("I;16", "white is 0"):
        values = np.rint(smooth(seed, 1) * 257)
        kept = turn(65535 - values if mode == "white is 0" else values)
        return Image.fromarray(np.squeeze(kept).astype(np.uint16)), shown_by(None, values // 256)
    if mode == "CMYK":
        values = smooth(seed, 4) * 0.5
        values = np.rint(values)
        plain = np.rint((255 - values[..., :3]) * (255 - values[..., 3:]) / 255)
        return Image.fromarray(eight(values), "CMYK"), shown_by(profile, values) if profile else plain
    assert mode == "LAB"
    values = smooth(seed, 3)
    lightness, signed = values[..., :1], np.rint((values[..., 1:] - 128) / 4)
    lab = np.concatenate([lightness * 100 / 255, signed], -1)
    kept = turn(np.concatenate([lightness, signed % 256], -1)).astype(np.uint8)
    return Image.fromarray(kept, "LAB"), np.rint(profiles._from_xyz(profiles._from_lab(lab)) * 255)


def palette(
    mode: str, profile: Profile | None, seed: int, turn: Callable[[Array], Array]
) -> tuple[Image.Image, Array]:
    """Sixteen colours; of `PA` the first one lets white through."""
    draw = np.random.default_rng(seed)
    colours = draw.integers(0, 256, (16, 3))
    numbers = smooth(seed, 1)[..., 0].astype(int) // 16
    image = Image.fromarray(turn(numbers).astype(np.uint8), "P")
    image.putpalette(colours.astype(np.uint8).tobytes())
    shown = shown_by(profile, colours.astype(float))
    if mode == "PA":
        image.info["transparency"] = 0
        shown[0] = 255
    return image, shown[numbers]


def made(image_format: str, mode: str, orientation: int, profile: Profile | None, seed: int) -> Made:
    image, shown = picture_of(mode, profile, seed, lambda values: stored(values, orientation))
    options: dict[str, Any] = {"quality": 95}
    if image_format == "WEBP":
        options = {"lossless": True, "exact": True}
    if image_format == "AVIF":
        options |= {"subsampling": "4:4:4"}
    if image_format == "TIFF":
        options = {"compression": ["raw", "tiff_lzw", "tiff_adobe_deflate"][seed % 3]}
        options["tiffinfo"] = {274: orientation}
        if mode == "white is 0":
            options["tiffinfo"][262] = 0
    elif image_format in ORIENTED:
        exif = Image.Exif()
        exif[ORIENTATION] = orientation
        options["exif"] = exif.tobytes()
    if "transparency" in image.info:
        options["transparency"] = image.info["transparency"]
    if profile is not None:
        options["icc_profile"] = profile.icc
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    exact = ARITHMETIC_STEPS if mode in ("RGBA", "LA", "CMYK") else LOSSLESS_STEPS
    steps = None if image_format not in LOSSLESS else PROFILE_STEPS if profile or mode == "LAB" else exact
    kind = f"{image_format} {mode} {orientation} {profile.name if profile else 'plain'}"
    return Made(data=buffer.getvalue(), name=kind, shown=shown, steps=steps)


def combinations() -> Iterator[tuple[str, str, int, Profile | None]]:
    """Every mode of every format in every profile; orientations in turn, until there are enough."""
    kinds = [
        (image_format, mode, profile)
        for image_format, modes in MODES.items()
        for mode in modes
        for profile in (PROFILES.get(mode, (None,)) if image_format != "BMP" else (None,))
    ]
    for number, (image_format, mode, profile) in enumerate(itertools.islice(itertools.cycle(kinds), COUNT)):
        orientation = 1 + (number + number // len(kinds)) % 8 if image_format in ORIENTED else 1
        yield image_format, mode, orientation, profile


@pytest.fixture(scope="module")
def pictures() -> list[Made]:
    return [made(*one, seed=number) for number, one in enumerate(combinations())]


@pytest.fixture(scope="module")
def folder(pictures: list[Made], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The set: folders of folders, captions in all three ways."""
    root = tmp_path_factory.mktemp("mixed")
    for number, one in enumerate(pictures):
        suffix = FORMATS[one.name.split()[0]]
        home = root / ("sidecars", "lines", "table/below")[number % 3]
        home.mkdir(parents=True, exist_ok=True)
        (home / f"{number:03}.{suffix}").write_bytes(one.data)
        if number % 3 == 0:
            (home / f"{number:03}.txt").write_text(one.name)
    rows = [(f"{n:03}.{FORMATS[one.name.split()[0]]}", one.name) for n, one in enumerate(pictures)]
    lines = [json.dumps({"file_name": file, "text": name}) for file, name in rows[1::3]]
    (root / "lines" / "metadata.jsonl").write_text("\n".join(lines))
    cells = [f'below/{file},"{name}"' for file, name in rows[2::3]]
    (root / "table" / "metadata.csv").write_text("\n".join(["file_name,text", *cells]))
    return root


def scanned(folder: Path, **options: Any) -> Scan:
    one = DataSet(img_dir=folder, **options.pop("set_options", {}))
    return scan_images((one,), resolution=64, multiple=16, trigger_word=None, **options)


def test_every_format_mode_orientation_and_profile_is_there(pictures: list[Made]) -> None:
    named = [one.name.rsplit(" ", 2) for one in pictures]
    assert len(pictures) == COUNT
    assert {kind for kind, _, _ in named} == {f"{f} {mode}" for f, modes in MODES.items() for mode in modes}
    for image_format in ORIENTED:
        assert {turn for kind, turn, _ in named if kind.startswith(image_format)} == set("12345678")
    assert {profile for _, _, profile in named} == {"plain", "adobe", "prophoto", "grey", "cmyk"}


def test_pixels_are_those_of_the_reference(folder: Path, pictures: list[Made]) -> None:
    records = images(scanned(folder))
    assert len(records) == COUNT
    exact = 0
    for record in records:
        one = pictures[int(record.path.stem)]
        assert record.caption == one.name
        assert (record.width, record.height) == (WIDTH, HEIGHT), one.name
        picture = read_image(record.path, content_sha256=record.content_sha256)
        difference = np.abs(np.asarray(picture).astype(float) - one.shown)
        cut = fit(picture, record.bucket_width, record.bucket_height, record.view)
        pixels = (to_pixels(cut).permute(1, 2, 0).numpy() + 1) * 127.5
        trained = np.abs(pixels - reference_cut(one.shown, record.bucket_width, record.bucket_height))
        if one.steps is None:
            assert difference.mean() <= LOSSY_MEAN, (one.name, difference.mean())
            assert trained.mean() <= LOSSY_MEAN, (one.name, trained.mean())
        else:
            exact += 1
            # the reference does not round what lies over white
            assert difference.max() <= one.steps + 0.001, (one.name, difference.max())
            assert trained.max() <= one.steps + CUT_STEPS, (one.name, trained.max())
    assert exact > COUNT / 2


def reference_cut(shown: Array, width: int, height: int) -> Array:
    """The middle of the bucket's shape at the bucket's size: Lanczos with three lobes, row by row."""
    rows, columns, _ = shown.shape
    scale = max(width / columns, height / rows)
    across = lanczos(columns, width, (columns - width / scale) / 2, width / scale)
    down = lanczos(rows, height, (rows - height / scale) / 2, height / scale)
    between = np.einsum("jc,rck->rjk", across, shown).clip(0, 255)
    return np.einsum("ir,rjk->ijk", down, between).clip(0, 255)


def lanczos(size: int, wanted: int, start: float, length: float) -> Array:
    """Weights (wanted, size) of a row's pixels."""
    step = length / wanted
    centres = start + (np.arange(wanted) + 0.5) * step
    distance = (np.arange(size) + 0.5 - centres[:, None]) / max(step, 1.0)
    weights = np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0.0)
    return weights / weights.sum(1, keepdims=True)


def test_keys_know_what_the_pixels_depend_on(folder: Path, pictures: list[Made]) -> None:
    """Pictures whose profile is applied have entries of their own; the keys of all others are as ever."""
    for record in images(scanned(folder)):
        applied = not pictures[int(record.path.stem)].name.endswith("plain")
        assert bool(record.colour) == applied


def test_what_is_left_out_is_told_exactly(folder: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "mixed"
    shutil.copytree(folder, mixed)
    good = {record.identifier for record in images(scanned(mixed))}
    reasons = spoil(mixed)
    found = scanned(mixed, on_bad_file="skip")
    told = dict(found.left_out)
    assert told.keys() == {str(mixed / name) for name in reasons}
    assert len(found.left_out) == len(told)
    for name, words in reasons.items():
        assert words in told[str(mixed / name)], name
    assert {record.identifier for record in images(found)} == good - {f"0/{name}" for name in reasons}
    report_left_out(found.left_out, tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    assert rows == [{"file": file, "reason": reason} for file, reason in found.left_out]
    with pytest.raises(DataError) as caught:
        scanned(mixed)
    assert len(caught.value.problems) >= len(reasons)
    report_left_out((), tmp_path)
    assert not (tmp_path / "left_out.jsonl").exists()


def spoil(mixed: Path) -> dict[str, str]:
    """Damage some files in every way; gives what must be left out, and words of why."""
    sidecars, lines, below = (
        sorted((mixed / name).glob("*.*")) for name in ("sidecars", "lines", "table/below")
    )
    broken = [path for path in sidecars if path.suffix != ".txt"][:6]
    expected = {}

    def expect(path: Path, words: str) -> Path:
        expected[path.relative_to(mixed).as_posix()] = words
        return path

    expect(broken[0], "empty (0 bytes)").write_bytes(b"")
    expect(broken[1], "damaged or cut off").write_bytes(encoded(picture())[:-300])
    expect(broken[2], f"{broken[2].stem}.txt: the caption is empty").with_suffix(".txt").write_text(" ")
    expect(broken[3], "the image is not named in").with_suffix(".txt").unlink()
    expect(broken[4], "leads out of the folder").unlink()
    broken[4].symlink_to(Path(__file__))
    expect(broken[5], "not UTF-8").with_suffix(".txt").write_bytes(b"caf\xe9")
    named = next(path for path in lines if path.suffix != ".jsonl")
    metadata = mixed / "lines" / "metadata.jsonl"
    rows = metadata.read_text().splitlines()
    number = next(n for n, row in enumerate(rows) if json.loads(row)["file_name"] == named.name)
    rows[number] = json.dumps({"file_name": named.name, "text": ""})
    expect(named, "metadata.jsonl:" + f"{number + 1}: the caption is empty")
    metadata.write_text("\n".join([*rows, "{"]))
    expect(mixed / "lines" / f"metadata.jsonl:{len(rows) + 1}", "not valid JSON")
    expect(below[0], "decompression bomb").write_bytes(bomb())
    expect(mixed / "table" / "clip.mp4", ".mp4 files are not read").write_bytes(b"x")
    expect(mixed / "table" / "orphan.txt", "without an image").write_text("a thing")
    return expected


def test_nothing_left_is_an_error_all_the_same(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png", "")
    with pytest.raises(DataError, match=r"no sample is left[\s\S]*the caption is empty"):
        scanned(tmp_path, on_bad_file="skip")
    with pytest.raises(DataError, match="does not exist"):
        scanned(tmp_path / "nowhere", on_bad_file="skip")


def images(scan: Scan) -> list[ImageRecord]:
    return [record for record in scan.records if isinstance(record, ImageRecord)]
