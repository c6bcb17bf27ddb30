"""The tiny base's VAE: diffusers' AutoencoderKL with FLUX's latents: 16 channels for 8x8 pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL.Image import Image
from tqdm import tqdm

from make.drawings import SIDE_PIXELS

CONFIG: dict[str, Any] = {
    "block_out_channels": [32, 64, 96, 96],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "latent_channels": 16,
    "sample_size": SIDE_PIXELS,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
STEPS, BATCH, LEARNING_RATE = 8000, 64, 8e-4
# of the mean squared deviation from N(0, 1) against the mean absolute error of pixels in [-1, 1]: latents
# come out smooth enough for a small transformer, at a cost in sharpness that nobody sees
KL_WEIGHT = 1e-3
EDGE_WEIGHT = 0.5
Log = Callable[[dict[str, float]], None]


def stack(pictures: Sequence[Image]) -> torch.Tensor:
    """Pixels (N, C, H, W) in 0..1."""
    pixels = np.stack([np.asarray(picture) for picture in pictures])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous().float() / 255


def train(
    pixels: torch.Tensor, *, device: str, seed: int, log: Log, steps: int = STEPS, batch: int = BATCH
) -> Any:
    """An AutoencoderKL for pictures like `pixels` (N, 4, H, W) and recoloured ones; fp32, on `device`.

    Its config holds the shift and the scale that give latents of the plain pictures mean 0 and deviation 1.
    """
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    torch.backends.cudnn.benchmark = True
    model: Any = AutoencoderKL(**CONFIG)
    model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=1e-3)
    warmup = max(1, steps // 40)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * min(1.0, i / steps)))
    )
    everything = pixels.to(device)
    for step in tqdm(range(1, steps + 1), desc="VAE"):
        clean = augment(everything[torch.randint(len(everything), (batch,), device=device)])
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            latents = model.encode(clean.to(memory_format=torch.channels_last)).latent_dist
            decoded = model.decode(latents.sample()).sample.float()
        error = F.l1_loss(decoded, clean)
        edges = sum(F.l1_loss(torch.diff(decoded, dim=d), torch.diff(clean, dim=d)) for d in (2, 3))
        kl = latents.kl().float().mean() / latents.mean[0].numel()
        loss = error + EDGE_WEIGHT * edges + KL_WEIGHT * kl
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == steps:
            log({"step": step, "l1": error.item(), "edges": float(edges), "kl": kl.item()})
    _set_scale(model.eval(), on_white(everything))
    return model


def augment(pixels: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in -1..1 from RGBA in 0..1: half as they are, the others moved and in other colours.

    A style that is learned later may use any colours: the VAE has to know them all.
    """
    count, device = len(pixels), pixels.device
    moved = _move(pixels)
    alpha = moved[:, 3:]
    grey = (moved[:, :3] * torch.tensor([0.299, 0.587, 0.114], device=device).view(1, 3, 1, 1)).sum(1, True)
    dark, light, sheet = torch.rand(3, count, 3, 1, 1, device=device).unbind(0)
    toned = dark + (light - dark) * grey
    swapped = moved[:, :3][:, torch.randperm(3, device=device)]
    kind = torch.rand(count, 1, 1, 1, device=device)
    colour = torch.where(kind < 0.4, toned, torch.where(kind < 0.7, swapped, moved[:, :3]))
    sheet = torch.where(torch.rand(count, 1, 1, 1, device=device) < 0.3, torch.ones_like(sheet), sheet)
    changed = colour * alpha + sheet * (1 - alpha)
    plain = on_white(pixels) / 2 + 0.5
    keep = torch.rand(count, 1, 1, 1, device=device) < 0.5
    return torch.where(keep, plain, changed) * 2 - 1


def on_white(pixels: torch.Tensor) -> torch.Tensor:
    """(B, 3, H, W) in -1..1: the pictures on white."""
    alpha = pixels[:, 3:]
    return (pixels[:, :3] * alpha + 1 - alpha) * 2 - 1


def _move(pixels: torch.Tensor) -> torch.Tensor:
    """Shifted by up to a tenth, scaled by 0.7 to 1.1, mirrored half the time; transparent around."""
    count, device = len(pixels), pixels.device
    scale = 1 / (0.7 + 0.4 * torch.rand(count, device=device))
    mirror = torch.where(torch.rand(count, device=device) < 0.5, -1.0, 1.0)
    shift = (torch.rand(2, count, device=device) - 0.5) * 0.2
    zero = torch.zeros_like(scale)
    rows = [torch.stack([scale * mirror, zero, shift[0]], 1), torch.stack([zero, scale, shift[1]], 1)]
    grid = F.affine_grid(torch.stack(rows, 1), list(pixels.shape), align_corners=False)
    premultiplied = torch.cat([pixels[:, :3] * pixels[:, 3:], pixels[:, 3:]], 1)
    moved = F.grid_sample(premultiplied, grid, align_corners=False)
    return torch.cat([moved[:, :3] / moved[:, 3:].clamp(min=1e-4), moved[:, 3:]], 1).clamp(0, 1)


@torch.no_grad()
def encode_means(model: Any, pictures: torch.Tensor, batch: int = 128) -> torch.Tensor:
    """Mean latents (N, 16, h, w) of pictures (N, 3, H, W) in -1..1, neither shifted nor scaled."""
    return torch.cat([model.encode(part).latent_dist.mean for part in pictures.split(batch)])


@torch.no_grad()
def peak_signal_to_noise(model: Any, pictures: torch.Tensor, batch: int = 128) -> float:
    """Mean over pictures of the peak signal-to-noise ratio in dB of what comes back."""
    values = []
    for part in pictures.split(batch):
        back = model.decode(model.encode(part).latent_dist.mean).sample.clamp(-1, 1)
        values.append(10 * torch.log10(4 / (back - part).square().flatten(1).mean(1).clamp(min=1e-9)))
    return float(torch.cat(values).mean())


def _set_scale(model: Any, pictures: torch.Tensor) -> None:
    latents = encode_means(model, pictures)
    shift, scale = float(latents.mean()), float(1 / latents.std())
    model.register_to_config(shift_factor=round(shift, 4), scaling_factor=round(scale, 4))


def save(model: Any, folder: Path) -> None:
    """Write the VAE in half precision: the rounding is below what the pixels show."""
    model.to("cpu", torch.float16).save_pretrained(folder)
