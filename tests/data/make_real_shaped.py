"""Write `tests/data/real_shaped`: sets whose sizes and lengths are spread as those of real ones.

`python -m tests.data.make_real_shaped` draws it again: the same pixels and texts everywhere, the same bytes
with the same Pillow. Everything is drawn and worded here; nothing is taken from elsewhere (CC0).
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from tests.tiny import TINY_MODELS, build_tiny
from trainer import families
from trainer.modeling.base.source import ModelSource

FOLDER = Path(__file__).resolve().parent / "real_shaped"
PICTURES, EDITS, CHATS, UNCAPTIONED = 60, 24, 60, 3
LONGEST_CAPTION, LONGEST_ANSWER, LONGEST_CHAT = 300, 3970, 4000
LONGEST_CHINESE = 90
"""Tokenizers without Chinese words make three tokens of a character: none gets beyond 300 there either."""
ASPECTS = ((1, 1), (4, 3), (3, 4), (7, 5), (5, 7), (16, 9))
SIDES = (640, 1024, 1536)
"""Square roots of the areas in pixels: below, at and above what `data.resolution: 1024` makes of them."""
CONTROL_SIDES = (512, 832, 1200)

ENGLISH = """
a photo of a cat|a drawing of a dog|the face of an orange fox|an owl and a frog on a green leaf
two birds in a tree|a red apple|a golden key|a white house with a blue roof|a brown horse in the snow
a boat on the water|a rocket in the night sky|a crown with gems|a woman with long hair
a man in a black coat|people on a street|a portrait in soft light|a mountain behind a lake
a forest in autumn|a beach at sunset|clouds over a city|flowers in a garden|stars and moon
in the style of an oil painting|pixel art|line art|high quality|from above|side view|white background
bright colors|dark shadows|yellow and grey
""".strip().replace("\n", "|").split("|")  # fmt: skip
CHINESE = """
一只猫在窗边|红色的苹果|雪山下的湖|夜空中的火箭|老人的肖像|柔和的光线|秋天的森林|海边的日落|城市上空的云
花园里有许多花|水彩画|高质量|白色背景|街上的人们|两只小鸟在树上|蓝色屋顶的房子|从上往下看|细节丰富
""".strip().replace("\n", "|").split("|")  # fmt: skip
COMMA = {"en": ", ", "zh": "\uff0c"}
EMOJI = ("🦊", "🍎", "🚀", "❄️", "👩‍🎨")
QUESTIONS = (
    "Why?",
    "What is this?",
    "Tell me of the lake.",
    "And then?",
    "Describe it again, please: in full.",
)


@dataclass(frozen=True, kw_only=True)
class Caption:
    """A caption of a wanted length."""

    text: str
    language: str
    tokens: int


def chance(*parts: object) -> float:
    """A number in [0, 1) that follows from `parts` alone, on every version of Python."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56


def shuffled(values: Sequence[int], purpose: str) -> list[int]:
    """The values in an order that follows from `purpose`."""
    return [value for _, value in sorted((chance(purpose, n), value) for n, value in enumerate(values))]


def log_uniform(count: int, highest: int) -> list[int]:
    """`count` lengths from 1 to `highest`, evenly spread by their logarithm."""
    return [round(highest ** (n / (count - 1))) for n in range(count)]


def nominal_tokens(text: str) -> int:
    """About what tokenizers of tens of thousands of words make of a text.

    One token for a Chinese character, a punctuation mark and each six letters that a word begins; three for
    an emoji.
    """
    words = [math.ceil(len(word) / 6) for word in re.findall(r"[a-zA-Z]+", text)]
    singles, emoji = re.findall(r"[\u4e00-\u9fff\uff0c,.?:]", text), re.findall("|".join(EMOJI), text)
    return sum(words) + len(singles) + 3 * len(emoji)


def words(length: int, language: str, purpose: str) -> str:
    """A text of so many nominal tokens: phrases after one another, the last one cut."""
    phrases, comma = ENGLISH if language == "en" else CHINESE, COMMA[language]
    text, number = "", 0
    while nominal_tokens(text) < length:
        chosen = phrases[int(chance(purpose, number) * len(phrases))]
        text += (comma if text else "") + chosen
        number += 1
    while nominal_tokens(text) > length:
        text = text.rpartition(" ")[0].rstrip(",") if language == "en" else text[:-1]
    # a comma went with the word behind it
    missing = length - nominal_tokens(text)
    return text + (" so" if language == "en" else "好") * missing


def captions(count: int, purpose: str) -> list[Caption]:
    """Captions of 1 to 300 tokens, a quarter of them Chinese, some with an emoji."""
    made = []
    for number, tokens in enumerate(shuffled(log_uniform(count, LONGEST_CAPTION), purpose)):
        language = "zh" if chance(purpose, "language", number) < 0.35 and tokens <= LONGEST_CHINESE else "en"
        ending = (
            " " + EMOJI[number % len(EMOJI)] if tokens > 4 and chance(purpose, "emoji", number) < 0.2 else ""
        )
        text = words(tokens - nominal_tokens(ending), language, f"{purpose}/{number}") + ending
        made.append(Caption(text=text, language=language, tokens=nominal_tokens(text)))
    return made


