"""Qwen-Image: two blocks, a vision-language model of two layers, a VAE of four levels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from tests.random_bases.common import CORPUS, Base, byte_pair_merges

_SPECIAL = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end")]
_SPECIAL += [f"<|{name}_pad|>" for name in ("vision", "image", "video")]


def qwen_tokenizer() -> Any:
    """A Qwen2Tokenizer for any text, by its bytes; words of the corpus and of the templates are one token.

    In the original every word of the pipelines' templates is one token too, so the counts of tokens that the
    pipelines drop (34 and 64) hold for both.
    """
    from diffusers import QwenImageEditPlusPipeline, QwenImagePipeline
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    absent = dict.fromkeys(("scheduler", "vae", "text_encoder", "tokenizer", "transformer"))
    pipelines: list[Any] = [QwenImagePipeline(**absent), QwenImageEditPlusPipeline(**absent, processor=None)]
    templates = [*(pipeline.prompt_template_encode for pipeline in pipelines), "Picture 1: "]
    texts = [CORPUS, *(part for template in templates for part in re.split(r"<\|\w+\|>|\{\}", template))]
    split = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer.pre_tokenize_str
    # annotated as lists of texts, documented as pairs
    merges: Any = byte_pair_merges(Counter(word for text in texts for word, _ in split(text)), end="")
    tokens = sorted(ByteLevel.alphabet()) + [left + right for left, right in merges]
    vocab = {token: index for index, token in enumerate(dict.fromkeys((*tokens, *_SPECIAL)))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=merges, model_max_length=131072)
    tokenizer.add_tokens(_SPECIAL, special_tokens=True)
    return tokenizer


def encoders(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """A Qwen2.5-VL config, 32 wide."""
    return {"text_encoder": tiny_qwen_vl(tokenizers["tokenizer"], 32)}


def tiny_qwen_vl(tokenizer: Any, width: int) -> dict[str, Any]:
    """Qwen2.5-VL with two layers each for text and for images; its patches are 14x14 pixels."""
    number = tokenizer.convert_tokens_to_ids
    heads = 2
    # a third of a head's frequencies each for time, height and width
    section = [width // heads // 2 - 2 * (width // heads // 6), *[width // heads // 6] * 2]
    return {
        "text_config": {
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 2,
            "num_attention_heads": heads,
            "num_key_value_heads": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": section},
            "bos_token_id": number("<|endoftext|>"),
            "eos_token_id": number("<|im_end|>"),
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": heads,
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": number("<|image_pad|>"),
        "video_token_id": number("<|video_pad|>"),
        "vision_start_token_id": number("<|vision_start|>"),
        "vision_end_token_id": number("<|vision_end|>"),
    }


BASE = Base(tokenizers={"tokenizer": qwen_tokenizer}, encoders=encoders)
