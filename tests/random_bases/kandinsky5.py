"""Kandinsky 5 Image Lite: Qwen2.5-VL and CLIP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.random_bases import qwen_image
from tests.random_bases.common import Base, clip_tokenizer, tiny_clip, words

_MARKS = "endoftext im_start im_end vision_start vision_end image_pad video_pad"
SPECIAL = tuple(f"<|{mark}|>" for mark in _MARKS.split())


def qwen_processor() -> Any:
    """A Qwen2VLProcessor for any text, by its bytes; its template is longer than the original's 40 tokens."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    # annotated as texts, documented as pairs
    pairs: Any = {(word[:end], word[end]): None for word in sorted(words()) for end in range(1, len(word))}
    tokens = sorted(ByteLevel.alphabet()) + [left + right for left, right in pairs]
    vocab = {token: index for index, token in enumerate(dict.fromkeys([*tokens, *SPECIAL]))}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=list(pairs), model_max_length=1024)
    tokenizer.add_tokens(list(SPECIAL), special_tokens=True)
    image_processor, video_processor = Qwen2VLImageProcessor(), Qwen2VLVideoProcessor()
    return Qwen2VLProcessor(image_processor, tokenizer, video_processor)


def tiny_qwen_vl(tokenizer: Any, width: int) -> dict[str, Any]:
    """Qwen-Image's with a vision tower of one layer, which is never run."""
    config = qwen_image.tiny_qwen_vl(tokenizer, width)
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    text = {**config["text_config"], "max_position_embeddings": 1024, "rope_parameters": rope}
    vision = {**config["vision_config"], "depth": 1, "fullatt_block_indexes": [0]}
    return {**config, "text_config": text, "vision_config": vision}


def encoders(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Qwen2.5-VL and CLIP configs, both 32 wide."""
    return {
        "text_encoder": tiny_qwen_vl(tokenizers["tokenizer"].tokenizer, 32),
        "text_encoder_2": tiny_clip(tokenizers["tokenizer_2"], 32),
    }


def fill_modulation(component: str, model: Any) -> None:
    """Give the modulation layers values: they start at zero, and so would every gradient inside blocks."""
    import torch

    if component == "transformer":
        for name, parameter in model.named_parameters():
            if "modulation" in name:
                torch.nn.init.normal_(parameter, std=0.1)


BASE = Base(
    tokenizers={"tokenizer": qwen_processor, "tokenizer_2": clip_tokenizer},
    encoders=encoders,
    prepare=fill_modulation,
)
