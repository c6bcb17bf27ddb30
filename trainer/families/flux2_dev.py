"""FLUX.2-dev: text to image by guidance-distilled flow matching (32 B transformer, Mistral, 32-channel VAE).

Numerics follow diffusers' `train_dreambooth_lora_flux2.py` and `Flux2Pipeline`; tests hold them together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trainer.families import diffusion, draws
from trainer.families.family import Family
from trainer.families.values import Batch, Draw, Header

if TYPE_CHECKING:
    import torch

    from trainer.modeling.base.source import ModelSource

_DOUBLE = r"transformer_blocks\.\d+"
_DOUBLE_MLP = r"(ff|ff_context)\.(linear_in|linear_out)"
# single blocks fuse attention and MLP: one linear before both, one after both
_SINGLE = r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
PIPELINE = diffusion.Pipeline(
    name="Flux2Pipeline",
    vae="AutoencoderKLFlux2",
    encoders={"text_encoder": "Mistral3ForConditionalGeneration"},
    tokenizers={"tokenizer": "PixtralProcessor"},
    stride=16,
    sampled=False,
    # Mistral's layers 10, 20 and 30 of the caption in the system's template; all captions are padded to one
    # length, as the model was trained: it sees the padding
    text_widths={"prompt_embeds": "joint_attention_dim"},
)


def caption_tokens(source: ModelSource) -> Callable[[str], int]:
    """A counter of a caption's tokens as a chat with the system's message: Flux2Pipeline cuts all of it."""
    from diffusers.pipelines.flux2.pipeline_flux2 import format_input
    from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
    from transformers import PixtralProcessor

    processor: Any = PixtralProcessor.from_pretrained(source.component("tokenizer"))

    def count(text: str) -> int:
        messages = format_input(prompts=[text], system_message=SYSTEM_MESSAGE)
        options = {"add_generation_prompt": False, "tokenize": True, "return_dict": True}
        return len(processor.apply_chat_template(messages, **options)["input_ids"][0])

    return count


def encode_pixels(
    encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """`mean` (4 C, h / 2, w / 2) fp32: 2x2 patches of the mode, by the VAE's batch statistics."""
    import torch
    from diffusers import Flux2Pipeline

    with torch.no_grad():
        mode = encoders.encode(pixels[None].to(encoders.device, encoders.dtype)).latent_dist.mode()
    mean = encoders.bn.running_mean.float().view(-1, 1, 1)
    variance = encoders.bn.running_var.float().view(-1, 1, 1)
    patches = Flux2Pipeline._patchify_latents(mode.float())[0]
    return {"mean": ((patches - mean) / torch.sqrt(variance + encoders.config.batch_norm_eps)).cpu()}


def draw(settings: draws.FlowSettings, positions: Sequence[int], latents: Header) -> Draw:
    """Noise of one micro-batch; the dynamic shift is Flux2Pipeline's for its default of 50 steps."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    _, height, width = latents["mean"]
    dynamic = settings.scheduler["use_dynamic_shifting"]
    mu = compute_empirical_mu(height * width, num_steps=50) if dynamic else None
    return draws.draw_samples(settings, positions, latents["mean"], mu=mu)


def predict(model: Any, batch: Batch, draw: Draw, settings: draws.FlowSettings) -> torch.Tensor:
    """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
    import torch
    from diffusers import Flux2Pipeline

    noised = draws.interpolate(batch.latents["mean"], draw)
    count, _, height, width = noised.shape
    text = batch.text["prompt_embeds"]
    guidance = None
    if model.config.guidance_embeds:
        guidance = torch.full((count,), settings.flow.guidance_scale, device=noised.device)
    packed = model(
        hidden_states=Flux2Pipeline._pack_latents(noised.to(text.dtype)),
        timestep=draw.sigma.to(text.dtype),
        guidance=guidance,
        encoder_hidden_states=text,
        txt_ids=diffusion.kept_on_device(
            _position_ids, Flux2Pipeline._prepare_text_ids, text.shape, text.device
        ),
        img_ids=diffusion.kept_on_device(
            _position_ids, Flux2Pipeline._prepare_latent_ids, noised.shape, text.device
        ),
        return_dict=False,
    )[0]
    # tokens are in rows; the pipeline's helper sorts them by their ids, and waits for the device to do so
    return packed.transpose(1, 2).unflatten(2, (height, width))


def _position_ids(
    prepare: Callable[[Any], Any], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Positions (B, tokens, 4) by one of the pipeline's helpers, which reads its argument's shape alone."""
    import torch

    return prepare(torch.empty(shape, device="meta")).to(device)


def comfyui_keys(module: str) -> str:
    """diffusers' name, which ComfyUI maps for most; modulation and embeddings have its own names."""
    own = re.sub(r"^(\w+_stream_modulation\w*)\.linear$", r"\1.lin", module)
    for number, end in (("1", "in"), ("2", "out")):
        embedder = rf"^time_guidance_embed\.(time|guidance)(step)?_embedder\.linear_{number}$"
        own = re.sub(embedder, rf"\1_in.{end}_layer", own)
    return f"{'transformer' if own == module else 'diffusion_model'}.{own}"


FLUX2_DEV = Family(
    name="flux2_dev",
    title="FLUX.2-dev",
    licence="FLUX [dev] Non-Commercial License v2.0",
    pixel_multiple=16,
    max_sequence_length=512,
    comfyui="comfy/lora.py maps `transformer.<diffusers name>` by `flux_to_diffusers` of comfy/utils.py",
    comfyui_swaps=("norm_out.linear",),
    defaults={
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.2-dev"},
        "data": {"max_sequence_length": 512},
        "flow": {"guidance_scale": 1.0},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 28},
    },
    lora_targets={
        "attention": rf"{_DOUBLE}\.{diffusion.JOINT_ATTENTION}|{_SINGLE}",
        "all-linear": rf"{_DOUBLE}\.({diffusion.JOINT_ATTENTION}|{_DOUBLE_MLP})|{_SINGLE}",
    },
    # embedders and the modulation that all blocks share carry sigma and the caption; they are sensitive
    high_precision=(
        r"(x|context)_embedder|proj_out",
        r"time_guidance_embed\..*",
        r"\w+_stream_modulation\w*\.linear|norm_out\.linear",
    ),
    modulation=(r"\w+_stream_modulation\w*\.linear",),
    blocks=("Flux2TransformerBlock", "Flux2SingleTransformerBlock"),
    model="diffusers.Flux2Transformer2DModel",
    encoder_components={"text": ("text_encoder",), "latents": ("vae",)},
    support_components=("tokenizer", "scheduler"),
    caption_tokens=caption_tokens,
    encode_pixels=encode_pixels,
    draw=draw,
    predict=predict,
    comfyui_keys=comfyui_keys,
    counted_as=lambda config: "flux2_dev",
    **diffusion.functions(PIPELINE),
)
