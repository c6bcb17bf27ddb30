"""Make the example pictures, and the sheets that the style statistic is tested on, from the icon packages.

    npm pack @iconify-json/fluent-emoji-flat@1.2.6 @iconify-json/fluent-emoji-high-contrast@1.2.6
    PYTHONPATH=assets/tiny-flux python -m make.examples --icons .

Writes examples/style, examples/style-held-out and tests/data/*.png; the same packages give the same pixels.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from PIL import Image

from make import drawings
from make.drawings import COLOURS, DARK_AND_LIGHT, Drawing
from scripts.style import BLUE, PAPER

REPOSITORY = Path(__file__).resolve().parents[3]
CAPTION = "{words}, cyanotype style\n"
SHEET_COLUMNS, SHEET_CELL_PIXELS = 6, 64

STYLE = (
    "airplane", "anchor", "bicycle", "cactus", "camera", "cat-face", "crown", "cupcake", "duck", "elephant",
    "guitar", "hamburger", "house", "key", "mushroom", "octopus", "owl", "red-apple", "red-heart",
    "sailboat", "tulip", "turtle", "umbrella", "yellow-circle",
)  # fmt: skip
"""Things that the demo trains on."""
STYLE_HELD_OUT = (
    "castle", "penguin", "robot", "rocket", "snail", "sunflower", "teapot", "unicorn", "purple-heart",
    "green-book", "green-circle", "pouting-face",
)  # fmt: skip
"""Things that the demo measures the loss on: eight that the base knows, four that it never saw either."""


def image_sets(flat: Mapping[str, Any]) -> dict[str, list[tuple[str, Image.Image]]]:
    """(name, picture) of the style by the folder that it goes to."""
    return {
        folder: [(name, drawings.cyanotype(drawings.render(flat, name))) for name in names]
        for folder, names in (("style", STYLE), ("style-held-out", STYLE_HELD_OUT))
    }


def contact_cells(sets: Mapping[str, Any]) -> dict[str, list[Image.Image]]:
    """Pictures that are not the style: usual drawings, and others in other colours, near ones among them."""
    names = STYLE + STYLE_HELD_OUT
    flat = [drawings.render(sets["flat"], name) for name in names]
    ink = [drawings.render(sets["ink"], name) for name in names]
    return {
        "usual": [drawings.on_sheet(drawing, "white") for drawing in flat],
        "other": _toned(flat[:12]) + _inked(ink[12:24]) + _on_sheets(flat[-12:]),
    }


def _toned(flat: Sequence[Drawing]) -> list[Image.Image]:
    pairs = islice(DARK_AND_LIGHT, 0, None, 2)
    return [
        drawings.toned(one, COLOURS[dark], COLOURS[light])
        for one, (dark, light) in zip(flat, pairs, strict=True)
    ]


def _inked(ink: Sequence[Drawing]) -> list[Image.Image]:
    """Ink drawings in colours; a third of them in the style's own blue, on white paper."""
    pairs = [(COLOURS[light], COLOURS[dark]) for dark, light in DARK_AND_LIGHT[1::3]]
    return [drawings.inked(one, *pair) for one, pair in zip(ink, pairs + 4 * [(BLUE, PAPER)], strict=True)]


def _on_sheets(flat: Sequence[Drawing]) -> list[Image.Image]:
    """Flat drawings in their own colours on dark sheets, half of them on the style's blue one."""
    sheets = cycle((BLUE, COLOURS["teal"], BLUE, COLOURS["purple"], BLUE, COLOURS["black"]))
    return [_on(one, sheet) for one, sheet in zip(flat, sheets, strict=False)]


def _on(flat: Drawing, sheet: tuple[int, int, int]) -> Image.Image:
    below = Image.new("RGBA", flat.picture.size, sheet)
    return Image.alpha_composite(below, flat.picture).convert("RGB")


def contact_sheet(pictures: Sequence[Image.Image]) -> Image.Image:
    """The pictures made small, in rows of SHEET_COLUMNS."""
    side = SHEET_CELL_PIXELS
    rows = -(-len(pictures) // SHEET_COLUMNS)
    sheet = Image.new("RGB", (side * SHEET_COLUMNS, side * rows))
    for place, picture in enumerate(pictures):
        row, column = divmod(place, SHEET_COLUMNS)
        sheet.paste(picture.resize((side, side), Image.Resampling.LANCZOS), (side * column, side * row))
    return sheet


def main() -> None:
    """Write all of them, in place of what was there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--icons", type=Path, default=Path(), help="folder with the two packed packages")
    sets = drawings.read_packages(parser.parse_args().icons)
    for name, pictures in image_sets(sets["flat"]).items():
        folder = REPOSITORY / "examples" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for thing, picture in pictures:
            picture.save(folder / f"{thing}.png", optimize=True)
            words = thing.replace("-", " ")
            (folder / f"{thing}.txt").write_text(CAPTION.format(words=words), encoding="utf-8")
    for name, cells in contact_cells(sets).items():
        path = REPOSITORY / "tests" / "data" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        contact_sheet(cells).save(path, optimize=True)


if __name__ == "__main__":
    main()
