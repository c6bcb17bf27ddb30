"""Before-and-after pictures: every image where it belongs, readable at every size and number."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFont

from trainer.engine import run as engine_run
from trainer.engine.results import pictures
from trainer.engine.results.pictures import before_after, read_png, write_png
from trainer.engine.training import preview

WHITE = (255, 255, 255)
TITLES = ("base model", "with the LoRA, step 300")
MARGIN, GAP = 20, 12


def colour(row: int, number: int) -> tuple[int, int, int]:
    return (40 + 150 * row, 10 + 18 * number, 90)


def plain(count: int, width: int, height: int) -> list[list[Image.Image]]:
    """Two rows of images of one colour each."""
    return [[Image.new("RGB", (width, height), colour(row, n)) for n in range(count)] for row in (0, 1)]


def rectangles(picture: Image.Image, count: int) -> dict[tuple[int, int], tuple[int, int, int, int]]:
    """Left, top, right, bottom of each image of `plain` by row and number, all of it in its colour."""
    found: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    pixels = np.asarray(picture)
    packed = pixels.astype(np.int32) @ (1 << 16, 1 << 8, 1)
    for row in (0, 1):
        for number in range(count):
            red, green, blue = colour(row, number)
            ys, xs = np.nonzero(packed == (red << 16 | green << 8 | blue))
            box = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
            assert len(xs) == (box[2] - box[0]) * (box[3] - box[1]), "torn apart or painted over"
            found[row, number] = box
    return found


def test_two_rows_one_over_the_other() -> None:
    rows = plain(3, 64, 64)
    picture = before_after(rows, ["a", "b", "c"], TITLES)
    boxes = rectangles(picture, 3)
    assert {(right - left, bottom - top) for left, top, right, bottom in boxes.values()} == {(192, 192)}
    for number in range(3):
        before, after = boxes[0, number], boxes[1, number]
        assert before[0] == after[0] == MARGIN + number * (192 + GAP)
        assert after[1] > before[3]
    assert boxes[0, 0][1] == boxes[0, 2][1]
    assert picture.width == 2 * MARGIN + 3 * 192 + 2 * GAP
    corners = [picture.getpixel((x, y)) for x in (0, picture.width - 1) for y in (0, picture.height - 1)]
    assert corners == [WHITE] * 4
    assert picture.tobytes() == before_after(plain(3, 64, 64), ["a", "b", "c"], TITLES).tobytes()


@pytest.mark.parametrize(
    ("count", "columns"), [(1, 1), (8, 8), (9, 5), (10, 5), (12, 6)], ids=lambda number: str(number)
)
def test_many_prompts_become_blocks_of_equal_width(count: int, columns: int) -> None:
    picture = before_after(plain(count, 64, 64), [str(n) for n in range(count)], TITLES)
    assert picture.width <= 1700
    boxes = rectangles(picture, count)
    for number in range(count):
        assert boxes[0, number][0] == MARGIN + number % columns * (192 + GAP)
        block = number // columns
        assert boxes[0, number][1] == boxes[0, block * columns][1]
        if block:
            assert boxes[0, number][1] > boxes[1, number - columns][3]


@pytest.mark.parametrize(
    ("size", "cell"),
    [
        ((64, 64), (192, 192)),
        ((128, 128), (256, 256)),
        ((256, 256), (256, 256)),
        ((512, 512), (384, 384)),
        ((1024, 512), (384, 192)),
    ],
)
def test_cells_can_be_seen_and_fit(size: tuple[int, int], cell: tuple[int, int]) -> None:
    picture = before_after(plain(2, *size), ["a", "b"], TITLES)
    left, top, right, bottom = rectangles(picture, 2)[1, 1]
    assert (right - left, bottom - top) == cell


def test_enlarged_pictures_are_smooth() -> None:
    image = Image.new("RGB", (64, 64), "white")
    image.paste("black", (0, 0, 32, 64))
    picture = before_after([[image], [image]], ["half"], TITLES)
    middle = picture.height // 4
    levels = {picture.getpixel((x, middle)) for x in range(MARGIN + 80, MARGIN + 112)}
    assert len(levels) > 2


def test_a_caption_stands_once_below_its_column_and_a_long_title_has_room() -> None:
    rows = plain(2, 64, 64)
    short = before_after(rows, ["word", "word"], TITLES)
    long = before_after(rows, ["word", "word " * 12], TITLES)
    assert long.height > short.height
    below = rectangles(long, 2)[1, 1][3] + 2
    ink = [
        x for x in range(long.width) if any(long.getpixel((x, y)) != WHITE for y in range(below, long.height))
    ]
    assert {x for x in ink if x < MARGIN + 192} and {x for x in ink if x >= MARGIN + 192 + GAP}
    assert max(ink) <= 2 * MARGIN + 2 * 192 + GAP
    wide = before_after(plain(1, 64, 64), ["a"], ("base", "with " + "a-long-file-name-" * 5))
    assert wide.width > 500


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("", []),
        ("one", ["one"]),
        ("one two", ["one two"]),
        ("one two three", ["one two", "three"]),
    ],
)
def test_lines_break_between_words(text: str, lines: list[str]) -> None:
    font = ImageFont.load_default(size=15)
    assert pictures._wrapped(text, font, round(font.getlength("one two th"))) == lines


def test_long_words_are_cut_and_long_texts_end_in_dots() -> None:
    font = ImageFont.load_default(size=15)
    cut = pictures._wrapped("abcdefgh" * 5, font, 100)
    assert "".join(cut) == "abcdefgh" * 5
    ended = pictures._wrapped("some words " * 30, font, 100)
    assert len(ended) == 4
    assert ended[-1].endswith("...")
    assert all(font.getlength(line) <= 100 for line in (*cut, *ended))
    assert pictures._wrapped("ab", font, 1) == ["a", "b"]


def test_text_inside_a_png_is_read_back(tmp_path: Path) -> None:
    text = {"prompt": "a caf\u00e9, \u65e5\u672c", "seed": "3"}
    path = tmp_path / "new" / "00.png"
    write_png(Image.new("RGB", (4, 3), "red"), path, text)
    first = path.read_bytes()
    image, read = read_png(path)
    assert (image.size, image.getpixel((0, 0)), read) == ((4, 3), (255, 0, 0), text)
    write_png(Image.new("RGB", (4, 3), "red"), path, text)
    assert path.read_bytes() == first


def test_pictures_that_somebody_else_keeps_there_are_not_rows(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "step-000004.png")
    for name in ("step-000004 (1).png", "step-final.png", "step-.png"):
        Image.new("RGB", (8, 64), "blue").save(tmp_path / name)
    with Image.open(pictures.write_strip(tmp_path)) as picture:
        assert picture.size == (8, 8)


def test_the_last_step_is_at_the_bottom_beyond_a_million_too(tmp_path: Path) -> None:
    for step, name in ((2_000_000, "blue"), (500_000, "red"), (1_000_000, "green")):
        Image.new("RGB", (8, 8), name).save(tmp_path / f"step-{step:06d}.png")
    with Image.open(pictures.write_strip(tmp_path)) as strip:
        found = [strip.getpixel((4, top)) for top in (4, 12, 20)]
    assert found == [(255, 0, 0), (0, 128, 0), (0, 0, 255)]


def test_a_long_text_without_blanks_is_measured_a_few_times() -> None:
    """A Chinese prompt is one word: a run stood still for minutes before it had drawn one of a thousand."""
    measured: list[int] = []

    class Font(ImageFont.ImageFont):
        def getlength(self, text: str | bytes | bytearray, *_: object, **__: object) -> int:
            measured.append(len(text))
            return 10 * len(text)

    lines = pictures._wrapped("\u732b" * 10_000, Font(), 200)
    assert [len(line) for line in lines] == [20, 20, 20, 17 + len("...")]
    assert sum(measured) < 20 * 10_000


@pytest.mark.parametrize(("count", "side"), [(40, 1024), (150, 256), (3, 64)])
def test_a_row_of_previews_is_bounded_and_can_be_opened_again(
    count: int, side: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run with 40 prompts at 2048 pixels died before its first step: Pillow did not open the row again."""
    most = 2_000_000
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", most)  # twice as many are refused
    images = [Image.new("RGB", (side, side), colour(0, number % 12)) for number in range(count)]
    whole = pictures.row(images[:3], ["a"] * 3, "step 0")
    monkeypatch.setattr(pictures, "ROW_PIXELS", most)
    picture = pictures.row(images, ["a red apple"] * count, "step 0")
    assert 0.8 * most < picture.width * picture.height <= most or count == 3
    write_png(picture, tmp_path / "step-000000.png")
    with Image.open(pictures.write_strip(tmp_path)) as strip:
        assert strip.width <= 2048
    cell = picture.width / count
    shown = [picture.getpixel((int((number + 0.5) * cell), picture.height // 2)) for number in range(count)]
    assert shown == [colour(0, number % 12) for number in range(count)]
    if count == 3:
        assert pictures.row(images, ["a"] * 3, "step 0").tobytes() == whole.tobytes()
    assert bool(pictures.smaller(images)) is (count > 3)


def test_previews_draw_rows_that_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "ROW_PIXELS", 100_000)
    drawn = [Image.new("RGB", (256, 256), colour(0, number)) for number in range(4)]
    monkeypatch.setattr(preview, "sample", lambda *_: drawn)
    monkeypatch.setattr(preview, "write_drawn", lambda *given: write_png(given[3], given[4]))
    config = SimpleNamespace(validation=SimpleNamespace(prompts=["a"] * 4))
    context = SimpleNamespace(config=config, run_dir=tmp_path, ranks=None)
    journal = SimpleNamespace(picture=lambda *_: None, look_at_folder=lambda: None)
    run: Any = SimpleNamespace(
        context=context, built=SimpleNamespace(model=None), entries=None, journal=journal
    )
    preview.draw_previews(run, 0)
    row, _ = read_png(tmp_path / "samples/step-000000.png")
    assert row.width * row.height <= 100_000
    assert read_png(tmp_path / "samples/step-000000/03.png")[0].size == (256, 256)


def test_sample_draws_a_row_that_is_bounded_and_tells_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pictures of 60 prompts at 2048 pixels became a row that Pillow refuses to open."""
    monkeypatch.setattr(pictures, "ROW_PIXELS", 100_000)
    drawn = [Image.new("RGB", (256, 256), colour(0, number)) for number in range(4)]
    for name in ("apply_backend_settings", "list_entries", "fill_cache", "prompt_controls"):
        monkeypatch.setattr(engine_run, name, lambda *_, **__: None)
    monkeypatch.setattr(engine_run, "load_base", lambda *_: SimpleNamespace(module=None))
    monkeypatch.setattr(engine_run, "sample", lambda *_: drawn)
    said: list[str] = []
    config = SimpleNamespace(validation=SimpleNamespace(prompts=["a"] * 4))
    context: Any = SimpleNamespace(config=config, family=None, say=said.append)
    target = tmp_path / "sample.png"
    spec: Any = SimpleNamespace(
        try_folder="", lora_file="", model_folder="", before_after=False, output_file=str(target)
    )
    engine_run.sample_once(context, spec)
    row, _ = read_png(target)
    assert row.width * row.height <= 100_000
    cell = round((row.width - 5 * 8) / 4)
    assert said == [f"picture: {target} (4 pictures of 256x256, each as {cell}x{cell})"]
    del drawn[1:], config.validation.prompts[1:]
    engine_run.sample_once(context, spec)
    assert said[1:] == [f"picture: {target}"]


@pytest.mark.slow
def test_before_and_after_of_many_large_pictures_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 prompts at 2048 pixels took 13 GB and gave 82 million pixels, 500 a picture that Pillow refuses."""
    held: list[tuple[int, int]] = []
    draw = pictures.before_after

    def watched(rows: Any, captions: Any, titles: Any) -> Image.Image:
        held.extend(image.size for images in rows for image in images)
        return draw(rows, captions, titles)

    monkeypatch.setattr(pictures, "before_after", watched)
    monkeypatch.setattr(preview, "_drawn_as", lambda *_: {})
    count = 200
    for step in (0, 5):
        for number in range(pictures.MOST_COMPARED):  # the others are not even read
            file = tmp_path / f"samples/step-{step:06d}/{number:02d}.png"
            if number < 12:
                write_png(Image.new("RGB", (768, 384), colour(step // 5, number)), file)
            else:
                shutil.copy(file.with_name(f"{number % 12:02d}.png"), file)
    validation = SimpleNamespace(prompts=["a red apple on the table " * 20] * count)
    said: list[str] = []
    context: Any = SimpleNamespace(
        config=SimpleNamespace(validation=validation, method="lora"), run_dir=tmp_path, say=said.append
    )
    preview.write_before_after(context, SimpleNamespace(prompts=[None] * count), 5, drawn=True)  # type: ignore[arg-type]
    target = tmp_path / "before_after.png"
    assert said == [f"before and after: {target} (the first 80 of 200 prompts)"]
    assert held == [(384, 192)] * 2 * 80
    with Image.open(target) as picture:
        assert picture.width * picture.height <= pictures.ROW_PIXELS
    for _ in range(2):  # a later start that draws none: the picture would be beside another LoRA
        preview.write_before_after(context, SimpleNamespace(prompts=[]), 9, drawn=False)  # type: ignore[arg-type]
    assert not target.exists()
    assert len(said) == 2 and "this one draws no previews" in said[1]
    square = draw(plain(81, 384, 384), ["a red apple on the table " * 20] * 81, TITLES)
    assert square.width * square.height <= pictures.ROW_PIXELS
    assert pictures.first_of(80) == ""


@pytest.mark.parametrize("size", [(64, 48), (1024, 512), (500, 999)])
def test_pictures_that_were_made_smaller_before_are_shown_alike(size: tuple[int, int]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (2, *size[::-1], 3), dtype=np.uint8)
    whole = [[Image.fromarray(one)] for one in noise]
    smaller = [[pictures.compared(image) for image in images] for images in whole]
    assert before_after(smaller, ["a"], TITLES).tobytes() == before_after(whole, ["a"], TITLES).tobytes()


def test_a_preview_that_said_once_that_it_is_square_is_the_same_one() -> None:
    """Before pictures with a control image had their own size in their text."""
    now = {"prompt": "a cat", "seed": "1", "controls": "abc", "width": "96", "height": "32"}
    drawn, square = Image.new("RGB", (96, 32)), {**now, "width": "64", "height": "64"}
    assert preview._is_drawn(now, drawn, now) and preview._is_drawn(square, drawn, now)
    assert not preview._is_drawn({**square, "seed": "2"}, drawn, now)
    assert not preview._is_drawn(square, Image.new("RGB", (64, 64)), now)  # of another resolution
    assert not preview._is_drawn({**now, "width": "80"}, drawn, now)
    alone = {name: text for name, text in now.items() if name != "controls"}
    assert not preview._is_drawn({**alone, "width": "64", "height": "64"}, drawn, alone)
