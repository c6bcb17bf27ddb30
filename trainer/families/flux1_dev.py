"""FLUX.1-dev: text to image by guidance-distilled flow matching (12 B transformer, CLIP, T5, 16-channel VAE).

Numerics follow diffusers' `train_dreambooth_lora_flux.py` and `FluxPipeline`; tests hold them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families import flow, limits
from trainer.families.family import EntryKind
from trainer.families.values import AttentionShape, Batch, Draw, Header, PreviewPrompt, PreviewRequest, Shape

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import RunConfig
    from trainer.data.records import Scan
    from trainer.modeling.base.source import ModelSource

_BLOCKS = r"(transformer_blocks|single_transformer_blocks)\.\d+"
_ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
_MLP = r"(ff|ff_context)\.net\.(0\.proj|2)|proj_mlp|proj_out"


class Flux1Dev:
    """Family `flux1_dev`."""

    name = "flux1_dev"
    title = "FLUX.1-dev"
    licence = "FLUX.1 [dev] Non-Commercial License"
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
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev"},
        "flow": {"guidance_scale": 1.0},
        "validation": {"guidance_scale": 3.5, "num_inference_steps": 28},
    }
    lora_targets: Mapping[str, str] = {
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|{_MLP})",
    }
    # embedders and modulation carry sigma and the caption into every block; they are small and sensitive
    high_precision = (r"(x|context)_embedder|proj_out", r"time_text_embed\..*", r".*\.?norm\w*\.linear")
    modulation = (r"(single_)?transformer_blocks\..*\.norm\w*\.linear",)
    blocks = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    trained_component = "transformer"
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = {
        "text": ("text_encoder", "text_encoder_2"),
        "latents": ("vae",),
    }
    support_components = ("tokenizer", "tokenizer_2", "scheduler")
    vae_shape = staticmethod(flow.autoencoder_kl_shape)
    collate = staticmethod(flow.collate)
    control_size = staticmethod(flow.unchanged_size)
    caption_tokens = staticmethod(limits.counted("tokenizer_2", "T5Tokenizer"))
    load_adapter = staticmethod(flow.load_pipeline_lora)

    def scan(self, config: RunConfig, progress: Callable[[int, int], None] | None) -> Scan:
        """All captioned images of the run's sets."""
        return flow.scan(config, progress, multiple=self.pixel_multiple)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """CLIP and T5 behind the pipeline's own prompt encoding, or the VAE."""
        from diffusers import AutoencoderKL, FluxPipeline
        from transformers import CLIPTextModel, CLIPTokenizer, T5EncoderModel, T5Tokenizer

        from trainer.modeling.base.load import load_component as load

        if kind == "latents":
            vae = load(AutoencoderKL, source, "vae", device=device, dtype=dtype)
            if vae_tiling:
                vae.enable_tiling()
            return vae
        return FluxPipeline(
            scheduler=None,
            vae=None,
            transformer=None,
            text_encoder=load(CLIPTextModel, source, "text_encoder", device=device, dtype=dtype),
            text_encoder_2=load(T5EncoderModel, source, "text_encoder_2", device=device, dtype=dtype),
            tokenizer=CLIPTokenizer.from_pretrained(source.component("tokenizer")),
            tokenizer_2=T5Tokenizer.from_pretrained(source.component("tokenizer_2")),
        )

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` (L, D) from T5, padded to one length, `pooled_prompt_embeds` (P,) from CLIP."""
        import torch

        with torch.no_grad():
            prompt_embeds, pooled, _ = encoders.encode_prompt(
                prompt=text, prompt_2=None, max_sequence_length=max_sequence_length
            )
        return {"prompt_embeds": prompt_embeds[0].cpu(), "pooled_prompt_embeds": pooled[0].cpu()}

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`mean` and `std` (C, h, w) fp32 of the latents, already shifted and scaled for training."""
        import torch

        with torch.no_grad():
            distribution = encoders.encode(pixels[None].to(encoders.device, encoders.dtype)).latent_dist
        scale = encoders.config.scaling_factor
        mean = (distribution.mean.float() - encoders.config.shift_factor) * scale
        return {"mean": mean[0].cpu(), "std": (distribution.std.float() * scale)[0].cpu()}

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Latent shape and text length; T5 pads every caption to one length."""
        return (latents["mean"], text["prompt_embeds"])

    def settings(self, source: ModelSource, config: RunConfig) -> flow.FlowSettings:
        """Noise levels of the base model's scheduler and the run's flow section."""
        return flow.read_settings(source.component("scheduler"), config.flow, config.train.seed)

    def draw(self, settings: flow.FlowSettings, positions: Sequence[int], latents: Header) -> Draw:
        """Noise of one micro-batch; the VAE's own sampling is drawn here too."""
        _, height, width = latents["mean"]
        mu = flow.dynamic_mu(settings, height * width // 4)
        return flow.draw_samples(settings, positions, latents["mean"], mu=mu)

    def model_class(self, source: ModelSource) -> Any:
        """diffusers' FluxTransformer2DModel."""
        from diffusers import FluxTransformer2DModel

        return FluxTransformer2DModel

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
        import torch
        from diffusers import FluxPipeline

        noised = flow.interpolate(flow.sample_latents(batch, draw), draw)
        count, channels, height, width = noised.shape
        text = batch.text["prompt_embeds"]
        guidance = None
        if model.config.guidance_embeds:
            guidance = torch.full((count,), settings.flow.guidance_scale, device=noised.device)
        # positions are those of one picture, whatever number of them the pipeline's helper is told
        size = (1, height // 2, width // 2, text.device, text.dtype)
        packed = model(
            hidden_states=FluxPipeline._pack_latents(noised.to(text.dtype), count, channels, height, width),
            timestep=draw.sigma.to(text.dtype),
            guidance=guidance,
            pooled_projections=batch.text["pooled_prompt_embeds"],
            encoder_hidden_states=text,
            txt_ids=torch.zeros(text.shape[1], 3, device=text.device, dtype=text.dtype),
            img_ids=flow.kept_on_device(FluxPipeline._prepare_latent_image_ids, *size),
            return_dict=False,
        )[0]
        # the scale factor 1 makes the pipeline's helper count in latent pixels
        return FluxPipeline._unpack_latents(packed, height, width, vae_scale_factor=1)

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, flow.sample_latents(batch, draw), batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """Random latents and captions for the LoRA proof and benchmarks, fp32 on the CPU."""
        import torch

        normal = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
        size = (shape.batch_size, config["in_channels"] // 4, shape.height // 8, shape.width // 8)
        text = (shape.batch_size, shape.text_tokens, config["joint_attention_dim"])
        pooled = (shape.batch_size, config["pooled_projection_dim"])
        return Batch(
            latents={"mean": normal(size), "std": torch.full(size, 0.1)},
            text={"prompt_embeds": normal(text), "pooled_prompt_embeds": normal(pooled)},
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
        """One image a prompt through FluxPipeline, whose scheduler is a fresh one: a call rewrites it."""
        from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        pipeline = FluxPipeline(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        inputs = [flow.on_device(prompt.text, model) for prompt in prompts]
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step)

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write with FluxPipeline.save_lora_weights."""
        from diffusers import FluxPipeline

        return flow.save_pipeline_lora(FluxPipeline, state, config, folder, name)

    def comfyui_keys(self, module: str) -> str | None:
        """ComfyUI's comfy/lora.py maps `transformer.<diffusers name>` for FLUX by `flux_to_diffusers`."""
        return f"transformer.{module}"

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """Its own: all bases have blocks of one shape."""
        return self.name

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """Joint attention over text and image tokens."""
        return AttentionShape(
            batch_size=shape.batch_size,
            heads=config["num_attention_heads"],
            head_width=config["attention_head_dim"],
            tokens=shape.height * shape.width // 256 + shape.text_tokens,
        )


FLUX1_DEV = Flux1Dev()
