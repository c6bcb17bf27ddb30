"""FLUX.2-dev: two blocks of each kind; a Mistral of 31 narrow layers, because the pipeline reads layer 30."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.random_bases.common import Base, byte_pair_merges, words

_SPECIAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "<pad>"),
)
# how Mistral Small 3 writes a system message and a caption, whose contents are lists of texts
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% set mark = 'SYSTEM_PROMPT' if message['role'] == 'system' else 'INST' %}"
    "{{ '[' + mark + ']' }}"
    "{% for part in message['content'] %}"
    "{{ '[IMG]' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{{ '[/' + mark + ']' }}{% endfor %}"
)


def pixtral_processor() -> Any:
    """A PixtralProcessor over a byte-level tokenizer for any text, padded on the left."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PixtralImageProcessor, PixtralProcessor, PreTrainedTokenizerFast

    merges = _merges()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*_SPECIAL, *alphabet, *(left + right for left, right in merges)]
    vocab = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=[token for token in _SPECIAL if token.startswith("[")],
        padding_side="left",
        model_max_length=131072,
    )
    images = PixtralImageProcessor(patch_size=14, size={"longest_edge": 56})
    return PixtralProcessor(
        images, tokenizer, patch_size=14, spatial_merge_size=2, chat_template=_CHAT_TEMPLATE
    )


def _merges() -> list[tuple[str, str]]:
    """Merges that join the corpus' words, and those of the system message that precedes every caption."""
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE

    known = words() + Counter(re.findall(r"[A-Za-z]+", SYSTEM_MESSAGE))
    # Ġ is the space before a word; a byte-level model does not mark a word's end, as these merges do
    pairs = byte_pair_merges({f"Ġ{word}": count for word, count in known.items()}, count=1000)
    return list(dict.fromkeys((left, right.removesuffix("</w>")) for left, right in pairs))


def encoders(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A Mistral config, 32 wide."""
    return {"text_encoder": tiny_mistral(tokenizers["tokenizer"].tokenizer, 32)}


def tiny_mistral(tokenizer: Any, width: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 2, "head_dim": width // 2}
    return {
        "text_config": {
            "model_type": "mistral",
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 31,
            "num_key_value_heads": 1,
            "max_position_embeddings": 1024,
            "sliding_window": None,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **heads,
        },
        "vision_config": {
            "model_type": "pixtral",
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 1,
            "image_size": 56,
            "patch_size": 14,
            **heads,
        },
        "image_token_index": tokenizer.convert_tokens_to_ids("[IMG]"),
        "tie_word_embeddings": True,
    }


def fill_batch_statistics(component: str, model: Any) -> None:
    """Means and variances of the VAE's latents that are not 0 and 1, so that leaving them out shows."""
    if component == "vae":
        model.bn.running_mean.normal_(std=0.1)
        model.bn.running_var.uniform_(0.5, 2.0)


BASE = Base(tokenizers={"tokenizer": pixtral_processor}, encoders=encoders, prepare=fill_batch_statistics)
