"""Functions that diffusion families have in common, driven by a family's `Pipeline`: its classes by name, and
where the sizes of its tensors stand.

torch, diffusers and transformers are imported inside the functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families.values import (
    AttentionShape,
    Batch,
    EntryKind,
    Header,
    PreviewPrompt,
    Rows,
    Shape,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import ValidationSection
    from trainer.modeling.base.source import ModelSource

JOINT_ATTENTION = r"attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
"""Linear layers of the attention of one block over the tokens of text and image."""
Arguments = Callable[[Any, PreviewPrompt, Mapping[str, "torch.Tensor"]], Mapping[str, Any]]
Encode = Callable[[Any, "torch.Tensor", Sequence["torch.Tensor"]], dict[str, "torch.Tensor"]]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """A family's pipeline as data. A token of its transformer is 16 x 16 pixels of the image."""

    name: str
    """Class of the pipeline in diffusers; `vae` is a class there too."""
    name_by_base: Callable[[ModelSource], str] | None = None
    """Class that encodes text and draws previews for a base, where bases differ."""
    vae: str
    encoders: Mapping[str, str]
    """Classes of the text encoders in transformers, by folder; `tokenizers` likewise."""
    tokenizers: Mapping[str, str]
    prepare: Callable[[Any], None] = lambda pipeline: None
    """Sets up the pipeline before it encodes text."""
    guidance: str = "guidance_scale"
    """Argument of the pipeline's call that gets `validation.guidance_scale`."""
    against_empty: bool = False
    """Guidance above 1 is classifier-free, against the empty caption."""
    arguments: Arguments = lambda pipeline, prompt, embeds: {}
    """More arguments of a call of this pipeline for a prompt, whose embeddings are a batch of one."""
    channels: str = "in_channels"
    """Key of the transformer's config for the latents' channels, `patch` times their number."""
    patch: int = 1
    stride: int = 8
    """Pixels of the image's side in one latent pixel."""
    sampled: bool = True
    """Whether latents are drawn from the VAE's `mean` and `std` at each step; else they are its mode."""
    text_widths: Mapping[str, str]
    """Text tensors (L, D) by name: keys of the transformer's config for their widths."""
    pooled_widths: Mapping[str, str] = field(default_factory=dict)
    """The same for pooled tensors (P,). The pipeline's `encode_prompt` returns these after `text_widths`."""
    least_controls: int = 0
    """Fewest control images of a sample."""


def load_encoders(
    pipeline: Pipeline,
    kind: EntryKind,
    source: ModelSource,
    *,
    device: str,
    dtype: torch.dtype,
    vae_tiling: bool,
) -> Any:
    """Text encoders and tokenizers behind the pipeline's own prompt encoding, or the VAE."""
    import diffusers
    import transformers

    from trainer.modeling.base.load import load_component

    if kind == "latents":
        vae = load_component(getattr(diffusers, pipeline.vae), source, "vae", device=device, dtype=dtype)
        if vae_tiling:
            vae.enable_tiling()
        return vae
    parts: dict[str, Any] = dict.fromkeys(("scheduler", "vae", "transformer"))
    for name, encoder in pipeline.encoders.items():
        encoder_class = getattr(transformers, encoder)
        parts[name] = load_component(encoder_class, source, name, device=device, dtype=dtype)
    for name, tokenizer in pipeline.tokenizers.items():
        parts[name] = getattr(transformers, tokenizer).from_pretrained(source.component(name))
    made = getattr(diffusers, _name(pipeline, source))(**parts)
    pipeline.prepare(made)
    return made


def _name(pipeline: Pipeline, source: ModelSource) -> str:
    return pipeline.name if pipeline.name_by_base is None else pipeline.name_by_base(source)


