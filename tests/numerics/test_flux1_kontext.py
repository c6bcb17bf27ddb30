"""FLUX.1-Kontext-dev against diffusers' training formula and its pipeline, on tiny models."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    AutoencoderKL,
    DiffusionPipeline,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
)
from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS
from diffusers.training_utils import compute_loss_weighting_for_sd3
from PIL import Image

from trainer.config.schema import FlowSection, ValidationSection
from trainer.data.pictures.images import fit, to_pixels
from trainer.families import draws
from trainer.families.flux1_kontext import FLUX1_KONTEXT
from trainer.families.values import Batch, Draw, PreviewPrompt, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.base.source import ModelSource

CONFIG: dict[str, Any] = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 56, 56),
}
CAPTION = "a red apple on a white house"


def build(**changes: int) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**{**CONFIG, **changes})


def settings(**values: Any) -> draws.FlowSettings:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    return draws.FlowSettings(
        sigmas=sigmas, flow=FlowSection(**values), seed=3, scheduler={"use_dynamic_shifting": False}
    )


def example(height: int = 128, width: int = 64, count: int = 2) -> Batch:
    shape = Shape(batch_size=count, width=width, height=height, text_tokens=16, bytes_per_value=4)
    return FLUX1_KONTEXT.synthetic_batch(CONFIG, shape, seed=1)


def with_control(batch: Batch, control: torch.Tensor) -> Batch:
    latents = {**batch.latents, "control_0": control}
    return Batch(latents=latents, text=batch.text, size=batch.size, weight=batch.weight)


def header(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


@pytest.fixture(scope="module")
def base(tiny_base: Callable[[str], Path]) -> Path:
    return tiny_base("flux1_kontext")


@pytest.fixture(scope="module")
def pipeline(base: Path) -> FluxKontextPipeline:
    loaded = DiffusionPipeline.from_pretrained(base)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def source(base: Path) -> ModelSource:
    return ModelSource(folder=base, identity="tiny", revision=None, random_components=frozenset(), seed=0)


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "sigma_sqrt"])
@pytest.mark.parametrize("control_size", [(16, 8), (8, 12)])
def test_loss_is_that_of_the_diffusers_training_script(scheme: str, control_size: tuple[int, int]) -> None:
    """The formula of examples/dreambooth/train_dreambooth_lora_flux_kontext.py, with its helper functions."""
    model, run = build(), settings(weighting_scheme=scheme, guidance_scale=3.5)
    generator = torch.Generator().manual_seed(9)
    batch = with_control(example(), torch.randn(2, 16, *control_size, generator=generator))
    draw = FLUX1_KONTEXT.draw(run, [5, 6], header(batch))
    with torch.no_grad():
        ours = FLUX1_KONTEXT.loss(model, batch, draw, run).mean()

        clean = batch.latents["mean"] + batch.latents["std"] * draw.vae_noise
        condition = batch.latents["control_0"]
        sigmas = draw.sigma.view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * clean + sigmas * draw.noise
        count, channels, height, width = clean.shape
        pack, make_ids = FluxKontextPipeline._pack_latents, FluxKontextPipeline._prepare_latent_image_ids
        ids = make_ids(count, height // 2, width // 2, noisy.device, noisy.dtype)
        rows, columns = control_size
        condition_ids = make_ids(count, rows // 2, columns // 2, noisy.device, noisy.dtype)
        condition_ids[..., 0] = 1
        packed = pack(noisy, count, channels, height, width)
        packed_condition = pack(condition, count, channels, rows, columns)
        prediction = model(
            hidden_states=torch.cat([packed, packed_condition], dim=1),
            timestep=draw.sigma * 1000 / 1000,
            guidance=torch.tensor([3.5]).expand(count),
            pooled_projections=batch.text["pooled_prompt_embeds"],
            encoder_hidden_states=batch.text["prompt_embeds"],
            txt_ids=torch.zeros(16, 3),
            img_ids=torch.cat([ids, condition_ids], dim=0),
            return_dict=False,
        )[0][:, : packed.shape[1]]
        unpack = FluxKontextPipeline._unpack_latents
        prediction = unpack(prediction, height * 8, width * 8, vae_scale_factor=8)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        error = weighting.float() * (prediction - (draw.noise - clean)) ** 2
        theirs = torch.mean(error.reshape(count, -1), 1).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_the_transformer_is_called_as_by_the_pipeline(pipeline: FluxKontextPipeline) -> None:
    """One sigma of a real call: the same arguments, and the same velocity of the same latents."""
    calls: list[dict[str, Any]] = []
    results: list[torch.Tensor] = []
    image = picture(64, 96)
    with torch.no_grad():
        hooks = [
            pipeline.transformer.register_forward_pre_hook(lambda m, a, k: calls.append(k), with_kwargs=True),
            pipeline.transformer.register_forward_hook(lambda m, a, out: results.append(out[0])),
        ]
        pipeline(
            image=image,
            prompt=CAPTION,
            width=64,
            height=64,
            max_area=64 * 64,
            _auto_resize=False,
            num_inference_steps=3,
            guidance_scale=2.5,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
            max_sequence_length=32,
        )
        theirs, velocity = calls[1], results[1]  # a sigma below 1
        entry = FLUX1_KONTEXT.encode_text(pipeline, CAPTION, (), prompt=True, max_sequence_length=32)
        latents = FLUX1_KONTEXT.encode_pixels(pipeline.vae, torch.zeros(3, 64, 64), [to_pixels(image)])
        clean, sigma = latents["mean"][None], theirs["timestep"]
        packed = theirs["hidden_states"][:, :64]
        now = FluxPipeline._unpack_latents(packed, 16, 16, vae_scale_factor=1)
        draw = Draw(
            sigma=sigma,
            noise=(now - (1 - sigma) * clean) / sigma,
            vae_noise=torch.zeros_like(clean),
            weight=torch.ones(1),
        )
        batch = FLUX1_KONTEXT.collate([entry], [latents])
        ours = FLUX1_KONTEXT.predict(pipeline.transformer, batch, draw, settings(guidance_scale=2.5))
        for hook in hooks:
            hook.remove()
    assert 0 < sigma.item() < 1
    for name, value in calls[-1].items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(value, theirs[name], atol=1e-5), name
    assert calls[-1]["hidden_states"].shape[1] == 64 + 96  # packed 8 x 8 pixels to a token
    expected = FluxPipeline._unpack_latents(velocity[:, :64], 16, 16, vae_scale_factor=1)
    assert torch.allclose(ours, expected, atol=1e-5)


def load_encoders(kind: Any, source: ModelSource) -> Any:
    return FLUX1_KONTEXT.load_encoders(kind, source, device="cpu", dtype=torch.float32, vae_tiling=False)


def test_text_entry_is_the_pipelines(pipeline: FluxKontextPipeline, source: ModelSource) -> None:
    encoders = load_encoders("text", source)
    entry = FLUX1_KONTEXT.encode_text(encoders, CAPTION, (), prompt=False, max_sequence_length=48)
    with torch.no_grad():
        embeds, pooled, ids = pipeline.encode_prompt(prompt=CAPTION, prompt_2=None, max_sequence_length=48)
    assert torch.equal(entry["prompt_embeds"], embeds[0])
    assert torch.equal(entry["pooled_prompt_embeds"], pooled[0])
    assert not ids.any()  # what predict passes


def test_latents_entry_is_the_pipelines(pipeline: FluxKontextPipeline, source: ModelSource) -> None:
    vae = load_encoders("latents", source)
    target, control = to_pixels(picture(64, 32)), to_pixels(picture(48, 80))
    entry = FLUX1_KONTEXT.encode_pixels(vae, target, [control])
    with torch.no_grad():
        _, packed, _, _ = pipeline.prepare_latents(
            control[None], 1, 4, 64, 64, torch.float32, torch.device("cpu"), torch.Generator()
        )
        distribution = pipeline.vae.encode(target[None]).latent_dist
    rows, columns = entry["control_0"].shape[1:]
    theirs = FluxKontextPipeline._unpack_latents(packed, rows, columns, vae_scale_factor=1)
    assert torch.allclose(entry["control_0"], theirs[0], atol=1e-6)
    back = entry["mean"] / vae.config.scaling_factor + vae.config.shift_factor  # as the pipeline decodes
    assert torch.allclose(back, distribution.mean[0], atol=1e-5)
    assert torch.allclose(entry["std"] / vae.config.scaling_factor, distribution.std[0], atol=1e-5)


class Stopped(Exception):
    """Ends a pipeline call before its transformer runs."""


def stop_at_latents(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments that the pipeline hands to prepare_latents; each call then raises Stopped."""
    seen: dict[str, Any] = {}

    def stop(self: Any, image: Any, batch_size: int, channels: int, height: int, width: int, *_: Any) -> None:
        seen.update(image=image, size=(width, height))
        raise Stopped

    monkeypatch.setattr(FluxKontextPipeline, "prepare_latents", stop)
    return seen


