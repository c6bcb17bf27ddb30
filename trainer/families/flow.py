"""Numerics that flow-matching families share, as functions. torch and diffusers are imported
inside.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import ConfigError
from trainer.families.values import Batch, Draw, PreviewPrompt, PreviewRequest, Rows

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

    from trainer.config.schema import FlowSection, RunConfig
    from trainer.data.records import Scan


@dataclass(frozen=True, kw_only=True)
class FlowSettings:
    """What one run's draws depend on. `sigmas` (T,) fp32 are the scheduler's own noise levels, highest
    first.
    """

    sigmas: torch.Tensor
    flow: FlowSection
    seed: int
    scheduler: Mapping[str, Any]
    """The scheduler's configuration."""
    measured_draws: int = 0
    """Draws of each held-out sample, at noise levels that are spread evenly; 0 in training."""


_GOLDEN = (5**0.5 - 1) / 2
LOSS_MASK, LOSS_WEIGHT = "loss_mask", "loss_weight"
"""Tensors that stand beside a batch's latents where a run has them: (B, 1, h, w) in [0, 1], and (B,)."""


def scan(
    config: RunConfig,
    progress: Callable[[int, int], None] | None,
    *,
    multiple: int,
    controls: tuple[int, int] = (0, 0),
) -> Scan:
    """All captioned images of the run's sets; `controls` are the least and most control images of each."""
    from trainer.data.sets.scan import scan_images

    data = config.data
    return scan_images(
        data.sets,
        resolution=data.resolution,
        multiple=multiple,
        controls=controls,
        trigger_word=data.trigger_word,
        on_bad_file=data.on_bad_file,
        progress=progress,
    )


def collate(text: Rows, latents: Rows) -> Batch:
    """Stack the entries of samples that are equal inside."""
    import torch

    def stacked(rows: Rows) -> dict[str, torch.Tensor]:
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return Batch(latents=stacked(latents), text=stacked(text), size=len(latents), weight=float(len(latents)))


def autoencoder_kl_shape(config: Mapping[str, Any]) -> tuple[int, int]:
    """`Family.vae_shape` of diffusers' AutoencoderKL and those built like it."""
    channels: Sequence[int] = config["block_out_channels"]
    return channels[min(1, len(channels) - 1)], config["sample_size"]


def unchanged_size(width: int, height: int) -> tuple[int, int]:
    """`Family.control_size` of families without control images."""
    return width, height


