"""Qwen-Image-Edit in both layouts against their pipelines, on tiny models; no training script exists."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from PIL import Image

from tests import random_bases
from tests.contract.runs import keep_edits_small
from tests.numerics.test_qwen_image import CONFIG, build, header, settings
from trainer.config.schema import ValidationSection
from trainer.data.pictures.images import to_pixels
from trainer.errors import ConfigError
from trainer.families import draws
from trainer.families.control_times import keep_time_index
from trainer.families.qwen_image_edit import QWEN_IMAGE_EDIT
from trainer.families.values import Batch, Draw, PreviewPrompt, Shape
from trainer.modeling.base.source import ModelSource

CAPTION = "a red apple on a white house"
LAYOUTS = [QwenImageEditPipeline, QwenImageEditPlusPipeline]


def picture(width: int, height: int) -> Image.Image:
    noise = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def controls_of(layout: Any) -> list[Image.Image]:
    return [picture(80, 64)] if layout is QwenImageEditPipeline else [picture(80, 64), picture(48, 64)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, ModelSource]:
    """A base of each layout; the older one has a transformer that modulates all images alike."""
    parent = tmp_path_factory.mktemp("tiny")
    plus, single = parent / "plus", parent / "single"
    random_bases.build("qwen_image_edit", "tiny", plus)
    shutil.copytree(plus, single)
    changes = {
        "model_index.json": {"_class_name": "QwenImageEditPipeline"},
        "transformer/config.json": {"zero_cond_t": False},
    }
    for name, values in changes.items():
        path = single / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    folders = dict(zip(LAYOUTS, (single, plus), strict=True))
    return {
        layout: ModelSource(
            folder=folder, identity="tiny", revision=None, random_components=frozenset(), seed=0
        )
        for layout, folder in folders.items()
    }


@pytest.fixture(scope="module")
def pipelines(sources: dict[Any, ModelSource]) -> dict[Any, Any]:
    """Pipelines of each layout, loaded with `from_pretrained` like a user does."""
    found = {}
    for layout, source in sources.items():
        loaded = DiffusionPipeline.from_pretrained(source.folder)
        assert type(loaded) is layout
        loaded.set_progress_bar_config(disable=True)
        found[layout] = loaded
    return found


def load_encoders(kind: Any, source: ModelSource) -> Any:
    return QWEN_IMAGE_EDIT.load_encoders(kind, source, device="cpu", dtype=torch.float32, vae_tiling=False)


def encode(
    source: ModelSource, text: str, controls: Sequence[Image.Image], length: int = 512
) -> torch.Tensor:
    encoders = load_encoders("text", source)
    return QWEN_IMAGE_EDIT.encode_text(encoders, text, controls, prompt=False, max_sequence_length=length)[
        "prompt_embeds"
    ]


def captured(module: Any, calls: list[dict[str, Any]]) -> Any:
    """A hook that keeps the arguments of every call of the module, those that other hooks added included."""
    return module.register_forward_pre_hook(lambda m, a, k: calls.append(dict(k)), with_kwargs=True)


@pytest.fixture
def small_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures before the edit have a few pixels instead of a megapixel, in both pipelines and with us.

    That the megapixel's sides are those of the pipelines has a test of its own.
    """
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as single

    keep_edits_small(monkeypatch.setattr)
    real = single.calculate_dimensions
    monkeypatch.setattr(single, "calculate_dimensions", lambda area, ratio: real(area // 16**2, ratio))


class Stopped(Exception):
    """Ends a pipeline call when its text is encoded."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_language_model_sees_what_the_pipeline_shows_it(
    layout: Any,
    sources: dict[Any, ModelSource],
    pipelines: dict[Any, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens and pixels of a real call; and which tokens are pictures, as the processor says."""
    images, calls = controls_of(layout), []
    pipeline, encoders = pipelines[layout], load_encoders("text", sources[layout])
    hooks = [captured(pipeline.text_encoder, calls), captured(encoders.text_encoder, calls)]
    given = images if layout is QwenImageEditPlusPipeline else images[0]

    def stop(*_: Any) -> None:
        raise Stopped

    monkeypatch.setattr(layout, "prepare_latents", stop)
    with pytest.raises(Stopped):
        pipeline(image=given, prompt=CAPTION, width=32, height=32, true_cfg_scale=1.0)
    QWEN_IMAGE_EDIT.encode_text(encoders, CAPTION, images, prompt=False, max_sequence_length=512)
    for hook in hooks:
        hook.remove()
    theirs, ours = calls
    for name in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw"):
        assert torch.equal(ours[name], theirs[name]), name
    grids = ours["image_grid_thw"]
    assert len(grids) == len(images)
    assert ours["mm_token_type_ids"].sum() == grids.prod(1).sum() // 4  # 2 x 2 patches to a token


@pytest.mark.parametrize("layout", LAYOUTS)
def test_text_entry_is_that_of_the_language_model_behind_the_template(
    layout: Any, sources: dict[Any, ModelSource], pipelines: dict[Any, Any]
) -> None:
    """transformers' own use of processor and model, less the tokens that the pipeline drops."""
    pipeline, images = pipelines[layout], controls_of(layout)
    encoders = load_encoders("text", sources[layout])
    calls: list[dict[str, Any]] = []
    original = encoders.processor.__class__.__call__

    class Listening(encoders.processor.__class__):  # type: ignore[misc,name-defined]
        def __call__(self, **inputs: Any) -> Any:
            calls.append(inputs)
            return original(self, **inputs)

    encoders.processor.__class__ = Listening
    entry = QWEN_IMAGE_EDIT.encode_text(encoders, CAPTION, images, prompt=False, max_sequence_length=512)
    inputs = pipeline.processor(**calls[0])
    with torch.no_grad():
        states = pipeline.text_encoder(**inputs, output_hidden_states=True).hidden_states[-1]
    dropped = pipeline.prompt_template_encode_start_idx
    assert torch.allclose(entry["prompt_embeds"], states[0, dropped:], atol=1e-5)
    prefix = pipeline.prompt_template_encode.partition("user\n")[0] + "user\n"
    assert len(pipeline.tokenizer(prefix).input_ids) == dropped


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(64, 64), (58, 40), (40, 64)])
def test_a_plan_counts_the_tokens_of_a_picture(
    layout: Any, size: tuple[int, int], sources: dict[Any, ModelSource]
) -> None:
    source, calls = sources[layout], []
    encoders = load_encoders("text", source)
    hook = captured(encoders.text_encoder, calls)
    QWEN_IMAGE_EDIT.encode_text(encoders, "", [picture(*size)], prompt=False, max_sequence_length=512)
    hook.remove()
    tokens = int(calls[0]["mm_token_type_ids"].sum())
    assert 0.8 < tokens / QWEN_IMAGE_EDIT.control_tokens(source.folder) <= 1


