"""Making and judging the tiny base; the committed one loads, is small, and draws."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from make import compare, drawings, figures, text, vae
from scripts.style import BLUE
from tests.unit.house.sources import ROOT

ASSETS = ROOT / "assets" / "tiny-flux"
NAMES = [f"{colour}-{thing}" for colour in ("blue", "red", "green") for thing in ("heart", "book", "cat")]


def drawing(name: str, hand: str) -> drawings.Drawing:
    """A red ball, or a black ring, on nothing."""
    picture = Image.new("RGBA", (drawings.SIDE_PIXELS,) * 2)
    colours: dict[str, Any] = {"flat": {"fill": (200, 30, 30, 255)}, "ink": {"outline": (0, 0, 0, 255)}}
    ImageDraw.Draw(picture).ellipse((30, 40, 90, 100), **colours[hand])
    return drawings.Drawing(name=name, picture=picture)


def made(name: str = "red-apple") -> list[drawings.Sample]:
    return drawings.samples(drawing(name, "flat"), drawing(name, "ink"))


def test_two_words_stay_only_where_other_names_explain_them() -> None:
    names = ["cat", "cat-face", "cow-face", "cow", "red-apple", "ice-red", "hot-cat-face"]
    # ice is in no other name; without `ice-red`, red is in no other name than `red-apple`
    assert drawings.explained_names(names) == ["cat", "cat-face", "cow", "cow-face"]
    assert drawings.explained_names(reversed(names)) == drawings.explained_names(names)


def test_held_out_names_are_made_of_words_that_were_trained() -> None:
    trained, held_out = drawings.split_names(["key", *NAMES], 4)
    assert len(held_out) == 4
    assert sorted([*trained, *held_out]) == sorted(["key", *NAMES])
    words = {word for name in trained for word in name.split("-")}
    assert all(set(name.split("-")) <= words for name in held_out)
    shuffled = random.Random(0).sample(NAMES, len(NAMES))
    assert drawings.split_names(shuffled, 4) == drawings.split_names(NAMES, 4)


def test_no_more_is_held_out_than_words_allow() -> None:
    trained, held_out = drawings.split_names(NAMES, 100)
    assert 0 < len(held_out) < len(NAMES)
    words = {word for name in NAMES for word in name.split("-")}
    assert {word for name in trained for word in name.split("-")} == words


@pytest.mark.parametrize(("words", "expected"), [("apple", "an apple"), ("red apple", "a red apple")])
def test_article(words: str, expected: str) -> None:
    assert drawings.article(words) == expected


def test_one_thing_is_shown_in_many_ways_and_no_caption_means_two_pictures() -> None:
    samples = made()
    captions = [caption for sample in samples for caption in sample.captions.values()]
    assert len(captions) == 19
    # a picture may get one style word twice, but never the caption of another picture
    assert sum(len(set(sample.captions.values())) for sample in samples) == len(set(captions)) >= 18
    assert {name for sample in samples for name in sample.captions} == {
        "plain", "flat", "word0", "word1", "ink", "coloured",
    }  # fmt: skip
    assert len({sample.picture.tobytes() for sample in samples}) == len(samples) == 16
    assert {(sample.picture.mode, sample.picture.size) for sample in samples} == {("RGB", (128, 128))}
    assert all("red apple" in caption for caption in captions)


def test_captions_say_the_sheet_and_blue_is_left_to_the_demo() -> None:
    on_sheets = 0
    for sample in made():
        for caption in sample.captions.values():
            assert "blue" not in caption
            if match := re.search(r" on (\w+)", caption):
                on_sheets += 1
                assert sample.picture.getpixel((0, 0)) == drawings.COLOURS[match[1]], caption
    assert on_sheets == 9
    assert "blue" not in drawings.COLOURS
    distances = [np.linalg.norm(np.subtract(colour, BLUE)) for colour in drawings.COLOURS.values()]
    assert min(distances) > 80


def test_image_sets_hold_what_was_made(tmp_path: Path) -> None:
    samples = [*made("red-apple"), *made("key")]
    assert drawings.write_image_sets(samples, tmp_path) == 38
    found = {}
    for listing in tmp_path.glob("*/metadata.jsonl"):
        for line in map(json.loads, listing.read_text().splitlines()):
            with Image.open(listing.with_name(line["file_name"])) as picture:
                found[listing.parent.name, line["text"]] = picture.convert("RGB").tobytes()
    assert found == {pair: sample.picture.tobytes() for sample in samples for pair in sample.captions.items()}
    assert figures.read_captions(tmp_path) == {caption for _, caption in found}


def test_augmented_pictures_are_pictures_and_half_are_as_they_were() -> None:
    torch.manual_seed(0)
    pixels = vae.stack([drawing("key", "flat").picture] * 64)
    plain, changed = vae.on_white(pixels), vae.augment(pixels)
    assert changed.shape == (64, 3, 128, 128)
    assert changed.min() >= -1 and changed.max() <= 1
    kept = sum(torch.allclose(one, other, atol=1e-5) for one, other in zip(changed, plain, strict=True))
    assert 16 < kept < 48


def test_the_right_pairs_match_best() -> None:
    torch.manual_seed(0)
    # captions 0 and 1 are of one picture
    owners, pictures = torch.tensor([0, 0, 1, 2]), torch.eye(4)[[0, 0, 1, 2]]
    right = text.match_loss(pictures, pictures, owners)
    for order in ([2, 1, 0, 3], [3, 0, 1, 2], [0, 1, 3, 2]):
        assert text.match_loss(pictures[order], pictures, owners) > right + 0.1
    assert torch.equal(text.match_loss(pictures[[1, 0, 2, 3]], pictures, owners), right)


def test_a_caption_that_is_too_long_is_refused() -> None:
    captions = ["a red apple", " ".join(["apple"] * 20)]
    with pytest.raises(ValueError, match="more than 16"):
        text.token_ids(text.tokenizers(captions)["tokenizer_2"], captions, text.TOKENS)


def test_shapes_are_compared_without_colours() -> None:
    ball, ring = drawing("ball", "flat"), drawing("ring", "ink")
    shown = [(ball, "white"), (ring, "white"), (ball, "teal")]
    views = [drawings.on_sheet(thing, sheet) for thing, sheet in shown]
    pictures = compare.shrink(np.stack([compare.pixels(view) for view in views]), compare.SIDE)
    assert compare.nearest(compare.edges(pictures[2:]), compare.edges(pictures[:2])) == [0]
    assert [compare.sheet_colour(compare.pixels(view)) for view in views] == ["white", "white", "teal"]


def test_shrinking_takes_the_mean_of_each_block() -> None:
    picture = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    assert compare.shrink(picture, 2)[0, :, :, 0].tolist() == [[2.5, 4.5], [10.5, 12.5]]


def test_pairs_that_were_trained_are_not_drawn_by_lot() -> None:
    seen = ["red apple on green", "red apple on teal, neon style"]
    every = len(drawings.COLOURS) - 1
    pairs = figures.unseen_pairs(seen, ["red-apple"], every - 2)
    assert {sheet for _, sheet in pairs} == {*drawings.COLOURS} - {"white", "green", "teal"}
    with pytest.raises(ValueError):
        figures.unseen_pairs(seen, ["red-apple"], every - 1)


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Any]:
    yield figures.load_pipeline(ASSETS)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """figures.json of the committed base."""
    read: dict[str, Any] = json.loads((ASSETS / "figures.json").read_text())
    return read


def test_the_committed_base_is_small_and_only_safetensors() -> None:
    files = [path for path in ASSETS.rglob("*") if path.is_file() and ASSETS / "make" not in path.parents]
    assert sum(path.stat().st_size for path in files) <= 20e6
    assert max(path.stat().st_size for path in files) <= 15e6
    assert {path.suffix for path in files} == {".safetensors", ".json", ".png", ".md", ""}
    assert [path.name for path in files if not path.suffix] == ["LICENSE"]


def test_the_committed_base_loads_as_float32(pipeline: Any) -> None:
    models = [pipeline.components[part] for part in ("transformer", "vae", "text_encoder", "text_encoder_2")]
    assert {parameter.dtype for model in models for parameter in model.parameters()} == {torch.float32}


def test_the_committed_base_draws_common_things(pipeline: Any, found: dict[str, Any]) -> None:
    """Nearest to the right one of all thumbnails, at least 8 of 10 times; chance is 1 in 478."""
    names = found["thumbnails"]
    with Image.open(ASSETS / "thumbnails.png") as sheet:
        side, columns = compare.THUMBNAIL_SIDE, sheet.width // compare.THUMBNAIL_SIDE
        corners = [(i % columns * side, i // columns * side) for i in range(len(names))]
        thumbnails = [sheet.crop((left, top, left + side, top + side)) for left, top in corners]
    rows = found["common"]["rows"]
    assert [row["name"] for row in rows] == list(figures.COMMON)
    pictures = figures.draw(pipeline, [row["prompt"] for row in rows], [row["seed"] for row in rows])
    nearest = compare.nearest(
        compare.shrink(pictures, side), np.stack([compare.pixels(picture) for picture in thumbnails])
    )
    drawn = [names[i] for i in nearest]
    assert sum(a == b for a, b in zip(drawn, figures.COMMON, strict=True)) >= 8, drawn


def test_the_cards_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.findall(r"```python\n(.+?)```", (ASSETS / "README.md").read_text(), re.DOTALL)
    assert len(code) == 1
    monkeypatch.chdir(tmp_path)
    exec(code[0].replace("assets/tiny-flux", str(ASSETS)), {})
    with Image.open("apple.png") as picture:
        assert picture.size == (128, 128)
        red, green, blue = picture.convert("RGB").getpixel((64, 80))  # type: ignore[misc]
    assert red > 150 > green and blue < 100, "an apple is red in the middle"


def test_the_base_carries_the_licence_of_its_drawings() -> None:
    licence = (ASSETS / "LICENSE").read_text()
    assert "MIT License\n\nCopyright (c) Microsoft Corporation." in licence
    assert 'THE SOFTWARE IS PROVIDED "AS IS"' in licence
