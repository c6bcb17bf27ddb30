"""Functions that families of causal language models have in common: packed rows, their loss, answers; those
that make tokens of conversations are in `conversations`. torch, transformers and peft are imported inside.

Numerics follow transformers' `ForCausalLMLoss` with `num_items_in_batch`; tests hold them together.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainer.errors import DataError
from trainer.families import conversations
from trainer.families.values import (
    ENDS,
    AttentionShape,
    Batch,
    Draw,
    PreviewPrompt,
    Rows,
    Shape,
)
from trainer.files import atomic
from trainer.modeling.adapter.peft_config import CONFIG_BESIDE, PEFT_PREFIX, config_beside

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import ValidationSection
    from trainer.modeling.base.source import ModelSource

USUAL_TOKENS = 482
"""Mean length of conversations of 1 to 4,000 tokens, as many short as long by their logarithm."""
USUAL_REACH = 2000
"""Mean length of the conversation that a token belongs to, among such conversations."""
LOGITS_TOKENS = 512
"""Tokens whose logits exist at one time while the loss is computed."""
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", CONFIG_BESIDE
"""Names that PEFT prescribes."""
_NORMS_OF_HEADS = ("qwen3",)
"""Types of models whose blocks normalise each head's query and key."""


class MoreValues(NamedTuple):
    """Values by token and width beyond those of blocks that were counted."""

    kept: float = 0.0
    """Of each block, for backward."""
    again: float = 0.0
    """Of one block that is computed again."""
    beyond: float = 0.0
    """At the highest point of a step that computes none again."""


def more_values(
    config: Mapping[str, Any], *, linear_inputs: bool, compiled: bool = True, trained: bool = False
) -> MoreValues:
    """Values by token and width beyond the 8B's, which were counted.

    The MLP keeps gate, activated gate and up (`linear_inputs`: their product too), attention queries, keys,
    values and output. Norms of heads keep their input, uncompiled in fp32, which is two values, and of those
    that are `trained` what the weight is multiplied with. Compiled and computed again, a LoRA's block holds
    most in its MLP, of four values, when nothing of its attention is there. Uncompiled, the backward pass of
    an MLP makes three gradients of its width when two values have gone; of the 8B that is less than the nine
    that the last norm holds, of Qwen2.5-7B more: on an H200 it held 13.9
    beyond what it is planned to keep.
    """
    inner, hidden = config["intermediate_size"] / config["hidden_size"], config["hidden_size"]
    heads = config["num_attention_heads"]
    queries = heads * _head_width(config) / hidden
    keys = config.get("num_key_value_heads", heads) * _head_width(config) / hidden
    norms = (1 if compiled else 3 if trained else 2) if config.get("model_type") in _NORMS_OF_HEADS else 0
    more = (4 if linear_inputs else 3) * (inner - 3.5) + 2 * (keys - 0.25) + 2 * (queries - 1)
    more += norms * (queries + keys)
    again = 4 * (inner - 3.5) if compiled and not trained else more
    return MoreValues(more, again, 0.0 if compiled or trained else max(0.0, 3 * inner - 2 - 9))


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


def window_of_some_layers(config: Mapping[str, Any]) -> int | None:
    """`Family.window` of configs that say by `use_sliding_window` whether layers from `max_window_layers` on,
    or those that `layer_types` names, have a window. Defaults are those of transformers' Qwen2Config.
    """
    if not config.get("use_sliding_window", False):
        return None
    layers, kinds = config.get("num_hidden_layers", 32), config.get("layer_types")
    slides = config.get("max_window_layers", 28) < layers if kinds is None else "sliding_attention" in kinds
    return config.get("sliding_window", 4096) if slides else None


def positions_of(said: Mapping[str, Any]) -> int | None:
    """Tokens that a language model has positions for; None where its config does not say."""
    most = said.get("max_position_embeddings")
    scaling = said.get("rope_scaling") or said.get("rope_parameters")
    if not isinstance(most, int):
        return None
    ropes = scaling if isinstance(scaling, Mapping) else {}
    factor, kind = ropes.get("factor"), ropes.get("rope_type") or ropes.get("type")
    # of other kinds the number is that of the scaled positions; of YaRN it may be, and the first one is told
    stretches = kind in ("linear", "dynamic", "yarn") and isinstance(factor, int | float)
    first = ropes.get("original_max_position_embeddings") if kind == "yarn" else None
    return math.floor((first or most) * factor) if factor and stretches else most


