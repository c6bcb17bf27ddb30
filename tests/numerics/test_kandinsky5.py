"""Kandinsky 5 against diffusers' own pipeline, on the tiny base and on a transformer of a few blocks.

There is no training script to compare with: what the pipeline's transformer is told must be what ours is
told, and the target is what the pipeline's scheduler takes a step with.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Kandinsky5T2IPipeline,
    Kandinsky5Transformer3DModel,
)

from tests import random_bases
from trainer.config.schema import FlowSection, RunConfig, TrainSection, ValidationSection
from trainer.families import draws
from trainer.families.kandinsky5 import KANDINSKY5
from trainer.families.values import Batch, Draw, PreviewPrompt, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.base.source import ModelSource

CONFIG = {
    "in_visual_dim": 16,
    "out_visual_dim": 16,
    "in_text_dim": 64,
    "in_text_dim2": 32,
    "time_dim": 64,
    "model_dim": 512,
    "ff_dim": 2048,
    "num_text_blocks": 1,
    "num_visual_blocks": 1,
    "axes_dims": (32, 48, 48),
}
CAPTION = "a photo of a cat on a green leaf"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kandinsky5") / "base"
    random_bases.build("kandinsky5", "tiny", folder)
    return folder


@pytest.fixture(scope="module")
def source(base: Path) -> ModelSource:
    return ModelSource(folder=base, identity="tiny", revision=None, random_components=frozenset(), seed=0)


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Kandinsky5T2IPipeline:
    """The real pipeline, told the length of its template in the tiny tokenizer, and our size."""
    pipeline = Kandinsky5T2IPipeline.from_pretrained(base)
    template = pipeline.prompt_template.removesuffix("{}<|im_end|>")
    ids = pipeline.tokenizer(text=[template], images=None, videos=None, return_tensors="pt")["input_ids"]
    pipeline.prompt_template_encode_start_idx = ids.shape[1]
    pipeline.resolutions = [(64, 96)]
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module")
def text_encoders(source: ModelSource) -> Any:
    return KANDINSKY5.load_encoders("text", source, device="cpu", dtype=torch.float32, vae_tiling=False)


def encode(encoders: Any, caption: str, length: int = 512) -> dict[str, torch.Tensor]:
    return KANDINSKY5.encode_text(encoders, caption, (), prompt=False, max_sequence_length=length)


def build(**changes: int) -> Kandinsky5Transformer3DModel:
    """Modulation starts at zero, which would hide what happens in the blocks."""
    torch.manual_seed(0)
    model = Kandinsky5Transformer3DModel(**{**CONFIG, **changes})
    for name, parameter in model.named_parameters():
        if "modulation" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def settings(**values: object) -> draws.FlowSettings:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    scheduler = {"use_dynamic_shifting": False}
    return draws.FlowSettings(sigmas=sigmas, flow=FlowSection(**values), seed=3, scheduler=scheduler)


def example(size: int = 128, count: int = 2, text_tokens: int = 16) -> Batch:
    shape = Shape(batch_size=count, width=size, height=size, text_tokens=text_tokens, bytes_per_value=4)
    return KANDINSKY5.synthetic_batch(CONFIG, shape, seed=1)


def header(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}


def drawn(batch: Batch, run: draws.FlowSettings) -> Draw:
    return KANDINSKY5.draw(run, range(batch.size), header(batch))


def calls(model: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Arguments of the model's calls inside the block."""
    seen: list[dict[str, Any]] = []

    def note(module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        assert not positional
        seen.append({name: value for name, value in named.items() if name != "return_dict"})

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


def same(left: Any, right: Any) -> bool:
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    assert left.shape == right.shape and left.dtype == right.dtype
    return torch.allclose(left.double(), right.double(), atol=1e-5, rtol=1e-5)


def test_the_transformer_is_told_what_the_pipeline_tells_it(
    pipeline: Kandinsky5T2IPipeline, text_encoders: Any
) -> None:
    """At each of three noise levels; the draw is solved so that our noised latents are the pipeline's."""
    model, entry = pipeline.transformer, encode(text_encoders, CAPTION)
    outputs: list[torch.Tensor] = []
    keep = model.register_forward_hook(lambda *arguments: outputs.append(arguments[-1].sample))
    for seen in calls(model):
        generator = torch.Generator().manual_seed(4)
        pipeline(CAPTION, width=64, height=96, num_inference_steps=3, guidance_scale=1.0, generator=generator)
        pipelines = [*seen]
    keep.remove()
    assert len(pipelines) == 3
    clean = torch.randn(1, 4, 12, 8, generator=torch.Generator().manual_seed(5))
    for theirs, output in zip(pipelines, outputs, strict=True):
        assert theirs.pop("scale_factor") == [1.0, 1.0, 1.0]  # the model's own defaults, both
        assert theirs.pop("sparse_params") is None
        sigma = theirs["timestep"] / 1000
        latents = theirs["hidden_states"][:, 0].permute(0, 3, 1, 2)
        noise = (latents - (1 - sigma) * clean) / sigma
        draw = Draw(sigma=sigma, noise=noise, vae_noise=torch.zeros_like(noise), weight=torch.ones(1))
        batch = KANDINSKY5.collate([entry], [{"mean": clean[0], "std": torch.zeros_like(clean[0])}])
        for seen in calls(model):
            with torch.no_grad():
                ours = KANDINSKY5.predict(model, batch, draw, settings())
            (told,) = seen
        assert told.keys() == theirs.keys()
        assert [name for name in told if not same(told[name], theirs[name])] == []
        # rotated queries are rounded to bf16 inside, so that 1e-7 of difference can become 1e-3
        assert torch.allclose(ours, output[:, 0].permute(0, 3, 1, 2), atol=1e-2)


def test_euler_steps_with_the_target_follow_the_straight_path(base: Path) -> None:
    """The pipeline's scheduler, fed our target, goes from noised latents to less noised, then clean ones."""
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(base, subfolder="scheduler")
    scheduler.set_timesteps(4)
    batch = example()
    draw, clean = drawn(batch, settings()), batch.latents["mean"]
    target = draw.noise - clean
    for step, time in enumerate(scheduler.timesteps):
        now, then = (
            Draw(**{**vars(draw), "sigma": scheduler.sigmas[at].expand(2)}) for at in (step, step + 1)
        )
        assert time.item() == pytest.approx(1000 * now.sigma[0].item())
        reached = scheduler.step(target, time, draws.interpolate(clean, now), return_dict=False)[0]
        assert torch.allclose(reached, draws.interpolate(clean, then), atol=1e-5)
    assert torch.allclose(reached, clean, atol=1e-5)


def test_loss_is_the_squared_error_of_the_velocity() -> None:
    model, batch, run = build(), example(), settings()
    draw = drawn(batch, run)
    with torch.no_grad():
        ours = KANDINSKY5.loss(model, batch, draw, run)
        latents = batch.latents["mean"] + batch.latents["std"] * draw.vae_noise
        prediction = KANDINSKY5.predict(model, batch, draw, run)
    theirs = ((prediction - (draw.noise - latents)) ** 2).flatten(1).mean(1)
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_training_sigmas_are_shifted_as_the_scheduler_is(source: ModelSource) -> None:
    """A static shift s moves sigma to s sigma / (1 + (s - 1) sigma); half way becomes 5/6 of the way."""
    config = RunConfig.model_construct(flow=FlowSection(), train=TrainSection())
    run = draws.settings(source, config)
    assert run.sigmas[500].item() == pytest.approx(5 / 6, abs=1e-3)
    middle = torch.stack([KANDINSKY5.draw(run, [p], {"mean": (1, 2, 2)}).sigma[0] for p in range(300)])
    assert middle.median().item() == pytest.approx(5 / 6, abs=0.03)


def test_a_number_is_multiplied_with_the_schedulers_own_shift(source: ModelSource) -> None:
    """The levels of a scheduler with the product, 0.6 times 5: 3 is what the model's authors draw with."""
    moved, plain = (
        draws.settings(source, RunConfig.model_construct(flow=flow, train=TrainSection()))
        for flow in (FlowSection(shift=0.6), FlowSection())
    )
    wanted = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas
    for position in range(20):
        ours, own = (KANDINSKY5.draw(run, [position], {"mean": (1, 2, 2)}).sigma for run in (moved, plain))
        (level,) = (plain.sigmas == own).nonzero()[0]
        assert ours.item() == pytest.approx(wanted[level].item(), rel=1e-5)


@pytest.mark.parametrize("caption", [CAPTION, "", "  two birds\n in a   tree &amp; {braces}"])
def test_text_is_encoded_as_the_pipeline_does(
    pipeline: Kandinsky5T2IPipeline, text_encoders: Any, caption: str
) -> None:
    entry = encode(text_encoders, caption)
    with torch.no_grad():
        qwen, clip, lengths = pipeline.encode_prompt(caption)
    assert torch.equal(entry["prompt_embeds_qwen"], qwen[0])
    assert torch.equal(entry["prompt_embeds_clip"], clip[0])
    assert lengths.tolist() == [0, len(entry["prompt_embeds_qwen"])]
    # what remains after the template's tokens is the caption and the end of the turn, without padding
    words = " ".join(caption.replace("&amp;", "&").split())
    ids = pipeline.tokenizer.tokenizer(f"{words}<|im_end|>")["input_ids"]
    assert len(ids) == len(entry["prompt_embeds_qwen"])


def test_template_tokens_are_counted_as_the_pipelines_constant_was(text_encoders: Any) -> None:
    """Words, marks, line ends, special tokens: 40 in the original, where each of them is one token."""
    before, _ = text_encoders.prompt_template.split("{}")
    split = text_encoders.tokenizer.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
    parts = [part for part in re.split(r"(<\|\w+\|>)", before) if part]
    pieces = [1 if part.startswith("<|") else len(split(part)) for part in parts]
    fresh = Kandinsky5T2IPipeline(
        **dict.fromkeys(text_encoders.config.keys() & text_encoders.components.keys())
    )
    assert sum(pieces) == fresh.prompt_template_encode_start_idx == 40
    assert text_encoders.prompt_template_encode_start_idx > 40


def test_long_captions_are_cut_and_lengths_never_share_a_batch(text_encoders: Any) -> None:
    long, short = encode(text_encoders, "cat " * 60, 32), encode(text_encoders, "cat")
    assert long["prompt_embeds_qwen"].shape[0] <= 32
    latents = {"mean": (4, 8, 8)}
    keys = [KANDINSKY5.batch_key(latents, {n: tuple(t.shape) for n, t in e.items()}) for e in (long, short)]
    assert keys[0] != keys[1]


def test_latents_are_what_the_pipeline_decodes(
    pipeline: Kandinsky5T2IPipeline, source: ModelSource, text_encoders: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transformer that predicts no velocity leaves latents alone: the VAE gets back what it gave."""
    vae = KANDINSKY5.load_encoders("latents", source, device="cpu", dtype=torch.float32, vae_tiling=False)
    pixels = torch.rand(3, 96, 64, generator=torch.Generator().manual_seed(2)) * 2 - 1
    entry = KANDINSKY5.encode_pixels(vae, pixels, ())
    with torch.no_grad():
        distribution = vae.encode(pixels[None]).latent_dist
    assert torch.allclose(entry["std"], 0.3611 * distribution.std[0])
    decoded: list[torch.Tensor] = []
    decode = AutoencoderKL.decode
    monkeypatch.setattr(AutoencoderKL, "decode", lambda vae, z: decoded.append(z) or decode(vae, z))
    still = pipeline.transformer.register_forward_hook(
        lambda *arguments: arguments[-1].__class__(sample=torch.zeros_like(arguments[-1].sample))
    )
    latents = entry["mean"].permute(1, 2, 0)[None, None]
    pipeline(CAPTION, width=64, height=96, num_inference_steps=2, guidance_scale=1.0, latents=latents)
    still.remove()
    assert torch.allclose(decoded[0], distribution.mode(), atol=1e-5)


def test_previews_are_the_pipelines_at_sizes_it_would_not_draw(
    pipeline: Kandinsky5T2IPipeline, source: ModelSource, text_encoders: Any
) -> None:
    """64 pixels, guided by the empty caption, pixel for pixel as the pipeline encodes and draws by itself."""
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
    sizes, steps = [(64, 64), (64, 96)], []
    text, empty = encode(text_encoders, CAPTION), encode(text_encoders, "")
    prompts = [
        PreviewPrompt(text=text, empty=empty, controls=(), width=width, height=height, number=number)
        for number, (width, height) in enumerate(sizes)
    ]
    for guidance in (3.5, 1.0):
        request = ValidationSection(num_inference_steps=2, guidance_scale=guidance, max_new_tokens=1, seed=7)
        for seen in calls(pipeline.transformer):
            images = KANDINSKY5.preview(
                pipeline.transformer, source, pipeline.vae, prompts, request, lambda: steps.append(1)
            )
            assert len(seen) == (8 if guidance > 1 else 4)
        pipeline.resolutions = sizes
        for number, (image, (width, height)) in enumerate(zip(images, sizes, strict=True)):
            options = {"width": width, "height": height, "num_inference_steps": 2, "guidance_scale": guidance}
            theirs = pipeline(CAPTION, generator=torch.Generator().manual_seed(7 + number), **options).image[
                0
            ]
            assert image.size == (width, height)
            assert image.tobytes() == theirs.tobytes()
    assert len(steps) == 8


def test_a_saved_lora_loads_as_the_pipeline_loads_it(base: Path, source: ModelSource, tmp_path: Path) -> None:
    def fresh() -> Kandinsky5Transformer3DModel:
        return KANDINSKY5.model_class(source).from_pretrained(base, subfolder="transformer")

    trained, run = fresh(), settings()
    shape = Shape(batch_size=1, width=64, height=64, text_tokens=5, bytes_per_value=4)
    batch = KANDINSKY5.synthetic_batch(trained.config, shape, seed=1)
    draw = drawn(batch, run)
    lora.add_lora(
        trained, rank=2, alpha=8, pattern=KANDINSKY5.lora_targets["all-linear"], seed=0, device="cpu"
    )
    KANDINSKY5.loss(trained, batch, draw, run).sum().backward()
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_B" in name:
                assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
                torch.nn.init.normal_(parameter, std=0.1)
        plain = KANDINSKY5.predict(fresh(), batch, draw, run)
        wanted = KANDINSKY5.predict(trained, batch, draw, run)
    state = lora.adapter_state(trained)
    path = KANDINSKY5.save_adapter(state, lora.adapter_config(trained), tmp_path, "style.safetensors")
    ours = fresh()
    KANDINSKY5.load_adapter(ours, path)
    pipeline = Kandinsky5T2IPipeline.from_pretrained(base)
    pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    for model in (ours, pipeline.transformer):
        with torch.no_grad():
            assert torch.allclose(KANDINSKY5.predict(model, batch, draw, run), wanted, atol=1e-6)
    assert (wanted - plain).abs().max() > 0.01
    assert KANDINSKY5.comfyui_keys("out_layer") == "diffusion_model.out_layer"


def test_blocks_recompute_under_checkpointing() -> None:
    model, batch, run = build(), example(64, 1), settings()
    lora.add_lora(model, rank=2, alpha=2, pattern=KANDINSKY5.lora_targets["attention"], seed=0, device="cpu")
    seen = []
    for block in (*model.text_transformer_blocks, *model.visual_transformer_blocks):
        block.self_attention.register_forward_pre_hook(lambda *_: seen.append(1))
    KANDINSKY5.loss(model.train(), batch, drawn(batch, run), run).mean().backward()
    plain = len(seen)
    model.enable_gradient_checkpointing()
    seen.clear()
    KANDINSKY5.loss(model.train(), batch, drawn(batch, run), run).mean().backward()
    assert (plain, len(seen)) == (2, 4)


def test_all_block_classes_exist_and_repeat() -> None:
    model = build(num_text_blocks=2, num_visual_blocks=3)
    found = [type(module).__name__ for module in model.modules()]
    assert [found.count(name) for name in KANDINSKY5.blocks] == [2, 3]


@pytest.mark.parametrize(("preset", "text", "visual"), [("attention", 4, 8), ("all-linear", 6, 10)])
def test_lora_targets_are_linears_of_every_block(preset: str, text: int, visual: int) -> None:
    model = build(num_text_blocks=2, num_visual_blocks=3)
    pattern = re.compile(KANDINSKY5.lora_targets[preset])
    matched = {name: module for name, module in model.named_modules() if pattern.fullmatch(name)}
    assert all(type(module) is torch.nn.Linear for module in matched.values())
    assert len(matched) == 2 * text + 3 * visual
    kept = re.compile("|".join(f"(?:{one})" for one in KANDINSKY5.high_precision))
    rest = {name for name in lora.linear_names(model) if kept.fullmatch(name)}
    assert rest.isdisjoint(matched)
    if preset == "all-linear":
        assert rest | matched.keys() == set(lora.linear_names(model))
