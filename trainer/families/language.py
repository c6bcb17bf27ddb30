"""Functions that families of causal language models have in common: conversations as tokens, packed rows,
their loss, answers. torch, transformers and peft are imported inside the functions.

Numerics follow transformers' `ForCausalLMLoss` with `num_items_in_batch`; tests hold them together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import AccessError, DataError
from trainer.families.values import (
    ENDS,
    AttentionShape,
    Batch,
    EntryKind,
    PreviewPrompt,
    Rows,
    Shape,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import ValidationSection
    from trainer.modeling.base.source import ModelSource

USUAL_TOKENS = 482
"""Mean length of conversations of 1 to 4,000 tokens, as many short as long by their logarithm."""
USUAL_REACH = 2000
"""Mean length of the conversation that a token belongs to, among such conversations."""
LOGITS_TOKENS = 512
"""Tokens whose logits exist at one time while the loss is computed."""
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Names that PEFT prescribes."""
_PEFT_PREFIX = "base_model.model."
# templates that write today's date would make every day's tokens others; this is the date that Llama 3.1's
# template writes where it is told none
_DATE = "26 Jul 2024"


def more_values(config: Mapping[str, Any], *, linear_inputs: bool) -> float:
    """Values by token and width that a block keeps for backward beyond the 8B's, which were counted.

    The MLP keeps gate, activated gate and up (`linear_inputs`: their product too), attention keys and values.
    """
    inner = config["intermediate_size"] / config["hidden_size"]
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    keys = heads * _head_width(config) / config["hidden_size"]
    return (4 if linear_inputs else 3) * (inner - 3.5) + 2 * (keys - 0.25)


def attention_shape(config: Mapping[str, Any], shape: Shape) -> AttentionShape:
    """A full row of conversations of usual length."""
    tokens = shape.batch_size * shape.text_tokens
    return AttentionShape(
        batch_size=1,
        heads=config["num_attention_heads"],
        head_width=_head_width(config),
        tokens=tokens,
        key_heads=config.get("num_key_value_heads", 0),
        causal=True,
        samples=max(1, tokens // USUAL_TOKENS),
        reach=min(tokens, USUAL_REACH),
    )


def _head_width(config: Mapping[str, Any]) -> int:
    """Width of one head; only newer configs say it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def load_tokenizer(
    kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
) -> Any:
    """`Family.load_encoders`: the tokenizer, which lies beside the model."""
    from transformers import AutoTokenizer

    assert kind == "text", "a language model has no pixels"
    return AutoTokenizer.from_pretrained(source.folder, local_files_only=True)


def encode_text(
    tokenizer: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
) -> dict[str, torch.Tensor]:
    """`input_ids` (L,) int64 of a conversation (JSON) and `loss_weight` (L,) fp32: 1 for every token of the
    assistant's messages and of what ends each of them, else 0. Of a prompt, a user's message, the ids alone.

    Nothing is cut: raises DataError for more than `max_sequence_length` tokens, and for a template that does
    not render a conversation's beginning as the beginning of the whole.
    """
    import torch

    messages = [{"role": "user", "content": text}] if prompt else json.loads(text)
    whole = _render(tokenizer, messages, opened=prompt)
    # verbose would warn of lengths that are checked here
    options = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
    encoding = tokenizer(whole, **options)
    ids, entry = list(encoding["input_ids"]), {}
    if not prompt:
        weights = _weights(tokenizer, messages, whole, encoding["offset_mapping"])
        token = tokenizer.added_tokens_decoder.get(ids[max(i for i, one in enumerate(weights) if one)])
        if token is None or not token.special:
            if tokenizer.eos_token_id is None:
                raise DataError(
                    "the chat template does not end answers, and the tokenizer has no end token",
                    where=tokenizer.name_or_path,
                    remedy="give it an `eos_token`",
                )
            ids, weights = [*ids, tokenizer.eos_token_id], [*weights, 1.0]
        entry["loss_weight"] = torch.tensor(weights)
    if len(ids) > max_sequence_length:
        raise DataError(
            f"{_named(messages)} has {len(ids)} tokens, more than data.max_sequence_length "
            f"({max_sequence_length})",
            remedy="raise data.max_sequence_length, or shorten or remove the conversation; nothing is cut",
        )
    return {"input_ids": torch.tensor(ids), **entry}


def _render(tokenizer: Any, messages: Sequence[Mapping[str, str]], *, opened: bool) -> str:
    """The template's text; `opened` up to where the assistant begins to write."""
    from jinja2 import TemplateError

    if not tokenizer.chat_template:
        raise DataError(
            "the base model's tokenizer has no chat template",
            where=tokenizer.name_or_path,
            remedy="use a model that was made for chats, or put its chat_template.jinja into the folder",
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=opened, date_string=_DATE
        )
    except TemplateError as error:
        raise DataError(
            f"the chat template refuses {_named(messages)}: {error}",
            where=tokenizer.name_or_path,
            remedy="correct or remove the conversation",
        ) from error


def _named(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation for people: many begin with the same system message."""
    asked = next((message["content"] for message in messages if message["role"] == "user"), "")
    return f"the conversation with {asked[:60]!r}"


def _weights(tokenizer: Any, messages: Sequence[Mapping[str, str]], whole: str, offsets: Any) -> list[float]:
    """1 for every token of the assistant's messages and of what ends each of them, without blanks, else 0."""
    learned = bytearray(len(whole) + 1)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:index], opened=True)
        after = _render(tokenizer, messages[: index + 1], opened=False)
        if not (after.startswith(before) and whole.startswith(after)):
            raise DataError(
                f"the chat template writes {_named(messages)} otherwise once it goes on, so that message "
                f"{index + 1} cannot be found in it",
                where=tokenizer.name_or_path,
                remedy="use a template that only appends, as Llama 3's does",
            )
        start, end = len(before), len(after.rstrip())
        learned[start:end] = b"\1" * (end - start)
    # one character may be several tokens, and some tokens have no character
    weights = [float(any(learned[start : max(end, start + 1)])) for start, end in offsets]
    weights[0] = 0.0  # nothing predicts it
    return weights


