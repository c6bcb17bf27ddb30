"""Families of causal language models against transformers' own models, losses and masks, PEFT's loading, and
what autograd keeps: each has Llama's numerics, and what it has besides.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests import random_bases
from tests.numerics.saved import kept_bytes
from tests.numerics.test_llama import CHATS, REQUEST
from trainer import families
from trainer.errors import DataError
from trainer.families import language
from trainer.families.values import Batch, PreviewPrompt
from trainer.modeling.adapter import lora
from trainer.modeling.attention.packed_rows import set_packed_attention
from trainer.modeling.base.meta_shapes import meta_shapes
from trainer.planning.shapes.geometry import TABLES, linear_weights, read_table

FAMILIES = [name for name in families.names() if families.get(name).sample_kind == "conversation"]
ONE_ANSWER = (*CHATS[1:], CHATS[0][:2])
"""Conversations that every template appends to."""
PLAIN = [chat for chat in ONE_ANSWER if chat[0]["role"] != "system"]
PUBLISHED = {
    "llama": 8_030_261_248,
    "mistral": 7_248_023_552,
    "qwen2": 7_615_616_512,
    "qwen3": 8_190_735_360,
}
"""Parameters, as the models' pages on the hub give them."""


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Any:
    return families.get(request.param)


@pytest.fixture
def base(family: Any, tiny_base: Callable[[str], Path]) -> Path:
    return tiny_base(family.name)


@pytest.fixture
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base, local_files_only=True)


def model_of(base: Path, **changes: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, **changes).eval()
    assert type(model).__name__ == json.loads((base / "config.json").read_text())["architectures"][0]
    return model


def encode(family: Any, tokenizer: Any, chat: Sequence[Mapping[str, str]]) -> dict[str, torch.Tensor]:
    learn = family.defaults["data"].get("learn", "answers")
    return family.encode_conversation(tokenizer, json.dumps(chat), max_sequence_length=512, learn=learn)


def row_of(family: Any, tokenizer: Any, *chats: Sequence[Mapping[str, str]]) -> Batch:
    return family.collate([encode(family, tokenizer, chat) for chat in chats], [{}] * len(chats))


def trained(model: Any, family: Any) -> Any:
    """With a LoRA that changes something."""
    pattern = family.lora_targets["all-linear"]
    lora.add_lora(model, rank=4, alpha=8, pattern=pattern, seed=0, device="cpu")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    return ((left - right).norm() / right.norm()).item()


# loss and gradients


@pytest.mark.parametrize("padded", [False, True], ids=["row", "padded"])
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_a_row_learns_what_transformers_learns_of_each_conversation(
    family: Any, base: Path, tokenizer: Any, adapter: bool, padded: bool
) -> None:
    """transformers' own model, attention and loss are given one conversation at a time."""
    ours, theirs = model_of(base), model_of(base)
    if adapter:
        ours, theirs = trained(ours, family), trained(theirs, family)
    set_packed_attention(ours, "native")
    row = row_of(family, tokenizer, *PLAIN)
    found = family.loss(ours, family.pad_row(row, 512) if padded else row, None, None)
    (found.sum() / row.weight).backward()
    wanted, weights = [], []
    for chat in PLAIN:
        text = row_of(family, tokenizer, chat).text
        labels = torch.where(text["loss_weight"] == 1, text["input_ids"], -100)
        weights.append(int((labels != -100).sum()))
        loss = theirs(input_ids=text["input_ids"], labels=labels).loss
        (loss * weights[-1] / row.weight).backward()
        wanted.append(loss.detach() * weights[-1])
    assert sum(weights) == row.weight
    assert relative(found, torch.stack(wanted)) < 1e-6
    learned = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    assert len(learned) == (28 if adapter else len(list(theirs.parameters())))
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (name not in learned)
        assert parameter.grad is None or relative(parameter.grad, learned[name]) < 2e-5, name
    whole = [torch.cat([one.flatten() for one in found]) for found in _both(ours, learned)]
    assert relative(*whole) < 2e-6


