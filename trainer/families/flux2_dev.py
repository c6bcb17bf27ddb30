"""FLUX.2-dev: text to image by guidance-distilled flow matching (32 B transformer, Mistral, 32-channel VAE).

Numerics follow diffusers' `train_dreambooth_lora_flux2.py` and `Flux2Pipeline`; tests hold them
together. What is the same as in FLUX.1-dev is taken from there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families import flow, limits
from trainer.families.family import EntryKind
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import Batch, Draw, Header, PreviewPrompt, PreviewRequest, Shape

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.modeling.base.source import ModelSource

_DOUBLE = r"transformer_blocks\.\d+"
_DOUBLE_ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
_DOUBLE_MLP = r"(ff|ff_context)\.(linear_in|linear_out)"
# single blocks fuse attention and MLP: one linear before both, one after both
_SINGLE = r"single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"


class Flux2Dev:
    """Family `flux2_dev`."""

    name = "flux2_dev"
    title = "FLUX.2-dev"
    licence = "FLUX [dev] Non-Commercial License v2.0"
    cache_version = 1
    pixel_multiple = 16
    sample_kind = "image"
    control_counts = (0, 0)
    text_sees_controls = False
    max_sequence_length = 512
    caption = None
    text_keys = ()
    packed_by = None
    comfyui = "comfy/lora.py maps `transformer.<diffusers name>` by `flux_to_diffusers` of comfy/utils.py"
    comfyui_swaps = ("norm_out.linear",)
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.2-dev"},
        "data": {"max_sequence_length": 512},
        "flow": {"guidance_scale": 1.0},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 28},
    }
    lora_targets: Mapping[str, str] = {
        "attention": rf"{_DOUBLE}\.{_DOUBLE_ATTENTION}|{_SINGLE}",
        "all-linear": rf"{_DOUBLE}\.({_DOUBLE_ATTENTION}|{_DOUBLE_MLP})|{_SINGLE}",
    }
    # embedders and the modulation that all blocks share carry sigma and the caption; they are sensitive
    high_precision = (
        r"(x|context)_embedder|proj_out",
        r"time_guidance_embed\..*",
        r"\w+_stream_modulation\w*\.linear|norm_out\.linear",
    )
    modulation = (r"\w+_stream_modulation\w*\.linear",)
    blocks = ("Flux2TransformerBlock", "Flux2SingleTransformerBlock")
    trained_component = "transformer"
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = {"text": ("text_encoder",), "latents": ("vae",)}
    support_components = ("tokenizer", "scheduler")

    # as in FLUX.1: one token is 16x16 pixels, captions are padded to one length, blocks attend to both
    scan = staticmethod(FLUX1_DEV.scan)
    control_size = staticmethod(FLUX1_DEV.control_size)
    caption_tokens = staticmethod(limits.counted_in_chat("tokenizer", "PixtralProcessor"))
    vae_shape = staticmethod(FLUX1_DEV.vae_shape)
    batch_key = staticmethod(FLUX1_DEV.batch_key)
    collate = staticmethod(FLUX1_DEV.collate)
    settings = staticmethod(FLUX1_DEV.settings)
    load_adapter = staticmethod(FLUX1_DEV.load_adapter)
    attention_shape = staticmethod(FLUX1_DEV.attention_shape)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """Mistral behind the pipeline's own prompt encoding, or the VAE."""
        from diffusers import AutoencoderKLFlux2, Flux2Pipeline
        from transformers import Mistral3ForConditionalGeneration as Mistral
        from transformers import PixtralProcessor

        from trainer.modeling.base.load import load_component as load

        if kind == "latents":
            vae = load(AutoencoderKLFlux2, source, "vae", device=device, dtype=dtype)
            if vae_tiling:
                vae.enable_tiling()
            return vae
        return Flux2Pipeline(
            scheduler=None,
            vae=None,
            transformer=None,
            text_encoder=load(Mistral, source, "text_encoder", device=device, dtype=dtype),
            tokenizer=PixtralProcessor.from_pretrained(source.component("tokenizer")),
        )

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` (L, 3 D): Mistral's layers 10, 20 and 30 of the caption in the system's template.

        All captions are padded to one length, as the model was trained: it sees the padding.
        """
        import torch

        with torch.no_grad():
            prompt_embeds, _ = encoders.encode_prompt(prompt=text, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": prompt_embeds[0].cpu()}

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
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

    def draw(self, settings: flow.FlowSettings, positions: Sequence[int], latents: Header) -> Draw:
        """Noise of one micro-batch; the dynamic shift is Flux2Pipeline's for its default of 50 steps."""
        from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

        _, height, width = latents["mean"]
        dynamic = settings.scheduler["use_dynamic_shifting"]
        mu = compute_empirical_mu(height * width, num_steps=50) if dynamic else None
        return flow.draw_samples(settings, positions, latents["mean"], mu=mu)

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """Its own: all bases have blocks of one shape."""
        return self.name

    def model_class(self, source: ModelSource) -> Any:
        """diffusers' Flux2Transformer2DModel."""
        from diffusers import Flux2Transformer2DModel

        return Flux2Transformer2DModel

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
        import torch
        from diffusers import Flux2Pipeline

        noised = flow.interpolate(batch.latents["mean"], draw)
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
            txt_ids=flow.kept_on_device(
                _position_ids, Flux2Pipeline._prepare_text_ids, text.shape, text.device
            ),
            img_ids=flow.kept_on_device(
                _position_ids, Flux2Pipeline._prepare_latent_ids, noised.shape, text.device
            ),
            return_dict=False,
        )[0]
        # tokens are in rows; the pipeline's helper sorts them by their ids, and waits for the device to do so
        unpacked: torch.Tensor = packed.transpose(1, 2).unflatten(2, (height, width))
        return unpacked

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, batch.latents["mean"], batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """Random latents and captions for the LoRA proof and benchmarks, fp32 on the CPU."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        size = (shape.batch_size, config["in_channels"], shape.height // 16, shape.width // 16)
        text = (shape.batch_size, shape.text_tokens, config["joint_attention_dim"])
        return Batch(
            latents={"mean": torch.randn(size, generator=generator)},
            text={"prompt_embeds": torch.randn(text, generator=generator)},
            size=shape.batch_size,
            weight=float(shape.batch_size),
        )

    def preview(
        self,
        model: Any,
        source: ModelSource,
        encoders: Any,
        prompts: Sequence[PreviewPrompt],
        request: PreviewRequest,
        on_step: Callable[[], None],
    ) -> list[Image]:
        """One image a prompt through Flux2Pipeline, whose scheduler is a fresh one: a call rewrites it."""
        from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = {"text_encoder": None, "tokenizer": None}
        pipeline = Flux2Pipeline(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        inputs = [flow.on_device(prompt.text, model) for prompt in prompts]
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step)

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write with Flux2Pipeline.save_lora_weights."""
        from diffusers import Flux2Pipeline

        return flow.save_pipeline_lora(Flux2Pipeline, state, config, folder, name)

    def comfyui_keys(self, module: str) -> str | None:
        """diffusers' name, which ComfyUI maps for most; modulation and embeddings have its own names."""
        own = re.sub(r"^(\w+_stream_modulation\w*)\.linear$", r"\1.lin", module)
        for number, end in (("1", "in"), ("2", "out")):
            embedder = rf"^time_guidance_embed\.(time|guidance)(step)?_embedder\.linear_{number}$"
            own = re.sub(embedder, rf"\1_in.{end}_layer", own)
        return f"{'transformer' if own == module else 'diffusion_model'}.{own}"


def _position_ids(
    prepare: Callable[[Any], Any], shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """Positions (B, tokens, 4) by one of the pipeline's helpers, which reads its argument's shape alone."""
    import torch

    ids: torch.Tensor = prepare(torch.empty(shape, device="meta"))
    return ids.to(device)


FLUX2_DEV = Flux2Dev()
