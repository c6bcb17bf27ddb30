"""FLUX.1-dev against diffusers' own formulas, on a transformer of two blocks."""

from __future__ import annotations

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import compute_loss_weighting_for_sd3

from trainer.config.schema import FlowSection
from trainer.families import draws
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import Batch, Shape
from trainer.modeling.adapter import lora

CONFIG = {
    "patch_size": 1,
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 64,
    "num_attention_heads": 4,
    "joint_attention_dim": 64,
    "pooled_projection_dim": 32,
    "guidance_embeds": True,
    "axes_dims_rope": (16, 24, 24),
}


def build(**changes: int) -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(**{**CONFIG, **changes})


def settings(**values: object) -> draws.FlowSettings:
    sigmas = torch.linspace(1000, 1, 1000) / 1000
    return draws.FlowSettings(
        sigmas=sigmas, flow=FlowSection(**values), seed=3, scheduler={"use_dynamic_shifting": False}
    )


def example(height: int = 128, width: int = 64, count: int = 2) -> Batch:
    shape = Shape(batch_size=count, width=width, height=height, text_tokens=16, bytes_per_value=4)
    return FLUX1_DEV.synthetic_batch(CONFIG, shape, seed=1)


def header(batch: Batch) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}


@pytest.mark.parametrize("scheme", ["none", "logit_normal", "sigma_sqrt", "mode", "cosmap"])
def test_loss_is_that_of_the_diffusers_training_script(scheme: str) -> None:
    """The formula of examples/dreambooth/train_dreambooth_lora_flux.py, with its helper functions."""
    model, batch = build(), example()
    run = settings(weighting_scheme=scheme, guidance_scale=3.5)
    draw = FLUX1_DEV.draw(run, [5, 6], header(batch))
    with torch.no_grad():
        ours = FLUX1_DEV.loss(model, batch, draw, run).mean()

        model_input = batch.latents["mean"] + batch.latents["std"] * draw.vae_noise
        count, channels, height, width = model_input.shape
        sigmas = draw.sigma.view(-1, 1, 1, 1)
        noisy = (1.0 - sigmas) * model_input + sigmas * draw.noise
        text_ids = torch.zeros(16, 3)
        image_ids = FluxPipeline._prepare_latent_image_ids(
            count, height // 2, width // 2, noisy.device, noisy.dtype
        )
        prediction = model(
            hidden_states=FluxPipeline._pack_latents(noisy, count, channels, height, width),
            timestep=draw.sigma * 1000 / 1000,
            guidance=torch.tensor([3.5]).expand(count),
            pooled_projections=batch.text["pooled_prompt_embeds"],
            encoder_hidden_states=batch.text["prompt_embeds"],
            txt_ids=text_ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        prediction = FluxPipeline._unpack_latents(prediction, height * 8, width * 8, vae_scale_factor=8)
        weighting = compute_loss_weighting_for_sd3(scheme, sigmas)
        target = draw.noise - model_input
        theirs = torch.mean((weighting.float() * (prediction - target) ** 2).reshape(count, -1), 1).mean()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_one_euler_step_with_the_target_reaches_the_clean_latents() -> None:
    batch, run = example(), settings()
    draw = FLUX1_DEV.draw(run, [0, 1], header(batch))
    clean = batch.latents["mean"]
    target = draw.noise - clean
    reached = draws.interpolate(clean, draw) - draw.sigma.view(-1, 1, 1, 1) * target
    assert torch.allclose(reached, clean, atol=1e-5)


def test_a_draw_depends_on_seed_and_position_only() -> None:
    batch, run = example(), settings()
    together = FLUX1_DEV.draw(run, [7, 8], header(batch))
    alone = FLUX1_DEV.draw(run, [8], header(batch))
    other = FLUX1_DEV.draw(run, [9], header(batch))
    assert torch.equal(together.noise[1], alone.noise[0])
    assert torch.equal(together.sigma[1], alone.sigma[0])
    assert not torch.equal(other.noise, alone.noise)


def test_sigmas_cover_the_unit_interval() -> None:
    run = settings()
    sigmas = torch.stack([draws.draw_samples(run, [p], (1, 2, 2)).sigma[0] for p in range(400)])
    assert 0 < sigmas.min() < 0.02
    assert 0.98 < sigmas.max() <= 1
    assert sigmas.mean().item() == pytest.approx(0.5, abs=0.05)


def test_blocks_recompute_under_checkpointing() -> None:
    model, batch, run = build(), example(64, 64, 1), settings()
    lora.add_lora(model, rank=2, alpha=2, pattern=FLUX1_DEV.lora_targets["attention"], seed=0, device="cpu")
    calls = []
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        block.attn.register_forward_pre_hook(lambda *_: calls.append(1))
    draw = FLUX1_DEV.draw(run, [0], header(batch))
    FLUX1_DEV.loss(model.train(), batch, draw, run).mean().backward()
    plain = len(calls)
    model.enable_gradient_checkpointing()
    calls.clear()
    FLUX1_DEV.loss(model.train(), batch, draw, run).mean().backward()
    assert (plain, len(calls)) == (2, 4)


def test_all_block_classes_exist_and_repeat() -> None:
    model = build(num_layers=2, num_single_layers=3)
    found = [type(module).__name__ for module in model.modules()]
    assert [found.count(name) for name in FLUX1_DEV.blocks] == [2, 3]
