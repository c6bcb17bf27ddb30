"""Qwen-Image against diffusers' training formula and its pipeline, on tiny models."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
)
from diffusers.training_utils import compute_loss_weighting_for_sd3
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import random_bases
from trainer.config.schema import FlowSection, RunConfig, TrainSection, ValidationSection
from trainer.families import diffusion, draws, losses
from trainer.families.qwen_image import QWEN_IMAGE
from trainer.families.values import Batch, Draw, PreviewPrompt, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.base.source import ModelSource

CONFIG: dict[str, Any] = {
    "patch_size": 2,
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 1,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "axes_dims_rope": (16, 56, 56),
    "zero_cond_t": False,
}
CAPTION = "a red apple on a white house"


def build(**changes: Any) -> QwenImageTransformer2DModel:
    torch.manual_seed(0)
    return QwenImageTransformer2DModel(**{**CONFIG, **changes})


def settings(**values: Any) -> draws.FlowSettings:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    return draws.FlowSettings(
        sigmas=sigmas, flow=FlowSection(**values), seed=3, scheduler={"use_dynamic_shifting": False}
    )


def example(height: int = 128, width: int = 64, count: int = 2) -> Batch:
    shape = Shape(batch_size=count, width=width, height=height, text_tokens=16, bytes_per_value=4)
    return QWEN_IMAGE.synthetic_batch(CONFIG, shape, seed=1)


def header(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "qwen_image"
    random_bases.build("qwen_image", "tiny", folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(base: Path) -> QwenImagePipeline:
    loaded = DiffusionPipeline.from_pretrained(base)
    loaded.set_progress_bar_config(disable=True)
    return loaded


@pytest.fixture(scope="module")
def source(base: Path) -> ModelSource:
    return ModelSource(folder=base, identity="tiny", revision=None, random_components=frozenset(), seed=0)


def load_encoders(kind: Any, source: ModelSource) -> Any:
    return QWEN_IMAGE.load_encoders(kind, source, device="cpu", dtype=torch.float32, vae_tiling=False)


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "sigma_sqrt", "mode", "cosmap"])
def test_loss_is_that_of_the_diffusers_training_script(scheme: str) -> None:
    """The formula of examples/dreambooth/train_dreambooth_lora_qwen_image.py, with its helper functions."""
    model, batch, run = build(), example(), settings(weighting_scheme=scheme)
    draw = QWEN_IMAGE.draw(run, [5, 6], header(batch))
    with torch.no_grad():
        ours = QWEN_IMAGE.loss(model, batch, draw, run).mean()

        clean = (batch.latents["mean"] + batch.latents["std"] * draw.vae_noise).unsqueeze(2)
        noise, sigmas = draw.noise.unsqueeze(2), draw.sigma.view(-1, 1, 1, 1, 1)
        noisy = ((1.0 - sigmas) * clean + sigmas * noise).permute(0, 2, 1, 3, 4)
        count, _, channels, height, width = noisy.shape
        prediction = model(
            hidden_states=QwenImagePipeline._pack_latents(noisy, count, channels, height, width),
            encoder_hidden_states=batch.text["prompt_embeds"],
            encoder_hidden_states_mask=torch.ones(count, 16, dtype=torch.long),
            timestep=draw.sigma * 1000 / 1000,
            img_shapes=[(1, height // 2, width // 2)] * count,
            return_dict=False,
        )[0]
        prediction = QwenImagePipeline._unpack_latents(prediction, height * 8, width * 8, 8)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        error = weighting.float() * (prediction - (noise - clean)) ** 2
        theirs = torch.mean(error.reshape(count, -1), 1).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_one_euler_step_with_the_target_reaches_the_clean_latents(source: ModelSource) -> None:
    """The step of the base's scheduler at its last noise level."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
    scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=0.7)
    batch = example(count=1)
    clean, noise = batch.latents["mean"], torch.randn(batch.latents["mean"].shape)
    sigma = scheduler.sigmas[1:2]
    draw = Draw(sigma=sigma, noise=noise, vae_noise=torch.zeros_like(clean), weight=torch.ones(1))
    noised = draws.interpolate(clean, draw)
    reached = scheduler.step(noise - clean, scheduler.timesteps[1], noised, return_dict=False)[0]
    assert torch.allclose(reached, clean, atol=1e-5)
    zero = losses.velocity_loss(noise - clean, clean, batch, draw)
    assert zero.item() == pytest.approx(0, abs=1e-10)


