"""Qwen-Image: text to image by flow matching (20 B transformer, Qwen2.5-VL, 16-channel VAE made for video).

Numerics follow diffusers' `train_dreambooth_lora_qwen_image.py` and `QwenImagePipeline`; tests hold them
together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families import diffusion, draws
from trainer.families.family import Family
from trainer.families.values import Batch, Draw, PreviewPrompt

if TYPE_CHECKING:
    import torch

_BLOCKS = r"transformer_blocks\.\d+"
_MLP = r"(img_mlp|txt_mlp)\.net\.(0\.proj|2)"
# the end of the pipeline's template counts against the limit, its beginning is dropped
_AFTER_CAPTION = "<|im_end|>\n<|im_start|>assistant\n"


def arguments(pipeline: Any, prompt: PreviewPrompt, embeds: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Masks by which no token is padding, and the pipelines' highest limit: else they cut at 512."""
    import torch

    masks = {
        f"{name}_mask": torch.ones(value.shape[:2], dtype=torch.long, device=value.device)
        for name, value in embeds.items()
    }
    return {**masks, "max_sequence_length": 1024}


PIPELINE = diffusion.Pipeline(
    name="QwenImagePipeline",
    vae="AutoencoderKLQwenImage",
    encoders={"text_encoder": "Qwen2_5_VLForConditionalGeneration"},
    tokenizers={"tokenizer": "Qwen2Tokenizer"},
    guidance="true_cfg_scale",
    against_empty=True,
    arguments=arguments,
    patch=4,
    text_widths={"prompt_embeds": "joint_attention_dim"},  # caption and end of the template, not padded
)


def encode_pixels(
    encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`mean` and `std` (C, h, w) fp32 of the latents, each channel already normalised for training."""
    import torch

    with torch.no_grad():
        # a picture is a video of one frame
        frames = pixels[None, :, None].to(encoders.device, encoders.dtype)
        distribution = encoders.encode(frames).latent_dist
    names = ("latents_mean", "latents_std")
    mean, std = (torch.tensor(encoders.config[name]).view(-1, 1, 1) for name in names)
    return {
        "mean": (distribution.mean[0, :, 0].float().cpu() - mean) / std,
        "std": distribution.std[0, :, 0].float().cpu() / std,
    }


def vae_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """Three times the channels: padding and caches for video take that much more than AutoencoderKL's."""
    factors: Sequence[int] = config["dim_mult"]
    return 3 * config["base_dim"] * factors[min(1, len(factors) - 1)], 256


def predict(model: Any, batch: Batch, draw: Draw, settings: draws.FlowSettings) -> torch.Tensor:
    """Velocity (B, C, h, w) that the transformer predicts for the noised latents, with the batch's controls,
    which editing variants have, after them as tokens.
    """
    import torch
    from diffusers import QwenImagePipeline

    from trainer.families.control_times import keep_time_index

    keep_time_index(model)
    noised = draws.interpolate(draws.sample_latents(batch, draw), draw)
    text, (count, channels, height, width) = batch.text["prompt_embeds"], noised.shape
    images = [noised, *(batch.latents[name] for name in diffusion.control_names(batch.latents))]
    packed = [
        QwenImagePipeline._pack_latents(image.to(text.dtype), count, channels, *image.shape[2:])
        for image in images
    ]
    output = model(
        hidden_states=torch.cat(packed, dim=1),
        timestep=draw.sigma.to(text.dtype),
        encoder_hidden_states=text,
        encoder_hidden_states_mask=None,  # attention is told what is padding by `text_lengths.padded_text`
        img_shapes=[[(1, image.shape[2] // 2, image.shape[3] // 2) for image in images]] * count,
        return_dict=False,
    )[0]
    # the scale factor 1 makes the pipeline's helper count in latent pixels; the only frame is dropped
    own = output[:, : packed[0].shape[1]]
    return QwenImagePipeline._unpack_latents(own, height, width, vae_scale_factor=1)[:, :, 0]


QWEN_IMAGE = Family(
    name="qwen_image",
    title="Qwen-Image",
    licence="Apache-2.0",
    pixel_multiple=16,
    max_sequence_length=1024,
    caption="prompt_embeds",
    text_keys=(r"transformer_blocks\.\d+\.attn",),
    comfyui="comfy/lora.py, model_lora_keys_unet: for QwenImage `transformer.<its own name of the module>`",
    defaults={
        "model": {"pretrained_model_name_or_path": "Qwen/Qwen-Image"},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 30},
    },
    lora_targets={
        "attention": rf"{_BLOCKS}\.{diffusion.JOINT_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({diffusion.JOINT_ATTENTION}|{_MLP})",
    },
    # embedders and modulation carry sigma and the caption into every block; they are sensitive
    high_precision=(r"img_in|txt_in|proj_out", r"time_text_embed\..*", r".*_mod\.1", r"norm_out\.linear"),
    modulation=(r".*_mod\.1",),
    blocks=("QwenImageTransformerBlock",),
    model="diffusers.QwenImageTransformer2DModel",
    encoder_components={"text": ("text_encoder",), "latents": ("vae",)},
    support_components=("tokenizer", "scheduler"),
    caption_tokens=partial(diffusion.caption_tokens, PIPELINE, "tokenizer", after=_AFTER_CAPTION),
    encode_pixels=encode_pixels,
    vae_shape=vae_shape,
    predict=predict,
    comfyui_keys="transformer.{}".format,
    counted_as=lambda config: "qwen_image",
    **diffusion.functions(PIPELINE),
)
