"""FLUX.1-dev: two blocks of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.random_bases.common import Base, clip_tokenizer, t5_tokenizer, tiny_clip, tiny_t5, tiny_vae


def tiny_configs(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Four heads of 16, two blocks of each kind, captions 32 wide."""
    latent_channels, text_width, pooled_width = 4, 32, 32
    return {
        "transformer": {
            "in_channels": 4 * latent_channels,
            "num_layers": 2,
            "num_single_layers": 2,
            "num_attention_heads": 4,
            "attention_head_dim": 16,
            "axes_dims_rope": [4, 6, 6],
            "joint_attention_dim": text_width,
            "pooled_projection_dim": pooled_width,
            "guidance_embeds": True,
        },
        "vae": tiny_vae(latent_channels),
        "text_encoder": tiny_clip(tokenizers["tokenizer"], pooled_width),
        "text_encoder_2": tiny_t5(tokenizers["tokenizer_2"], text_width),
    }


BASE = Base(
    tokenizers={"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer},
    tiny_configs=tiny_configs,
)
