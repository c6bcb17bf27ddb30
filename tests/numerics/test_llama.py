"""Llama against transformers' own loss, masks, marks and generation, and PEFT's loading, on two layers."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests import random_bases
from tests.numerics.saved import kept_bytes
from tests.random_bases.llama import tokenizer as make_tokenizer
from trainer.config.schema import LoraSection, ValidationSection
from trainer.errors import AccessError, DataError, StoppedError
from trainer.families import language
from trainer.families.llama import LLAMA
from trainer.families.values import Batch, PreviewPrompt, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.attention.kernels import SDPA_BACKENDS
from trainer.modeling.attention.packed_rows import packed_attention, set_packed_attention
from trainer.modeling.base.meta_shapes import meta_shapes
from trainer.modeling.fused import head_loss
from trainer.planning.shapes.adapters import adapter_parameters
from trainer.planning.shapes.geometry import TABLES, linear_weights, quantized_linears, read_table

CHATS: tuple[list[dict[str, str]], ...] = (
    [
        {"role": "user", "content": "What is the answer?"},
        {"role": "assistant", "content": "Forty-two. 日本 🚀"},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "  Because of the cat\n\non the boat.  "},
    ],
    [
        {"role": "system", "content": "You answer in short sentences."},
        {"role": "user", "content": "How do I bake a cake?"},
        {"role": "assistant", "content": "First, butter. Then, sugar."},
    ],
    [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, please come in!"}],
)
CHATML = (
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
BARE = (
    "{%- for m in messages %}"
    "{{ ('Q: ' if m['role'] == 'user' else 'A: ') + m['content'] + '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ 'A: ' }}{%- endif %}"
)
FORGETFUL = "{%- for m in messages %}{{ m['content'] if loop.last else m['content'][:3] }}{%- endfor %}"


REQUEST = ValidationSection(num_inference_steps=1, guidance_scale=1.0, max_new_tokens=12, seed=0)


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "base"
    random_bases.build("llama", "tiny", folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base, local_files_only=True)


@pytest.fixture
def model(base: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(base, local_files_only=True).eval()


def encode(
    tokenizer: Any, messages: Sequence[Mapping[str, str]], limit: int = 512
) -> dict[str, torch.Tensor]:
    text = json.dumps(messages)
    return LLAMA.encode_text(tokenizer, text, (), prompt=False, max_sequence_length=limit)


def batch_of(tokenizer: Any, *chats: Sequence[Mapping[str, str]]) -> Batch:
    return LLAMA.collate([encode(tokenizer, chat) for chat in chats], [{}] * len(chats))


def learned_text(tokenizer: Any, entry: Mapping[str, torch.Tensor]) -> str:
    return tokenizer.decode(entry["input_ids"][entry["loss_weight"] == 1])


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    return ((left - right).norm() / right.norm()).item()


# conversations as tokens


def test_answers_and_what_ends_them_are_learned(tokenizer: Any) -> None:
    entry = encode(tokenizer, CHATS[0])
    assert entry["input_ids"].dtype == torch.int64
    assert entry["loss_weight"].dtype == torch.float32
    whole = tokenizer.apply_chat_template(CHATS[0], tokenize=False)
    assert tokenizer.decode(entry["input_ids"]) == whole
    expected = "Forty-two. 日本 🚀<|eot_id|>Because of the cat\n\non the boat.<|eot_id|>"
    assert learned_text(tokenizer, entry) == expected


@pytest.mark.parametrize("chat", CHATS)
def test_learned_tokens_are_those_of_a_template_with_marks(chat: list[dict[str, str]]) -> None:
    marked = make_tokenizer()
    turn = "message['content'] | trim + '<|eot_id|>' }}"
    plain = "{{- '\\n\\n' + " + turn
    assert plain in marked.chat_template
    with_marks = (
        "{{- '\\n\\n' }}{%- if message['role'] == 'assistant' %}{%- generation %}{{- "
        + turn
        + "{%- endgeneration %}"
        "{%- else %}{{- " + turn + "{%- endif %}"
    )
    marked.chat_template = marked.chat_template.replace(plain, with_marks)
    theirs = marked.apply_chat_template(chat, return_assistant_tokens_mask=True)
    ours = encode(make_tokenizer(), chat)
    assert ours["input_ids"].tolist() == theirs["input_ids"]
    assert ours["loss_weight"].tolist() == theirs["assistant_masks"]


def test_blanks_after_the_end_of_a_turn_are_not_learned() -> None:
    chatml = make_tokenizer()
    chatml.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    chatml.chat_template = CHATML
    entry = encode(chatml, CHATS[2])
    assert learned_text(chatml, entry) == "Hello, please come in!<|im_end|>"
    assert chatml.decode(entry["input_ids"][-1:]) == "\n"


def test_an_end_token_is_appended_where_the_template_has_none() -> None:
    bare = make_tokenizer()
    bare.chat_template = BARE
    entry = encode(bare, CHATS[2])
    assert bare.decode(entry["input_ids"]) == "Q: Hi\nA: Hello, please come in!\n<|eot_id|>"
    assert learned_text(bare, entry) == "Hello, please come in!<|eot_id|>"


def test_the_day_changes_nothing() -> None:
    dated = make_tokenizer()
    today = "{%- if not date_string is defined %}{%- set date_string = strftime_now('%f') %}{%- endif %}"
    dated.chat_template = today + "{{- date_string }}" + dated.chat_template
    assert dated.decode(encode(dated, CHATS[2])["input_ids"]).startswith("26 Jul 2024<|begin_of_text|>")


def test_a_prompt_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    entry = LLAMA.encode_text(tokenizer, "Hi", (), prompt=True, max_sequence_length=64)
    assert set(entry) == {"input_ids"}
    prompt = tokenizer.apply_chat_template(CHATS[2][:1], tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(entry["input_ids"]) == prompt
    whole = encode(tokenizer, CHATS[2])
    assert whole["input_ids"][: len(entry["input_ids"])].tolist() == entry["input_ids"].tolist()
    assert whole["loss_weight"][: len(entry["input_ids"]) + 1].nonzero().tolist() == [
        [len(entry["input_ids"])]
    ]


def test_what_cannot_be_learned_is_told(tokenizer: Any) -> None:
    length = len(encode(tokenizer, CHATS[0])["input_ids"])
    with pytest.raises(DataError, match=rf"What is.* has {length} tokens, more than .*length \(32\)"):
        encode(tokenizer, CHATS[0], limit=32)
    for template, words in (
        (FORGETFUL, "chat template writes .* otherwise once it goes on, so that message 2 cannot"),
        (
            "{{ raise_exception('no system role') }}",
            "template refuses .*'What is the answer.'.*: no system role",
        ),
        (None, "has no chat template"),
    ):
        other = make_tokenizer()
        other.chat_template = template
        with pytest.raises(DataError, match=words) as caught:
            encode(other, CHATS[0])
        assert caught.value.problems[0].remedy


# loss


@pytest.mark.parametrize("chat", CHATS)
def test_loss_is_that_of_transformers(
    model: LlamaForCausalLM, tokenizer: Any, chat: list[dict[str, str]]
) -> None:
    batch = batch_of(tokenizer, chat)
    ids, weight = batch.text["input_ids"], batch.text["loss_weight"]
    labels = torch.where(weight == 1, ids, -100)
    theirs = model(input_ids=ids, labels=labels, num_items_in_batch=int(batch.weight)).loss
    set_packed_attention(model, "native")
    ours = LLAMA.loss(model, batch, None, None)
    assert (ours.shape, ours.dtype) == ((1,), torch.float32)
    assert ours.sum().item() / batch.weight == pytest.approx(theirs.item(), rel=1e-6)


@pytest.mark.parametrize("kernel", ["native", "flash", "math"])
def test_packed_is_unpacked(model: LlamaForCausalLM, tokenizer: Any, kernel: str) -> None:
    set_packed_attention(model, kernel)
    packed = batch_of(tokenizer, *CHATS)
    alone = [batch_of(tokenizer, chat) for chat in CHATS]
    assert (packed.size, packed.latents, LLAMA.batch_key({}, {})) == (3, {}, ())
    assert packed.weight == sum(one.weight for one in alone)
    assert packed.tokens == sum(one.tokens for one in alone) == packed.text["input_ids"].numel()
    together = LLAMA.loss(model, packed, None, None)
    together.sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    single = torch.cat([LLAMA.loss(model, one, None, None) for one in alone])
    single.sum().backward()
    assert torch.allclose(together, single, rtol=1e-5)
    for name, parameter in model.named_parameters():
        assert relative(gradients[name], parameter.grad) < 1e-5, name
    with torch.no_grad():
        logits = torch.cat([LLAMA.predict(model, one, None, None) for one in alone], dim=1)
        assert relative(LLAMA.predict(model, packed, None, None), logits) < 1e-5


@pytest.mark.parametrize("chats", [CHATS, CHATS[1:2], CHATS * 6], ids=["three", "one", "eighteen"])
@pytest.mark.parametrize("adapter", [True, False], ids=["lora", "full"])
def test_a_padded_row_learns_what_transformers_learns_of_each_conversation(
    base: Path, tokenizer: Any, adapter: bool, chats: Sequence[Sequence[Mapping[str, str]]]
) -> None:
    """transformers' own model, attention and loss are given one conversation at a time."""
    ours, theirs = (LlamaForCausalLM.from_pretrained(base, local_files_only=True) for _ in range(2))
    if adapter:
        ours, theirs = trained(ours), trained(theirs)
    set_packed_attention(ours, "native")
    row = batch_of(tokenizer, *chats)
    assert LLAMA.pad_row is not None
    padded = LLAMA.pad_row(row, 1536)
    assert (padded.tokens, padded.weight, padded.size) == (row.tokens, row.weight, len(chats))
    assert padded.text["input_ids"].shape == (1, 1536) and row.tokens < 1400
    found = LLAMA.loss(ours, padded, None, None)
    (found.sum() / padded.weight).backward()
    wanted = []
    for chat in chats:
        text = batch_of(tokenizer, chat).text
        labels = torch.where(text["loss_weight"] == 1, text["input_ids"], -100)
        loss = theirs(input_ids=text["input_ids"], labels=labels, num_items_in_batch=int(row.weight)).loss
        loss.backward()
        wanted.append(loss.detach())
    assert relative(found / row.weight, torch.stack(wanted)) < 1e-5
    learned = {name: one.grad for name, one in theirs.named_parameters() if one.grad is not None}
    assert len(learned) == (28 if adapter else 21)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad is None) == (name not in learned)
        assert parameter.grad is None or relative(parameter.grad, learned[name]) < 1e-5, name


