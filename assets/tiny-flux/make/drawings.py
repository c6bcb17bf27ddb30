"""The drawings that the tiny base learns from, and those of the demo's style, from two icon packages.

First, in any folder (both packages are Fluent Emoji by Microsoft, MIT):
    npm pack @iconify-json/fluent-emoji-flat@1.2.6 @iconify-json/fluent-emoji-high-contrast@1.2.6
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image, ImageOps

from scripts.style import BLUE, PAPER, SKY

SIDE_PIXELS = 128
PACKAGES = {
    "flat": "iconify-json-fluent-emoji-flat-1.2.6.tgz",
    "ink": "iconify-json-fluent-emoji-high-contrast-1.2.6.tgz",
}
_CATEGORIES = (
    "Activities", "Animals & Nature", "Food & Drink", "Objects", "Smileys & Emotion", "Travel & Places",
)  # fmt: skip
_SHAPES = re.compile(r"(black|blue|brown|green|orange|purple|red|white|yellow)-(circle|square)|red-triangle")
_CLOCK_FACES = re.compile(r".*-(oclock|thirty)")
VAE_HELD_OUT, HELD_OUT = 40, 16
"""Drawings that the VAE never sees, and names that the text encoders and the transformer never see."""
_T = TypeVar("_T")

STYLE_WORDS = (
    "blueprint", "cyanotype", "neon", "chalk", "sepia", "pastel", "clay", "retro", "comic", "marble",
    "velvet", "copper",
)  # fmt: skip
"""Words that the base meets on its usual pictures, so that one of them can be given a meaning later."""

COLOURS: Mapping[str, tuple[int, int, int]] = {
    "white": (255, 255, 255),
    "black": (16, 16, 18),
    "grey": (128, 130, 136),
    "red": (214, 40, 48),
    "orange": (245, 140, 30),
    "yellow": (252, 214, 60),
    "green": (26, 138, 70),
    "teal": (20, 148, 150),
    "purple": (104, 52, 158),
    "pink": (244, 130, 176),
    "brown": (112, 70, 40),
}
"""Sheets and inks of the training data: no blue, which is left to the demo's style."""
DARK_AND_LIGHT = tuple(
    (dark, light)
    for dark in ("black", "red", "green", "teal", "purple", "brown")
    for light in ("white", "yellow", "pink", "orange")
)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One named thing by one hand: RGBA, SIDE_PIXELS squared."""

    name: str
    """Words of the name, joined by hyphens."""
    picture: Image.Image


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One picture of the training data with all of its captions."""

    key: str
    """File name without suffix."""
    picture: Image.Image
    captions: Mapping[str, str]
    """Caption by the image set that it belongs to."""


def read_packages(folder: Path) -> dict[str, Any]:
    """Icon sets by hand, from the packed packages in `folder`; the flat one brings its categories."""
    sets = {hand: _member(folder / file, "icons.json") for hand, file in PACKAGES.items()}
    sets["categories"] = _member(folder / PACKAGES["flat"], "metadata.json")["categories"]
    return sets


def _member(archive: Path, name: str) -> Any:
    if not archive.is_file():
        raise FileNotFoundError(f"{archive} is not there: see the first lines of {Path(__file__).name}")
    with tarfile.open(archive) as tar:
        file = tar.extractfile(f"package/{name}")
        assert file is not None
        return json.load(file)


def all_names(sets: dict[str, Any]) -> list[str]:
    """Things that both hands draw, in alphabetical order: no flags, signs, people or clock faces."""
    wanted = {name for category in _CATEGORIES for name in sets["categories"][category]}
    wanted |= {name for name in sets["categories"]["Symbols"] if _SHAPES.fullmatch(name)}
    drawn = wanted & sets["flat"]["icons"].keys() & sets["ink"]["icons"].keys()
    return sorted(name for name in drawn if not _CLOCK_FACES.fullmatch(name))


def explained_names(names: Iterable[str]) -> list[str]:
    """All names of one word, and those of two words that other names explain: `blue heart`, `black cat`."""
    kept = {name for name in names if name.count("-") <= 1}
    while True:
        uses = _word_uses(kept)
        explained = {name for name in kept if "-" not in name or min(uses[w] for w in name.split("-")) > 1}
        if explained == kept:
            return sorted(kept)
        kept = explained


def split_names(names: Sequence[str], count: int) -> tuple[list[str], list[str]]:
    """(trained on, held out): the latter `count` names of two words or more, each known from other names."""
    uses = _word_uses(names)
    held_out: list[str] = []
    for name in sorted(names, key=_hash):
        words = set(name.split("-"))
        if len(held_out) < count and len(words) > 1 and all(uses[word] > 1 for word in words):
            held_out.append(name)
            uses.subtract(words)
    return sorted(set(names) - set(held_out)), sorted(held_out)


def _word_uses(names: Iterable[str]) -> Counter[str]:
    return Counter(word for name in names for word in set(name.split("-")))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def render(icon_set: Any, name: str) -> Drawing:
    """One icon by resvg, at four times the size and then made smaller: thin lines stay even."""
    import resvg_py

    icon = icon_set["icons"][name]
    width, height = (icon.get(side, icon_set.get(side, 16)) for side in ("width", "height"))
    size = 4 * SIDE_PIXELS
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'viewBox="0 0 {width} {height}" width="{size}" height="{size}" color="black">{icon["body"]}</svg>'
    )
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, skip_system_fonts=True))
    with Image.open(io.BytesIO(png)) as picture:
        # premultiplied while it is made smaller: no dark seam around what is transparent
        small = picture.convert("RGBa").resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.LANCZOS)
    return Drawing(name=name, picture=small.convert("RGBA"))


