"""Kandinsky 5 Image Lite: two blocks of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.random_bases import qwen_image
from tests.random_bases.common import Base, clip_tokenizer, tiny_clip, tiny_vae, words

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


def tiny_configs(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Four heads of 16, two blocks of each kind, captions 32 wide."""
    latent_channels, text_width, pooled_width = 4, 32, 32
    return {
        "transformer": {
            "in_visual_dim": latent_channels,
            "out_visual_dim": latent_channels,
            "in_text_dim": text_width,
            "in_text_dim2": pooled_width,
            "time_dim": 32,
            "model_dim": 64,
            "ff_dim": 256,
            "num_text_blocks": 2,
            "num_visual_blocks": 2,
            "axes_dims": [4, 6, 6],
        },
        # the pipeline counts on a VAE of four levels: one latent covers 8x8 pixels
        "vae": {
            **tiny_vae(latent_channels),
            "block_out_channels": [8, 8, 16, 16],
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
        },
        "text_encoder": tiny_qwen_vl(tokenizers["tokenizer"].tokenizer, text_width),
        "text_encoder_2": tiny_clip(tokenizers["tokenizer_2"], pooled_width),
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
    tiny_configs=tiny_configs,
    prepare=fill_modulation,
)
