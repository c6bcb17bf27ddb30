"""Make examples/emoji from the unpacked package `@lobehub/fluent-emoji-3d` (see examples/README.md).

First: npm pack @lobehub/fluent-emoji-3d@1.1.0 && tar xzf lobehub-fluent-emoji-3d-1.1.0.tgz
Then: python scripts/render_examples.py package/assets examples/emoji
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

STYLE = "3d emoji style"
SIDE_PIXELS = 256

# file name -> (code point of the source image, caption without the style)
SUBJECTS: dict[str, tuple[str, str]] = {
    "apple": ("1f34e", "a red apple with a green leaf"),
    "balloon": ("1f388", "a red balloon on a blue string"),
    "bee": ("1f41d", "a bee with yellow and black stripes"),
    "bicycle": ("1f6b2", "a red bicycle"),
    "cactus": ("1f335", "a green cactus"),
    "cake": ("1f382", "a birthday cake with three candles"),
    "camera": ("1f4f7", "a grey camera"),
    "car": ("1f697", "a red car"),
    "cat": ("1f431", "the face of an orange cat"),
    "crown": ("1f451", "a golden crown with red and blue gems"),
    "doughnut": ("1f369", "a chocolate doughnut with sprinkles"),
    "frog": ("1f438", "the face of a green frog"),
    "house": ("1f3e0", "a house with a red roof"),
    "key": ("1f511", "a golden key"),
    "mushroom": ("1f344", "a red mushroom with white spots"),
    "owl": ("1f989", "a brown owl"),
    "penguin": ("1f427", "a purple penguin"),
    "rocket": ("1f680", "a white and red rocket"),
    "sailboat": ("26f5", "a sailboat on blue water"),
    "whale": ("1f433", "a blue whale that spouts water"),
}


def on_white(path: Path) -> Image.Image:
    """The picture at `path` over white, as RGB of SIDE_PIXELS squared."""
    with Image.open(path) as source:
        picture = source.convert("RGBA")
    white = Image.new("RGBA", picture.size, "white")
    flat = Image.alpha_composite(white, picture).convert("RGB")
    return flat.resize((SIDE_PIXELS, SIDE_PIXELS), Image.Resampling.LANCZOS)


def main() -> None:
    """Write one png and one caption for every subject."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("assets", type=Path, help="folder `assets` of the unpacked package")
    parser.add_argument("output", type=Path, help="folder to write to")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name, (code_point, caption) in SUBJECTS.items():
        picture = on_white(arguments.assets / f"{code_point}.webp")
        picture.save(arguments.output / f"{name}.png", optimize=True)
        (arguments.output / f"{name}.txt").write_text(f"{caption}, {STYLE}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