def test_packed_is_what_transformers_masks(model: LlamaForCausalLM, tokenizer: Any) -> None:
    """transformers' own attention finds packed rows by their positions, and makes a mask for them."""
    batch = batch_of(tokenizer, *CHATS)
    with torch.no_grad():
        text = {name: batch.text[name] for name in ("input_ids", "position_ids")}
        theirs = model(**text, use_cache=False).logits
        set_packed_attention(model, "flash")
        ours = LLAMA.predict(model, batch, None, None)
    assert ours.shape == (1, batch.tokens, model.config.vocab_size)
    assert relative(ours, theirs) < 1e-5


def test_a_conversation_sees_no_other(model: LlamaForCausalLM, tokenizer: Any) -> None:
    set_packed_attention(model, "native")
    batch = batch_of(tokenizer, *CHATS[:2])
    ids = batch.text["input_ids"].clone()
    first = int(batch.text["lengths"][0])
    ids[0, :first] = ids[0, :first].flip(0)
    other = Batch(latents={}, text={**batch.text, "input_ids": ids}, size=2, weight=batch.weight)
    with torch.no_grad():
        one, two = (LLAMA.predict(model, which, None, None)[0] for which in (batch, other))
    assert torch.equal(one[first:], two[first:])
    assert not torch.allclose(one[:first], two[:first])