def _both(ours: Any, learned: Mapping[str, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    own = dict(ours.named_parameters())
    gradients = [own[name].grad for name in learned]
    assert all(one is not None for one in gradients)
    return gradients, list(learned.values())


@pytest.mark.parametrize("kernel", ["native", "flash", "math"])
def test_packed_is_what_transformers_masks(family: Any, base: Path, tokenizer: Any, kernel: str) -> None:
    """transformers' own attention finds packed rows by their positions, and makes a mask for them."""
    model, batch = model_of(base), row_of(family, tokenizer, *PLAIN)
    with torch.no_grad():
        text = {name: batch.text[name] for name in ("input_ids", "position_ids")}
        theirs = model(**text, use_cache=False).logits
        set_packed_attention(model, kernel)
        assert relative(family.predict(model, batch, None, None), theirs) < 1e-5


def test_a_conversation_sees_no_other(family: Any, base: Path, tokenizer: Any) -> None:
    model = model_of(base)
    set_packed_attention(model, "native")
    batch = row_of(family, tokenizer, *PLAIN)
    ids, first = batch.text["input_ids"].clone(), int(batch.text["lengths"][0])
    ids[0, :first] = ids[0, :first].flip(0)
    other = Batch(latents={}, text={**batch.text, "input_ids": ids}, size=2, weight=batch.weight)
    with torch.no_grad():
        one, two = (family.predict(model, which, None, None)[0] for which in (batch, other))
    assert torch.equal(one[first:], two[first:])
    assert not torch.allclose(one[:first], two[:first])


# what differs from Llama


@pytest.mark.parametrize(("name", "parts"), [("qwen2", r"[qkv]_proj\.bias"), ("qwen3", r"[qk]_norm\.weight")])
def test_what_a_family_has_besides_changes_its_output(
    name: str, parts: str, tiny_base: Callable[[str], Path]
) -> None:
    """Else a test that compares outputs would not see it left out."""
    family, model = families.get(name), model_of(tiny_base(name))
    batch = row_of(family, AutoTokenizer.from_pretrained(tiny_base(name), local_files_only=True), *PLAIN)
    own = [one for key, one in model.named_parameters() if re.search(parts, key)]
    assert len(own) == (6 if name == "qwen2" else 4)
    with torch.no_grad():
        whole = family.predict(model, batch, None, None)
        for one in own:
            one.fill_(0.0 if name == "qwen2" else 1.0)
        assert relative(family.predict(model, batch, None, None), whole) > 0.01


def test_a_window_as_long_as_a_conversation_changes_nothing(tiny_base: Callable[[str], Path]) -> None:
    """And one that is shorter does, which is why bases with one are refused."""
    family = families.get("mistral")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base("mistral"), local_files_only=True)
    batch = row_of(family, tokenizer, PLAIN[0])
    ours = model_of(tiny_base("mistral"))
    set_packed_attention(ours, "native")
    for window, alike in ((batch.tokens, True), (batch.tokens - 1, False)):
        theirs = model_of(tiny_base("mistral"), sliding_window=window, attn_implementation="eager")
        assert theirs.config.sliding_window == window
        with torch.no_grad():
            wanted = theirs(input_ids=batch.text["input_ids"]).logits
            found = family.predict(ours, batch, None, None)
        assert (relative(found, wanted) < 1e-5) == alike


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": None}),
        ("mistral", {"sliding_window": 4096}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"sliding_window": 131_072, "use_sliding_window": False}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}),
        ("qwen3", {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["full_attention"] * 2}),
        (
            "qwen3",
            {
                "sliding_window": 64,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
        ),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}),
    ],
)
def test_windows_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Read what transformers makes of a config: the window, where a layer has one."""
    written = {"model_type": name, "num_hidden_layers": 2, **changes}
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * 2
    theirs = getattr(config, "sliding_window", None) if "sliding_attention" in kinds else None
    assert families.get(name).window(written) == theirs


# conversations


def test_a_model_that_thinks_learns_its_last_answer(tiny_base: Callable[[str], Path]) -> None:
    """An empty thinking where none is written, as it would generate it."""
    family = families.get("qwen3")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base("qwen3"), local_files_only=True)
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "<think>\nThey greet.\n</think>\n\nHello!"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
    ]

    def learned(messages: Sequence[Mapping[str, str]], learn: Any) -> str:
        entry = family.encode_conversation(
            tokenizer, json.dumps(messages), max_sequence_length=512, learn=learn
        )
        assert tokenizer.decode(entry["input_ids"]) == tokenizer.apply_chat_template(messages, tokenize=False)
        return tokenizer.decode(entry["input_ids"][entry["loss_weight"] == 1])

    assert family.defaults["data"]["learn"] == "last_answer"
    assert learned(chat, "last_answer") == "<think>\n\n</think>\n\nSo.<|im_end|>"
    assert learned(chat[:2], "answers") == "<think>\nThey greet.\n</think>\n\nHello!<|im_end|>"
    with pytest.raises(DataError, match=r"otherwise once it goes on, so that message 2") as caught:
        learned(chat, "answers")
    assert "data.learn: last_answer" in caught.value.problems[0].remedy


def test_a_system_message_that_is_not_written_is_told(tiny_base: Callable[[str], Path]) -> None:
    family = families.get("mistral")
    tokenizer = AutoTokenizer.from_pretrained(tiny_base("mistral"), local_files_only=True)
    text = json.dumps(CHATS[1])
    for learn in ("answers", "last_answer", "all"):
        with pytest.raises(DataError, match=r"leaves out the system message of the conversation") as caught:
            family.encode_conversation(tokenizer, text, max_sequence_length=512, learn=learn)
        assert "put its words before the first question" in caught.value.problems[0].remedy
    # written, in other letters or without a mark
    for writes in ("m.content | upper", "m.content | e", "m.content.replace('/no_think', '')"):
        tokenizer.chat_template = f"{{% for m in messages %}}{{{{ {writes} + eos_token }}}}{{% endfor %}}"
        marked = [{"role": "system", "content": "Be <b>brief</b>. /no_think"}, *json.loads(text)[1:]]
        family.encode_conversation(tokenizer, json.dumps(marked), max_sequence_length=512, learn="all")


# adapters and answers


def test_peft_loads_what_is_saved(family: Any, base: Path, tokenizer: Any, tmp_path: Path) -> None:
    model, batch = trained(model_of(base), family), row_of(family, tokenizer, *PLAIN)
    path = family.save_adapter(lora.adapter_state(model), lora.adapter_config(model), tmp_path, "ignored")
    with torch.no_grad():
        wanted = family.predict(model, batch, None, None)
        plain = family.predict(model_of(base), batch, None, None)
        theirs = PeftModel.from_pretrained(model_of(base), tmp_path)
        assert torch.equal(family.predict(theirs.base_model.model, batch, None, None), wanted)
        merged = theirs.merge_and_unload()
        assert relative(family.predict(merged, batch, None, None), wanted) < 1e-5
        lora.remove_lora(model)
        assert torch.equal(family.predict(model, batch, None, None), plain)
        family.load_adapter(model, path)
        assert torch.equal(family.predict(model, batch, None, None), wanted)
    assert relative(plain, wanted) > 0.01


def test_answers_are_those_of_transformers(family: Any, base: Path, tokenizer: Any) -> None:
    assert_same_answers(family, tokenizer, model_of(base))


@pytest.mark.parametrize("family", ["mistral"], indirect=True)
def test_a_window_that_is_shorter_than_prompt_and_answer(family: Any, base: Path, tokenizer: Any) -> None:
    assert_same_answers(family, tokenizer, model_of(base, sliding_window=24))


def assert_same_answers(family: Any, tokenizer: Any, model: Any) -> None:
    entries = [
        family.encode_text(tokenizer, text, (), prompt=True, max_sequence_length=64)
        for text in ("What is the answer?", "Hi")
    ]
    theirs = []
    for entry in entries:
        ids = entry["input_ids"][None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        theirs.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    set_packed_attention(model, "native")
    asked = [
        PreviewPrompt(text=entry, empty=None, controls=(), width=0, height=0, number=number)
        for number, entry in enumerate(entries)
    ]
    ours = family.preview(model, None, tokenizer, asked, REQUEST, lambda: None)
    assert ours == theirs
    assert ours[0] != ours[1]


# the full model


def test_the_committed_table_is_the_published_model(family: Any) -> None:
    folder = random_bases.CONFIGS / family.name
    shapes = read_table(TABLES / f"{family.name}.json")[""]
    library, _, name = family.model.rpartition(".")
    assert shapes == meta_shapes(folder, library, name)
    assert sum(math.prod(shape) for shape in shapes.values()) == PUBLISHED[family.name]
    targets = re.compile(family.lora_targets["all-linear"])
    blocks = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    assert sum(bool(targets.fullmatch(one)) for one in linear_weights(shapes)) == 7 * blocks


WIDE = {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
}
TOKENS = 512


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("full", [False, True], ids=["frozen", "full"])
@pytest.mark.parametrize(("name", "width"), [("mistral", 32), ("qwen2", 32), ("qwen3", 32), ("qwen3", 64)])
def test_blocks_keep_beside_llamas_what_is_planned(name: str, width: int, full: bool, compiled: bool) -> None:
    """By the bytes that autograd keeps of one block in bf16, beside those of Llama's.

    A compiled one is parted as Inductor parts it, which decides what is kept; no code is generated.
    """
    kept = [_kept(one, size, full, compiled) for one, size in (("llama", 32), (name, width))]
    planned = [
        language.more_values(
            {**WIDE, "model_type": one, "head_dim": size},
            linear_inputs=full,
            compiled=compiled,
            trained=full,
        )[0]
        for one, size in (("llama", 32), (name, width))
    ]
    # a norm keeps one fp32 number of each head besides
    heads = 10 * 4 / (WIDE["hidden_size"] * 2) if name == "qwen3" else 0.0
    assert kept[1] - kept[0] == pytest.approx(planned[1] - planned[0] + heads, abs=1e-6)


@functools.cache
def _kept(name: str, head_size: int, full: bool, compiled: bool) -> float:
    """Values by token and width that a block keeps."""
    family, tokens, config = families.get(name), TOKENS, {**WIDE, "head_dim": head_size}
    torch.manual_seed(0)
    library = AutoConfig.for_model(name, **config)
    model = AutoModelForCausalLM.from_config(library).to(torch.bfloat16).requires_grad_(full)
    set_packed_attention(model, "flash")
    block: Any = model.model.layers[0]
    assert type(block).__name__ in family.blocks
    states = torch.randn(1, tokens, config["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    tables = model.model.rotary_emb(states, torch.arange(tokens)[None])
    torch.compiler.reset()  # else all cases count as recompilations of one function
    call = torch.compile(block, backend="aot_eager_decomp_partition") if compiled else block
    size = kept_bytes(
        model,
        lambda: call(states, attention_mask=None, position_embeddings=tables, segments=(tokens,)),
    )
    # RoPE's tables are kept once by all blocks
    return (size / tokens / 2 - 2 * config["head_dim"]) / config["hidden_size"]