def read_settings(scheduler_folder: Path, flow: FlowSection, seed: int) -> FlowSettings:
    """Take the noise levels from the base model's scheduler configuration.

    A scheduler with dynamic shifting trains on unshifted levels, one with a static shift on shifted ones,
    exactly
    as diffusers' training scripts do by copying the scheduler.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(scheduler_folder)
    return FlowSettings(
        sigmas=scheduler.sigmas.clone(), flow=flow, seed=seed, scheduler=dict(scheduler.config)
    )


def dynamic_mu(settings: FlowSettings, tokens: int) -> float | None:
    """The shift that FLUX.1's and Qwen-Image's pipelines give the scheduler for so many image tokens.

    None where the scheduler's configuration has no dynamic shift.
    """
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    config = settings.scheduler
    if not config["use_dynamic_shifting"]:
        return None
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu: float = calculate_shift(tokens, *(config[name] for name in names))
    return mu


def held_out(settings: FlowSettings, draws: int) -> FlowSettings:
    """Settings to measure with: other noise than training draws for any position, and for each sample so many
    noise levels, spread evenly over what training draws. Sample r has the positions from `draws * r` on.
    """
    return dataclasses.replace(settings, measured_draws=draws)


def sample_seed(seed: int, position: int, purpose: str = "") -> int:
    """A 63-bit generator seed for one sample of one run, independent of batch size and of what came
    before; of another purpose than training, another one.
    """
    text = "/".join(filter(None, (purpose, str(seed), str(position))))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def even_density(flow: FlowSection, position: int, draws: int) -> float:
    """The noise level of a held-out draw as a share of the table, (0, 1): a quantile of what
    `compute_density_for_timestep_sampling` draws.

    The quantiles of a sample are `1 / draws` apart, and those of all samples go by the golden ratio.
    """
    sample, number = divmod(position, draws)
    quantile = (number + (0.5 + sample * _GOLDEN) % 1.0) / draws
    if flow.weighting_scheme == "logit_normal":
        normal = statistics.NormalDist(flow.logit_mean, flow.logit_std)
        # its lowest value has no quantile
        return 1.0 / (1.0 + math.exp(-normal.inv_cdf(max(quantile, 1e-9))))
    if flow.weighting_scheme == "mode":
        bent = math.cos(math.pi * quantile / 2) ** 2 - 1 + quantile
        return 1.0 - quantile - flow.mode_scale * bent
    return quantile


def draw_samples(
    settings: FlowSettings, positions: Sequence[int], noise_shape: tuple[int, ...], *, mu: float | None = None
) -> Draw:
    """Draw noise level, noise and VAE noise for each sample from its own generator, on the CPU in fp32.

    Noise levels are drawn with diffusers' `compute_density_for_timestep_sampling`, looked up in the
    scheduler's table and shifted as `flow.shift` says; weights are those of `compute_loss_weighting_for_sd3`.
    `noise_shape` is one sample's (C, H, W), `mu` the dynamic shift at its size.
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
            density = even_density(flow, position, draws)
        # the mode scheme can reach 1.0 exactly, one past the table's end
        rows.append(min(int(density * steps), steps - 1))
        one_noise.normal_(generator=generator)
        one_vae_noise.normal_(generator=generator)
    sigmas = _shifted(settings.sigmas[rows], flow, mu)
    weight = compute_loss_weighting_for_sd3(flow.weighting_scheme, sigmas)
    return Draw(sigma=sigmas, noise=noise, vae_noise=vae_noise, weight=weight.float())


def _shifted(sigmas: torch.Tensor, flow: FlowSection, mu: float | None) -> torch.Tensor:
    """Noise levels after `flow.shift`: sigma' = s sigma / (1 + (s - 1) sigma), s being exp(mu) or a number.

    Source: FlowMatchEulerDiscreteScheduler's exponential `time_shift`. Raises ConfigError where the base
    model has no dynamic shift.
    """
    if flow.shift == "auto":
        return sigmas
    if flow.shift != "resolution":
        factor = float(flow.shift)
    elif mu is not None:
        factor = math.exp(mu)
    else:
        raise ConfigError(
            "the base model's scheduler has no shift that depends on the resolution",
            where="flow.shift",
            remedy="use auto, or a number",
        )
    return factor * sigmas / (1.0 + (factor - 1.0) * sigmas)


@functools.lru_cache(maxsize=256)  # a CUDA graph may read them still: more than all sizes that are captured
def kept_on_device(make: Callable[..., torch.Tensor], *arguments: Hashable) -> torch.Tensor:
    """The result of `make(*arguments)`, made once: position ids made each step would wait for the device."""
    return make(*arguments)


def sample_latents(batch: Batch, draw: Draw) -> torch.Tensor:
    """Latents (B, C, h, w) fp32: one sample of the distribution that a VAE gave as `mean` and `std`."""
    return batch.latents["mean"] + batch.latents["std"] * draw.vae_noise


def interpolate(clean: torch.Tensor, draw: Draw) -> torch.Tensor:
    """z_t = (1 - sigma) z + sigma noise; clean (B, C, H, W) fp32, result the same."""
    sigma = draw.sigma.view(-1, *[1] * (clean.ndim - 1))
    return (1.0 - sigma) * clean + sigma * draw.noise