def _head_width(config: Mapping[str, Any]) -> int:
    """Width of one head; only newer configs say it."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


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


def predict(model: Any, batch: Batch, draw: Draw | None, settings: None) -> torch.Tensor:
    """`Family.predict`: logits of the whole row, (1, T, vocabulary)."""
    return model.lm_head(hidden_states(model, batch))


def losses(model: Any, batch: Batch) -> torch.Tensor:
    """`Family.own_loss`: cross entropy in fp32 summed over each conversation's learned tokens, (n,).

    Logits exist for learned tokens only, `LOGITS_TOKENS` at a time. In fp16, whose gradients are scaled, and
    through a head with an adapter they exist again in the backward pass, else once.
    """
    targets, factors = _learned(batch)
    states, labels = _predicting(model, batch, targets)
    return _by_sample(batch, targets, _token_losses(model.lm_head, states, labels, factors))


def scores(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """`Family.own_scores`: `losses`, and how many learned tokens of each conversation are the most likely
    ones, (n,) each; of equal logits the first one is. Logits exist as in `losses`.
    """
    import torch

    targets, factors = _learned(batch)
    with torch.no_grad():
        states, labels = _predicting(model, batch, targets)
        found = _token_losses(model.lm_head, states, labels, factors)
        parts = zip(states.split(LOGITS_TOKENS), labels.split(LOGITS_TOKENS), strict=True)
        hits = [model.lm_head(part).argmax(dim=-1) == label for part, label in parts]
    correct = torch.cat(hits).float() if hits else torch.zeros_like(factors)
    return _by_sample(batch, targets, found), _by_sample(batch, targets, correct)


def _learned(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Places in the row of the tokens that are learned, and their weights, (N,) each."""
    weight = batch.text["loss_weight"][0].float()
    targets = weight.nonzero()[:, 0]
    return targets, weight.index_select(0, targets)


def _predicting(model: Any, batch: Batch, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States (N, D) that predict the tokens at `targets`, and these tokens (N,)."""
    # the token before predicts; it is of the same conversation, because no first token is learned
    states = hidden_states(model, batch)[0].index_select(0, targets - 1)
    return states, batch.text["input_ids"][0].index_select(0, targets)


def _by_sample(batch: Batch, targets: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sums (n,) over each conversation of values that belong to `targets`."""
    import torch

    by_token = torch.zeros_like(batch.text["loss_weight"][0], dtype=torch.float32)
    samples = by_token.index_copy(0, targets, values).split(batch.text["lengths"].tolist())[: batch.size]
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
    # a base that was not made for chats does not know what ends an answer
    known = {tokenizer.eos_token_id, conversations.answer_end(tokenizer)}
    ends = {*known, *(ends if isinstance(ends, list) else [ends])} - {None}
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
    write_tensors(path, {PEFT_PREFIX + name: value for name, value in state.items()}, {"format": "pt"}, None)
    values = {**config, "base_model_name_or_path": None, "inference_mode": True, "task_type": "CAUSAL_LM"}
    atomic.write_text(folder / ADAPTER_CONFIG, json.dumps(values, indent=2, sort_keys=True) + "\n")
    return path


def load_adapter(model: Any, path: Path) -> None:
    """Add the adapter to a transformers model in place, in its dtype, from a file and the config beside it.

    Raises AccessError where that config is missing, DataError where it is damaged, or the file another
    model's.
    """
    from peft import PeftConfig, set_peft_model_state_dict
    from safetensors.torch import load_file

    from trainer.modeling.adapter.lora import ADAPTER, adapter_state, to_model_type

    config, remedy = config_beside(path), "is it a LoRA of this base model?"
    state = {name.removeprefix(PEFT_PREFIX): value for name, value in load_file(path).items()}
    try:
        model.add_adapter(PeftConfig.from_peft_type(**config), adapter_name=ADAPTER)
    except (TypeError, ValueError, re.error) as error:
        what = f"PEFT cannot add this adapter to the model ({error})"
        raise DataError(what, where=str(path.with_name(ADAPTER_CONFIG)), remedy=remedy) from error
    for name, value in adapter_state(model).items():
        if name in state and state[name].shape != value.shape:
            what = f"{name} is {tuple(state[name].shape)}, by {ADAPTER_CONFIG} and the model it is"
            raise DataError(f"{what} {tuple(value.shape)}", where=str(path), remedy=remedy)
    loaded: Any = set_peft_model_state_dict(model, state, adapter_name=ADAPTER)
    to_model_type(model)
    missing = [name for name in loaded.missing_keys if f".{ADAPTER}." in name]
    if loaded.unexpected_keys or missing:
        raise DataError(
            f"the adapter does not fit the model, first {[*loaded.unexpected_keys, *missing][0]}",
            where=str(path),
            remedy=remedy,
        )
