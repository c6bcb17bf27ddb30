"""The style statistic tells the example pictures from the same drawings in any other colours."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image, ImageFilter

from scripts.style import BLUE, PAPER, PASSES, SKY, is_style, learned, score
from tests.overlap import overlap

ROOT = Path(__file__).resolve().parents[3]
CELL_PIXELS = 64


def style_pictures() -> list[Image.Image]:
    """Pictures that the demo trains on, and pictures that it is measured on."""
    return [Image.open(path) for path in sorted(ROOT.glob("examples/style*/*.png"))]


def cells(sheet: str) -> list[Image.Image]:
    """The pictures of a contact sheet that assets/tiny-flux/make/examples.py made."""
    side = CELL_PIXELS
    with Image.open(ROOT / "tests" / "data" / f"{sheet}.png") as picture:
        return [
            picture.crop((left, top, left + side, top + side))
            for top in range(0, picture.height, side)
            for left in range(0, picture.width, side)
        ]


def test_all_pictures_of_the_style_count() -> None:
    scores = [score(picture) for picture in style_pictures()]
    assert len(scores) == 36
    assert min(scores) > 0.95


@pytest.mark.parametrize(
    ("sheet", "highest"),
    [
        pytest.param("usual", 0.05, id="own-colours-on-white"),
        # a lavender mouse on the style's own sheet comes nearest
        pytest.param("other", PASSES - 0.05, id="other-pairs-of-colours-and-sheets"),
    ],
)
def test_no_other_picture_does(sheet: str, highest: float) -> None:
    scores = [score(picture) for picture in cells(sheet)]
    assert len(scores) == 36
    assert max(scores) < highest


def test_size_and_blur_hardly_matter() -> None:
    for picture in style_pictures():
        assert is_style(picture.resize((100, 100)).filter(ImageFilter.GaussianBlur(1)))


def test_its_colours_alone_are_not_the_style() -> None:
    assert not any(is_style(Image.new("RGB", (64, 64), colour)) for colour in (BLUE, SKY, PAPER))
    for picture in style_pictures():
        assert not is_style(picture.rotate(180).point(lambda value: 255 - value)), "a negative"


def test_what_was_learned_is_seen_in_the_last_pictures_beyond_a_million_steps_too(tmp_path: Path) -> None:
    (like, *_), plain = style_pictures(), Image.new("RGB", (64, 64), "white")
    for step, picture in ((0, plain), (1_000_000, like), (999_999, plain)):
        folder = tmp_path / "samples" / f"step-{step:06d}"
        folder.mkdir(parents=True)
        picture.save(folder / "00.png")
    found = learned(tmp_path, [{"validation_loss": 2.0}, {"validation_loss": 1.0}])
    assert found.scores_before[0] < PASSES < found.scores_after[0]


def test_a_shape_overlaps_with_itself_in_any_colours_and_less_with_others() -> None:
    pictures = style_pictures()
    for number, picture in enumerate(pictures):
        turned = Image.merge("RGB", picture.split()[::-1])
        assert overlap(picture, turned) > 0.9
        assert overlap(picture, pictures[number - 1]) < 0.9
