"""Noise levels and noise of flow matching: drawn for each sample from (seed, position), then applied.

torch and diffusers are imported inside the functions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.families.values import Batch, Draw, Header

if TYPE_CHECKING:
    import torch

    from trainer.config.schema import FlowSection, RunConfig
    from trainer.modeling.base.source import ModelSource

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """Settings of one run's draws. `sigmas` (T,) fp32 are the scheduler's own noise levels, highest first."""

    sigmas: torch.Tensor
    flow: FlowSection
    seed: int
    scheduler: Mapping[str, Any]
    """The scheduler's configuration."""
    measured_draws: int = 0
    """Draws of each held-out sample, else 0: their noise is other than training draws for any position, and
    their noise levels are spread evenly over what training draws. Sample r has the positions from
    `measured_draws * r` on."""


def settings(source: ModelSource, config: RunConfig) -> FlowSettings:
    """`Family.settings`: the run's flow section, and noise levels by the base model's scheduler.

    A scheduler with dynamic shifting trains on unshifted levels, one with a static shift on shifted ones,
    exactly as diffusers' training scripts do by copying the scheduler.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(source.component("scheduler"))
    return FlowSettings(
        sigmas=scheduler.sigmas.clone(),
        flow=config.flow,
        seed=config.train.seed,
        scheduler=dict(scheduler.config),
    )


def draw(settings: FlowSettings, positions: Sequence[int], latents: Header) -> Draw:
    """`Family.draw` of 2 x 2 latent pixels a token; the VAE's own sampling is drawn too.

    Where the scheduler has a dynamic shift, it is that of FLUX.1's and Qwen-Image's pipelines at this size.
    """
    (_, height, width), mu = latents["mean"], None
    if settings.scheduler["use_dynamic_shifting"]:
        mu = dynamic_shift(settings.scheduler, height * width // 4)
    return draw_samples(settings, positions, latents["mean"], mu=mu)


def dynamic_shift(scheduler: Mapping[str, Any], tokens: int) -> float:
    """The shift of noise levels in FLUX.1's and Qwen-Image's pipelines for so many tokens of a picture."""
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    return float(calculate_shift(tokens, *(scheduler[name] for name in names)))


def draw_samples(
    settings: FlowSettings, positions: Sequence[int], noise_shape: tuple[int, ...], *, mu: float | None = None
) -> Draw:
    """Draw noise level, noise and VAE noise for each sample from its own generator, on the CPU in fp32.

    Noise levels are drawn with diffusers' `compute_density_for_timestep_sampling`, looked up in the
    scheduler's table and shifted as `flow.shift` says; weights are those of `compute_loss_weighting_for_sd3`.
    `noise_shape` is one sample's (C, H, W), `mu` the dynamic shift at its size. Raises ConfigError where
    `flow.shift` asks for a dynamic shift and the base model has none.
    """
    import torch
    from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3

    flow, steps, draws = settings.flow, len(settings.sigmas), settings.measured_draws
    noise = torch.empty((len(positions), *noise_shape))
    vae_noise = torch.empty_like(noise)
    generator, rows = torch.Generator(), []
    for position, one_noise, one_vae_noise in zip(positions, noise.unbind(), vae_noise.unbind(), strict=True):
        generator.manual_seed(sample_seed(settings.seed, position, "held out" if draws else ""))
        density = compute_density_for_timestep_sampling(
            weighting_scheme=flow.weighting_scheme,
            batch_size=1,
            logit_mean=flow.logit_mean,
            logit_std=flow.logit_std,
            mode_scale=flow.mode_scale,
            generator=generator,
        ).item()
        if draws:
            density = _even_density(flow, position, draws)
        # the mode scheme can reach 1.0 exactly, one past the table's end
        rows.append(min(int(density * steps), steps - 1))
        one_noise.normal_(generator=generator)
        one_vae_noise.normal_(generator=generator)
    sigmas = settings.sigmas[rows]
    if flow.shift != "auto":
        sigmas = _shifted(sigmas, flow.shift, mu)
    weight = compute_loss_weighting_for_sd3(flow.weighting_scheme, sigmas)
    return Draw(sigma=sigmas, noise=noise, vae_noise=vae_noise, weight=weight.float())


def sample_seed(seed: int, position: int, purpose: str = "") -> int:
    """A 63-bit generator seed for one sample of one run, independent of batch size and of what came
    before; of another purpose than training, another one.
    """
    text = "/".join(filter(None, (purpose, str(seed), str(position))))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _even_density(flow: FlowSection, position: int, draws: int) -> float:
    """The noise level of a held-out draw as a share of the table, (0, 1): a quantile of what
    `compute_density_for_timestep_sampling` draws.

    The quantiles of a sample are `1 / draws` apart, and those of all samples go by the golden ratio.
    """
    sample, number = divmod(position, draws)
    quantile = (number + (0.5 + sample * _GOLDEN) % 1.0) / draws
    if flow.weighting_scheme == "logit_normal":
        import statistics  # takes longer than the rest of this file, and no other scheme needs it

        normal = statistics.NormalDist(flow.logit_mean, flow.logit_std)
        # its lowest value has no quantile, and exp has no number for more than 709
        return 1.0 / (1.0 + math.exp(min(-normal.inv_cdf(max(quantile, 1e-9)), 700.0)))
    if flow.weighting_scheme == "mode":
        bent = math.cos(math.pi * quantile / 2) ** 2 - 1 + quantile
        return 1.0 - quantile - flow.mode_scale * bent
    return quantile


def _shifted(sigmas: torch.Tensor, shift: str | float, mu: float | None) -> torch.Tensor:
    """Noise levels after `flow.shift`: sigma' = s sigma / (1 + (s - 1) sigma), s being exp(mu) or a number.

    Source: FlowMatchEulerDiscreteScheduler's exponential `time_shift`.
    """
    if shift != "resolution":
        factor = float(shift)
    elif mu is not None:
        factor = math.exp(mu)
    else:
        raise ConfigError(
            "the base model's scheduler has no shift that depends on the resolution",
            where="flow.shift",
            remedy="use auto, or a number",
        )
    return factor * sigmas / (1.0 + (factor - 1.0) * sigmas)


def sample_latents(batch: Batch, draw: Draw) -> torch.Tensor:
    """Latents (B, C, h, w) fp32: one sample of the distribution that a VAE gave as `mean` and `std`, or the
    mode alone where the family's pipeline takes that.
    """
    latents = batch.latents
    return latents["mean"] + latents["std"] * draw.vae_noise if "std" in latents else latents["mean"]


def interpolate(clean: torch.Tensor, draw: Draw) -> torch.Tensor:
    """z_t = (1 - sigma) z + sigma noise; clean (B, C, H, W) fp32, result the same."""
    sigma = draw.sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1.0 - sigma) * clean + sigma * draw.noise
