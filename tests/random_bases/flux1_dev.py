"""FLUX.1-dev: CLIP and T5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.random_bases.common import Base, clip_tokenizer, t5_tokenizer, tiny_clip, tiny_t5


def encoders(tokenizers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """CLIP and T5 configs, both 32 wide."""
    return {
        "text_encoder": tiny_clip(tokenizers["tokenizer"], 32),
        "text_encoder_2": tiny_t5(tokenizers["tokenizer_2"], 32),
    }


BASE = Base(tokenizers={"tokenizer": clip_tokenizer, "tokenizer_2": t5_tokenizer}, encoders=encoders)