def test_logits_of_few_tokens_exist_at_one_time(
    model: LlamaForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = batch_of(tokenizer, *CHATS)
    whole = LLAMA.loss(model, batch, None, None)
    rows: list[int] = []
    computed = head_loss._loss_and_gradient

    def count(logits: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return computed(logits, *given)

    monkeypatch.setattr(head_loss, "_loss_and_gradient", count)
    monkeypatch.setattr(language, "LOGITS_TOKENS", 16)
    parts = LLAMA.loss(model, batch, None, None)
    assert torch.allclose(parts, whole, rtol=1e-6)
    assert sum(rows) == batch.weight
    assert max(rows) == 16


@pytest.mark.parametrize("kept", ["an adapter", "fp16"])
def test_heads_whose_gradients_are_not_made_in_forward_have_the_same_loss(
    kept: str, model: LlamaForCausalLM, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their logits exist again in backward, which the gradients of both ways show to be equal."""
    batch, weight = batch_of(tokenizer, *CHATS), model.model.norm.weight
    weight.requires_grad_()
    whole = LLAMA.loss(model, batch, None, None)
    (wanted,) = torch.autograd.grad(whole.sum(), weight)
    if kept == "an adapter":
        model.lm_head.__class__ = type("Wrapped", (torch.nn.Linear,), {})
        more = 1e-6
    else:
        model.half()
        more = 5e-3
    monkeypatch.setattr(head_loss, "head_losses", None)
    losses = LLAMA.loss(model, batch, None, None)
    (found,) = torch.autograd.grad(losses.sum(), weight)
    assert torch.allclose(losses, whole, rtol=more)
    assert relative(found.float(), wanted) < 4 * more


def test_keys_are_repeated_for_the_kernel_that_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    expected = packed_attention(query, key, value, "math", segments=(4, 2))
    # no CPU has the kernel itself
    monkeypatch.delitem(SDPA_BACKENDS, "efficient")
    assert relative(packed_attention(query, key, value, "efficient", segments=(4, 2)), expected) < 1e-6


# memory

WIDE = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 1792,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 128,
    "num_hidden_layers": 2,
}


def saved_bytes(depth: int, method: str, checkpointing: bool) -> int:
    """Bytes that autograd keeps for backward in bf16, no parameters."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**WIDE, "num_hidden_layers": depth})).to(torch.bfloat16).train()
    set_packed_attention(model, "flash")
    if method != "full":
        lora.add_lora(model, rank=2, alpha=2, pattern=LLAMA.lora_targets[method], seed=0, device="cpu")
    if checkpointing:
        model.activation_checkpointing_enable()
    batch = LLAMA.synthetic_batch(WIDE, shape_of(256), seed=1)
    return kept_bytes(model, lambda: LLAMA.loss(model, batch, None, None))


def shape_of(tokens: int) -> Shape:
    return Shape(batch_size=1, width=1, height=1, text_tokens=tokens, bytes_per_value=2)


def test_the_head_keeps_no_logits() -> None:
    # without blocks: the two ends of the model, and nothing of the vocabulary's size
    assert saved_bytes(1, "attention", True) < 256 * 512 * 2 * 16


def test_blocks_recompute_under_checkpointing(model: LlamaForCausalLM, tokenizer: Any) -> None:
    set_packed_attention(model, "flash")
    lora.add_lora(model, rank=2, alpha=2, pattern=LLAMA.lora_targets["all-linear"], seed=0, device="cpu")
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.add_(0.01)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
    batch = batch_of(tokenizer, *CHATS)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        calls.clear()
        LLAMA.loss(model.train(), batch, None, None).sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.requires_grad]

    plain, once = gradients(), len(calls)
    model.activation_checkpointing_enable()
    again, twice = gradients(), len(calls)
    assert (once, twice) == (2, 4)
    assert all(torch.equal(one, two) for one, two in zip(plain, again, strict=True))


# adapters


def trained(model: LlamaForCausalLM, preset: str = "all-linear") -> LlamaForCausalLM:
    """With a LoRA that changes something."""
    lora.add_lora(model, rank=4, alpha=8, pattern=LLAMA.lora_targets[preset], seed=0, device="cpu")
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


def save(model: LlamaForCausalLM, folder: Path) -> Path:
    folder.mkdir()
    return LLAMA.save_adapter(
        lora.adapter_state(model), lora.adapter_config(model), folder, "ignored.safetensors"
    )


@pytest.mark.parametrize("preset", ["attention", "all-linear"])
def test_peft_and_we_load_what_is_saved(base: Path, tokenizer: Any, tmp_path: Path, preset: str) -> None:
    def fresh() -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(base, local_files_only=True).eval()

    model, batch = trained(fresh(), preset), batch_of(tokenizer, *CHATS)
    path = save(model, tmp_path / "one")
    assert path == tmp_path / "one" / "adapter_model.safetensors"
    config = json.loads(path.with_name("adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, None)
    assert str(base) not in path.with_name("adapter_config.json").read_text()
    with torch.no_grad():
        wanted = LLAMA.predict(model, batch, None, None)
        plain = LLAMA.predict(fresh(), batch, None, None)
        theirs = PeftModel.from_pretrained(fresh(), tmp_path / "one").base_model.model
        assert torch.equal(LLAMA.predict(theirs, batch, None, None), wanted)
        # the way of the proof: off, compared, on again
        lora.remove_lora(model)
        assert torch.equal(LLAMA.predict(model, batch, None, None), plain)
        LLAMA.load_adapter(model, path)
        assert torch.equal(LLAMA.predict(model, batch, None, None), wanted)
    assert relative(plain, wanted) > 0.01
    again = save(model, tmp_path / "two")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        first, second = (
            hashlib.sha256(file.with_name(name).read_bytes()).hexdigest() for file in (path, again)
        )
        assert first == second


def test_an_adapter_takes_the_type_of_its_model(base: Path, tmp_path: Path) -> None:
    path = save(trained(LlamaForCausalLM.from_pretrained(base)), tmp_path / "one")
    half = LlamaForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    LLAMA.load_adapter(half, path)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


def test_an_adapter_that_does_not_fit_is_refused(base: Path, tmp_path: Path) -> None:
    path = save(trained(LlamaForCausalLM.from_pretrained(base)), tmp_path / "one")
    shallow = LlamaForCausalLM(LlamaConfig.from_pretrained(base, num_hidden_layers=1))
    with pytest.raises(DataError, match=r"does not fit the model, first model\.layers\.1"):
        LLAMA.load_adapter(shallow, path)
    path.with_name("adapter_config.json").unlink()
    with pytest.raises(AccessError, match="is not beside the adapter"):
        LLAMA.load_adapter(shallow, path)


# answers


def prompts(tokenizer: Any, *texts: str) -> list[PreviewPrompt]:
    entries = [LLAMA.encode_text(tokenizer, text, (), prompt=True, max_sequence_length=64) for text in texts]
    return [
        PreviewPrompt(text=entry, empty=None, controls=(), width=0, height=0, number=number)
        for number, entry in enumerate(entries)
    ]


@pytest.mark.parametrize("kernel", ["native", "flash"])
def test_answers_are_those_of_transformers(model: LlamaForCausalLM, tokenizer: Any, kernel: str) -> None:
    asked = prompts(tokenizer, "What is the answer?", "Hi")
    theirs = []
    for prompt in asked:
        ids = prompt.text["input_ids"][None]
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=0
        )
        theirs.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    steps: list[int] = []
    set_packed_attention(model, kernel)
    # as a published model asks for; previews are the same every time
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9)
    ours = LLAMA.preview(model, None, tokenizer, asked, REQUEST, lambda: steps.append(1))
    assert ours == theirs
    assert ours[0] != ours[1]
    assert 2 <= len(steps) <= 24


def test_an_answer_ends_at_the_end_of_its_turn_and_may_be_stopped(
    model: LlamaForCausalLM, tokenizer: Any
) -> None:
    set_packed_attention(model, "native")
    asked = prompts(tokenizer, "Hi")
    ids = asked[0].text["input_ids"][None]
    first = int(model(input_ids=ids).logits[0, -1].argmax())
    model.generation_config.eos_token_id = [first, 3]
    steps: list[int] = []
    assert LLAMA.preview(model, None, tokenizer, asked, REQUEST, lambda: steps.append(1)) == [
        tokenizer.decode(first)
    ]
    assert len(steps) == 1

    def stop() -> None:
        raise StoppedError("asked to stop")

    with pytest.raises(StoppedError):
        LLAMA.preview(model, None, tokenizer, asked, REQUEST, stop)


# the full model


@pytest.mark.parametrize(("preset", "count"), [("attention", 8), ("all-linear", 14)])
def test_targets_are_linears_of_all_blocks(model: LlamaForCausalLM, preset: str, count: int) -> None:
    names = [type(module).__name__ for module in model.modules()]
    assert [names.count(block) for block in LLAMA.blocks] == [2]
    linears = set(lora.linear_names(model))
    lora.add_lora(model, rank=2, alpha=2, pattern=LLAMA.lora_targets[preset], seed=0, device="cpu")
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if ".lora_A" in name}
    assert adapted <= linears
    assert len(adapted) == count
    assert preset == "attention" or linears - adapted == {"lm_head"}


def test_the_committed_table_is_the_published_model() -> None:
    folder = random_bases.CONFIGS / "llama"
    shapes = read_table(TABLES / "llama.json")[""]
    assert shapes == meta_shapes(folder, "transformers", "LlamaForCausalLM")
    assert sum(math.prod(shape) for shape in shapes.values()) == 8_030_261_248
    # 16 * (in + out) of q, o (4096, 4096), k, v (4096, 1024), gate, up, down (4096, 14336), 32 blocks
    targets = re.compile(LLAMA.lora_targets["all-linear"])
    adapted = {name: size for name, size in linear_weights(shapes).items() if targets.fullmatch(name)}
    assert adapter_parameters(adapted, LoraSection(rank=16)) == 41_943_040
    sizes = quantized_linears(linear_weights(shapes), LLAMA.high_precision).values()
    parameters = sum(out * into for out, into in sizes)
    assert parameters == 8_030_261_248 - 2 * 128_256 * 4096 - 65 * 4096
    config = LlamaConfig.from_pretrained(folder)
    assert config.rope_parameters["rope_type"] == "llama3"
    shape = LLAMA.attention_shape(json.loads((folder / "config.json").read_text()), shape_of(4096))
    assert (shape.batch_size, shape.heads, shape.head_width, shape.tokens) == (1, 32, 128, 4096)


def test_there_are_no_pixels() -> None:
    for call in (lambda: LLAMA.vae_shape({}), lambda: LLAMA.control_size(1, 1)):
        with pytest.raises(AssertionError, match="no pixels"):
            call()