def velocity_loss(prediction: torch.Tensor, clean: torch.Tensor, batch: Batch, draw: Draw) -> torch.Tensor:
    """Weighted squared error against the velocity `noise - clean`, one fp32 value a sample: (B,).

    Where the batch has a mask, each position's error is multiplied by it; the mean is over all positions all
    the same, so that a mask of m everywhere multiplies the loss by m. The sample's weight multiplies that.
    """
    weight = draw.weight.view(-1, *[1] * (clean.ndim - 1))
    error = weight * (prediction.float() - (draw.noise - clean)) ** 2
    if LOSS_MASK in batch.latents:
        error = error * batch.latents[LOSS_MASK]
    losses = error.flatten(1).mean(1)
    return losses * batch.latents[LOSS_WEIGHT] if LOSS_WEIGHT in batch.latents else losses


def mask_entry(pixels: torch.Tensor, latents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A mask (1, H, W) as part of a latents entry: its mean over each latent position, (1, h, w)."""
    import torch

    *_, height, width = latents["mean"].shape
    return {LOSS_MASK: torch.nn.functional.adaptive_avg_pool2d(pixels, (height, width))}


def weighed(
    latents: Mapping[str, torch.Tensor], loss_weight: float | None, *, masked: bool
) -> Mapping[str, torch.Tensor]:
    """A latents entry with what else its loss depends on: all samples of a run have the same names.

    `loss_weight` is None where no sample has one; with `masked` a sample without a mask counts everywhere.
    """
    import torch

    extra: dict[str, torch.Tensor] = {}
    if masked and LOSS_MASK not in latents:
        extra[LOSS_MASK] = torch.ones(1, *latents["mean"].shape[-2:])
    if loss_weight is not None:
        extra[LOSS_WEIGHT] = torch.tensor(loss_weight)
    return {**latents, **extra}


def run_pipeline(
    pipeline: Any,
    inputs: Sequence[Mapping[str, Any]],
    prompts: Sequence[PreviewPrompt],
    request: PreviewRequest,
    on_step: Callable[[], None],
    *,
    guidance: str = "guidance_scale",
) -> list[Image]:
    """One image for each of `inputs` (arguments of a pipeline call), each from its own seeded generator.

    `on_step` runs after every denoising step; what it raises ends the call. `guidance` is how the pipeline
    calls `request.guidance_scale`.
    """
    import torch

    def step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        on_step()
        return tensors

    pipeline.set_progress_bar_config(disable=True)
    images: list[Image] = []
    for number, (arguments, prompt) in enumerate(zip(inputs, prompts, strict=True)):
        drawn = pipeline(
            **arguments,
            **{guidance: request.guidance_scale},
            width=prompt.width,
            height=prompt.height,
            num_inference_steps=request.num_inference_steps,
            generator=torch.Generator().manual_seed(request.seed + number),
            callback_on_step_end=step_end,
            return_dict=False,  # some pipelines call their result otherwise
        )
        images.extend(drawn[0])
    return images


def on_device(text: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """A text entry as a batch of one, on the model's device; floating values in its type."""
    device, dtype = model.device, model.dtype
    return {
        name: value[None].to(device, dtype if value.is_floating_point() else value.dtype)
        for name, value in text.items()
    }


def save_pipeline_lora(
    pipeline_class: Any, state: Mapping[str, torch.Tensor], config: Mapping[str, Any], folder: Path, name: str
) -> Path:
    """Write with the pipeline's save_lora_weights, metadata included: without it alpha is lost."""
    pipeline_class.save_lora_weights(
        folder,
        transformer_lora_layers=dict(state),
        weight_name=name,
        transformer_lora_adapter_metadata=dict(config),
    )
    return folder / name


def load_pipeline_lora(model: Any, path: Path, *, adapter_name: str) -> None:
    """Load as diffusers' pipelines do; `load_lora_adapter` also takes a quantised transformer.

    Raises DataError where a part of the file is for no layer of the model.
    """
    from trainer.modeling.adapter.adapter_file import require_fits

    require_fits(model, path, "transformer.")
    options = {"weight_name": path.name, "prefix": "transformer", "adapter_name": adapter_name}
    model.load_lora_adapter(path.parent, **options)
