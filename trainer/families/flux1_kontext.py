"""FLUX.1-Kontext-dev: image editing by FLUX.1-dev's network, which takes the image before the edit as tokens.

Numerics follow diffusers' `train_dreambooth_lora_flux_kontext.py` and `FluxKontextPipeline`; tests hold them
together. The pipelines share prompt encoding, VAE, LoRA format, and a shift that counts the target's tokens
only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from trainer.families import diffusion, flux1_dev
from trainer.families.values import PreviewPrompt

if TYPE_CHECKING:
    import torch


def control_size(width: int, height: int) -> tuple[int, int]:
    """The nearest in aspect of the resolutions that Kontext was trained at, as in the pipeline's call."""
    from diffusers.pipelines.flux.pipeline_flux_kontext import PREFERRED_KONTEXT_RESOLUTIONS

    # the pipeline compares the aspect after it cut both sides to multiples of 16
    columns, rows = (max(side // 16, 1) for side in (width, height))
    _, best_width, best_height = min(
        (abs(columns / rows - w / h), w, h) for w, h in PREFERRED_KONTEXT_RESOLUTIONS
    )
    return best_width, best_height


def _arguments(pipeline: Any, prompt: PreviewPrompt, embeds: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
    """The control at the preview's size, as training cuts one of the target's size, and no other sizes.

    By itself the pipeline scales every result, and every control, to about 1024 x 1024 pixels.
    """
    from trainer.data.pictures.images import fit

    (control,) = prompt.controls
    width, height = prompt.width, prompt.height
    return {"image": fit(control, width, height), "max_area": width * height, "_auto_resize": False}


PIPELINE = dataclasses.replace(
    flux1_dev.PIPELINE, name="FluxKontextPipeline", arguments=_arguments, least_controls=1
)
FLUX1_KONTEXT = dataclasses.replace(
    flux1_dev.FLUX1_DEV,
    name="flux1_kontext",
    title="FLUX.1-Kontext-dev",
    control_counts=(1, 1),
    defaults={
        "model": {"pretrained_model_name_or_path": "black-forest-labs/FLUX.1-Kontext-dev"},
        "flow": {"guidance_scale": 1.0},
        # the model card draws with 2.5, less than FLUX.1-dev's 3.5
        "validation": {"guidance_scale": 2.5, "num_inference_steps": 28},
    },
    encode_pixels=partial(diffusion.encode_with_controls, flux1_dev.encode_pixels),
    control_size=control_size,
    **diffusion.functions(PIPELINE),
)
