"""Qwen-Image-Edit: image editing by Qwen-Image's network, which takes the images before the edit as tokens.

Two layouts, told apart by the class in the base's model_index.json: QwenImageEditPipeline (one control, which
the language model sees at the VAE's size) and QwenImageEditPlusPipeline (2509, 2511: one to three controls,
which it sees smaller, as "Picture 1", "Picture 2"). Numerics follow the pipelines; tests hold them together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.families import flow, limits, qwen_image
from trainer.families.family import EntryKind
from trainer.families.qwen_image import QWEN_IMAGE
from trainer.families.values import AttentionShape, Batch, Draw, Header, PreviewPrompt, PreviewRequest, Shape
from trainer.modeling.base.base import read_json
from trainer.modeling.base.source import ModelSource

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import Scan


class QwenImageEdit:
    """Family `qwen_image_edit`."""

    name = "qwen_image_edit"
    title = "Qwen-Image-Edit"
    licence = QWEN_IMAGE.licence
    cache_version = 1
    pixel_multiple = QWEN_IMAGE.pixel_multiple
    sample_kind = "image"
    control_counts = (1, 3)
    text_sees_controls = True
    max_sequence_length = QWEN_IMAGE.max_sequence_length
    caption = QWEN_IMAGE.caption
    text_keys = QWEN_IMAGE.text_keys
    packed_by = None
    comfyui = QWEN_IMAGE.comfyui
    comfyui_swaps = QWEN_IMAGE.comfyui_swaps
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "Qwen/Qwen-Image-Edit-2511"},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 30},
    }
    lora_targets = QWEN_IMAGE.lora_targets
    high_precision = QWEN_IMAGE.high_precision
    modulation = QWEN_IMAGE.modulation
    blocks = QWEN_IMAGE.blocks
    trained_component = QWEN_IMAGE.trained_component
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = QWEN_IMAGE.encoder_components
    support_components = (*QWEN_IMAGE.support_components, "processor")

    # the pipelines share VAE, LoRA format, and a shift that counts the target's tokens only
    caption_tokens = staticmethod(limits.counted("tokenizer", "Qwen2Tokenizer"))
    vae_shape = staticmethod(QWEN_IMAGE.vae_shape)
    collate = staticmethod(QWEN_IMAGE.collate)
    settings = staticmethod(QWEN_IMAGE.settings)
    draw = staticmethod(QWEN_IMAGE.draw)
    model_class = staticmethod(QWEN_IMAGE.model_class)
    save_adapter = staticmethod(QWEN_IMAGE.save_adapter)
    load_adapter = staticmethod(QWEN_IMAGE.load_adapter)
    comfyui_keys = staticmethod(QWEN_IMAGE.comfyui_keys)

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
        """All captioned images of the run's sets, each with the images before the edit."""
        return flow.scan(config, progress, multiple=self.pixel_multiple, controls=self.control_counts)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """Qwen2.5-VL behind the prompt encoding of the base's own pipeline, or the VAE."""
        from transformers import Qwen2VLProcessor

        load = QWEN_IMAGE.load_encoders
        loaded = load(kind, source, device=device, dtype=dtype, vae_tiling=vae_tiling)
        if kind == "latents":
            return loaded
        processor = Qwen2VLProcessor.from_pretrained(source.component("processor"))
        _tell_pictures(loaded.text_encoder, processor.image_token_id)
        parts = {"text_encoder": loaded.text_encoder, "tokenizer": loaded.tokenizer, "processor": processor}
        return _pipeline_class(source)(scheduler=None, vae=None, transformer=None, **parts)

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` (L, D) of the controls, the caption and the end of the template, not padded.

        The limit is the caption's. Raises ConfigError for several controls where the base takes one.
        """
        import torch

        tokens = encoders.tokenizer(text).input_ids
        if len(tokens) > max_sequence_length:
            text = encoders.tokenizer.decode(tokens[:max_sequence_length])
        images = _images(encoders, [_shown(encoders, control) for control in controls])
        with torch.no_grad():
            embeds, _ = encoders.encode_prompt(prompt=text, image=images)
        return {"prompt_embeds": embeds[0].cpu()}

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`mean` and `std` (C, h, w) fp32 of the target; of each control, `control_0` and on, the mode."""
        # a Gaussian's mode is its mean
        modes = [QWEN_IMAGE.encode_pixels(encoders, control, ())["mean"] for control in controls]
        named = {f"control_{index}": mode for index, mode in enumerate(modes)}
        return {**QWEN_IMAGE.encode_pixels(encoders, pixels, ()), **named}

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """About the area of 1024 x 1024 at the control's aspect, in multiples of 32, as in both pipelines."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        size: tuple[int, int] = plus.calculate_dimensions(plus.VAE_IMAGE_SIZE, width / height)
        return size

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Shapes of the latents of target and controls, and length of the text."""
        return (latents["mean"], *(latents[name] for name in _control_names(latents)), text["prompt_embeds"])

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents of the target."""
        controls = [batch.latents[name] for name in _control_names(batch.latents)]
        return qwen_image.predict_velocity(model, batch, draw, controls)

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, flow.sample_latents(batch, draw), batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """That of Qwen-Image with one control of the target's size."""
        import torch

        batch = QWEN_IMAGE.synthetic_batch(config, shape, seed)
        generator = torch.Generator().manual_seed(seed + 1)
        control = torch.randn(batch.latents["mean"].shape, generator=generator)
        return dataclasses.replace(batch, latents={**batch.latents, "control_0": control})

    def preview(
        self,
        model: Any,
        source: ModelSource,
        encoders: Any,
        prompts: Sequence[PreviewPrompt],
        request: PreviewRequest,
        on_step: Callable[[], None],
    ) -> list[Image]:
        """One edited image a prompt through the base's pipeline with a fresh scheduler.

        Guidance above 1 is classifier-free, against the empty caption that was shown the same controls.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = dict.fromkeys(("text_encoder", "tokenizer", "processor"))
        pipeline = _pipeline_class(source)(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        images = [{"image": _images(pipeline, prompt.controls)} for prompt in prompts]
        texts = [qwen_image.pipeline_inputs(prompt, request, model) for prompt in prompts]
        inputs = [{**text, **image} for text, image in zip(texts, images, strict=True)]
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step, guidance="true_cfg_scale")

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """Its own where scales and gates are kept for each image token, else Qwen-Image's."""
        return self.name if config.get("zero_cond_t", False) else QWEN_IMAGE.name

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """Joint attention over the tokens of text, target and controls."""
        return QWEN_IMAGE.attention_shape(config, _with_controls(shape))


def _with_controls(shape: Shape) -> Shape:
    """The shape of an image as large as target and controls together; one control is the least."""
    return dataclasses.replace(shape, height=(1 + max(1, shape.controls)) * shape.height)


def _control_names(latents: Mapping[str, Any]) -> list[str]:
    """Names of the controls of one entry or batch, in their order."""
    return sorted(name for name in latents if name.startswith("control_"))


def _pipeline_class(source: ModelSource) -> Any:
    """The pipeline of the base's layout. Raises ConfigError for a base of another kind."""
    from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline

    layouts = {kind.__name__: kind for kind in (QwenImageEditPipeline, QwenImageEditPlusPipeline)}
    name = read_json(source.folder / "model_index.json").get("_class_name")
    if name not in layouts:
        raise ConfigError(
            f"the base model is for {name}, not for image editing",
            where="model.pretrained_model_name_or_path",
            remedy=f"name a base of {' or '.join(layouts)}, or another family",
        )
    return layouts[name]


def _tell_pictures(text_encoder: Any, image_token_id: int) -> None:
    """Let the language model place the tokens of pictures in rows and columns, as it was trained to.

    transformers 5 does so only if it is told which tokens those are, and the pipelines do not tell it
    (huggingface/diffusers#14194). The id is that of the published config, but for small tokenizers.
    """
    text_encoder.config.image_token_id = image_token_id

    def add_types(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        types = (kwargs["input_ids"] == image_token_id).int()
        return args, {"mm_token_type_ids": types, **kwargs}

    text_encoder.register_forward_pre_hook(add_types, with_kwargs=True)


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


def _shown(pipeline: Any, image: Image) -> Any:
    """A control at the size at which the pipeline's call shows it to the language model."""
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

    small = isinstance(pipeline, plus.QwenImageEditPlusPipeline)
    area = plus.CONDITION_IMAGE_SIZE if small else plus.VAE_IMAGE_SIZE
    width, height = plus.calculate_dimensions(area, image.width / image.height)
    return pipeline.image_processor.resize(image, height, width)


QWEN_IMAGE_EDIT = QwenImageEdit()
