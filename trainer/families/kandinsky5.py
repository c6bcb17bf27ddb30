"""Kandinsky 5 Image Lite: text to image by flow matching (6 B transformer, Qwen2.5-VL, CLIP, FLUX.1's VAE).

Numerics follow diffusers' `Kandinsky5T2IPipeline`, which has no training script; tests hold them together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families import flow, limits
from trainer.families.family import EntryKind
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import AttentionShape, Batch, Draw, Header, PreviewPrompt, PreviewRequest, Shape

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.modeling.base.source import ModelSource

_BLOCKS = r"(text|visual)_transformer_blocks\.\d+"
# by their parents: the model's own `out_layer` is no linear, and modulation has one of that name
_ATTENTION = r"(self|cross)_attention\.(to_query|to_key|to_value|out_layer)"


class Kandinsky5:
    """Family `kandinsky5`."""

    name = "kandinsky5"
    title = "Kandinsky 5 Image Lite"
    licence = "MIT"
    cache_version = 1
    pixel_multiple = 16
    sample_kind = "image"
    control_counts = (0, 0)
    text_sees_controls = False
    max_sequence_length = 512
    caption = "prompt_embeds_qwen"
    text_keys = (
        r"text_transformer_blocks\.\d+\.self_attention",
        r"visual_transformer_blocks\.\d+\.cross_attention",
    )
    packed_by = None
    comfyui = (
        "comfy/lora.py maps `diffusion_model.<name>`; comfy/ldm/kandinsky5/model.py has diffusers' names"
    )
    comfyui_swaps = ()
    # the values that the model's authors train LoRAs with (kandinskylab/kandinsky-5-lora-train)
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "kandinskylab/Kandinsky-5.0-T2I-Lite-sft-Diffusers"},
        "lora": {"rank": 32, "alpha": 32.0, "target_modules": "all-linear"},
        "train": {"adam_beta2": 0.95, "weight_decay": 0.0},
        "flow": {"weighting_scheme": "logit_normal"},
        "validation": {"guidance_scale": 3.5, "num_inference_steps": 50},
    }
    lora_targets: Mapping[str, str] = {
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|feed_forward\.(in_layer|out_layer))",
    }
    # embedders and modulation carry sigma and the caption into every block; they are small and sensitive
    high_precision = (r"\w+_embeddings\..*", r".*modulation\.out_layer", r"out_layer\.out_layer")
    modulation = ()  # the class keeps them in fp32
    blocks = ("Kandinsky5TransformerEncoderBlock", "Kandinsky5TransformerDecoderBlock")
    trained_component = FLUX1_DEV.trained_component
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = FLUX1_DEV.encoder_components
    support_components = FLUX1_DEV.support_components

    # images, VAE and LoRA files are as FLUX.1's; `draw` has no dynamic shift where the scheduler's is static
    scan = staticmethod(FLUX1_DEV.scan)
    control_size = staticmethod(FLUX1_DEV.control_size)
    caption_tokens = staticmethod(limits.counted("tokenizer", "Qwen2VLProcessor", after="<|im_end|>"))
    vae_shape = staticmethod(FLUX1_DEV.vae_shape)
    collate = staticmethod(FLUX1_DEV.collate)
    settings = staticmethod(FLUX1_DEV.settings)
    draw = staticmethod(FLUX1_DEV.draw)
    load_adapter = staticmethod(FLUX1_DEV.load_adapter)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """Qwen2.5-VL and CLIP behind the pipeline's own prompt encoding, or the VAE."""
        import transformers
        from diffusers import Kandinsky5T2IPipeline

        from trainer.modeling.base.load import load_component as load

        if kind == "latents":
            return FLUX1_DEV.load_encoders(kind, source, device=device, dtype=dtype, vae_tiling=vae_tiling)
        qwen, clip = transformers.Qwen2_5_VLForConditionalGeneration, transformers.CLIPTextModel
        pipeline: Any = Kandinsky5T2IPipeline(
            **dict.fromkeys(("scheduler", "vae", "transformer")),
            text_encoder=load(qwen, source, "text_encoder", device=device, dtype=dtype),
            text_encoder_2=load(clip, source, "text_encoder_2", device=device, dtype=dtype),
            tokenizer=transformers.Qwen2VLProcessor.from_pretrained(source.component("tokenizer")),
            tokenizer_2=transformers.CLIPTokenizer.from_pretrained(source.component("tokenizer_2")),
        )
        # the pipeline's constant is the length of its template in the original tokenizer: 40
        before, _ = pipeline.prompt_template.split("{}")
        pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer.tokenizer(before)["input_ids"])
        return pipeline

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds_qwen` (L, D), as long as the caption, and `prompt_embeds_clip` (P,)."""
        import torch

        with torch.no_grad():
            qwen, clip, _ = encoders.encode_prompt(prompt=text, max_sequence_length=max_sequence_length)
        return {"prompt_embeds_qwen": qwen[0].cpu(), "prompt_embeds_clip": clip[0].cpu()}

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """`mean` and `std` (C, h, w) fp32 of the latents, already scaled for training; no shift here."""
        import torch

        with torch.no_grad():
            distribution = encoders.encode(pixels[None].to(encoders.device, encoders.dtype)).latent_dist
        scale = encoders.config.scaling_factor
        mean, std = ((part[0].float() * scale).cpu() for part in (distribution.mean, distribution.std))
        return {"mean": mean, "std": std}

    def batch_key(self, latents: Header, text: Header) -> tuple[Any, ...]:
        """Latent shape and text length, which is the padded one where captions are padded."""
        return (latents["mean"], text["prompt_embeds_qwen"])

    def model_class(self, source: ModelSource) -> Any:
        """diffusers' Kandinsky5Transformer3DModel."""
        from diffusers import Kandinsky5Transformer3DModel

        return Kandinsky5Transformer3DModel

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
        import torch

        noised = flow.interpolate(flow.sample_latents(batch, draw), draw)
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

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, flow.sample_latents(batch, draw), batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """Random latents and captions for the LoRA proof and benchmarks, fp32 on the CPU."""
        import torch

        count, generator = shape.batch_size, torch.Generator().manual_seed(seed)
        normal = functools.partial(torch.randn, generator=generator)
        mean = normal((count, config["in_visual_dim"], shape.height // 8, shape.width // 8))
        qwen = normal((count, shape.text_tokens, config["in_text_dim"]))
        clip = normal((count, config["in_text_dim2"]))
        return Batch(
            latents={"mean": mean, "std": torch.full_like(mean, 0.1)},
            text={"prompt_embeds_qwen": qwen, "prompt_embeds_clip": clip},
            size=count,
            weight=float(count),
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
        """One image a prompt through Kandinsky5T2IPipeline, whose scheduler is fresh: a call rewrites it."""
        from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky5T2IPipeline

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = dict.fromkeys(("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        pipeline: Any = Kandinsky5T2IPipeline(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        # other sizes would be replaced by the nearest of its own seven
        pipeline.resolutions = [(prompt.width, prompt.height) for prompt in prompts]
        inputs = [_arguments(prompt.text, model) for prompt in prompts]
        for arguments, prompt in zip(inputs, prompts, strict=True):
            if prompt.empty is not None and request.guidance_scale > 1:
                arguments.update(_arguments(prompt.empty, model, prefix="negative_"))
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step)

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write with Kandinsky5T2IPipeline.save_lora_weights."""
        from diffusers import Kandinsky5T2IPipeline

        return flow.save_pipeline_lora(Kandinsky5T2IPipeline, state, config, folder, name)

    def comfyui_keys(self, module: str) -> str | None:
        """ComfyUI's own module names are diffusers', and comfy/lora.py takes them for every model."""
        return f"diffusion_model.{module}"

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """Its own: all bases have blocks of one shape."""
        return self.name

    def attention_shape(self, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
        """Self-attention over image tokens."""
        width, tokens = sum(config["axes_dims"]), shape.height * shape.width // 256
        heads = config["model_dim"] // width
        return AttentionShape(batch_size=shape.batch_size, heads=heads, head_width=width, tokens=tokens)


def _arguments(text: Mapping[str, torch.Tensor], model: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """A text entry as arguments of the pipeline, which takes the length of the one caption as a pair."""
    import torch

    lengths = torch.tensor([0, len(text["prompt_embeds_qwen"])])
    arguments = flow.on_device(text, model) | {"prompt_cu_seqlens": lengths}
    return {prefix + name: value for name, value in arguments.items()}


KANDINSKY5 = Kandinsky5()
