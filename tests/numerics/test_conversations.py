"""Tokens of conversations against transformers' own rendering, marks and loss: lengths, what is cut off long
ones, and what is learned.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from tests.numerics.test_llama import BARE, CHATML, CHATS, encode
from tests.random_bases.llama import tokenizer as make_tokenizer
from trainer.engine.caching.lengths import shortened
from trainer.errors import DataError
from trainer.families import conversations
from trainer.families.llama import LLAMA
from trainer.families.values import Learn
from trainer.modeling.attention.packed_rows import set_packed_attention

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
    source: Any = SimpleNamespace(folder=folder, chat_template=None)
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


def test_a_template_that_writes_nothing_is_told(tmp_path: Path) -> None:
    empty = tokenizer_of("bare")
    empty.chat_template = "{{ '\n' }}"
    with pytest.raises(DataError, match="writes nothing of a conversation"):
        counter(empty, tmp_path)(json.dumps(CHATS[2]))
    with pytest.raises(DataError, match="writes nothing of a conversation"):
        encode(empty, CHATS[2])


def test_an_answers_end_is_a_special_token_that_the_template_writes() -> None:
    """Generation ends at it: a word of the answer, or a mark that texts may have, is not taken for it."""
    ends = {"llama": "<|eot_id|>", "chatml": "<|im_end|>"}
    for name, end in ends.items():
        made = tokenizer_of(name)
        assert conversations.answer_end(made) == made.convert_tokens_to_ids(end)
    bare = tokenizer_of("bare")
    assert conversations.answer_end(bare) is None
    bare.add_tokens(["<end>"])
    bare.chat_template = "{% for m in messages %}{{ m['content'] + '<end>' }}{% endfor %}"
    assert conversations.answer_end(bare) is None


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


# what is learned

# of earlier answers what was thought before them is left out, as reasoning models' templates do
THOUGHTFUL = (
    "{%- for m in messages %}{%- set said = m['content'] %}"
    "{%- if m['role'] == 'assistant' and not loop.last %}"
    "{%- set said = said.split('</think>')[-1] %}{%- endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + said + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
MARKED = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{%- if m['role'] == 'assistant' and (loop.last or not LAST) %}"
    "{%- generation %}{{ m['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{%- else %}{{ m['content'] + '<|im_end|>' }}{%- endif %}{{ '\n' }}{%- endfor %}"
)


def learned(tokenizer: Any, chat: Sequence[Mapping[str, str]], learn: Learn) -> dict[str, torch.Tensor]:
    text = json.dumps(chat)
    return conversations.encode_conversation(tokenizer, text, max_sequence_length=2048, learn=learn)


def spoken(tokenizer: Any, entry: Mapping[str, torch.Tensor]) -> str:
    return tokenizer.decode(entry["input_ids"][entry["loss_weight"] == 1])


@pytest.mark.parametrize("learn", ["answers", "last_answer"])
@pytest.mark.parametrize("chat", [*CHATS, LONG])
def test_learned_tokens_are_those_that_transformers_marks(chat: list[dict[str, str]], learn: Learn) -> None:
    marked = tokenizer_of("chatml")
    marked.chat_template = MARKED.replace("LAST", str(learn == "last_answer").lower())
    theirs = marked.apply_chat_template(chat, return_assistant_tokens_mask=True, return_dict=True)
    ours = learned(tokenizer_of("chatml"), chat, learn)
    assert ours["input_ids"].tolist() == theirs["input_ids"]
    assert ours["loss_weight"].tolist() == theirs["assistant_masks"]
    assert ours["loss_weight"].dtype == torch.float32


def test_answers_are_what_encoding_has_always_learned(tokenizer: Any) -> None:
    for chat in CHATS:
        ours, theirs = learned(tokenizer, chat, "answers"), encode(tokenizer, chat, limit=2048)
        assert all(torch.equal(ours[name], theirs[name]) for name in ("input_ids", "loss_weight"))


def test_the_last_answer_has_the_others_as_its_history(tokenizer: Any) -> None:
    entry = learned(tokenizer, CHATS[0], "last_answer")
    assert torch.equal(entry["input_ids"], encode(tokenizer, CHATS[0])["input_ids"])
    assert spoken(tokenizer, entry).strip().startswith("Because of the cat")


@pytest.mark.parametrize("chat", CHATS)
def test_the_loss_of_all_tokens_is_that_of_transformers(
    chat: list[dict[str, str]], tiny_base: Callable[[str], Path]
) -> None:
    model = LlamaForCausalLM.from_pretrained(tiny_base("llama"), local_files_only=True).eval()
    batch = LLAMA.collate([learned(make_tokenizer(), chat, "all")], [{}])
    ids = batch.text["input_ids"]
    with torch.no_grad():
        theirs = model(input_ids=ids, labels=ids).loss
        set_packed_attention(model, "native")
        ours = LLAMA.loss(model, batch, None, None)
    assert batch.weight == ids.numel() - 1
    assert ours.sum().item() / batch.weight == pytest.approx(theirs.item(), rel=1e-6)


def test_a_missing_end_is_learned_with_all_tokens() -> None:
    bare = tokenizer_of("bare")
    entry = learned(bare, CHATS[2], "all")
    assert bare.decode(entry["input_ids"][-1:]) == "<|eot_id|>"
    assert entry["loss_weight"].tolist() == [0.0] + [1.0] * (len(entry["input_ids"]) - 1)


def test_templates_that_rewrite_earlier_turns_have_a_last_answer() -> None:
    made = tokenizer_of("chatml")
    made.chat_template = THOUGHTFUL
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>They greet.</think>Hello!"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "<think>They ask.</think>So."},
    ]
    with pytest.raises(DataError, match=r"writes .* otherwise once it goes on, so that message 2") as caught:
        learned(made, chat, "answers")
    assert "data.learn: last_answer" in caught.value.problems[0].remedy
    entry = learned(made, chat, "last_answer")
    assert spoken(made, entry) == "<think>They ask.</think>So.<|im_end|>"
    whole = made.decode(learned(made, chat, "all")["input_ids"])
    assert whole == made.apply_chat_template(chat, tokenize=False) and "They greet." not in whole


@pytest.mark.parametrize("learn", ["answers", "last_answer", "all"])
def test_no_conversation_is_longer_than_a_row(learn: Learn) -> None:
    made = tokenizer_of("llama")
    length = rendered(made, CHATS[0])
    with pytest.raises(DataError, match=f"has {length} tokens, more than"):
        conversations.encode_conversation(
            made, json.dumps(CHATS[0]), max_sequence_length=length - 1, learn=learn
        )
    entry = conversations.encode_conversation(
        made, json.dumps(CHATS[0]), max_sequence_length=length, learn=learn
    )
    assert len(entry["input_ids"]) == len(entry["loss_weight"]) == length
