"""`tests/data/real_shaped` is spread as its script says: counted again from the files alone."""

from __future__ import annotations

import csv
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.data.make_real_shaped import tokenizer_counts
from trainer import families
from trainer.config.schema import DataSet
from trainer.data.pictures.buckets import buckets
from trainer.data.sets.scan import scan_images
from trainer.errors import DataError

ROOT = Path(__file__).resolve().parents[2] / "data" / "real_shaped"
CENTRES = {
    name: math.log(int(name.split(":")[0]) / int(name.split(":")[1]))
    for name in ("1:1", "4:3", "3:4", "7:5", "5:7", "16:9")
}
TARGET = 1024


def table(name: str) -> dict[str, dict[str, str]]:
    """Rows of one set by file name."""
    with (ROOT / "lengths.csv").open(encoding="utf-8", newline="") as file:
        return {row["file"]: row for row in csv.DictReader(file) if row["set"] == name}


def captions(name: str) -> dict[str, str]:
    """Captions of a set by file name."""
    lines = ROOT / name / "metadata.jsonl"
    if lines.exists():
        rows = map(json.loads, lines.read_text(encoding="utf-8").splitlines())
        return {row["file_name"]: row["text"] for row in rows}
    return {path.name: path.with_suffix(".txt").read_text(encoding="utf-8").strip() for path in files(name)}


def files(name: str) -> list[Path]:
    return sorted(path for path in (ROOT / name).iterdir() if path.suffix in (".png", ".jpg", ".webp"))


def nominal_tokens(text: str) -> int:
    """Character by character: six letters, a Chinese character or a mark are one, an emoji is three."""
    tokens, letters = 0, 0
    for character in [*text, " "]:
        if character.isascii() and character.isalpha():
            letters += 1
            continue
        tokens, letters = tokens + (letters + 5) // 6, 0
        # joiners, and what says that a sign is drawn in colour, belong to the emoji before them
        if unicodedata.category(character) == "So":
            tokens += 3
        elif unicodedata.category(character) in ("Lo", "Po"):
            tokens += 1
    # a person with a trade is two signs
    return tokens - 3 * text.count("\N{ZERO WIDTH JOINER}")


def aspect(width: int, height: int) -> str:
    return min(CENTRES, key=lambda name: abs(CENTRES[name] - math.log(width / height)))


@pytest.mark.parametrize(("name", "count"), [("pictures", 60), ("edits", 24)])
def test_pictures_have_six_aspects_in_three_sizes_below_and_above_the_target(name: str, count: int) -> None:
    found, listed = {}, table(name)
    for path in files(name):
        with Image.open(path) as picture:
            found[path.name] = picture.size
    assert len(found) == count
    assert found == {file: (int(row["width"]), int(row["height"])) for file, row in listed.items()}
    kinds = Counter((aspect(*size), round(math.log2(math.prod(size) / TARGET**2))) for size in found.values())
    assert len(kinds) == 18
    assert {size for _, size in kinds} == {-1, 0, 1}
    sizes = buckets(TARGET, 16)
    nearest = [min(sizes, key=lambda one: abs(math.log(one[0] / one[1] * h / w))) for w, h in found.values()]
    assert len(set(nearest)) == 6
    assert any(side % 16 for size in found.values() for side in size)


@pytest.mark.parametrize(("name", "distinct"), [("pictures", 40), ("edits", 18)])
def test_captions_are_of_1_to_300_tokens_spread_by_their_logarithm(name: str, distinct: int) -> None:
    lengths = {file: nominal_tokens(text) for file, text in captions(name).items()}
    assert lengths == {file: int(row["tokens"]) for file, row in table(name).items()}
    assert (min(lengths.values()), max(lengths.values())) == (1, 300)
    assert len(set(lengths.values())) >= distinct
    # a third of the logarithm holds a third of the captions
    thirds = Counter(min(2, int(3 * math.log(one) / math.log(300))) for one in lengths.values())
    assert all(abs(thirds[third] - len(lengths) / 3) < len(lengths) / 8 for third in range(3))


def test_captions_are_in_two_languages_with_emoji() -> None:
    texts, listed = captions("pictures"), table("pictures")
    chinese = {file for file, text in texts.items() if re.search("[\u4e00-\u9fff]", text)}
    assert chinese == {file for file, row in listed.items() if row["language"] == "zh"}
    assert 10 <= len(chinese) <= 20
    assert sum(any(unicodedata.category(one) == "So" for one in text) for text in texts.values()) >= 3
    assert any(
        "\N{ZERO WIDTH JOINER}" in text for name in ("pictures", "edits") for text in captions(name).values()
    )


def test_controls_have_other_sizes_and_aspects_than_their_targets() -> None:
    listed = table("edits")
    controls = {path.stem: path for path in files("controls")}
    assert len(controls) == 24
    for file, row in listed.items():
        with Image.open(controls[Path(file).stem]) as control:
            assert control.size == (int(row["control_width"]), int(row["control_height"]))
            before, after = control.size, (int(row["width"]), int(row["height"]))
        assert before != after
        assert aspect(*before) != aspect(*after)


def test_conversations_are_of_2_to_4000_tokens_and_answers_begin_at_1() -> None:
    rows = [json.loads(line)["messages"] for line in (ROOT / "chats.jsonl").read_text().splitlines()]
    lengths = [sum(nominal_tokens(message["content"]) for message in row) for row in rows]
    assert lengths == [int(row["tokens"]) for row in table("chats").values()]
    learned = [
        sum(nominal_tokens(one["content"]) for one in row if one["role"] == "assistant") for row in rows
    ]
    assert min(learned) == 1
    assert 3900 < max(lengths) <= 4000
    thirds = Counter(min(2, int(3 * math.log(one) / math.log(4000))) for one in learned)
    assert all(abs(thirds[third] - 20) < 8 for third in range(3))
    assert {len(row) // 2 for row in rows} == {1, 2, 3, 4}


@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image_edit", "llama", "mistral", "qwen2", "qwen3"])
def test_tokens_of_tiny_bases_are_those_of_the_table(family: str, tiny_base: Callable[[str], Path]) -> None:
    count = tokenizer_counts(family, tiny_base(family))
    if families.get(family).sample_kind != "image":
        rows = [json.loads(line)["messages"] for line in (ROOT / "chats.jsonl").read_text().splitlines()]
        found = [count(json.dumps(row)) for row in rows]
        assert found == [int(row[family]) for row in table("chats").values()]
        return
    for name in ("pictures", "edits"):
        counts = {file: count(text) for file, text in captions(name).items()}
        assert counts == {file: int(row[family]) for file, row in table(name).items()}


def test_the_sets_are_read_whole_and_empty_captions_are_told() -> None:
    common = {"resolution": 64, "multiple": 16, "trigger_word": None}
    assert len(scan_images([DataSet(img_dir=ROOT / "pictures")], **common).records) == 60
    edits = DataSet(img_dir=ROOT / "edits", control_dir=ROOT / "controls")
    assert len(scan_images([edits], **common, controls=(1, 3)).records) == 24
    both = [DataSet(img_dir=ROOT / "pictures"), DataSet(img_dir=ROOT / "uncaptioned")]
    with pytest.raises(DataError, match="the caption is empty"):
        scan_images(both, **common)
    found = scan_images(both, **common, on_bad_file="skip")
    assert (len(found.records), len(found.left_out)) == (60, 3)
