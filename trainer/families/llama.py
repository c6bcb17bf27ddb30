"""Llama 3: chats with a causal language model (8 B; the class is that of all models of its architecture).

Conversations are packed into rows and attend to themselves only; the numerics are in `conversations` and in
`language`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.families import conversations, language
from trainer.families.family import Family, no_pixels
from trainer.families.values import Batch, Draw

if TYPE_CHECKING:
    import torch

_BLOCKS = r"model\.layers\.\d+"
_ATTENTION = r"self_attn\.[qkvo]_proj"
_MLP = r"mlp\.(gate|up|down)_proj"


def predict(model: Any, batch: Batch, draw: Draw | None, settings: None) -> torch.Tensor:
    """Logits of the whole row, (1, T, vocabulary)."""
    return model.lm_head(language.hidden_states(model, batch))


LLAMA = Family(
    name="llama",
    title="Llama 3",
    licence="Llama 3.1 Community License Agreement",
    pixel_multiple=1,
    sample_kind="conversation",
    max_sequence_length=131_072,
    packed_by="input_ids",
    defaults={
        "model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B-Instruct"},
        "data": {"max_sequence_length": 4096, "caption_dropout_rate": 0.0},
        # adapters on attention alone learn less than those on all layers (QLoRA, arXiv 2305.14314)
        "lora": {"rank": 16, "alpha": 16.0, "target_modules": "all-linear"},
        "train": {
            "learning_rate": 2.0e-4,
            "max_train_steps": 500,
            "lr_scheduler": "cosine",
            "lr_warmup_steps": 20,
        },
    },
    lora_targets={
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|{_MLP})",
    },
    # the two ends of the model decide over single tokens
    high_precision=(r"lm_head", r"model\.embed_tokens"),
    blocks=("LlamaDecoderLayer",),
    model="transformers.LlamaForCausalLM",
    trained_component="",
    encoder_components={"text": ()},
    vae_shape=no_pixels,
    load_encoders=conversations.load_tokenizer,
    encode_text=conversations.encode_text,
    caption_tokens=lambda source: None,  # `encode_text` refuses what is too long
    encode_conversation=conversations.encode_conversation,
    conversation_tokens=conversations.token_counter,
    batch_key=lambda latents, text: (),  # all conversations may share a row
    collate=language.pack,
    pad_row=language.pad_row,
    settings=lambda source, config: None,
    draw=lambda settings, positions, latents: None,
    predict=predict,
    own_loss=language.losses,
    own_scores=language.scores,
    synthetic_batch=language.synthetic_batch,
    preview=language.answers,
    save_adapter=language.save_adapter,
    load_adapter=language.load_adapter,
    comfyui_keys=lambda module: None,  # ComfyUI draws images
    counted_as=lambda config: "llama",  # the 8B's; `language.more_values` has what other bases keep more
    attention_shape=language.attention_shape,
)