def test_the_caption_is_cut_and_the_pictures_are_not(sources: dict[Any, ModelSource]) -> None:
    source, images = sources[QwenImageEditPlusPipeline], [picture(64, 64)]
    none, short, long = (encode(source, text, images, length=8) for text in ("", "a cat", "a cat " * 50))
    assert short.shape[0] == none.shape[0] + 2
    assert long.shape[0] == none.shape[0] + 8
    assert torch.equal(long, encode(source, "a cat a cat a cat a cat", images))


def test_several_controls_need_a_base_that_takes_them(sources: dict[Any, ModelSource]) -> None:
    with pytest.raises(ConfigError, match=r"data\.sets\.control_dir"):
        encode(sources[QwenImageEditPipeline], CAPTION, [picture(64, 64)] * 2)


def test_a_base_of_another_kind_is_refused(tmp_path: Path, sources: dict[Any, ModelSource]) -> None:
    (tmp_path / "model_index.json").write_text('{"_class_name": "QwenImagePipeline"}')
    source = sources[QwenImageEditPlusPipeline]
    for name in ("text_encoder", "tokenizer", "processor"):
        (tmp_path / name).symlink_to(source.component(name))
    with pytest.raises(ConfigError, match="QwenImagePipeline"):
        load_encoders("text", replace(source, folder=tmp_path))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("small_edits")