def pack(text: Rows, latents: Rows = ()) -> Batch:
    """`Family.collate`: one row of T tokens.

    It has ids, positions that restart with every conversation, `loss_weight`, all (1, T), `lengths` (n,) of
    the conversations, and `ends` as `packed_rows.row_ends`. Its weight is the number of tokens that are
    learned.
    """
    import torch

    from trainer.modeling.attention.packed_rows import row_ends

    lengths = [len(row["input_ids"]) for row in text]
    weight = torch.cat([row["loss_weight"] for row in text])[None]
    packed = {
        "input_ids": torch.cat([row["input_ids"] for row in text])[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "loss_weight": weight,
        "lengths": torch.tensor(lengths),
        ENDS: row_ends(lengths),
    }
    learned = float(weight.sum())
    return Batch(latents={}, text=packed, size=len(lengths), weight=learned, tokens=sum(lengths))


def pad_row(batch: Batch, tokens: int) -> Batch:
    """`Family.pad_row`: the batch with its row padded to `tokens`, which it must fit in.

    Padding is a sample of its own, of which nothing is learned: the last of `lengths`, also where it is
    empty. `ends` are as `packed_rows.padded_row_ends`. What the batch counts and weighs stays.
    """
    import torch

    from trainer.modeling.attention.packed_rows import padded_row_ends

    padding = tokens - batch.text["input_ids"].shape[1]
    assert padding >= 0, "a row that is longer than it is padded to"
    lengths = [*batch.text["lengths"].tolist(), padding]
    padded = {
        name: torch.nn.functional.pad(batch.text[name], (0, padding))
        for name in ("input_ids", "position_ids", "loss_weight")
    }
    ends = padded_row_ends(lengths)
    return dataclasses.replace(batch, text={**padded, "lengths": torch.tensor(lengths), ENDS: ends})


def synthetic_batch(config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
    """Two conversations of random tokens, all learned but the first of each."""
    import torch

    total, generator = shape.batch_size * shape.text_tokens, torch.Generator().manual_seed(seed)
    rows = []
    for length in (total // 2, total - total // 2):
        ids = torch.randint(config["vocab_size"], (length,), generator=generator)
        rows.append({"input_ids": ids, "loss_weight": (torch.arange(length) > 0).float()})
    return pack(rows)


def hidden_states(model: Any, batch: Batch) -> torch.Tensor:
    """The input of the model's head, (1, T, D), each conversation for itself, and padding too."""
    from trainer.modeling.attention.packed_rows import segments_of

    lengths = batch.text["lengths"]
    return model.model(
        input_ids=batch.text["input_ids"],
        position_ids=batch.text["position_ids"],
        use_cache=False,
        segments=segments_of(model, lengths, batch.text[ENDS], padded=len(lengths) > batch.size),
    ).last_hidden_state


def losses(model: Any, batch: Batch) -> torch.Tensor:
    """`Family.own_loss`: cross entropy in fp32 summed over each conversation's learned tokens, (n,).

    Logits exist for learned tokens only, `LOGITS_TOKENS` at a time. In fp16, whose gradients are scaled, and
    through a head with an adapter they exist again in the backward pass, else once.
    """
    import torch

    weight = batch.text["loss_weight"][0].float()
    targets = weight.nonzero()[:, 0]
    # the token before predicts; it is of the same conversation, because no first token is learned
    states = hidden_states(model, batch)[0].index_select(0, targets - 1)
    labels = batch.text["input_ids"][0].index_select(0, targets)
    found = _token_losses(model.lm_head, states, labels, weight.index_select(0, targets))
    by_token = torch.zeros_like(weight).index_copy(0, targets, found)
    samples = by_token.split(batch.text["lengths"].tolist())[: batch.size]
    return torch.stack([part.sum() for part in samples])


def _token_losses(
    head: Any, states: torch.Tensor, labels: torch.Tensor, factors: torch.Tensor
) -> torch.Tensor:
    """Cross entropies of states (N, D) in fp32, times `factors` (N,)."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from trainer.modeling.fused.head_loss import head_losses

    own = {name for name, _ in head.named_parameters()}
    if type(head) is torch.nn.Linear and own == {"weight"} and states.dtype != torch.float16:
        return head_losses(states, head.weight, labels, factors, at_once=LOGITS_TOKENS)
    parts = [
        checkpoint(_cross_entropy, head, *part, use_reentrant=False, preserve_rng_state=False)
        for part in zip(states.split(LOGITS_TOKENS), labels.split(LOGITS_TOKENS), strict=True)
    ]
    return torch.cat(parts) * factors


def _cross_entropy(head: Any, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(head(states).float(), labels, reduction="none")


def answers(
    model: Any,
    source: ModelSource,
    tokenizer: Any,
    prompts: Sequence[PreviewPrompt],
    validation: ValidationSection,
    on_step: Callable[[], None],
) -> list[str]:
    """`Family.preview` by transformers' `generate`: the most likely answer to each prompt, token by token, so
    that a seed changes nothing.
    """
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    def step(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        on_step()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    ends = model.generation_config.eos_token_id
    ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    config = GenerationConfig(
        do_sample=False,
        # published models set these for sampling, of which transformers would warn
        temperature=1.0,
        top_p=1.0,
        max_new_tokens=validation.max_new_tokens,
        eos_token_id=sorted(ends),
        pad_token_id=min(ends, default=0),
    )
    results = []
    for prompt in prompts:
        ids = prompt.text["input_ids"][None].to(model.device)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([step]),
        )
        results.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True))
    return results


def save_adapter(
    state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
) -> Path:
    """Write an adapter that `peft.PeftModel.from_pretrained(model, folder)` loads.

    PEFT prescribes the files' names, so `name` is not used. Returns the file with the tensors.
    """
    from trainer.modeling.tensor_file import write_tensors

    path = folder / ADAPTER_FILE
    write_tensors(path, {_PEFT_PREFIX + name: value for name, value in state.items()}, {"format": "pt"}, None)
    values = {**config, "base_model_name_or_path": None, "inference_mode": True, "task_type": "CAUSAL_LM"}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
    return path


def load_adapter(model: Any, path: Path) -> None:
    """Add the adapter to a transformers model in place, in its dtype, from a file and the config beside it.

    Raises AccessError where that config is missing, DataError where the file is another model's.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    from trainer.modeling.adapter.lora import ADAPTER, to_model_type

    if not (path.parent / ADAPTER_CONFIG).is_file():
        what = f"{ADAPTER_CONFIG} is not beside the adapter, which cannot be read without it"
        raise AccessError(what, where=str(path), remedy="copy both files into one folder")
    state = {name.removeprefix(_PEFT_PREFIX): value for name, value in load_file(path).items()}
    model.add_adapter(PeftConfig.from_pretrained(str(path.parent)), adapter_name=ADAPTER)
    loaded: Any = set_peft_model_state_dict(model, state, adapter_name=ADAPTER)
    to_model_type(model)
    missing = [name for name in loaded.missing_keys if f".{ADAPTER}." in name]
    if loaded.unexpected_keys or missing:
        raise DataError(
            f"the adapter does not fit the model, first {[*loaded.unexpected_keys, *missing][0]}",
            where=str(path),
            remedy="is it a LoRA of this base model?",
        )
