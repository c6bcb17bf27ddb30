"""Qwen-Image-Edit in its "Plus" layout: Qwen-Image with a processor, and a transformer as that of 2511."""

from __future__ import annotations

from typing import Any

from tests.random_bases import qwen_image
from tests.random_bases.common import Base


def qwen_processor() -> Any:
    """A Qwen2VLProcessor with the image sizes of the original."""
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    size = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 16384}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=size),
        tokenizer=qwen_image.qwen_tokenizer(),
        video_processor=Qwen2VLVideoProcessor(size=size),
    )


BASE = Base(
    tokenizers={"tokenizer": qwen_image.qwen_tokenizer, "processor": qwen_processor},
    encoders=qwen_image.encoders,
)
