"""Kandinsky 5 Image Lite: text to image by flow matching (6 B transformer, Qwen2.5-VL, CLIP, FLUX.1's VAE).

Numerics follow diffusers' `Kandinsky5T2IPipeline`, which has no training script; tests hold them together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families import diffusion, draws
from trainer.families.family import Family
from trainer.families.values import AttentionShape, Batch, Draw, PreviewPrompt, Shape

if TYPE_CHECKING:
    import torch

_BLOCKS = r"(text|visual)_transformer_blocks\.\d+"
# by their parents: the model's own `out_layer` is no linear, and modulation has one of that name
_ATTENTION = r"(self|cross)_attention\.(to_query|to_key|to_value|out_layer)"


def _arguments(pipeline: Any, prompt: PreviewPrompt, embeds: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """The length of each caption, which the pipeline takes as a pair."""
    import torch

    # other sizes would be replaced by the nearest of its own seven
    pipeline.resolutions = [(prompt.width, prompt.height)]
    return {
        name.replace("embeds_qwen", "cu_seqlens"): torch.tensor([0, caption.shape[1]])
        for name, caption in embeds.items()
        if name.endswith("embeds_qwen")
    }


def _prepare(pipeline: Any) -> None:
    """Count the tokens of the template, which the pipeline's constant does for the original tokenizer: 40."""
    before, _ = pipeline.prompt_template.split("{}")
    pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer.tokenizer(before)["input_ids"])


PIPELINE = diffusion.Pipeline(
    name="Kandinsky5T2IPipeline",
    vae="AutoencoderKL",
    encoders={"text_encoder": "Qwen2_5_VLForConditionalGeneration", "text_encoder_2": "CLIPTextModel"},
    tokenizers={"tokenizer": "Qwen2VLProcessor", "tokenizer_2": "CLIPTokenizer"},
    prepare=_prepare,
    against_empty=True,
    arguments=_arguments,
    channels="in_visual_dim",
    text_widths={"prompt_embeds_qwen": "in_text_dim"},  # as long as the caption
    pooled_widths={"prompt_embeds_clip": "in_text_dim2"},
)


def encode_pixels(
    encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`mean` and `std` (C, h, w) fp32 of the latents, already scaled for training; no shift here."""
    import torch

    with torch.no_grad():
        distribution = encoders.encode(pixels[None].to(encoders.device, encoders.dtype)).latent_dist
    scale = encoders.config.scaling_factor
    mean, std = ((part[0].float() * scale).cpu() for part in (distribution.mean, distribution.std))
    return {"mean": mean, "std": std}


def predict(model: Any, batch: Batch, draw: Draw, settings: draws.FlowSettings) -> torch.Tensor:
    """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
    import torch

    noised = draws.interpolate(draws.sample_latents(batch, draw), draw)
    text, (*_, height, width) = batch.text["prompt_embeds_qwen"], noised.shape
    velocity = model(
        hidden_states=noised.permute(0, 2, 3, 1)[:, None].to(text.dtype),  # (B, 1, h, w, C)
        encoder_hidden_states=text,
        timestep=(draw.sigma * 1000).to(text.dtype),
        pooled_projections=batch.text["prompt_embeds_clip"],
        visual_rope_pos=[torch.arange(n, device=text.device) for n in (1, height // 2, width // 2)],
        text_rope_pos=torch.arange(text.shape[1], device=text.device),
        return_dict=False,
    )
    return velocity[:, 0].permute(0, 3, 1, 2)


def attention_shape(config: Mapping[str, Any], shape: Shape) -> AttentionShape:
    """Self-attention over image tokens."""
    width, tokens = sum(config["axes_dims"]), shape.height * shape.width // 256
    heads = config["model_dim"] // width
    return AttentionShape(batch_size=shape.batch_size, heads=heads, head_width=width, tokens=tokens)


KANDINSKY5 = Family(
    name="kandinsky5",
    title="Kandinsky 5 Image Lite",
    licence="MIT",
    pixel_multiple=16,
    # tables of diffusers' class: 128 positions of 16 pixels
    most_side=2048,
    max_sequence_length=512,
    caption="prompt_embeds_qwen",
    text_keys=(
        r"text_transformer_blocks\.\d+\.self_attention",
        r"visual_transformer_blocks\.\d+\.cross_attention",
    ),
    comfyui="comfy/lora.py maps `diffusion_model.<name>`; comfy/ldm/kandinsky5/model.py has diffusers' names",
    # the values that the model's authors train LoRAs with (kandinskylab/kandinsky-5-lora-train)
    defaults={
        "model": {"pretrained_model_name_or_path": "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"},
        "lora": {"rank": 32, "alpha": 32.0, "target_modules": "all-linear"},
        "train": {"adam_beta2": 0.95, "weight_decay": 0.0},
        "flow": {"weighting_scheme": "logit_normal"},
        "validation": {"guidance_scale": 3.5, "num_inference_steps": 50},
    },
    lora_targets={
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|feed_forward\.(in_layer|out_layer))",
    },
    # embedders and modulation carry sigma and the caption into every block; they are small and sensitive
    high_precision=(r"\w+_embeddings\..*", r".*modulation\.out_layer", r"out_layer\.out_layer"),
    modulation=(),  # the class keeps them in fp32
    blocks=("Kandinsky5TransformerEncoderBlock", "Kandinsky5TransformerDecoderBlock"),
    model="diffusers.Kandinsky5Transformer3DModel",
    encoder_components={"text": ("text_encoder", "text_encoder_2"), "latents": ("vae",)},
    support_components=("tokenizer", "tokenizer_2", "scheduler"),
    caption_tokens=partial(diffusion.caption_tokens, PIPELINE, "tokenizer", after="<|im_end|>"),
    encode_pixels=encode_pixels,
    predict=predict,
    comfyui_keys="diffusion_model.{}".format,
    counted_as=lambda config: "kandinsky5",
    **diffusion.functions(PIPELINE) | {"attention_shape": attention_shape},
)
