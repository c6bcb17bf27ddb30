"""Qwen-Image: text to image by flow matching (20 B transformer, Qwen2.5-VL, 16-channel VAE made for video).

Numerics follow diffusers' `train_dreambooth_lora_qwen_image.py` and `QwenImagePipeline`; tests hold them
together. Functions below the class serve the editing family too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families import flow, limits
from trainer.families.family import EntryKind
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import Batch, Draw, PreviewPrompt, PreviewRequest, Shape

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.modeling.base.source import ModelSource

_BLOCKS = r"transformer_blocks\.\d+"
_ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
_MLP = r"(img_mlp|txt_mlp)\.net\.(0\.proj|2)"
# the end of the pipeline's template counts against the limit, its beginning is dropped
_AFTER_CAPTION = "<|im_end|>\n<|im_start|>assistant\n"


class QwenImage:
    """Family `qwen_image`."""

    name = "qwen_image"
    title = "Qwen-Image"
    licence = "Apache-2.0"
    cache_version = 1
    pixel_multiple = 16
    sample_kind = "image"
    control_counts = (0, 0)
    text_sees_controls = False
    max_sequence_length = 1024
    caption = "prompt_embeds"
    text_keys = (r"transformer_blocks\.\d+\.attn",)
    packed_by = None
    comfyui = "comfy/lora.py, model_lora_keys_unet: for QwenImage `transformer.<its own name of the module>`"
    comfyui_swaps = ()
    defaults: Mapping[str, Mapping[str, Any]] = {
        "model": {"pretrained_model_name_or_path": "Qwen/Qwen-Image"},
        "validation": {"guidance_scale": 4.0, "num_inference_steps": 30},
    }
    lora_targets: Mapping[str, str] = {
        "attention": rf"{_BLOCKS}\.{_ATTENTION}",
        "all-linear": rf"{_BLOCKS}\.({_ATTENTION}|{_MLP})",
    }
    # embedders and modulation carry sigma and the caption into every block; they are sensitive
    high_precision = (r"img_in|txt_in|proj_out", r"time_text_embed\..*", r".*_mod\.1", r"norm_out\.linear")
    modulation = (r".*_mod\.1",)
    blocks = ("QwenImageTransformerBlock",)
    trained_component = "transformer"
    encoder_components: Mapping[EntryKind, tuple[str, ...]] = {"text": ("text_encoder",), "latents": ("vae",)}
    support_components = ("tokenizer", "scheduler")

    # what these do for FLUX.1-dev holds here: latents are packed and shifted alike, entries have equal names
    scan = staticmethod(FLUX1_DEV.scan)
    control_size = staticmethod(FLUX1_DEV.control_size)
    caption_tokens = staticmethod(limits.counted("tokenizer", "Qwen2Tokenizer", after=_AFTER_CAPTION))
    batch_key = staticmethod(FLUX1_DEV.batch_key)
    collate = staticmethod(FLUX1_DEV.collate)
    settings = staticmethod(FLUX1_DEV.settings)
    draw = staticmethod(FLUX1_DEV.draw)
    load_adapter = staticmethod(FLUX1_DEV.load_adapter)
    comfyui_keys = staticmethod(FLUX1_DEV.comfyui_keys)
    attention_shape = staticmethod(FLUX1_DEV.attention_shape)

    def load_encoders(
        self, kind: EntryKind, source: ModelSource, *, device: str, dtype: torch.dtype, vae_tiling: bool
    ) -> Any:
        """Qwen2.5-VL behind the pipeline's own prompt encoding, or the VAE."""
        from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
        from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

        from trainer.modeling.base.load import load_component as load

        if kind == "latents":
            vae = load(AutoencoderKLQwenImage, source, "vae", device=device, dtype=dtype)
            if vae_tiling:
                vae.enable_tiling()
            return vae
        model_class = Qwen2_5_VLForConditionalGeneration
        return QwenImagePipeline(
            scheduler=None,
            vae=None,
            transformer=None,
            text_encoder=load(model_class, source, "text_encoder", device=device, dtype=dtype),
            tokenizer=Qwen2Tokenizer.from_pretrained(source.component("tokenizer")),
        )

    def encode_text(
        self, encoders: Any, text: str, controls: Sequence[Image], *, prompt: bool, max_sequence_length: int
    ) -> dict[str, torch.Tensor]:
        """`prompt_embeds` (L, D) of the caption and the end of the template, not padded."""
        import torch

        with torch.no_grad():
            embeds, _ = encoders.encode_prompt(prompt=text, max_sequence_length=max_sequence_length)
        return {"prompt_embeds": embeds[0].cpu()}

    def encode_pixels(
        self, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
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

    def vae_shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Three times the channels: padding and caches for video take that much more than AutoencoderKL's."""
        factors: Sequence[int] = config["dim_mult"]
        return 3 * config["base_dim"] * factors[min(1, len(factors) - 1)], 256

    def counted_as(self, config: Mapping[str, Any]) -> str:
        """Its own: all bases have blocks of one shape."""
        return self.name

    def model_class(self, source: ModelSource) -> Any:
        """diffusers' QwenImageTransformer2DModel."""
        from diffusers import QwenImageTransformer2DModel

        return QwenImageTransformer2DModel

    def predict(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Velocity (B, C, h, w) that the transformer predicts for the noised latents."""
        return predict_velocity(model, batch, draw, controls=())

    def loss(self, model: Any, batch: Batch, draw: Draw, settings: flow.FlowSettings) -> torch.Tensor:
        """Squared error of the predicted velocity, one value a sample."""
        prediction = self.predict(model, batch, draw, settings)
        return flow.velocity_loss(prediction, flow.sample_latents(batch, draw), batch, draw)

    def synthetic_batch(self, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
        """Random latents and captions for the LoRA proof and benchmarks, fp32 on the CPU."""
        import torch

        generator = torch.Generator().manual_seed(seed)
        size = (shape.batch_size, config["in_channels"] // 4, shape.height // 8, shape.width // 8)
        text = (shape.batch_size, shape.text_tokens, config["joint_attention_dim"])
        return Batch(
            latents={"mean": torch.randn(size, generator=generator), "std": torch.full(size, 0.1)},
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
        """One image a prompt through QwenImagePipeline with a fresh scheduler, whose calls rewrite it.

        Guidance above 1 is classifier-free, against the empty caption.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler, QwenImagePipeline

        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
        absent = dict.fromkeys(("text_encoder", "tokenizer"))
        pipeline = QwenImagePipeline(scheduler=scheduler, vae=encoders, transformer=model, **absent)
        inputs = [pipeline_inputs(prompt, request, model) for prompt in prompts]
        return flow.run_pipeline(pipeline, inputs, prompts, request, on_step, guidance="true_cfg_scale")

    def save_adapter(
        self, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
    ) -> Path:
        """Write with QwenImagePipeline.save_lora_weights."""
        from diffusers import QwenImagePipeline

        return flow.save_pipeline_lora(QwenImagePipeline, state, config, folder, name)


def predict_velocity(model: Any, batch: Batch, draw: Draw, controls: Sequence[torch.Tensor]) -> torch.Tensor:
    """The transformer's output (B, C, h, w) for the noised latents, with controls after them as tokens."""
    import torch
    from diffusers import QwenImagePipeline

    from trainer.families.control_times import keep_time_index

    keep_time_index(model)
    noised = flow.interpolate(flow.sample_latents(batch, draw), draw)
    text = batch.text["prompt_embeds"]
    count, channels, height, width = noised.shape
    images = [noised, *controls]
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


def pipeline_inputs(prompt: PreviewPrompt, request: PreviewRequest, model: Any) -> dict[str, Any]:
    """Arguments of a pipeline call: embeddings, and those of the empty caption where guidance needs them."""
    import torch

    embeds = flow.on_device(prompt.text, model)
    if prompt.empty is not None and request.guidance_scale > 1:
        empty = flow.on_device(prompt.empty, model)
        embeds |= {f"negative_{name}": value for name, value in empty.items()}
    # no token is padding; the limit is the pipelines' highest, else they cut at 512
    masks = {
        f"{name}_mask": torch.ones(value.shape[:2], dtype=torch.long, device=value.device)
        for name, value in embeds.items()
    }
    return {**embeds, **masks, "max_sequence_length": 1024}


QWEN_IMAGE = QwenImage()