def size(number: int, sides: Sequence[int], purpose: str) -> tuple[int, int]:
    """Width and height in pixels: some pixels off the aspect ratio, as cut pictures are."""
    across, down = ASPECTS[number % len(ASPECTS)]
    side = sides[number // len(ASPECTS) % len(sides)]
    width, height = side * math.sqrt(across / down), side * math.sqrt(down / across)
    return tuple(
        round(one) + int(chance(purpose, number, axis) * 7) for axis, one in enumerate((width, height))
    )


def draw(width: int, height: int, purpose: str) -> Image.Image:
    """Flat shapes on a flat ground."""
    colours = [tuple(int(chance(purpose, "colour", n, c) * 256) for c in range(3)) for n in range(9)]
    picture = Image.new("RGB", (width, height), colours[0])
    canvas = ImageDraw.Draw(picture)
    for number in range(1, 9):
        x, y, w, h = (chance(purpose, "place", number, part) for part in range(4))
        box = (x * width, y * height, (x + 0.05 + w / 2) * width, (y + 0.05 + h / 2) * height)
        (canvas.ellipse if number % 2 else canvas.rectangle)(box, fill=colours[number])
    return picture


def save(picture: Image.Image, folder: Path, stem: str, number: int) -> Path:
    """The picture as png, jpg or webp by turns."""
    folder.mkdir(parents=True, exist_ok=True)
    suffix, options = (("png", {"optimize": True}), ("jpg", {"quality": 70}), ("webp", {"quality": 50}))[
        number % 3
    ]
    path = folder / f"{stem}.{suffix}"
    picture.save(path, **options)
    return path


def make_pictures() -> Iterator[dict[str, Any]]:
    """Pictures with a .txt beside each."""
    for number, caption in enumerate(captions(PICTURES, "pictures")):
        width, height = size(number, SIDES, "pictures")
        path = save(draw(width, height, f"pictures/{number}"), FOLDER / "pictures", f"{number:02d}", number)
        path.with_suffix(".txt").write_text(caption.text + "\n", encoding="utf-8")
        yield row("pictures", path.name, caption, width=width, height=height)


def make_edits() -> Iterator[dict[str, Any]]:
    """Pictures with captions in a metadata.jsonl, and what each was before: of another size and aspect."""
    lines = []
    for number, caption in enumerate(captions(EDITS, "edits")):
        width, height = size(number, SIDES, "edits")
        # another side and another aspect than the target's, in every combination
        before = size(number + 1 + number // 6, CONTROL_SIDES, "controls")
        path = save(draw(width, height, f"edits/{number}"), FOLDER / "edits", f"{number:02d}", number)
        save(draw(*before, f"controls/{number}"), FOLDER / "controls", path.stem, number + 1)
        lines.append({"file_name": path.name, "text": caption.text})
        sizes = {"width": width, "height": height, "control_width": before[0], "control_height": before[1]}
        yield row("edits", path.name, caption, **sizes)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (FOLDER / "edits" / "metadata.jsonl").write_text(text, encoding="utf-8")


def make_uncaptioned() -> None:
    """Pictures with an empty .txt: a set that has one is refused, or told to leave it out."""
    for number in range(UNCAPTIONED):
        path = save(draw(640, 480, f"uncaptioned/{number}"), FOLDER / "uncaptioned", f"{number:02d}", number)
        path.with_suffix(".txt").write_text("", encoding="utf-8")


def make_chats() -> Iterator[dict[str, Any]]:
    """Conversations with answers of 1 to 3,970 tokens in all, of one to four turns."""
    lines = []
    for number, tokens in enumerate(shuffled(log_uniform(CHATS, LONGEST_ANSWER), "chats")):
        turns = min(1 + number % 4, tokens)
        messages = []
        for turn in range(turns):
            question = QUESTIONS[int(chance("question", number, turn) * len(QUESTIONS))]
            share = tokens // turns + (tokens % turns if turn == 0 else 0)
            language = "zh" if chance("chat language", number) < 0.2 and tokens <= LONGEST_CHINESE else "en"
            answer = words(share, language, f"chats/{number}/{turn}")
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        lines.append({"messages": messages})
        text = "\n".join(message["content"] for message in messages)
        caption = Caption(text=json.dumps(messages), language=language, tokens=nominal_tokens(text))
        yield row("chats", f"chats.jsonl:{number + 1}", caption)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    (FOLDER / "chats.jsonl").write_text(text, encoding="utf-8")


def row(name: str, file: str, caption: Caption, **sizes: int) -> dict[str, Any]:
    """A line of the table; `caption` goes before it is written."""
    return {"set": name, "file": file, **sizes, "language": caption.language, "tokens": caption.tokens,
            "caption": caption.text}  # fmt: skip


def tokenizer_counts(name: str, base: Path) -> Callable[[str], int]:
    """A function that counts the tokens of a caption or conversation, special tokens included."""
    family = families.get(name)
    source = ModelSource(folder=base, identity="", revision=None, random_components=frozenset(), seed=0)
    counted = (family.conversation_tokens or family.caption_tokens)(source)
    if counted is not None:
        return counted
    encoders = family.load_encoders("text", source, device="cpu", dtype=torch.float32, vae_tiling=False)
    options = {"prompt": False, "max_sequence_length": 10 * LONGEST_CHAT}
    return lambda text: len(family.encode_text(encoders, text, (), **options)["input_ids"])


def count_tokens(rows: Sequence[dict[str, Any]]) -> None:
    """Add the counts of each family's tiny base to the captions that it reads."""
    for name in TINY_MODELS:
        with tempfile.TemporaryDirectory() as folder:
            count = tokenizer_counts(name, build_tiny(name, Path(folder) / name))
            for one in rows:
                if (one["set"] == "chats") == (families.get(name).sample_kind != "image"):
                    one[name] = count(one["caption"])


def main() -> None:
    for name in ("pictures", "edits", "controls", "uncaptioned"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)
    rows = [*make_pictures(), *make_edits(), *make_chats()]
    make_uncaptioned()
    count_tokens(rows)
    columns = list(dict.fromkeys(name for one in rows for name in one if name != "caption"))
    columns.sort(key=lambda name: name in families.names())
    with (FOLDER / "lengths.csv").open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()
