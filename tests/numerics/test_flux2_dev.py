"""FLUX.2-dev against diffusers' own formulas and pipeline: small transformers, and the tiny base."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2 import SYSTEM_MESSAGE, compute_empirical_mu
from diffusers.training_utils import compute_loss_weighting_for_sd3

from tests import random_bases
from trainer.config.schema import FlowSection, ValidationSection
from trainer.families import draws
from trainer.families.flux2_dev import FLUX2_DEV
from trainer.families.values import Batch, Draw, PreviewPrompt, Shape
from trainer.modeling.adapter import lora
from trainer.modeling.base.source import ModelSource
from trainer.planning.shapes.geometry import TABLES

# the real width of heads, and the real mlp_ratio, which is the class' default
CONFIG = {
    "in_channels": 128,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 128,
    "num_attention_heads": 2,
    "joint_attention_dim": 64,
    "timestep_guidance_channels": 32,
}


def build(**changes: Any) -> Flux2Transformer2DModel:
    torch.manual_seed(0)
    return Flux2Transformer2DModel(**{**CONFIG, **changes})


def settings(**values: Any) -> draws.FlowSettings:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    scheduler = {"use_dynamic_shifting": True}
    return draws.FlowSettings(sigmas=sigmas, flow=FlowSection(**values), seed=3, scheduler=scheduler)


def example(height: int = 128, width: int = 64, count: int = 2) -> Batch:
    shape = Shape(batch_size=count, width=width, height=height, text_tokens=16, bytes_per_value=4)
    return FLUX2_DEV.synthetic_batch(CONFIG, shape, seed=1)


def header(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "sigma_sqrt", "mode", "cosmap"])
def test_loss_is_that_of_the_diffusers_training_script(scheme: str) -> None:
    """The formula of examples/dreambooth/train_dreambooth_lora_flux2.py, with its helper functions."""
    model, batch = build(), example()
    run = settings(weighting_scheme=scheme, guidance_scale=3.5)
    draw = FLUX2_DEV.draw(run, [5, 6], header(batch))
    with torch.no_grad():
        ours = FLUX2_DEV.loss(model, batch, draw, run).mean()

        model_input = batch.latents["mean"]
        model_input_ids = Flux2Pipeline._prepare_latent_ids(model_input)
        sigmas = draw.sigma.view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * model_input + sigmas * draw.noise
        prediction = model(
            hidden_states=Flux2Pipeline._pack_latents(noisy),
            timestep=draw.sigma * 1000 / 1000,
            guidance=torch.full([1], 3.5).expand(len(noisy)),
            encoder_hidden_states=batch.text["prompt_embeds"],
            txt_ids=Flux2Pipeline._prepare_text_ids(batch.text["prompt_embeds"]),
            img_ids=model_input_ids,
            return_dict=False,
        )[0]
        prediction = Flux2Pipeline._unpack_latents_with_ids(prediction, model_input_ids)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        target = draw.noise - model_input
        squares = weighting.float() * (prediction.float() - target.float()) ** 2
        theirs = torch.mean(squares.reshape(target.shape[0], -1), 1).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_one_step_of_the_scheduler_with_the_target_reaches_the_clean_latents() -> None:
    batch, run = example(), settings()
    draw = FLUX2_DEV.draw(run, [0, 1], header(batch))
    clean = batch.latents["mean"]
    noised = draws.interpolate(clean, draw)
    for row, sigma in enumerate(draw.sigma.tolist()):
        scheduler = FlowMatchEulerDiscreteScheduler()
        scheduler.set_timesteps(sigmas=[sigma])
        velocity = draw.noise[row] - clean[row]
        reached = scheduler.step(velocity, scheduler.timesteps[0], noised[row]).prev_sample
        assert torch.allclose(reached, clean[row], atol=1e-5)


def test_a_shift_by_resolution_gives_the_noise_levels_of_the_pipeline() -> None:
    run = settings(shift="resolution")
    shape = (128, 64, 48)
    plain = draws.draw_samples(settings(), [4, 5, 6], shape, mu=None).sigma
    ours = FLUX2_DEV.draw(run, [4, 5, 6], {"mean": shape}).sigma
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=plain.tolist(), mu=compute_empirical_mu(64 * 48, 50))
    assert torch.allclose(ours, scheduler.sigmas[:-1], atol=1e-6)
    assert not torch.allclose(ours, plain, atol=1e-2)


def test_blocks_recompute_under_checkpointing() -> None:
    model, batch, run = build(), example(64, 64, 1), settings()
    lora.add_lora(model, rank=2, alpha=2, pattern=FLUX2_DEV.lora_targets["attention"], seed=0, device="cpu")
    calls = []
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.register_forward_pre_hook(lambda *_: calls.append(1))
    draw = FLUX2_DEV.draw(run, [0], header(batch))
    FLUX2_DEV.loss(model.train(), batch, draw, run).mean().backward()
    plain = len(calls)
    model.enable_gradient_checkpointing()
    calls.clear()
    FLUX2_DEV.loss(model.train(), batch, draw, run).mean().backward()
    assert (plain, len(calls)) == (2, 4)


def test_all_block_classes_exist_and_repeat() -> None:
    model = build(num_layers=2, num_single_layers=3)
    found = [type(module).__name__ for module in model.modules()]
    assert [found.count(name) for name in FLUX2_DEV.blocks] == [2, 3]


@pytest.mark.parametrize(("preset", "double"), [("attention", 8), ("all-linear", 12)])
def test_lora_targets_are_linears_of_the_blocks(preset: str, double: int) -> None:
    """All linears of a single block are fused with attention, so that both presets have them."""
    pattern = re.compile(FLUX2_DEV.lora_targets[preset])
    model = build(num_layers=2, num_single_layers=3)
    hits = {name: module for name, module in model.named_modules() if pattern.fullmatch(name)}
    assert {type(module) for module in hits.values()} == {torch.nn.Linear}
    assert len(hits) == 2 * double + 3 * 2
    assert all(FLUX2_DEV.comfyui_keys(name) == f"transformer.{name}" for name in hits)


def test_linears_outside_the_blocks_keep_their_precision() -> None:
    keep = re.compile("|".join(FLUX2_DEV.high_precision))
    linears = [n for n, m in build(num_layers=2).named_modules() if isinstance(m, torch.nn.Linear)]
    kept = {name for name in linears if keep.fullmatch(name)}
    assert kept == {name for name in linears if "transformer_blocks" not in name}


def test_layers_outside_the_blocks_have_the_names_that_comfyui_gives_them() -> None:
    """ComfyUI's names in the real model: seven layers with names of its own, and three that it maps."""
    linears = [n for n, m in build().named_modules() if isinstance(m, torch.nn.Linear)]
    found = {n: FLUX2_DEV.comfyui_keys(n) for n in linears if "transformer_blocks" not in n}
    embedders = "time_guidance_embed.{0}_embedder.linear_{1}"
    assert found == {
        "double_stream_modulation_img.linear": "diffusion_model.double_stream_modulation_img.lin",
        "double_stream_modulation_txt.linear": "diffusion_model.double_stream_modulation_txt.lin",
        "single_stream_modulation.linear": "diffusion_model.single_stream_modulation.lin",
        embedders.format("timestep", 1): "diffusion_model.time_in.in_layer",
        embedders.format("timestep", 2): "diffusion_model.time_in.out_layer",
        embedders.format("guidance", 1): "diffusion_model.guidance_in.in_layer",
        embedders.format("guidance", 2): "diffusion_model.guidance_in.out_layer",
        **{n: f"transformer.{n}" for n in ("x_embedder", "context_embedder", "norm_out.linear", "proj_out")},
    }


