"""Defaults of families of causal language models: the values of a run that names a family and its data."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trainer import families
from trainer.config.reading.load import Loaded, load

CONFIGS = Path(families.__file__).with_name("configs")
BASES = {
    "llama": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral": "mistralai/Mistral-7B-Instruct-v0.3",
    "qwen2": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3": "Qwen/Qwen3-8B",
}
"""The instructed model of 7 or 8 B: its tokenizer has the chat template that conversations are encoded by."""
LONGEST = {"llama": 131_072, "mistral": 32_768, "qwen2": 32_768, "qwen3": 40_960}
"""`max_position_embeddings` of these bases: a longer row has positions that they were not trained on."""
CLASSES = {
    "llama": ("LlamaForCausalLM", "LlamaDecoderLayer"),
    "mistral": ("MistralForCausalLM", "MistralDecoderLayer"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2DecoderLayer"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3DecoderLayer"),
}
"""Class of the model and of its blocks, which are compiled, recomputed and sharded."""
DEFAULTS: dict[tuple[str, str], Any] = {
    # the length of a row: activations grow with it, and a chat of 4,096 tokens is a long one
    ("data", "max_sequence_length"): 4096,
    # an answer without its question teaches nothing: only pictures are learned without their captions
    ("data", "caption_dropout_rate"): 0.0,
    # adapters on attention alone learn less than those on all layers (QLoRA, arXiv 2305.14314)
    ("lora", "target_modules"): "all-linear",
    ("lora", "rank"): 16,
    # the rank's: the adapter's product is added as it is
    ("lora", "alpha"): 16.0,
    # QLoRA's for models of 7 to 13 B
    ("train", "learning_rate"): 2.0e-4,
    ("train", "max_train_steps"): 500,
    ("train", "lr_scheduler"): "cosine",
    # Adam's moments are of one batch after the first step
    ("train", "lr_warmup_steps"): 20,
}
LEARN = {"llama": "answers", "mistral": "answers", "qwen2": "answers", "qwen3": "last_answer"}
"""Qwen3's template takes the thinking out of all answers but the last: that one is as the model writes it."""


@pytest.fixture(params=sorted(BASES))
def name(request: pytest.FixtureRequest) -> str:
    """A family of causal language models."""
    found: str = request.param
    return found


def read(name: str, folder: Path) -> Loaded:
    """The configuration of a run that names a family and its data alone."""
    file = folder / "own.yaml"
    file.write_text(
        f"family: {name}\nmethod: lora\noutput_dir: out\ndata: {{sets: [{{chat_file: chats.jsonl}}]}}\n"
    )
    return load([file], family_defaults={name: families.get(name).defaults}, environ={})


def test_these_are_all_of_them() -> None:
    kinds = {name: families.get(name).sample_kind for name in families.names()}
    assert {name for name, kind in kinds.items() if kind == "conversation"} == set(BASES)


def test_a_run_that_names_its_data_alone_has_these_values(name: str, tmp_path: Path) -> None:
    loaded = read(name, tmp_path)
    for (section, key), value in DEFAULTS.items():
        assert vars(vars(loaded.config)[section])[key] == value, f"{section}.{key}"
    assert loaded.config.model.pretrained_model_name_or_path == BASES[name]
    assert loaded.config.data.learn == LEARN[name]
    sections = {(section, key) for section, keys in families.get(name).defaults.items() for key in keys}
    learn = {("data", "learn")} if LEARN[name] != "answers" else set()
    assert sections == {*DEFAULTS, *learn, ("model", "pretrained_model_name_or_path")}, (
        "a default without a test"
    )


def test_classes_and_lengths_are_those_of_the_default_base(name: str) -> None:
    family, (model, block) = families.get(name), CLASSES[name]
    assert (family.model, family.blocks) == (f"transformers.{model}", (block,))
    said = json.loads((CONFIGS / name / "config.json").read_text())
    assert (said["max_position_embeddings"], said["architectures"]) == (LONGEST[name], [model])
    assert family.max_sequence_length == LONGEST[name]
    assert family.packed_by == "input_ids" and family.pixel_multiple == 1
    # their files are the whole model, not a component of a pipeline
    assert family.trained_component == "" and family.encoder_components == {"text": ()}


def test_adapters_lie_on_the_linears_of_blocks_alone(name: str) -> None:
    """The ends decide over single tokens: neither is adapted, nor stored in fewer bits."""
    family = families.get(name)
    linears = {
        "attention": [f"self_attn.{one}_proj" for one in "qkvo"],
        "mlp": [f"mlp.{one}_proj" for one in ("gate", "up", "down")],
    }
    for target, parts in (("attention", ("attention",)), ("all-linear", ("attention", "mlp"))):
        named = re.compile(family.lora_targets[target])
        for kind, layers in linears.items():
            for layer in layers:
                found = named.fullmatch(f"model.layers.31.{layer}") is not None
                assert found is (kind in parts), (target, layer)
        assert not any(named.fullmatch(end) for end in ("lm_head", "model.embed_tokens", "model.norm"))
    kept = [re.compile(one) for one in family.high_precision]
    for end in ("lm_head", "model.embed_tokens"):
        assert any(one.fullmatch(end) for one in kept)
    assert not any(one.search("model.layers.0.mlp.up_proj") for one in kept)


@pytest.mark.parametrize(
    ("name", "config", "window"),
    [
        ("llama", {"sliding_window": 64}, None),
        # as transformers: 4,096 where a config of before version 0.2 says nothing, none where it says null
        ("mistral", {}, 4096),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {"sliding_window": 64}, 64),
        # published configs name a window and switch it off
        ("qwen2", {"sliding_window": 131_072, "use_sliding_window": False}, None),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 4}, 64),
        ("qwen3", {"sliding_window": None, "use_sliding_window": False}, None),
        (
            "qwen3",
            {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention"]},
            64,
        ),
    ],
)
def test_windows_are_read_from_the_bases_config(
    name: str, config: dict[str, Any], window: int | None
) -> None:
    """Attention over packed rows has none: a base with one shorter than its rows is refused by it."""
    assert families.get(name).window(config) == window
