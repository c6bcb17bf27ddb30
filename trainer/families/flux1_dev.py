"""FLUX.1-dev: text to image by guidance-distilled flow matching (12 B transformer, CLIP, T5, 16-channel VAE).

Numerics follow diffusers' `train_dreambooth_lora_flux.py` and `FluxPipeline`; tests hold them together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families import diffusion, draws
from trainer.families.family import Family
from trainer.families.values import Batch, Draw

if TYPE_CHECKING:
    import torch

_BLOCKS = r"(transformer_blocks|single_transformer_blocks)\.\d+"
_MLP = r"(ff|ff_context)\.net\.(0\.proj|2)|proj_mlp|proj_out"
PIPELINE = diffusion.Pipeline(
    name="FluxPipeline",
    vae="AutoencoderKL",
    encoders={"text_encoder": "CLIPTextModel", "text_encoder_2": "T5EncoderModel"},
    tokenizers={"tokenizer": "CLIPTokenizer", "tokenizer_2": "T5Tokenizer"},
    patch=4,
    text_widths={"prompt_embeds": "joint_attention_dim"},  # T5's, of captions that are padded to one length
    pooled_widths={"pooled_prompt_embeds": "pooled_projection_dim"},  # CLIP's
)


def encode_pixels(
    encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`mean` and `std` (C, h, w) fp32 of the latents, already shifted and scaled for training."""
    import torch

    with torch.no_grad():
        distribution = encoders.encode(pixels[None].to(encoders.device, encoders.dtype)).latent_dist
    scale = encoders.config.scaling_factor
    mean = (distribution.mean.float() - encoders.config.shift_factor) * scale
    return {"mean": mean[0].cpu(), "std": (distribution.std.float() * scale)[0].cpu()}


def predict(model: Any, batch: Batch, draw: Draw, settings: draws.FlowSettings) -> torch.Tensor:
    """Velocity (B, C, h, w) that the transformer predicts for the noised latents, with the batch's controls,
    which editing variants have, after them as tokens.
    """
    import torch
    from diffusers import FluxPipeline

    noised = draws.interpolate(draws.sample_latents(batch, draw), draw)
    text, (count, _, height, width) = batch.text["prompt_embeds"], noised.shape
    guidance = None
    if model.config.guidance_embeds:
        guidance = torch.full((count,), settings.flow.guidance_scale, device=noised.device)
    images = [noised, *(batch.latents[name] for name in diffusion.control_names(batch.latents))]
    tokens = [FluxPipeline._pack_latents(image.to(text.dtype), *image.shape) for image in images]
    sizes = tuple((image.shape[2] // 2, image.shape[3] // 2) for image in images)
    packed = model(
        hidden_states=torch.cat(tokens, dim=1) if len(tokens) > 1 else tokens[0],
        timestep=draw.sigma.to(text.dtype),
        guidance=guidance,
        pooled_projections=batch.text["pooled_prompt_embeds"],
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
        img_ids=diffusion.kept_on_device(_image_ids, sizes, text.device, text.dtype),
        return_dict=False,
    )[0][:, : tokens[0].shape[1]]
    # the scale factor 1 makes the pipeline's helper count in latent pixels
    return FluxPipeline._unpack_latents(packed, height, width, vae_scale_factor=1)


def _image_ids(sizes: tuple[tuple[int, int], ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """Position ids (N, 3) of the tokens of images of these rows and columns, the target's first.

    They are those of one picture, whatever number of them the pipeline's helper is told.
    """
    import torch
    from diffusers import FluxPipeline

    ids = [FluxPipeline._prepare_latent_image_ids(1, *size, device, dtype) for size in sizes]
    for number, one in enumerate(ids):
        one[:, 0] = number
    return torch.cat(ids)


FLUX1_DEV = Family(
    name="flux1_dev",
    title="FLUX.1-dev",
    licence="FLUX.1 [dev] Non-Commercial License",
    pixel_multiple=16,
    max_sequence_length=512,
    comfyui="comfy/lora.py maps `transformer.<diffusers name>` by `flux_to_diffusers` of comfy/utils.py",
    comfyui_swaps=("norm_out.linear",),
    defaults={
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev"},
        "flow": {"guidance_scale": 1.0},
        "validation": {"guidance_scale": 3.5, "num_inference_steps": 28},
    },
    lora_targets={
        "attention": rf"{_BLOCKS}\.{diffusion.JOINT_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({diffusion.JOINT_ATTENTION}|{_MLP})",
    },
    # embedders and modulation carry sigma and the caption into every block; they are small and sensitive
    high_precision=(r"(x|context)_embedder|proj_out", r"time_text_embed\..*", r".*\.?norm\w*\.linear"),
    modulation=(r"(single_)?transformer_blocks\..*\.norm\w*\.linear",),
    blocks=("FluxTransformerBlock", "FluxSingleTransformerBlock"),
    model="diffusers.FluxTransformer2DModel",
    encoder_components={"text": ("text_encoder", "text_encoder_2"), "latents": ("vae",)},
    support_components=("tokenizer", "tokenizer_2", "scheduler"),
    caption_tokens=partial(diffusion.caption_tokens, PIPELINE, "tokenizer_2"),
    encode_pixels=encode_pixels,
    predict=predict,
    comfyui_keys="transformer.{}".format,
    counted_as=lambda config: "flux1_dev",
    **diffusion.functions(PIPELINE),
)
