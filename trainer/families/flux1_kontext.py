"""FLUX.1-Kontext-dev: image editing by FLUX.1-dev's network, which takes the image before the edit as tokens.

Numerics follow diffusers' `train_dreambooth_lora_flux_kontext.py` and `FluxKontextPipeline`; tests hold them
together. What is the same as in FLUX.1-dev is taken from there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.families import flow
from trainer.families.family import EntryKind
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import AttentionShape, Batch, Draw, Header, PreviewPrompt, PreviewRequest, Shape

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import Scan
    from trainer.modeling.base.source import ModelSource


class Flux1Kontext:
    """Family `flux1_kontext`."""

    name = "flux1_kontext"
    title = "FLUX.1-Kontext-dev"
    licence = FLUX1_DEV.licence
    cache_version = 1
    pixel_multiple = FLUX1_DEV.pixel_multiple
    sample_kind = "image"
    control_counts = (1, 1)
    text_sees_controls = False
    max_sequence_length = FLUX1_DEV.max_sequence_length
    caption = None
    text_keys = ()
    packed_by = None
    comfyui = FLUX1_DEV.comfyui
    comfyui_swaps = FLUX1_DEV.comfyui_swaps
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"},
        "flow": {"guidance_scale": 1.0},
        # the model card draws with 2.5, less than FLUX.1-dev's 3.5
        "validation": {"guidance_scale": 2.5, "num_inference_steps": 28},
    }
    lora_targets = FLUX1_DEV.lora_targets
    high_precision = FLUX1_DEV.high_precision
    modulation = FLUX1_DEV.modulation
    blocks = FLUX1_DEV.blocks
    trained_component = FLUX1_DEV.trained_component
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = FLUX1_DEV.encoder_components
    support_components = FLUX1_DEV.support_components

    # the pipelines share prompt encoding, VAE, LoRA format, and a shift that counts the target's tokens only
    load_encoders = staticmethod(FLUX1_DEV.load_encoders)
    encode_text = staticmethod(FLUX1_DEV.encode_text)
    caption_tokens = staticmethod(FLUX1_DEV.caption_tokens)
    vae_shape = staticmethod(FLUX1_DEV.vae_shape)
    collate = staticmethod(FLUX1_DEV.collate)
    settings = staticmethod(FLUX1_DEV.settings)
    draw = staticmethod(FLUX1_DEV.draw)
    model_class = staticmethod(FLUX1_DEV.model_class)
    save_adapter = staticmethod(FLUX1_DEV.save_adapter)
    load_adapter = staticmethod(FLUX1_DEV.load_adapter)
    comfyui_keys = staticmethod(FLUX1_DEV.comfyui_keys)

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
        """All captioned images of the run's sets, each with the image before the edit."""
        return flow.scan(config, progress, multiple=self.pixel_multiple, controls=self.control_counts)

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`mean` and `std` (C, h, w) fp32 of the target, and of the control, `control_0`, the mode."""
        (control,) = controls
        # a Gaussian's mode is its mean
        mode = FLUX1_DEV.encode_pixels(encoders, control, ())["mean"]
        return {**FLUX1_DEV.encode_pixels(encoders, pixels, ()), "control_0": mode}

    def control_size(self, width: int, height: int) -> tuple[int, int]:
        """The nearest in aspect of the resolutions that Kontext was trained at, as in the pipeline's call."""
        from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

        # the pipeline compares the aspect after it cut both sides to multiples of 16
        columns, rows = (max(side // self.pixel_multiple, 1) for side in (width, height))
        _, best_width, best_height = min(
            (abs(columns / rows - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS
        )
        return best_width, best_height

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Latent shapes of target and control, and text length."""
        return (latents["mean"], latents["control_0"], text["prompt_embeds"])

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents of the target."""
        import torch
        from diffusers import FluxKontextPipeline

        noised = flow.interpolate(flow.sample_latents(batch, draw), draw)
        control, text = batch.latents["control_0"], batch.text["prompt_embeds"]
        count, _, height, width = noised.shape
        guidance = None
        if model.config.guidance_embeds:
            guidance = torch.full((count,), settings.flow.guidance_scale, device=noised.device)
        tokens = [FluxKontextPipeline._pack_latents(x.to(text.dtype), *x.shape) for x in (noised, control)]
        size = (height, width, *control.shape[2:], text.device, text.dtype)
        packed = model(
            hidden_states=torch.cat(tokens, dim=1),
            timestep=draw.sigma.to(text.dtype),
            guidance=guidance,
            pooled_projections=batch.text["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
            img_ids=flow.kept_on_device(_image_ids, *size),
            return_dict=False,
        )[0][:, : tokens[0].shape[1]]
        # the scale factor 1 makes the pipeline's helper count in latent pixels
        return FluxKontextPipeline._unpack_latents(packed, height, width, vae_scale_factor=1)

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, flow.sample_latents(batch, draw), batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """That of FLUX.1-dev with a control of the target's size."""
        import torch

        batch = FLUX1_DEV.synthetic_batch(config, shape, seed)
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
        """One edited image a prompt through FluxKontextPipeline, whose scheduler is a fresh one."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxKontextPipeline

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        pipeline = FluxKontextPipeline(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        inputs = [{**flow.on_device(prompt.text, model), **_image_options(prompt)} for prompt in prompts]
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step)

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """FLUX.1-dev's, whose blocks it has."""
        return FLUX1_DEV.name

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """Joint attention over the tokens of text, target and control."""
        return FLUX1_DEV.attention_shape(config, _with_control(shape))


def _with_control(shape: Shape) -> Shape:
    """The shape of an image as large as target and control of one size together."""
    return dataclasses.replace(shape, height=2 * shape.height)


def _image_ids(
    height: int, width: int, control_height: int, control_width: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Position ids (N, 3) of the target's tokens, then the control's, of latents of these sizes."""
    import torch
    from diffusers import FluxKontextPipeline

    target, control = (
        FluxKontextPipeline._prepare_latent_image_ids(1, rows // 2, columns // 2, device, dtype)
        for rows, columns in ((height, width), (control_height, control_width))
    )
    control[:, 0] = 1
    return torch.cat([target, control])


def _image_options(prompt: PreviewPrompt) -> dict[str, Any]:
    """The control at the preview's size, as training cuts one of the target's size, and no other sizes.

    By itself the pipeline scales every result, and every control, to about 1024 x 1024 pixels.
    """
    from trainer.data.pictures.images import fit

    (control,) = prompt.controls
    width, height = prompt.width, prompt.height
    return {"image": fit(control, width, height), "max_area": width * height, "_auto_resize": False}


FLUX1_KONTEXT = Flux1Kontext()