def test_the_committed_table_has_the_published_sizes() -> None:
    components = json.loads((TABLES / "flux2_dev.json").read_text())["components"]
    sizes = {
        name: sum(math.prod(shape) * count for _, shape, count in rows) for name, rows in components.items()
    }
    assert sizes["transformer"] == pytest.approx(32.2e9, rel=0.005)
    assert sizes["text_encoder"] == pytest.approx(24.0e9, rel=0.005)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """The tiny base."""
    folder = tmp_path_factory.mktemp("flux2_dev") / "base"
    random_bases.build("flux2_dev", "tiny", folder)
    return ModelSource(folder=folder, identity="tiny", revision=None, random_components=frozenset(), seed=0)


@pytest.fixture(scope="module")
def pipeline(source: ModelSource) -> Flux2Pipeline:
    """diffusers' own loading of the tiny base."""
    loaded = Flux2Pipeline.from_pretrained(source.folder)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def encoders(source: ModelSource, kind: Any) -> Any:
    return FLUX2_DEV.load_encoders(kind, source, device="cpu", dtype=torch.float32, vae_tiling=False)


@contextmanager
def captured(model: torch.nn.Module) -> Iterator[list[dict[str, Any]]]:
    """The keyword arguments of each of the model's calls."""
    calls: list[dict[str, Any]] = []
    hook = model.register_forward_pre_hook(lambda _, __, kwargs: calls.append(kwargs), with_kwargs=True)
    yield calls
    hook.remove()


def test_text_is_encoded_as_by_the_pipeline(source: ModelSource, pipeline: Flux2Pipeline) -> None:
    loaded = encoders(source, "text")
    entries = {
        text: FLUX2_DEV.encode_text(loaded, text, (), prompt=False, max_sequence_length=128)["prompt_embeds"]
        for text in ("a red apple", "")
    }
    for text, entry in entries.items():
        with torch.no_grad():
            theirs, _ = pipeline.encode_prompt(prompt=text, max_sequence_length=128)
        assert torch.equal(entry, theirs[0])
        assert entry.shape == (128, 96)
    # the tokenizer writes the system's message in few tokens: room is left for the caption
    assert not torch.equal(*entries.values())
    assert len(pipeline.tokenizer.tokenizer(SYSTEM_MESSAGE)["input_ids"]) < 64


