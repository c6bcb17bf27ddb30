"""The value that families of causal language models share, whose layers have the names of Llama's.

Conversations are packed into rows and attend to themselves only; the numerics are in `conversations` and in
`language`. A family's file says what its models are, and what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from trainer.families import conversations, language
from trainer.families.family import Family, no_pixels, no_window

_BLOCKS = r"model\.layers\.\d+"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_MLP = r"mlp\.(gate|up|down)_proj"
_TRAIN = {"learning_rate": 2.0e-4, "max_train_steps": 500, "lr_scheduler": "cosine", "lr_warmup_steps": 20}
_DATA = {"max_sequence_length": 4096, "caption_dropout_rate": 0.0}


def causal_family(
    *,
    name: str,
    title: str,
    licence: str,
    base: str,
    max_sequence_length: int,
    model: str,
    block: str,
    data: Mapping[str, Any] = MappingProxyType({}),
    window: Callable[[Mapping[str, Any]], int | None] = no_window,
) -> Family:
    """The family of transformers' class `model` with blocks of class `block`; `base` is the default model,
    `data` changes defaults of that section, `window` is `Family.window`.
    """
    return Family(
        name=name,
        title=title,
        licence=licence,
        max_sequence_length=max_sequence_length,
        defaults={
            "model": {"pretrained_model_name_or_path": base},
            "data": {**_DATA, **data},
            # adapters on attention alone learn less than those on all layers (QLoRA, arXiv 2305.14314)
            "lora": {"rank": 16, "alpha": 16.0, "target_modules": "all-linear"},
            "train": _TRAIN,
        },
        blocks=(block,),
        model=f"transformers.{model}",
        window=window,
        **_SHARED,
    )


_SHARED: dict[str, Any] = {
    "pixel_multiple": 1,
    "sample_kind": "conversation",
    "packed_by": "input_ids",
    "lora_targets": {
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|{_MLP})",
    },
    # the two ends of the model decide over single tokens
    "high_precision": (r"lm_head", r"model\.embed_tokens"),
    "trained_component": "",
    "encoder_components": {"text": ()},
    "vae_shape": no_pixels,
    "load_encoders": conversations.load_tokenizer,
    "encode_text": conversations.encode_text,
    "caption_tokens": lambda source: None,  # `encode_text` refuses what is too long
    "encode_conversation": conversations.encode_conversation,
    "conversation_tokens": conversations.token_counter,
    "batch_key": lambda latents, text: (),  # all conversations may share a row
    "collate": language.pack,
    "pad_row": language.pad_row,
    "settings": lambda source, config: None,
    "draw": lambda settings, positions, latents: None,
    "predict": language.predict,
    "own_loss": language.losses,
    "own_scores": language.scores,
    "synthetic_batch": language.synthetic_batch,
    "preview": language.answers,
    "save_adapter": language.save_adapter,
    "load_adapter": language.load_adapter,
    "comfyui_keys": lambda module: None,  # ComfyUI draws images
    # Llama-8B's blocks were counted; `language.more_values` has what others keep more
    "counted_as": lambda config: "llama",
    "attention_shape": language.attention_shape,
}
