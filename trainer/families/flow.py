"""Floor 5: numerics that flow-matching families share, as functions. torch and diffusers are imported
inside.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.families.protocol import Draw, PreviewRequest

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import FlowSection


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """What one run's draws depend on. `sigmas` (T,) fp32 are the scheduler's own noise levels, highest
    first.
    """

    sigmas: torch.Tensor
    flow: FlowSection
    seed: int


def read_settings(scheduler_folder: Path, flow: FlowSection, seed: int) -> FlowSettings:
    """Take the noise levels from the base model's scheduler configuration.

    A scheduler with dynamic shifting trains on unshifted levels, one with a static shift on shifted ones,
    exactly
    as diffusers' training scripts do by copying the scheduler.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(scheduler_folder)
    return FlowSettings(sigmas=scheduler.sigmas.clone(), flow=flow, seed=seed)


def sample_seed(seed: int, position: int) -> int:
    """A 63-bit generator seed for one sample of one run, independent of batch size and of what came
    before.
    """
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def draw_samples(settings: FlowSettings, positions: Sequence[int], noise_shape: tuple[int, ...]) -> Draw:
    """Draw noise level, noise and VAE noise for each sample from its own generator, on the CPU in fp32.

    Noise levels are drawn with diffusers' `compute_density_for_timestep_sampling` and looked up in the
    scheduler's
    table; weights are those of `compute_loss_weighting_for_sd3`. `noise_shape` is one sample's (C, H, W).
    """
    import torch
    from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

    flow, steps = settings.flow, len(settings.sigmas)
    noise = torch.empty((len(positions), *noise_shape))
    vae_noise = torch.empty_like(noise)
    generator, rows = torch.Generator(), []
    for position, one_noise, one_vae_noise in zip(positions, noise.unbind(), vae_noise.unbind(), strict=True):
        generator.manual_seed(sample_seed(settings.seed, position))
        density = compute_density_for_timestep_sampling(
            weighting_scheme=flow.weighting_scheme,
            batch_size=1,
            logit_mean=flow.logit_mean,
            logit_std=flow.logit_std,
            mode_scale=flow.mode_scale,
            generator=generator,
        )
        # the mode scheme can reach 1.0 exactly, one past the table's end
        rows.append(min(int(density.item() * steps), steps - 1))
        one_noise.normal_(generator=generator)
        one_vae_noise.normal_(generator=generator)
    sigmas = settings.sigmas[rows]
    weight = compute_loss_weighting_for_sd3(flow.weighting_scheme, sigmas)
    return Draw(sigma=sigmas, noise=noise, vae_noise=vae_noise, weight=weight.float())


@functools.lru_cache(maxsize=64)
def kept_on_device(make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """The result of `make(*arguments)`, made once: position ids made each step would wait for the device."""
    return make(*arguments)


def interpolate(clean: torch.Tensor, draw: Draw) -> torch.Tensor:
    """z_t = (1 - sigma) z + sigma noise; clean (B, C, H, W) fp32, result the same."""
    sigma = draw.sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1.0 - sigma) * clean + sigma * draw.noise


def velocity_loss(prediction: torch.Tensor, clean: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Weighted squared error against the velocity `noise - clean`, one fp32 value a sample: (B,)."""
    weight = draw.weight.view(-1, *[1] * (clean.ndim - 1))
    error = weight * (prediction.float() - (draw.noise - clean)) ** 2
    return error.flatten(1).mean(1)


def run_pipeline(
    pipeline: Any,
    inputs: Sequence[Mapping[str, torch.Tensor]],
    request: PreviewRequest,
    on_step: Callable[[], None],
) -> list[Image]:
    """One image for each of `inputs` (arguments of a pipeline call), each from its own seeded generator.

    `on_step` runs after every denoising step; what it raises ends the call.
    """
    import torch

    def step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    pipeline.set_progress_bar_config(disable=True)
    images: list[Image] = []
    for number, arguments in enumerate(inputs):
        result = pipeline(
            **arguments,
            width=request.width,
            height=request.height,
            num_inference_steps=request.num_inference_steps,
            guidance_scale=request.guidance_scale,
            generator=torch.Generator().manual_seed(request.seed + number),
            callback_on_step_end=step_end,
        )
        images.extend(result.images)
    return images