@pytest.mark.parametrize(
    "size", [(1024, 1024), (500, 333), (333, 500), (3000, 2000), (1920, 1080), (40, 900), (900, 40), (47, 31)]
)
def test_control_size_is_the_pipelines_choice(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = stop_at_latents(monkeypatch)
    torch.manual_seed(0)
    four_levels = AutoencoderKL(
        block_out_channels=[4] * 4,
        down_block_types=["DownEncoderBlock2D"] * 4,
        up_block_types=["UpDecoderBlock2D"] * 4,
        norm_num_groups=2,
        latent_channels=16,
    )
    absent = dict.fromkeys(("scheduler", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    real = FluxKontextPipeline(vae=four_levels, transformer=build(), **absent)
    with pytest.raises(Stopped):
        real(
            image=picture(*size),
            prompt_embeds=torch.zeros(1, 4, 64),
            pooled_prompt_embeds=torch.zeros(1, 32),
            width=64,
            height=64,
        )
    height, width = seen["image"].shape[-2:]
    assert FLUX1_KONTEXT.control_size(*size) == (width, height)


def test_control_sizes_fit_the_packing() -> None:
    multiple = FLUX1_KONTEXT.pixel_multiple
    assert all(side % multiple == 0 for size in PREFERRED_KONTEXT_RESOLUTIONS for side in size)
    assert all(FLUX1_KONTEXT.control_size(*size) == size for size in PREFERRED_KONTEXT_RESOLUTIONS)
    assert FLUX1_KONTEXT.control_size(5, 9) == (1024, 1024)  # less than one token


def preview(pipeline: Any, source: ModelSource, control: Image.Image, on_step: Callable[[], None]) -> Any:
    entry = FLUX1_KONTEXT.encode_text(pipeline, CAPTION, (), prompt=True, max_sequence_length=32)
    prompt = PreviewPrompt(text=entry, empty=None, controls=(control,), width=96, height=64, number=0)
    request = ValidationSection(num_inference_steps=2, guidance_scale=2.5, max_new_tokens=1, seed=0)
    return FLUX1_KONTEXT.preview(pipeline.transformer, source, pipeline.vae, [prompt], request, on_step)


def test_a_preview_has_the_size_asked_for_and_reads_its_control(
    pipeline: FluxKontextPipeline, source: ModelSource
) -> None:
    steps: list[int] = []
    controls = [Image.new("RGB", (96, 64), color) for color in ("black", "black", "white")]
    images = [preview(pipeline, source, control, lambda: steps.append(1)) for control in controls]
    (first,), (again,), (other,) = images
    assert first.size == (96, 64)
    assert len(steps) == 6
    assert first.tobytes() == again.tobytes() != other.tobytes()


@pytest.mark.parametrize("size", [(96, 64), (300, 150), (64, 96), (1536, 1024)])
def test_a_preview_cuts_its_control_as_training_does(
    size: tuple[int, int], pipeline: FluxKontextPipeline, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training has `fit` give a control of the target's size the bucket's size."""
    seen, control = stop_at_latents(monkeypatch), picture(*size)
    with pytest.raises(Stopped):
        preview(pipeline, source, control, lambda: None)
    assert seen["size"] == (96, 64)
    assert torch.allclose(seen["image"][0], to_pixels(fit(control, 96, 64)), atol=1e-5)


def test_samples_share_a_batch_by_the_sizes_of_both_images() -> None:
    latents, text = header(example()), {"prompt_embeds": (16, 64), "pooled_prompt_embeds": (32,)}
    key = FLUX1_KONTEXT.batch_key(latents, text)
    assert FLUX1_KONTEXT.batch_key({**latents, "control_0": (16, 8, 16)}, text) != key
    assert FLUX1_KONTEXT.batch_key({**latents, "mean": (16, 8, 16)}, text) != key


def test_adapters_are_written_by_the_function_that_both_pipelines_have() -> None:
    ours, base = FluxKontextPipeline.save_lora_weights, FluxPipeline.save_lora_weights
    assert ours.__func__ is base.__func__


def test_the_kernel_probe_runs_the_attention_of_all_tokens() -> None:
    shape = Shape(batch_size=2, width=1024, height=1024, text_tokens=512, bytes_per_value=2)
    assert FLUX1_KONTEXT.attention_shape(CONFIG, shape).tokens == 2 * 4096 + 512


def test_blocks_repeat_and_recompute_under_checkpointing() -> None:
    model, batch, run = build(num_layers=2, num_single_layers=3), example(64, 64, 1), settings()
    found = [type(module).__name__ for module in model.modules()]
    assert [found.count(name) for name in FLUX1_KONTEXT.blocks] == [2, 3]
    pattern = FLUX1_KONTEXT.lora_targets["attention"]
    lora.add_lora(model, rank=2, alpha=2, pattern=pattern, seed=0, device="cpu")
    calls: list[int] = []
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.register_forward_pre_hook(lambda *_: calls.append(1))
    draw = FLUX1_KONTEXT.draw(run, [0], header(batch))
    FLUX1_KONTEXT.loss(model.train(), batch, draw, run).mean().backward()
    plain = len(calls)
    model.enable_gradient_checkpointing()
    FLUX1_KONTEXT.loss(model.train(), batch, draw, run).mean().backward()
    assert (plain, len(calls) - plain) == (5, 10)


@pytest.mark.parametrize(("preset", "double", "single"), [("attention", 8, 3), ("all-linear", 12, 5)])
def test_lora_targets_are_linears_of_every_block(preset: str, double: int, single: int) -> None:
    model = build(num_layers=2, num_single_layers=3)
    pattern = re.compile(FLUX1_KONTEXT.lora_targets[preset])
    found = {name: module for name, module in model.named_modules() if pattern.fullmatch(name)}
    assert all(isinstance(module, torch.nn.Linear) for module in found.values())
    assert len(found) == 2 * double + 3 * single
