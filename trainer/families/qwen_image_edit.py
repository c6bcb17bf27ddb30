"""Qwen-Image-Edit: image editing by Qwen-Image's network, which takes the images before the edit as tokens.

Two layouts, told apart by the class in the base's model_index.json: QwenImageEditPipeline (one control, which
the language model sees at the VAE's size) and QwenImageEditPlusPipeline (2509, 2511: one to three controls,
which it sees smaller, as "Picture 1", "Picture 2"). Numerics follow the pipelines; tests hold them together.
The pipelines share VAE, LoRA format, and a shift that counts the target's tokens only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.families import diffusion, qwen_image
from trainer.families.qwen_image import QWEN_IMAGE
from trainer.families.values import PreviewPrompt
from trainer.modeling.base.base import read_config

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.modeling.base.source import ModelSource

_LAYOUTS = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline")
# the most that the language model reads of a control by layout, with the words beside it: a token is 28 x 28
# pixels of 1024 x 1024, and of 384 x 384
_CONTROL_TOKENS = (1400, 200)


def _arguments(pipeline: Any, prompt: PreviewPrompt, embeds: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Qwen-Image's arguments, and the controls."""
    images = _images(pipeline, prompt.controls)
    return {**qwen_image.arguments(pipeline, prompt, embeds), "image": images}


def _layout(source: ModelSource) -> str:
    """Name of the pipeline of the base's layout. Raises ConfigError for a base of another kind."""
    name = str(read_config(source.folder / "model_index.json").get("_class_name"))
    if name not in _LAYOUTS:
        raise ConfigError(
            f"the base model is for {name}, not for image editing",
            where="model.pretrained_model_name_or_path",
            remedy=f"name a base of {' or '.join(_LAYOUTS)}, or another family",
        )
    return name


def _prepare(pipeline: Any) -> None:
    """Let the language model place the tokens of pictures in rows and columns, as it was trained to.

    transformers 5 does so only if it is told which tokens those are, and the pipelines do not tell it
    (huggingface/diffusers#14194). The id is that of the published config, but for small tokenizers.
    """
    image_token_id = pipeline.processor.image_token_id
    pipeline.text_encoder.config.image_token_id = image_token_id

    def add_types(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        types = (kwargs["input_ids"] == image_token_id).int()
        return args, {"mm_token_type_ids": types, **kwargs}

    pipeline.text_encoder.register_forward_pre_hook(add_types, with_kwargs=True)


PIPELINE = dataclasses.replace(
    qwen_image.PIPELINE,
    name_by_base=_layout,
    tokenizers={"tokenizer": "Qwen2Tokenizer", "processor": "Qwen2VLProcessor"},
    prepare=_prepare,
    arguments=_arguments,
    least_controls=1,
)


def encode_text(
    encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
) -> dict[str, torch.Tensor]:
    """`prompt_embeds` (L, D) of the controls, the caption and the end of the template, not padded.

    The limit is the caption's. Raises ConfigError for several controls where the base takes one.
    """
    import torch
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    tokens = encoders.tokenizer(text).input_ids
    if len(tokens) > max_sequence_length:
        text = encoders.tokenizer.decode(tokens[:max_sequence_length])
    # the size at which the pipeline's call shows a control to the language model
    small = isinstance(encoders, plus.QwenImageEditPlusPipeline)
    area = plus.CONDITION_IMAGE_SIZE if small else plus.VAE_IMAGE_SIZE
    sizes = [plus.calculate_dimensions(area, one.width / one.height) for one in controls]
    resize = encoders.image_processor.resize
    shown = [resize(one, height, width) for one, (width, height) in zip(controls, sizes, strict=True)]
    with torch.no_grad():
        embeds, _ = encoders.encode_prompt(prompt=text, image=_images(encoders, shown))
    return {"prompt_embeds": embeds[0].cpu()}


def _images(pipeline: Any, images: Sequence[Image]) -> Any:
    """The controls as the pipeline takes them: a list, or the only one. Raises ConfigError for too many."""
    from diffusers import QwenImageEditPlusPipeline

    if isinstance(pipeline, QwenImageEditPlusPipeline):
        return list(images)
    if len(images) > 1:
        raise ConfigError(
            f"{len(images)} control images a sample, but the base model takes one",
            where="data.sets.control_dir",
            remedy="name one folder, or train Qwen/Qwen-Image-Edit-2511, which takes up to three",
        )
    return images[0]


def control_tokens(folder: Path | None) -> int:
    """Tokens of a control in the language model; of a base that is not here, or says nothing, the newer
    layout's.
    """
    single, plus = _CONTROL_TOKENS
    index = None if folder is None else folder / "model_index.json"
    if index is None or not index.is_file():
        return plus
    return single if read_config(index).get("_class_name") == _LAYOUTS[0] else plus


def control_size(width: int, height: int) -> tuple[int, int]:
    """About the area of 1024 x 1024 at the control's aspect, in multiples of 32, as in both pipelines."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    return plus.calculate_dimensions(plus.VAE_IMAGE_SIZE, width / height)


QWEN_IMAGE_EDIT = dataclasses.replace(
    QWEN_IMAGE,
    name="qwen_image_edit",
    title="Qwen-Image-Edit",
    control_counts=(1, 3),
    text_sees_controls=True,
    control_tokens=control_tokens,
    defaults={
        "model": {"pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2511"},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 30},
    },
    support_components=(*QWEN_IMAGE.support_components, "processor"),
    caption_tokens=partial(diffusion.caption_tokens, PIPELINE, "tokenizer"),
    encode_pixels=partial(diffusion.encode_with_controls, qwen_image.encode_pixels),
    control_size=control_size,
    # its own where scales and gates are kept for each image token
    counted_as=lambda config: "qwen_image_edit" if config.get("zero_cond_t", False) else "qwen_image",
    **diffusion.functions(PIPELINE) | {"encode_text": encode_text},
)
