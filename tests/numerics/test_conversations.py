"""Tokens of conversations against transformers' own rendering: lengths, and what is cut off long ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.numerics.test_llama import BARE, CHATML, CHATS, encode
from tests.random_bases.llama import tokenizer as make_tokenizer
from trainer.engine.caching.lengths import shortened
from trainer.errors import DataError
from trainer.families import conversations

LONG = [{"role": "system", "content": "You answer in short sentences."}] + [
    {"role": role, "content": f"{word} {number} " + "and so on " * number}
    for number in range(6)
    for role, word in (("user", "Why is it"), ("assistant", "Because of"))
]
TEMPLATES = {"llama": None, "chatml": CHATML, "bare": BARE}


def tokenizer_of(name: str) -> Any:
    """A tokenizer with the template of this name."""
    made = make_tokenizer()
    if name == "chatml":
        made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    made.chat_template = TEMPLATES[name] or made.chat_template
    return made


@pytest.fixture(params=list(TEMPLATES))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return tokenizer_of(request.param)


def counter(tokenizer: Any, folder: Path) -> Callable[[str], int]:
    """`token_counter` of a base with this tokenizer."""
    tokenizer.save_pretrained(folder)
    source: Any = SimpleNamespace(folder=folder)
    return conversations.token_counter(source)


def rendered(tokenizer: Any, messages: Sequence[Mapping[str, str]]) -> int:
    """Tokens of transformers' own rendering, and the end token where the template writes none."""
    ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    return len(ids) + (tokenizer.chat_template == BARE)


def test_lengths_are_those_of_transformers(tokenizer: Any, tmp_path: Path) -> None:
    count = counter(tokenizer, tmp_path)
    for chat in (*CHATS, LONG):
        assert count(json.dumps(chat)) == rendered(tokenizer, chat)
        assert count(json.dumps(chat)) == len(encode(tokenizer, chat, limit=2048)["input_ids"])


def test_a_tokenizer_without_an_end_is_told(tmp_path: Path) -> None:
    bare = tokenizer_of("bare")
    bare.eos_token = None
    with pytest.raises(DataError, match="does not end answers") as caught:
        counter(bare, tmp_path)(json.dumps(CHATS[2]))
    assert caught.value.problems[0].remedy == "give it an `eos_token`"


def test_the_longest_beginning_that_fits_is_kept(tokenizer: Any, tmp_path: Path) -> None:
    """By every limit, compared with trying all beginnings that end with an answer."""
    count = counter(tokenizer, tmp_path)
    beginnings = [LONG[:end] for end in range(1, len(LONG) + 1) if LONG[end - 1]["role"] == "assistant"]
    lengths = [rendered(tokenizer, beginning) for beginning in beginnings]
    limits = sorted({length + more for length in lengths for more in (-1, 0, 1)} | {8})
    for limit in limits:
        fitting = [one for one, length in zip(beginnings, lengths, strict=True) if length <= limit]
        kept = shortened(json.dumps(LONG), count, limit)
        assert kept is None if not fitting else json.loads(kept or "[]") == fitting[-1], limit


def test_turns_of_several_messages_are_cut_after_an_answer(tmp_path: Path) -> None:
    made = tokenizer_of("llama")
    count = counter(made, tmp_path)
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "One."},
        {"role": "assistant", "content": "Two."},
        {"role": "user", "content": "Why?"},
        {"role": "user", "content": "How?"},
        {"role": "assistant", "content": "So."},
    ]
    for limit, kept in ((rendered(made, chat) - 1, 3), (rendered(made, chat[:3]) - 1, 2)):
        assert json.loads(shortened(json.dumps(chat), count, limit) or "[]") == chat[:kept]
    assert shortened(json.dumps(chat), count, rendered(made, chat[:2]) - 1) is None
