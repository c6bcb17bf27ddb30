"""Names in the plots stand clear of dots, of one another and of the frame."""

from __future__ import annotations

import random

import pytest
from PIL import Image

from bench import plots, record
from bench.labels import Box, covered, place

FRAME = Box(94, 68, 1116, 644)
RADIUS = 7.0


def clear(dots: list[tuple[float, float]], sizes: list[tuple[float, float]], labels: list[Box]) -> bool:
    """Whether no label covers anything."""
    circles = [Box(x - RADIUS, y - RADIUS, x + RADIUS, y + RADIUS) for x, y in dots]
    for number, (label, size) in enumerate(zip(labels, sizes, strict=True)):
        assert (label.right - label.left, label.bottom - label.top) == pytest.approx(size)
        others = [*circles, *labels[:number], *labels[number + 1 :]]
        if covered(label, others, FRAME) > 1e-6:
            return False
    return True


def test_a_name_stands_right_of_its_dot_where_there_is_room() -> None:
    (label,) = place([(500.0, 300.0)], [(100.0, 20.0)], RADIUS, FRAME)
    assert label == Box(511.0, 290.0, 611.0, 310.0)


@pytest.mark.parametrize(
    "dots",
    [
        [(1110.0, 300.0)],
        [(1110.0, 80.0), (1100.0, 85.0)],
        [(880.0, 349.0), (1034.0, 342.0)],
        [(600.0, 300.0), (600.0, 302.0), (601.0, 299.0), (602.0, 301.0), (598.0, 303.0)],
        [(102.0, 636.0), (110.0, 636.0), (118.0, 636.0)],
    ],
    ids=["at the right", "in the corner", "a neighbour on both sides", "in one heap", "at the foot"],
)
def test_names_find_room(dots: list[tuple[float, float]]) -> None:
    sizes = [(158.0, 20.0)] * len(dots)
    assert clear(dots, sizes, place(dots, sizes, RADIUS, FRAME))


def test_twelve_dots_anywhere_have_room() -> None:
    dice = random.Random(0)
    for _ in range(50):
        dots = [(dice.uniform(110, 1075), dice.uniform(95, 630)) for _ in range(12)]
        sizes = [(dice.uniform(80, 210), 20.0) for _ in dots]
        assert clear(dots, sizes, place(dots, sizes, RADIUS, FRAME))


def test_where_there_is_no_room_a_name_is_put_all_the_same() -> None:
    narrow = Box(0, 0, 50, 50)
    assert len(place([(25.0, 25.0)], [(100.0, 20.0)], RADIUS, narrow)) == 1


def test_no_dot_lies_on_the_frame() -> None:
    for value in (13.4, 47.5, 102.8, 994.0, 1000.0, 2203.0):
        top = plots._nice(plots._HEADROOM * value)
        assert value <= top / plots._HEADROOM, value
        assert top <= 1.7 * value, "most of the plot is used"


def test_names_fit_the_height_that_is_kept_for_them() -> None:
    font = plots.ImageFont.load_default(size=plots._TEXT)
    assert font.getbbox("flux1_kontext ours-nf4 (jqgpy_)")[3] <= plots._LABEL_HEIGHT


def test_the_committed_records_are_drawn_as_they_are_placed() -> None:
    for one in record.read_records().values():
        if isinstance(one, record.Record):
            assert isinstance(plots.scatter(one), Image.Image)