def test_pixels_are_encoded_as_by_the_pipeline(source: ModelSource, pipeline: Flux2Pipeline) -> None:
    pixels = torch.rand(3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    entry = FLUX2_DEV.encode_pixels(encoders(source, "latents"), pixels, ())
    with torch.no_grad():
        theirs = pipeline._encode_vae_image(pixels[None], generator=None)
    assert set(entry) == {"mean"}
    assert torch.allclose(entry["mean"], theirs[0], atol=1e-5)
    # the tiny base's statistics are not 0 and 1
    assert not torch.allclose(pipeline.vae.bn.running_var, torch.ones(16))


def test_the_transformer_is_called_as_by_the_pipeline(source: ModelSource, pipeline: Flux2Pipeline) -> None:
    """Every step of the pipeline: predict() with its latents, caption and noise level calls it the same."""
    text = FLUX2_DEV.encode_text(encoders(source, "text"), "a boat", (), prompt=True, max_sequence_length=64)
    with captured(pipeline.transformer) as theirs:
        pipeline(
            prompt="a boat",
            width=64,
            height=32,
            num_inference_steps=2,
            guidance_scale=2.5,
            max_sequence_length=64,
            generator=torch.Generator().manual_seed(0),
        )
    run = settings(guidance_scale=2.5)
    for call in theirs:
        tokens = call["hidden_states"]
        noise = tokens.transpose(1, 2).reshape(1, 16, 4, 8)
        # noise alone is noised by nothing: latents of the same values stay what they are
        draw = Draw(sigma=call["timestep"], noise=noise, vae_noise=noise, weight=torch.ones(1))
        batch = FLUX2_DEV.collate([text], [{"mean": noise[0]}])
        with captured(pipeline.transformer) as ours, torch.no_grad():
            FLUX2_DEV.predict(pipeline.transformer, batch, draw, run)
        assert_same_call(ours[0], call)


def assert_same_call(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for name in ("hidden_states", "timestep", "guidance", "encoder_hidden_states", "txt_ids", "img_ids"):
        assert ours[name].shape == theirs[name].shape, name
        assert torch.allclose(ours[name], theirs[name], atol=1e-5), name
    assert theirs["joint_attention_kwargs"] is None


def test_a_preview_is_the_pipelines_image(source: ModelSource, pipeline: Flux2Pipeline) -> None:
    text = FLUX2_DEV.encode_text(encoders(source, "text"), "a boat", (), prompt=True, max_sequence_length=512)
    prompt = PreviewPrompt(text=text, empty=None, controls=(), width=64, height=32, number=0)
    request = ValidationSection(num_inference_steps=2, guidance_scale=4.0, max_new_tokens=1, seed=7)
    steps: list[int] = []
    (ours,) = FLUX2_DEV.preview(
        pipeline.transformer, source, pipeline.vae, [prompt], request, lambda: steps.append(1)
    )
    theirs = pipeline(
        prompt="a boat",
        width=64,
        height=32,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(7),
    ).images[0]
    assert numpy.array_equal(numpy.asarray(ours), numpy.asarray(theirs))
    assert len(steps) == 2


def test_a_saved_adapter_loads_in_the_pipeline(
    source: ModelSource, pipeline: Flux2Pipeline, tmp_path: Path
) -> None:
    """Through load_lora_weights, which first asks whether the file has another program's keys."""
    batch, run = example(64, 64, 1), settings()
    shape = Shape(batch_size=1, width=64, height=64, text_tokens=16, bytes_per_value=4)
    batch = FLUX2_DEV.synthetic_batch(dict(pipeline.transformer.config), shape, seed=1)
    draw = FLUX2_DEV.draw(run, [0], header(batch))
    trained = Flux2Transformer2DModel.from_pretrained(source.component("transformer"))
    lora.add_lora(
        trained, rank=2, alpha=4, pattern=FLUX2_DEV.lora_targets["all-linear"], seed=0, device="cpu"
    )
    with torch.no_grad():
        plain = FLUX2_DEV.predict(trained, batch, draw, run)
        for name, parameter in trained.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.05)
        ours = FLUX2_DEV.predict(trained, batch, draw, run)
        path = FLUX2_DEV.save_adapter(
            lora.adapter_state(trained), lora.adapter_config(trained), tmp_path, "adapter.safetensors"
        )
        pipeline.load_lora_weights(path.parent, weight_name=path.name)
        theirs = FLUX2_DEV.predict(pipeline.transformer, batch, draw, run)
        pipeline.unload_lora_weights()
    assert torch.allclose(ours, theirs, atol=1e-5)
    assert not torch.allclose(ours, plain, atol=1e-3)