def test_the_transformer_is_called_as_by_the_pipeline(
    layout: Any, sources: dict[Any, ModelSource], pipelines: dict[Any, Any]
) -> None:
    """One sigma of a real call: the same arguments, and the same velocity of the same latents."""
    pipeline, images = pipelines[layout], controls_of(layout)
    embeds = encode(sources[layout], CAPTION, images)
    calls: list[dict[str, Any]] = []
    results: list[torch.Tensor] = []
    with torch.no_grad():
        hooks = [
            captured(pipeline.transformer, calls),
            pipeline.transformer.register_forward_hook(lambda m, a, out: results.append(out[0])),
        ]
        pipeline(
            image=images if layout is QwenImageEditPlusPipeline else images[0],
            prompt_embeds=embeds[None],
            width=64,
            height=96,
            true_cfg_scale=1.0,
            num_inference_steps=3,
            generator=torch.Generator().manual_seed(1),
            output_type="latent",
        )
        theirs, velocity = calls[1], results[1]  # a sigma below 1
        resized = [
            to_pixels(image.resize(QWEN_IMAGE_EDIT.control_size(*image.size), Image.Resampling.LANCZOS))
            for image in images
        ]
        latents = QWEN_IMAGE_EDIT.encode_pixels(pipeline.vae, torch.zeros(3, 96, 64), resized)
        clean, sigma = latents["mean"][None], theirs["timestep"]
        now = QwenImagePipeline._unpack_latents(theirs["hidden_states"][:, :24], 12, 8, 1)[:, :, 0]
        draw = Draw(
            sigma=sigma,
            noise=(now - (1 - sigma) * clean) / sigma,
            vae_noise=torch.zeros_like(clean),
            weight=torch.ones(1),
        )
        batch = QWEN_IMAGE_EDIT.collate([{"prompt_embeds": embeds}], [latents])
        # a copy: other tests compare with the pipeline's own transformer as diffusers made it
        ours = QWEN_IMAGE_EDIT.predict(copy.deepcopy(pipeline.transformer), batch, draw, settings())
        for hook in hooks:
            hook.remove()
    assert 0 < sigma.item() < 1
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.allclose(calls[-1][name], value, atol=1e-5), name
    assert calls[-1]["img_shapes"] == theirs["img_shapes"]
    assert len(theirs["img_shapes"][0]) == 1 + len(images)
    assert theirs["encoder_hidden_states_mask"] is None
    expected = QwenImagePipeline._unpack_latents(velocity[:, :24], 12, 8, 1)[:, :, 0]
    assert torch.allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("size", [(1024, 1024), (500, 333), (3000, 2000), (40, 900), (47, 31)])
def test_control_size_is_the_pipelines_choice(size: tuple[int, int]) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    ratio, area = size[0] / size[1], 1024 * 1024
    ours = QWEN_IMAGE_EDIT.control_size(*size)
    assert ours == pipeline_qwenimage_edit.calculate_dimensions(area, ratio)[:2]
    assert ours == pipeline_qwenimage_edit_plus.calculate_dimensions(area, ratio)


def example(controls: Sequence[tuple[int, int]], count: int = 2) -> Batch:
    """Two targets of 16 x 8 latents with controls of these sizes."""
    shape = Shape(batch_size=count, width=64, height=128, text_tokens=16, bytes_per_value=4)
    batch = QWEN_IMAGE_EDIT.synthetic_batch(CONFIG, shape, seed=1)
    generator = torch.Generator().manual_seed(7)
    latents = {name: batch.latents[name] for name in ("mean", "std")}
    for index, size in enumerate(controls):
        latents[f"control_{index}"] = torch.randn(count, 16, *size, generator=generator)
    return replace(batch, latents=latents)


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_the_target_is_the_velocity_of_one_exact_euler_step(
    zero_cond_t: bool, sources: dict[Any, ModelSource]
) -> None:
    """The loss is that of the prediction against it; the scheduler's last step reaches the clean latents."""
    model, batch, run = build(zero_cond_t=zero_cond_t), example([(16, 8), (8, 12)]), settings()
    draw = QWEN_IMAGE_EDIT.draw(run, [5, 6], header(batch))
    clean = batch.latents["mean"] + batch.latents["std"] * draw.vae_noise
    target = draw.noise - clean
    folder = sources[QwenImageEditPlusPipeline].component("scheduler")
    for one in range(2):
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, use_dynamic_shifting=False)
        scheduler.set_timesteps(sigmas=[1.0, draw.sigma[one].item()])
        scheduler.sigmas[1] = draw.sigma[one]  # the terminal shift moves it
        noised = draws.interpolate(clean, draw)[one]
        reached = scheduler.step(target[one], scheduler.timesteps[1], noised, return_dict=False)[0]
        assert torch.allclose(reached, clean[one], atol=1e-5)
    with torch.no_grad():
        losses = QWEN_IMAGE_EDIT.loss(model, batch, draw, run)
        prediction = QWEN_IMAGE_EDIT.predict(model, batch, draw, run)
    assert losses.shape == (2,)
    assert torch.allclose(losses, ((prediction - target) ** 2).mean((1, 2, 3)), rtol=1e-6)