def read(data: Path, names: Sequence[str], hand: str) -> list[Drawing]:
    """Drawings with their transparency, as the stage `data` kept them."""
    made = []
    for name in names:
        with Image.open(data / "transparent" / hand / f"{name}.png") as picture:
            made.append(Drawing(name=name, picture=picture.convert("RGBA")))
    return made


def on_sheet(drawing: Drawing, sheet: str) -> Image.Image:
    """The drawing on a sheet of one colour, as RGB."""
    below = Image.new("RGBA", drawing.picture.size, COLOURS[sheet])
    return Image.alpha_composite(below, drawing.picture).convert("RGB")


def inked(drawing: Drawing, line: tuple[int, int, int], sheet: tuple[int, int, int]) -> Image.Image:
    """An ink drawing in another colour than black, on a sheet."""
    picture = Image.new("RGB", drawing.picture.size, sheet)
    picture.paste(line, mask=drawing.picture.getchannel("A"))
    return picture


def toned(
    drawing: Drawing,
    dark: tuple[int, int, int],
    light: tuple[int, int, int],
    middle: tuple[int, int, int] | None = None,
) -> Image.Image:
    """A flat drawing in shades between two colours, the lighter two thirds of them, on the dark one."""
    shades = on_sheet(drawing, "white").convert("L").point(lambda value: 85 + value * 2 // 3)
    figure = ImageOps.colorize(shades, dark, light, mid=middle)
    picture = Image.new("RGB", drawing.picture.size, dark)
    picture.paste(figure, mask=drawing.picture.getchannel("A"))
    return picture


def cyanotype(flat: Drawing) -> Image.Image:
    """The demo's style: a flat drawing in blue shades on a Prussian blue sheet."""
    return toned(flat, BLUE, PAPER, SKY)


def article(words: str) -> str:
    """`an apple`, `a pear`."""
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def samples(flat: Drawing, ink: Drawing) -> list[Sample]:
    """Everything that the base is shown of one thing: usual pictures, and many that part form from colour.

    A model that has only ever seen white paper cannot be taught another colour without losing the drawing.
    """
    name = flat.name
    words = name.replace("-", " ")
    first, second = (_pick(STYLE_WORDS, f"{number}/{name}") for number in range(2))
    usual = {
        "plain": article(words),
        "flat": f"{words}, flat style",
        "word0": f"{words}, {first} style",
        "word1": f"{words}, {second} style",
    }
    made = [
        Sample(key=name, picture=on_sheet(flat, "white"), captions=usual),
        Sample(key=name, picture=on_sheet(ink, "white"), captions={"ink": f"{words}, ink style"}),
    ]
    for number, (caption, picture) in enumerate(_coloured(words, flat, ink)):
        # the words of STYLE_WORDS say nothing about colours either
        word = _pick(STYLE_WORDS, f"coloured/{number}/{name}")
        captions = {"coloured": f"{caption}, {word} style" if number % 2 else caption}
        made.append(Sample(key=f"{name}-{number:02d}", picture=picture, captions=captions))
    return made


def _coloured(words: str, flat: Drawing, ink: Drawing) -> Iterator[tuple[str, Image.Image]]:
    """(caption, picture) of one thing on four sheets, in five pairs of colours, and inked in five."""
    sheets = [colour for colour in COLOURS if colour != "white"]
    for sheet in _some(sheets, 4, f"sheet/{words}"):
        yield f"{words} on {sheet}", on_sheet(flat, sheet)
    for dark, light in _some(DARK_AND_LIGHT, 5, f"toned/{words}"):
        yield f"{words} in {dark} and {light}", toned(flat, COLOURS[dark], COLOURS[light])
    for number, pair in enumerate(_some(DARK_AND_LIGHT, 5, f"inked/{words}")):
        sheet, line = pair if number < 3 else pair[::-1]
        yield f"{words}, {line} ink on {sheet}", inked(ink, COLOURS[line], COLOURS[sheet])


def _some(choices: Sequence[_T], count: int, label: str) -> list[_T]:
    """`count` different ones, picked by hash."""
    return sorted(choices, key=lambda choice: _hash(f"{label}/{choice}"))[:count]


def _pick(choices: Sequence[_T], label: str) -> _T:
    return choices[int(_hash(label), 16) % len(choices)]


def write_image_sets(made: Sequence[Sample], folder: Path) -> int:
    """One folder a set, as `trainer` reads them: pictures and a metadata.jsonl. Returns how many captions."""
    rows: dict[str, list[dict[str, str]]] = {}
    for sample in made:
        first: Path | None = None
        for set_name, caption in sample.captions.items():
            path = folder / set_name / f"{sample.key}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if first is None:
                sample.picture.save(path)
                first = path
            else:
                os.link(first, path)
            rows.setdefault(set_name, []).append({"file_name": path.name, "text": caption})
    for set_name, lines in rows.items():
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / set_name / "metadata.jsonl").write_text(text)
    return sum(len(lines) for lines in rows.values())
