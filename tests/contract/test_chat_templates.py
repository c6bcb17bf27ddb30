"""Runs whose configuration names a chat template: on bases without one, apart from runs with others, and with
results that transformers writes conversations with.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.contract.runs import Case, Job, Workshop
from tests.contract.test_long_conversations import OTHER, SHORT, WRITER, chat
from trainer import families
from trainer.cli import main
from trainer.cli.loras import with_file
from trainer.config.reading.load import load
from trainer.engine.caching.entries import _parts as parts_of
from trainer.engine.caching.entries import list_entries, text_entry
from trainer.engine.training.held_out import held_out_entries
from trainer.errors import ConfigError, DataError
from trainer.ways.chat_templates import BESIDE

ROWS = [SHORT, OTHER, chat("One.", "Two.", "Three.")]
WITHOUT = ("alpaca", "llama3", "mistral")


@pytest.fixture(scope="module")
def bare(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base without its chat template."""
    folder = tmp_path_factory.mktemp("bare") / "base"
    shutil.copytree(workshop.base("llama"), folder)
    (folder / "chat_template.jinja").unlink()
    config = folder / "tokenizer_config.json"
    assert "chat_template" not in json.loads(config.read_text())
    return folder


def made(
    workshop: Workshop, base: Path, folder: Path, template: str, *options: str, case: Case = WRITER
) -> Job:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    usual = (
        f"data.sets=[{{chat_file: {file}}}]",
        f"model.pretrained_model_name_or_path={base}",
        f"data.chat_template={template}",
        "train.max_train_steps=1",
        "validation.prompts=[Why]",
        "validation.held_out=0",
    )
    return workshop.job(case, folder, *usual, *options)


def test_entries_are_of_the_template(workshop: Workshop, bare: Path, tmp_path: Path) -> None:
    """Keys without the option are as before; a file is what it holds, whatever it is called."""
    own = tmp_path / "own.jinja"
    own.write_text("{% for m in messages %}{{ m.content + eos_token }}{% endfor %}")
    copy = tmp_path / "copy.jinja"
    copy.write_bytes(own.read_bytes())
    keys: dict[str, set[str]] = {}
    for name in ("auto", *WITHOUT, str(own), str(copy)):
        one = made(workshop, bare, tmp_path / Path(name).stem, name)
        entries = list_entries(one.context, one.samples.training, one.samples.prompt_controls)
        held_out = held_out_entries(one.context, one.samples.training)
        assert held_out is not None
        prompts = {prompt.entry.key for prompt in entries.prompts}
        keys[name] = {entry.key for entry in entries.texts} | prompts | {held_out.data}
        if name == "auto":
            plain: Any = parts_of(one.context, "text")
            assert set(plain) == {
                "cache_version", "model", "revision", "weights", "components", "dtype", "max_sequence_length"
            }  # fmt: skip
            assert {text_entry(record.caption, plain).key for record in one.samples.training} < keys[name]
    assert keys.pop(str(copy)) == keys[str(own)]
    assert len(set.union(*keys.values())) == sum(map(len, keys.values()))


@pytest.mark.parametrize("case", [WRITER, Case(family="llama", method="full")], ids=str)
def test_a_result_writes_as_it_learned(case: Case, workshop: Workshop, bare: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no chat template") as caught:
        made(workshop, bare, tmp_path / "none", "auto", case=case).train()
    assert "data.chat_template: alpaca, chatml" in caught.value.problems[0].remedy
    one = made(workshop, bare, tmp_path, "llama3", case=case)
    one.train()
    result = one.folder / ("lora" if case.method == "lora" else "model")
    with_own = AutoTokenizer.from_pretrained(workshop.base("llama"))  # of Llama 3's layout
    loaded = AutoTokenizer.from_pretrained(result)
    for row in ROWS:
        messages = row["messages"]
        assert loaded.apply_chat_template(messages, tokenize=False) == with_own.apply_chat_template(
            messages, tokenize=False
        )
    if case.method == "full":
        model = AutoModelForCausalLM.from_pretrained(result)
        ends = model.generation_config.eos_token_id
        assert loaded.convert_tokens_to_ids("<|eot_id|>") in (ends if isinstance(ends, list) else [ends])


def test_adapters_of_runs_without_the_key_are_as_before(workshop: Workshop, tmp_path: Path) -> None:
    """The base's own template, named by its file: equal bits, and only then the tokenizer beside them."""
    base = workshop.base("llama")
    plain = made(workshop, base, tmp_path / "plain", "auto")
    plain.train()
    named = made(workshop, base, tmp_path / "named", str(base / "chat_template.jinja"))
    named.train()
    file = "lora/adapter_model.safetensors"
    assert (plain.folder / file).read_bytes() == (named.folder / file).read_bytes()
    beside = {path.name for path in (named.folder / "lora").iterdir()}
    assert {"chat_template.jinja", "tokenizer.json"} <= beside
    assert not {"chat_template.jinja", "tokenizer.json"} & {p.name for p in (plain.folder / "lora").iterdir()}


def test_a_resume_writes_by_the_same_template(workshop: Workshop, bare: Path, tmp_path: Path) -> None:
    every = "checkpoint.checkpointing_steps=1"
    made(workshop, bare, tmp_path, "llama3", every).train()
    more = (every, "train.max_train_steps=2")
    words = r"data.chat_template: it began with llama3, this start has alpaca"
    with pytest.raises(ConfigError, match=words):
        made(workshop, bare, tmp_path, "alpaca", *more).train()
    made(workshop, bare, tmp_path, "llama3", *more).train()


def test_a_lora_merges_and_draws_with_the_template_that_lies_beside_it(
    workshop: Workshop, bare: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The configuration is for the base alone, and names none."""
    one = made(workshop, bare, tmp_path, "llama3")
    one.train()
    config, file = str(tmp_path / "config.yaml"), one.folder / "lora" / "adapter_model.safetensors"
    template = (one.folder / "lora" / BESIDE).read_text()
    given = ("--set", f"model.pretrained_model_name_or_path={bare}", "--lora", str(file), "--to")
    assert main(["merge", config, *given, str(tmp_path / "merged")]) == 0
    assert f"chat template: {file.parent / BESIDE}, which lies beside the LoRA" in capfd.readouterr().err
    assert (tmp_path / "merged" / BESIDE).read_text() == template
    named = (*given, str(tmp_path / "named"), "--set", "data.chat_template=alpaca")
    assert main(["merge", config, *named]) == 0
    assert (tmp_path / "named" / BESIDE).read_text() != template, "what is asked for counts"
    defaults = {name: families.get(name).defaults for name in families.names()}
    loaded = load([Path(config)], overrides=[], family_defaults=defaults, lora_presets={}, environ={})
    assert with_file(loaded, file).config.data.chat_template == str(file.parent / BESIDE)
    own = {**loaded.sources, "data.chat_template": "--set data.chat_template"}
    assert with_file(dataclasses.replace(loaded, sources=own), file).config.data.chat_template == "auto"
    link = tmp_path / "blobs" / "0a1b"
    link.parent.mkdir()
    file.rename(link)
    file.symlink_to(link)
    assert with_file(loaded, file).config.data.chat_template == str(file.parent / BESIDE)