def test_both_times_are_diffusers_own_though_their_index_is_kept() -> None:
    """Output and gradients of a batch of two with two controls, to the bit, and its class and config too."""
    theirs, ours = build(zero_cond_t=True), build(zero_cond_t=True)
    theirs.requires_grad_(True), ours.requires_grad_(True)
    batch = example([(16, 8), (8, 12)])
    draw = QWEN_IMAGE_EDIT.draw(settings(), [5, 6], header(batch))
    calls: list[dict[str, Any]] = []
    hook = captured(ours, calls)
    found = QWEN_IMAGE_EDIT.predict(ours, batch, draw, settings())
    hook.remove()
    (output,) = theirs(**calls[0])
    expected = QwenImagePipeline._unpack_latents(output[:, :32], 16, 8, 1)[:, :, 0]
    assert torch.equal(found, expected)
    for one in (found, expected):
        one.square().sum().backward()
    named = dict(theirs.named_parameters())
    assert named.keys() == dict(ours.named_parameters()).keys()
    for name, parameter in ours.named_parameters():
        # the last block's output for the text leads nowhere
        both = parameter.grad, named[name].grad
        assert both == (None, None) or torch.equal(*both), name
    assert ours.config == theirs.config and type(ours).__name__ == type(theirs).__name__
    assert {type(one).__name__ for one in ours.modules()} == {type(one).__name__ for one in theirs.modules()}
    # a second time, from the kept index
    assert torch.equal(QWEN_IMAGE_EDIT.predict(ours, batch, draw, settings()), found)


def test_controls_are_told_apart_by_their_order() -> None:
    model, run, batch = build(), settings(), example([(16, 8), (16, 8)])
    draw = QWEN_IMAGE_EDIT.draw(run, [0, 1], header(batch))
    swapped = {"control_0": batch.latents["control_1"], "control_1": batch.latents["control_0"]}
    other = replace(batch, latents={**batch.latents, **swapped})
    with torch.no_grad():
        first, second = (QWEN_IMAGE_EDIT.predict(model, one, draw, run) for one in (batch, other))
    assert not torch.allclose(first, second, atol=1e-3)


def test_samples_share_a_batch_only_with_equal_controls() -> None:
    text = {"prompt_embeds": (20, 64)}
    one, two = header(example([(16, 8)])), header(example([(16, 8), (8, 12)]))
    keys = {QWEN_IMAGE_EDIT.batch_key(latents, text) for latents in (one, two, header(example([(8, 12)])))}
    keys.add(QWEN_IMAGE_EDIT.batch_key(one, {"prompt_embeds": (21, 64)}))
    assert len(keys) == 4
    assert QWEN_IMAGE_EDIT.batch_key(one, text) in keys


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("small_edits")
def test_previews_are_the_pipelines_images(
    layout: Any, sources: dict[Any, ModelSource], pipelines: dict[Any, Any]
) -> None:
    """With guidance, from entries instead of captions."""
    source, pipeline, images = sources[layout], pipelines[layout], controls_of(layout)[:1]
    text, empty = ({"prompt_embeds": encode(source, caption, images)} for caption in (CAPTION, ""))
    prompt = PreviewPrompt(text=text, empty=empty, controls=tuple(images), width=64, height=48, number=0)
    request = ValidationSection(num_inference_steps=2, guidance_scale=4.0, max_new_tokens=1, seed=5)
    steps: list[int] = []
    vae = load_encoders("latents", source)
    theirs = pipeline(
        image=images if layout is QwenImageEditPlusPipeline else images[0],
        prompt_embeds=text["prompt_embeds"][None],
        negative_prompt_embeds=empty["prompt_embeds"][None],
        true_cfg_scale=4.0,
        width=64,
        height=48,
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    # as it is after the first step of training
    trained = copy.deepcopy(pipeline.transformer)
    keep_time_index(trained)
    (ours,) = QWEN_IMAGE_EDIT.preview(trained, source, vae, [prompt], request, lambda: steps.append(1))
    assert ours.size == (64, 48)
    assert ours.tobytes() == theirs.tobytes()
    assert len(steps) == 2


def test_attention_covers_text_target_and_control() -> None:
    shape = Shape(batch_size=1, width=64, height=128, text_tokens=16, bytes_per_value=4)
    batch, seen = QWEN_IMAGE_EDIT.synthetic_batch(CONFIG, shape, seed=1), []
    model, run = build(), settings()
    model.transformer_blocks[0].attn.register_forward_hook(
        lambda m, a, out: seen.append(sum(stream.shape[1] for stream in out))
    )
    with torch.no_grad():
        QWEN_IMAGE_EDIT.predict(model, batch, QWEN_IMAGE_EDIT.draw(run, [0], header(batch)), run)
    assert QWEN_IMAGE_EDIT.attention_shape(CONFIG, shape).tokens == seen[0]
