"""Shared parts of tiny random bases: the entry type, tokenizers built offline, small component configs."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# what the tokenizers learn: words of image captions
CORPUS = """
a photo of a cat, a drawing of a dog, the face of an orange fox, an owl and a frog on a green leaf, two
birds in a tree a red apple, a golden key, a white house with a blue roof, a purple balloon on a string, a
brown horse in the snow a bicycle, a car, a boat on the water, a rocket in the night sky, a camera, a crown
with gems, a birthday cake with candles a woman with long hair, a man in a black coat, a child with a hat,
people on a street, a portrait in soft light a mountain behind a lake, a forest in autumn, a beach at
sunset, clouds over a city, flowers in a garden, stars and moon in the style of an oil painting, watercolor,
pencil sketch, pixel art, 3d emoji style, flat icon, duotone, line art high quality, detailed, close up,
from above, side view, white background, bright colors, dark shadows, yellow and grey
"""


@dataclass(frozen=True, kw_only=True)
class Base:
    """The part of a random base that the committed configs of its family (CONFIGS) leave open."""

    tokenizers: Mapping[str, Callable[[], Any]]
    """Maker of each tokenizer by its folder's name."""
    encoders: Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
    """Config keys that depend on the tokenizers, by component of the tiny model; tiny.yaml has the others."""
    classes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """(library, class) by component, where the committed configs have no model_index.json."""
    prepare: Callable[[str, Any], None] = lambda component, model: None
    """Changes the tiny model of a component before it is saved, as where layers start at zero."""


def clip_tokenizer() -> Any:
    """A CLIPTokenizer that joins the corpus' words."""
    return make_clip_tokenizer(words(), merges=240)


def make_clip_tokenizer(words: Counter[str], *, merges: int) -> Any:
    """A CLIPTokenizer for any text, by its bytes; <|endoftext|> has the highest id, as in the original."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    pairs: Any = byte_pair_merges(words, count=merges)  # annotated as lists of texts, documented as pairs
    alphabet = sorted(ByteLevel.alphabet())
    tokens = alphabet + [letter + "</w>" for letter in alphabet] + [left + right for left, right in pairs]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    return CLIPTokenizer(vocab=vocab, merges=pairs, model_max_length=77)


def words() -> Counter[str]:
    return Counter(re.findall(r"[a-z0-9]+", CORPUS))


def byte_pair_merges(
    words: Mapping[str, int], count: int | None = None, *, end: str = "</w>"
) -> list[tuple[str, str]]:
    """The `count` most frequent pairs, or all, as byte pair encoding finds them; ties in alphabetical order.

    `end` marks the last letter of a word. The trainer of the tokenizers library breaks ties by chance.
    """
    splits = {word: [*word[:-1], word[-1] + end] for word in words}
    merges: list[tuple[str, str]] = []
    while count is None or len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, parts in splits.items():
            for pair in itertools.pairwise(parts):
                pairs[pair] += words[word]
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        for word, parts in splits.items():
            splits[word] = _joined(parts, best)
    return merges


def _joined(parts: list[str], pair: tuple[str, str]) -> list[str]:
    """`parts` with every occurrence of `pair` made one."""
    result: list[str] = []
    for part in parts:
        if result and (result[-1], part) == pair:
            result[-1] += part
        else:
            result.append(part)
    return result


def t5_tokenizer() -> Any:
    """A T5Tokenizer of the corpus' words."""
    return make_t5_tokenizer(words())


def make_t5_tokenizer(words: Counter[str]) -> Any:
    """A T5Tokenizer: `words`, and every printable ASCII character for all other words."""
    from transformers import T5Tokenizer

    total = sum(words.values())
    pieces = {f"▁{word}": math.log(count / total) for word, count in sorted(words.items())}
    # single characters cost more than any word, so that a known word is one piece
    characters = {chr(code): -10.0 for code in range(ord("!"), ord("~") + 1)} | {"▁": -10.0}
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = special + list((characters | pieces).items())
    return T5Tokenizer(vocab=vocab, extra_ids=0, model_max_length=512)


def tiny_clip(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "projection_dim": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": tokenizer.model_max_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def tiny_t5(tokenizer: Any, width: int) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "d_model": width,
        "d_kv": width // 2,
        "d_ff": 2 * width,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