def test_the_shift_is_the_pipelines(source: ModelSource) -> None:
    """`flow.shift: resolution` moves a level as the pipeline's scheduler does at the same count of tokens."""
    from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
    flat, moved = (
        draws.settings(source, RunConfig.model_construct(flow=flow, train=TrainSection(seed=3)))
        for flow in (FlowSection(), FlowSection(shift="resolution"))
    )
    one = {"mean": (16, 128, 96)}
    plain, shifted = QWEN_IMAGE.draw(flat, [4], one).sigma, QWEN_IMAGE.draw(moved, [4], one).sigma
    mu = calculate_shift(128 * 96 // 4, 256, 8192, 0.5, 0.9)
    assert shifted.item() == pytest.approx(scheduler.time_shift(mu, 1.0, plain).item(), rel=1e-5)


def test_the_transformer_is_called_as_by_the_pipeline(pipeline: QwenImagePipeline) -> None:
    """One sigma of a real call: the same arguments, and the same velocity of the same latents."""
    calls: list[dict[str, Any]] = []
    results: list[torch.Tensor] = []
    with torch.no_grad():
        hooks = [
            pipeline.transformer.register_forward_pre_hook(lambda m, a, k: calls.append(k), with_kwargs=True),
            pipeline.transformer.register_forward_hook(lambda m, a, out: results.append(out[0])),
        ]
        pipeline(
            prompt=CAPTION,
            width=64,
            height=96,
            true_cfg_scale=1.0,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
        )
        theirs, velocity = calls[1], results[1]  # a sigma below 1
        entry = QWEN_IMAGE.encode_text(pipeline, CAPTION, (), prompt=True, max_sequence_length=512)
        latents = QWEN_IMAGE.encode_pixels(pipeline.vae, torch.zeros(3, 96, 64), ())
        clean, sigma = latents["mean"][None], theirs["timestep"]
        now = QwenImagePipeline._unpack_latents(theirs["hidden_states"], 12, 8, 1)[:, :, 0]
        draw = Draw(
            sigma=sigma,
            noise=(now - (1 - sigma) * clean) / sigma,
            vae_noise=torch.zeros_like(clean),
            weight=torch.ones(1),
        )
        ours = QWEN_IMAGE.predict(
            pipeline.transformer, QWEN_IMAGE.collate([entry], [latents]), draw, settings()
        )
        for hook in hooks:
            hook.remove()
    assert 0 < sigma.item() < 1
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(calls[-1][name], value, atol=1e-5), name
    assert calls[-1]["img_shapes"] == theirs["img_shapes"]
    assert theirs["encoder_hidden_states_mask"] is None and theirs["guidance"] is None
    expected = QwenImagePipeline._unpack_latents(velocity, 12, 8, 1)[:, :, 0]
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("text", ["", CAPTION, "zebra 7 crossings, {braces}\nand a new line"])
@pytest.mark.parametrize("length", [8, 512])
def test_text_entry_is_the_pipelines(
    pipeline: QwenImagePipeline, source: ModelSource, text: str, length: int
) -> None:
    entry = QWEN_IMAGE.encode_text(
        load_encoders("text", source), text, (), prompt=False, max_sequence_length=length
    )
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(prompt=text, max_sequence_length=length)
    assert torch.equal(entry["prompt_embeds"], embeds[0])
    assert mask is None  # nothing is padded


def test_the_dropped_tokens_are_the_templates(pipeline: QwenImagePipeline) -> None:
    """The pipeline's constant counts the tokens before the caption: each word there is one token."""
    prefix, _, rest = pipeline.prompt_template_encode.partition("{}")
    count = len(pipeline.tokenizer(prefix).input_ids)
    assert count == pipeline.prompt_template_encode_start_idx
    embeds, _ = pipeline.encode_prompt(prompt=CAPTION)
    assert embeds.shape[1] == len(pipeline.tokenizer(CAPTION + rest).input_ids)


def test_latents_entry_is_what_the_pipeline_decodes(
    pipeline: QwenImagePipeline, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pipeline scales latents back to those of the VAE."""
    pixels = torch.rand(3, 64, 48, generator=torch.Generator().manual_seed(2)) * 2 - 1
    entry = QWEN_IMAGE.encode_pixels(load_encoders("latents", source), pixels, ())
    with torch.no_grad():
        distribution = pipeline.vae.encode(pixels[None, :, None]).latent_dist
    decoded: list[torch.Tensor] = []
    decode = pipeline.vae.decode
    monkeypatch.setattr(
        pipeline.vae, "decode", lambda z, **_: (decoded.append(z), decode(z, return_dict=False))[1]
    )
    packed = QwenImagePipeline._pack_latents(entry["mean"][None], 1, 4, 8, 6)

    def replace(_: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        return {"latents": packed}

    pipeline(
        prompt="", width=48, height=64, true_cfg_scale=1, num_inference_steps=2, callback_on_step_end=replace
    )
    assert torch.allclose(decoded[0], distribution.mean, atol=1e-5)
    spread = torch.tensor(pipeline.vae.config.latents_std).view(-1, 1, 1)
    assert torch.allclose(entry["std"] * spread, distribution.std[0, :, 0], atol=1e-6)


def test_previews_are_the_pipelines_images(pipeline: QwenImagePipeline, source: ModelSource) -> None:
    """With guidance against the empty caption and without, from entries instead of captions."""
    entries = [
        QWEN_IMAGE.encode_text(pipeline, text, (), prompt=True, max_sequence_length=512)
        for text in (CAPTION, "")
    ]
    prompt = PreviewPrompt(text=entries[0], empty=entries[1], controls=(), width=64, height=48, number=0)
    vae, steps = load_encoders("latents", source), []
    for guidance in (1.0, 4.0):
        request = ValidationSection(num_inference_steps=2, guidance_scale=guidance, max_new_tokens=1, seed=5)
        (ours,) = QWEN_IMAGE.preview(
            pipeline.transformer, source, vae, [prompt], request, lambda: steps.append(1)
        )
        theirs = pipeline(
            prompt=CAPTION,
            negative_prompt="" if guidance > 1 else None,
            true_cfg_scale=guidance,
            width=64,
            height=48,
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(5),
        ).images[0]
        assert ours.size == (64, 48)
        assert ours.tobytes() == theirs.tobytes()
    assert len(steps) == 4


def test_a_preview_of_one_step_is_no_black_image(pipeline: QwenImagePipeline, source: ModelSource) -> None:
    """The scheduler stretches levels to a last one, which of a single level are not numbers any more."""
    text = QWEN_IMAGE.encode_text(pipeline, CAPTION, (), prompt=True, max_sequence_length=512)
    prompt = PreviewPrompt(text=text, empty=None, controls=(), width=64, height=48, number=0)
    request = ValidationSection(num_inference_steps=1, guidance_scale=1.0, seed=5)
    vae = load_encoders("latents", source)
    (image,) = QWEN_IMAGE.preview(pipeline.transformer, source, vae, [prompt], request, lambda: None)
    assert image.getextrema() != ((0, 0), (0, 0), (0, 0))


def test_blocks_recompute_under_checkpointing() -> None:
    model, batch, run = build(num_layers=2), example(64, 64, 1), settings()
    lora.add_lora(model, rank=2, alpha=2, pattern=QWEN_IMAGE.lora_targets["attention"], seed=0, device="cpu")
    calls = []
    for block in model.transformer_blocks:
        block.attn.register_forward_pre_hook(lambda *_: calls.append(1))
    draw = QWEN_IMAGE.draw(run, [0], header(batch))
    QWEN_IMAGE.loss(model.train(), batch, draw, run).mean().backward()
    plain = len(calls)
    model.enable_gradient_checkpointing()
    calls.clear()
    QWEN_IMAGE.loss(model.train(), batch, draw, run).mean().backward()
    assert (plain, len(calls)) == (2, 4)


def test_all_block_classes_exist_and_repeat() -> None:
    found = [type(module).__name__ for module in build(num_layers=3).modules()]
    assert [found.count(name) for name in QWEN_IMAGE.blocks] == [3]


@pytest.mark.parametrize(("preset", "count"), [("attention", 8), ("all-linear", 12)])
def test_lora_targets_are_the_linears_of_every_block(preset: str, count: int) -> None:
    pattern = re.compile(QWEN_IMAGE.lora_targets[preset])
    matched = {
        name: module for name, module in build(num_layers=2).named_modules() if pattern.fullmatch(name)
    }
    assert len(matched) == 2 * count
    assert all(type(module) is torch.nn.Linear for module in matched.values())


def test_linears_outside_the_targets_keep_their_precision() -> None:
    """Attention and MLPs alone may be quantised."""
    targets, kept = QWEN_IMAGE.lora_targets["all-linear"], "|".join(QWEN_IMAGE.high_precision)
    for name, module in build(num_layers=2).named_modules():
        if isinstance(module, torch.nn.Linear):
            assert bool(re.fullmatch(targets, name)) != bool(re.fullmatch(kept, name)), name


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside hold at a time; `peak` after the block."""

    def __init__(self) -> None:
        super().__init__()
        self.holders: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                self.now += size if key not in self.holders else 0
                self.holders[key] = self.holders.get(key, 0) + 1
                weakref.finalize(tensor, self.release, key, size)
        self.peak = max(self.peak, self.now)
        return result

    def release(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if not self.holders[key]:
            del self.holders[key]
            self.now -= size


def test_vae_shape_counts_what_decoding_takes_over_an_autoencoder_kl() -> None:
    """The planner knows the peak of AutoencoderKL by its widest channels at full size."""
    side, ours = 64, AutoencoderKLQwenImage(base_dim=24)
    channels = (32, 64, 64, 64)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    theirs = AutoencoderKL(
        block_out_channels=channels, layers_per_block=2, latent_channels=16, sample_size=side, **blocks
    )
    with torch.no_grad(), LiveBytes() as kl:
        theirs.decode(torch.zeros(1, 16, side // 8, side // 8))
    with torch.no_grad(), LiveBytes() as video:
        ours.decode(torch.zeros(1, 16, 1, side // 8, side // 8))
    width, tile = QWEN_IMAGE.vae_shape(ours.config)
    assert tile == ours.tile_sample_min_height
    assert video.peak / kl.peak == pytest.approx(width / diffusion.vae_shape(theirs.config)[0], rel=0.06)


def test_an_adapter_is_saved_under_the_names_that_comfyui_maps(tmp_path: Path) -> None:
    """The saved adapter loads again, alpha included."""
    pattern = QWEN_IMAGE.lora_targets["attention"]
    model, fresh = build(), build()
    lora.add_lora(model, rank=2, alpha=3, pattern=pattern, seed=0, device="cpu")
    state = {name: torch.ones_like(value) for name, value in lora.adapter_state(model).items()}
    path = QWEN_IMAGE.save_adapter(state, lora.adapter_config(model), tmp_path, "lora.safetensors")
    modules = {name.partition(".lora_")[0] for name in load_file(path)}
    targets = {name for name, _ in build().named_modules() if re.fullmatch(pattern, name)}
    assert modules == {QWEN_IMAGE.comfyui_keys(name) for name in targets}
    QWEN_IMAGE.load_adapter(fresh, path)
    assert lora.adapter_config(fresh)["lora_alpha"] == 3
    loaded = lora.adapter_state(fresh)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
