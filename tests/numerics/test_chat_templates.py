"""Chat templates by name write what LLaMA-Factory, and transformers with the published templates, write
(tests/data/chat_templates.json, recorded by make_chat_templates.py beside it).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.random_bases.llama import make_tokenizer
from trainer.engine.results.chat_files import write_chat_files
from trainer.errors import ConfigError, DataError
from trainer.families import conversations
from trainer.modeling.base.source import ModelSource
from trainer.ways import chat_templates

RECORDED = json.loads((Path(__file__).parents[1] / "data" / "chat_templates.json").read_text())
KNOWN = [mark for name in chat_templates.names() for mark in chat_templates.marks(name)]
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Four."},
]


def base(folder: Path, template: str | None, marks: list[str] = KNOWN) -> ModelSource:
    """A base without a template of its own whose tokenizer knows `marks`."""
    made = make_tokenizer([], longest=4096)
    made.add_special_tokens({"bos_token": "<bos>", "eos_token": "<eos>", "additional_special_tokens": marks})
    made.chat_template = None
    made.save_pretrained(folder)
    return ModelSource(
        folder=folder,
        identity="tiny",
        revision=None,
        random_components=frozenset(),
        seed=0,
        chat_template=None if template is None else chat_templates.text_of(template),
    )


@pytest.mark.parametrize("oracle", RECORDED["written"])
def test_conversations_are_written_as_others_write_them(oracle: str, tmp_path: Path) -> None:
    name = oracle.partition(":")[0]
    tokenizer, problem = conversations.open_tokenizer(base(tmp_path, name))
    assert not problem
    theirs = RECORDED["written"][oracle]
    chats = [*RECORDED["chats"], RECORDED["padded"]]
    ours = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    ours.append(
        tokenizer.apply_chat_template(RECORDED["chats"][2][:2], tokenize=False, add_generation_prompt=True)
    )
    assert ours[: len(theirs)] == theirs


def test_every_name_has_an_oracle() -> None:
    assert {oracle.partition(":")[0] for oracle in RECORDED["written"]} == set(chat_templates.names())


@pytest.mark.parametrize("name", chat_templates.names())
def test_answers_and_what_ends_them_are_learned(name: str, tmp_path: Path) -> None:
    tokenizer, _ = conversations.open_tokenizer(base(tmp_path, name))
    row = conversations.encode_conversation(
        tokenizer, json.dumps(CHAT), max_sequence_length=4096, learn="answers"
    )
    learned = [int(one) for one, weight in zip(row["input_ids"], row["loss_weight"], strict=True) if weight]
    end = conversations.answer_end(tokenizer)
    assert end is not None
    text = tokenizer.decode([one for one in learned if one != end])
    assert [part.strip() for part in text.replace("Four.", " Four.").split()] == ["Two.", "Four."]
    assert learned.count(end) == 2 and learned[-1] == end


# as those of DeepSeek-R1's distilled models: what was thought is left out of answers
REASONS = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("learn", "wanted"), [("answers", "Two.<eos>Four.<eos>"), ("last_answer", "Four.<eos>")]
)
def test_answers_are_learned_where_a_model_is_opened_with_a_thought(
    learn: Any, wanted: str, tmp_path: Path
) -> None:
    file = tmp_path / "reasons.jinja"
    file.write_text(REASONS)
    marks = [*KNOWN, "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer, _ = conversations.open_tokenizer(base(tmp_path / "base", str(file), marks))
    chat = [*CHAT[:-1], {"role": "assistant", "content": "<think>Two and two.</think>Four."}]
    row = conversations.encode_conversation(
        tokenizer, json.dumps(chat), max_sequence_length=4096, learn=learn
    )
    learned = [int(one) for one, weight in zip(row["input_ids"], row["loss_weight"], strict=True) if weight]
    assert tokenizer.decode(learned).replace(" ", "") == wanted


def test_today_is_in_no_conversation(tmp_path: Path) -> None:
    """Else tokens would be others on each day, and what is cached of one day beside those of another."""
    file = tmp_path / "dated.jinja"
    file.write_text(
        "{% set today = strftime_now('%Y-%m-%d') %}{{ 'Today is ' + today + strftime_now('%d %b %Y') + '.' }}"
        "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    )
    tokenizer, _ = conversations.open_tokenizer(base(tmp_path / "base", str(file)))
    row = conversations.encode_text(tokenizer, "Hi", [], prompt=True, max_sequence_length=4096)
    assert "2024-07-2626Jul2024.Hi" in tokenizer.decode(row["input_ids"]).replace(" ", "")


def test_a_base_without_a_template_is_told_to_name_one(tmp_path: Path) -> None:
    tokenizer, _ = conversations.open_tokenizer(base(tmp_path, None))
    with pytest.raises(DataError, match="has no chat template") as caught:
        conversations.encode_conversation(
            tokenizer, json.dumps(CHAT), max_sequence_length=4096, learn="answers"
        )
    remedy = caught.value.problems[0].remedy
    assert "data.chat_template: alpaca, chatml, gemma, llama3" in remedy and "FILE.jinja" in remedy


@pytest.mark.parametrize("name", ["chatml", "gemma"])
def test_marks_that_the_tokenizer_would_split_are_refused(name: str, tmp_path: Path) -> None:
    absent = chat_templates.marks(name)[-1]
    with pytest.raises(ConfigError) as caught:
        conversations.open_tokenizer(base(tmp_path, name, [one for one in KNOWN if one != absent]))
    problem = caught.value.problems[0]
    assert problem.where == "data.chat_template"
    assert problem.what.startswith(f"{name}: the base's tokenizer does not have {absent} as tokens")
    others = ", ".join(one for one in chat_templates.names() if one != name)
    assert problem.remedy.startswith(f"templates whose marks it has: {others};")


def test_a_file_with_marks_that_are_split_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ '<|mine|>' + m.content + eos_token }}{% endfor %}")
    source = base(tmp_path / "base", str(file))
    made: Any = conversations.load_tokenizer("text", source, device="cpu", dtype=None, vae_tiling=False)  # type: ignore[arg-type]
    (told,) = caplog.messages
    assert told.startswith("data.chat_template: the base's tokenizer does not have <|mine|> as tokens")
    assert "alpaca" in told
    assert made.apply_chat_template(CHAT[1:3], tokenize=False) == "<|mine|>One?<eos><|mine|>Two.<eos>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\n\n{% for m in messages %}{{ m.content }}{% fo", "does not write a conversation: line 3: "),
        ("{{ 'x' + 1 }}", "does not write a conversation: TypeError: "),
        ("{{ 1 / 0 }}", "does not write a conversation: ZeroDivisionError: "),
        (" \n", "is empty"),
        ("### {{ messages[0].content }} ###", "leaves out what the assistant says"),
        ("{{ messages[-1].content }}", "leaves out what the user says"),
    ],
)
def test_a_file_that_is_no_template_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        conversations.open_tokenizer(base(tmp_path / "base", str(file)))
    assert caught.value.problems[0].where == "data.chat_template"


def test_a_conversation_that_a_template_cannot_put_together_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text(
        "{% for m in messages %}{{ m.content + (1 if m.content == 'odd' else '</s>') }}{% endfor %}"
    )
    tokenizer = conversations.open_tokenizer(base(tmp_path / "base", str(file)))[0]
    messages = [{"role": "user", "content": "odd"}, {"role": "assistant", "content": "x"}]
    with pytest.raises(DataError, match="refuses the conversation with 'odd': TypeError") as caught:
        conversations.encode_conversation(
            tokenizer, json.dumps(messages), max_sequence_length=64, learn="all"
        )
    assert caught.value.problems[0].remedy == "correct or remove the conversation"


@pytest.mark.parametrize("name", ["gemma", "mistral", "alpaca"])
def test_a_system_message_that_a_template_has_no_place_for_is_refused(name: str, tmp_path: Path) -> None:
    """It would be learned as an answer, or be lost."""
    tokenizer = conversations.open_tokenizer(base(tmp_path, name))[0]
    turns = [("user", "q"), ("assistant", "x"), ("system", "mid"), ("assistant", "y")]
    messages = [{"role": role, "content": content} for role, content in turns]
    with pytest.raises(DataError, match="system message"):
        conversations._render(tokenizer, messages, opened=False)


def test_what_is_saved_renders_by_transformers_alone(tmp_path: Path) -> None:
    """Also where the base has a template of its own, in its tokenizer_config.json."""
    source = base(tmp_path / "base", "chatml")
    config = tmp_path / "base" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": "{{ 'other' }}"}))
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": 3, "top_p": 0.9}')
    saved = tmp_path / "saved"
    saved.mkdir()
    write_chat_files(source, saved)
    shutil.rmtree(tmp_path / "base")
    loaded = AutoTokenizer.from_pretrained(saved)
    chats = RECORDED["chats"]
    theirs = next(rows for name, rows in RECORDED["written"].items() if name.startswith("chatml: LLaMA"))
    assert [loaded.apply_chat_template(chat, tokenize=False) for chat in chats] == theirs
    generation = json.loads((saved / "generation_config.json").read_text())
    ends = {3, loaded.eos_token_id, loaded.convert_tokens_to_ids("<|im_end|>")}
    assert generation == {"eos_token_id": sorted(ends), "top_p": 0.9}


def test_nothing_is_saved_without_a_named_template(tmp_path: Path) -> None:
    source = base(tmp_path / "base", None)
    saved = tmp_path / "saved"
    saved.mkdir()
    write_chat_files(source, saved)
    assert not list(saved.iterdir())