def caption_tokens(
    pipeline: Pipeline, name: str, source: ModelSource, *, after: str = ""
) -> Callable[[str], int]:
    """A counter of the tokens of a caption with `after` behind it, special ones included.

    `name` is the tokenizer's folder, `after` the end of a template whose beginning does not count.
    """
    import transformers

    loaded = getattr(transformers, pipeline.tokenizers[name]).from_pretrained(source.component(name))
    # a processor reads pictures besides; its texts are its tokenizer's
    tokenizer = loaded.tokenizer if isinstance(loaded, transformers.ProcessorMixin) else loaded
    return lambda text: len(tokenizer(text + after, verbose=False).input_ids)


def encode_text(
    pipeline: Pipeline,
    encoders: Any,
    text: str,
    controls: Sequence[Image],
    *,
    prompt: bool,
    max_sequence_length: int,
) -> dict[str, torch.Tensor]:
    """The text entry that the pipeline's own prompt encoding makes of a caption."""
    import torch

    names = (*pipeline.text_widths, *pipeline.pooled_widths)
    with torch.no_grad():
        embeds = encoders.encode_prompt(prompt=text, max_sequence_length=max_sequence_length)
    return {name: one[0].cpu() for name, one in zip(names, embeds[: len(names)], strict=True)}


def encode_with_controls(
    encode: Encode, encoders: Any, pixels: torch.Tensor, controls: Sequence[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The entry that `encode` writes of the target, and of each control, `control_0` and on, the mode."""
    # a Gaussian's mode is its mean
    modes = [encode(encoders, control, ())["mean"] for control in controls]
    return encode(encoders, pixels, ()) | {f"control_{index}": mode for index, mode in enumerate(modes)}


def functions(pipeline: Pipeline) -> dict[str, Any]:
    """The fields of `Family` that depend on its pipeline alone: a variant of another one replaces all."""
    shared = (load_encoders, encode_text, synthetic_batch, preview, save_adapter, attention_shape)
    made: dict[str, Any] = {one.__name__: functools.partial(one, pipeline) for one in shared}
    return {**made, "takes_negative": pipeline.against_empty}


def vae_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """`Family.vae_shape` of diffusers' AutoencoderKL and those built like it."""
    channels: Sequence[int] = config["block_out_channels"]
    return channels[min(1, len(channels) - 1)], config["sample_size"]


def control_names(latents: Mapping[str, Any]) -> list[str]:
    """Names of the controls of one entry or batch, in their order."""
    return sorted(name for name in latents if name.startswith("control_"))


def batch_key(latents: Header, text: Header) -> tuple[Any, ...]:
    """Shapes of the latents of target and controls, and of the text as long as it is, or is padded to."""
    named = (latents[name] for name in control_names(latents))
    return (latents["mean"], *named, *(text[name] for name in sorted(text)))


def collate(text: Rows, latents: Rows) -> Batch:
    """Stack the entries of samples whose tensors have equal shapes."""
    import torch

    clean, captions = (
        {name: torch.stack([row[name] for row in rows]) for name in rows[0]} for rows in (latents, text)
    )
    return Batch(latents=clean, text=captions, size=len(latents), weight=float(len(latents)))


# a CUDA graph may read them still: twice the engine's MOST_SETS, and room for those of previews
@functools.lru_cache(maxsize=1024)
def kept_on_device(make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """The result of `make(*arguments)`, made once: position ids made each step would wait for the device."""
    return make(*arguments)


def synthetic_batch(pipeline: Pipeline, config: Mapping[str, Any], shape: Shape, seed: int) -> Batch:
    """Random latents and captions for the LoRA proof and benchmarks, fp32 on the CPU, with a control of the
    target's size where the family edits.
    """
    import torch

    count, generator = shape.batch_size, torch.Generator().manual_seed(seed)
    height, width = shape.height // pipeline.stride, shape.width // pipeline.stride
    channels = config[pipeline.channels] // pipeline.patch
    mean = torch.randn((count, channels, height, width), generator=generator)
    latents, text = {"mean": mean}, {}
    for name, key in pipeline.text_widths.items():
        text[name] = torch.randn((count, shape.text_tokens, config[key]), generator=generator)
    for name, key in pipeline.pooled_widths.items():
        text[name] = torch.randn((count, config[key]), generator=generator)
    if pipeline.sampled:
        latents["std"] = torch.full_like(mean, 0.1)
    if pipeline.least_controls:
        latents["control_0"] = torch.randn(mean.shape, generator=generator.manual_seed(seed + 1))
    return Batch(latents=latents, text=text, size=count, weight=float(count))


def attention_shape(pipeline: Pipeline, config: Mapping[str, Any], shape: Shape) -> AttentionShape:
    """Joint attention over the tokens of text, target and controls."""
    pixels = shape.height * shape.width
    if pipeline.least_controls:
        pixels += max(pipeline.least_controls, shape.controls) * (shape.control_pixels or pixels)
    return AttentionShape(
        batch_size=shape.batch_size,
        heads=config["num_attention_heads"],
        head_width=config["attention_head_dim"],
        tokens=pixels // 256 + shape.text_tokens,
    )


def preview(
    pipeline: Pipeline,
    model: Any,
    source: ModelSource,
    encoders: Any,
    prompts: Sequence[PreviewPrompt],
    validation: ValidationSection,
    on_step: Callable[[], None],
) -> list[Image]:
    """One image a prompt, each from its own seeded generator, through the pipeline with a fresh scheduler: a
    call rewrites it. `on_step` runs after every denoising step; what it raises ends the call.
    """
    import diffusers
    import torch

    def step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    # a single level cannot be stretched to a last one: diffusers divides zero by zero, and draws black
    changes = {"shift_terminal": None} if validation.num_inference_steps == 1 else {}
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(
        source.component("scheduler"), **changes
    )
    parts: dict[str, Any] = dict.fromkeys((*pipeline.encoders, *pipeline.tokenizers))
    parts |= {"scheduler": scheduler, "vae": encoders, "transformer": model}
    made = getattr(diffusers, _name(pipeline, source))(**parts)
    made.set_progress_bar_config(disable=True)
    images: list[Image] = []
    for prompt in prompts:
        texts = dict(prompt.text)
        if pipeline.against_empty and prompt.empty is not None and validation.guidance_scale > 1:
            texts |= {f"negative_{name}": one for name, one in prompt.empty.items()}
        # a batch of one; floating values in the model's type
        embeds = {
            name: one[None].to(model.device, model.dtype if one.is_floating_point() else one.dtype)
            for name, one in texts.items()
        }
        images += made(
            **embeds,
            **pipeline.arguments(made, prompt, embeds),
            **{pipeline.guidance: validation.guidance_scale},
            width=prompt.width,
            height=prompt.height,
            num_inference_steps=validation.num_inference_steps,
            generator=torch.Generator().manual_seed(validation.seed + prompt.number),
            callback_on_step_end=step_end,
            return_dict=False,  # some pipelines call their result otherwise
        )[0]
    return images


def save_adapter(
    pipeline: Pipeline, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
) -> Path:
    """Write with the pipeline's save_lora_weights, metadata included: without it alpha is lost."""
    import diffusers

    from trainer.modeling.adapter.lora import portable_config

    getattr(diffusers, pipeline.name).save_lora_weights(
        folder,
        transformer_lora_layers=dict(state),
        weight_name=name,
        transformer_lora_adapter_metadata=portable_config(config),
    )
    return folder / name


def load_adapter(model: Any, path: Path) -> None:
    """Load as diffusers' pipelines do; `load_lora_adapter` also takes a quantised transformer.

    Raises DataError where a part of the file is for no layer of the model.
    """
    from trainer.modeling.adapter.adapter_file import require_fits
    from trainer.modeling.adapter.lora import ADAPTER

    require_fits(model, path, "transformer.")
    model.load_lora_adapter(path.parent, weight_name=path.name, prefix="transformer", adapter_name=ADAPTER)
