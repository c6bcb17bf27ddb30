"""Loss masks: their values at the image's bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from PIL import Image

from trainer.data.pictures.images import fit, read_mask
from trainer.data.records import ImageRecord

if TYPE_CHECKING:
    import torch

MASK_VERSION = 1
"""Part of the keys of masked entries: raise it when `mask_pixels` gives other values."""


def mask_pixels(record: ImageRecord) -> torch.Tensor:
    """Values (1, H, W) float32 in [0, 1] of a sample's mask at its bucket, cut as the image is."""
    import numpy as np
    import torch

    assert record.mask is not None, "a sample without a mask"
    mask = read_mask(record.mask.path, content_sha256=record.mask.content_sha256)
    if mask.size != (record.width, record.height):
        mask = mask.resize((record.width, record.height), Image.Resampling.BILINEAR)
    cut = fit(mask, record.bucket_width, record.bucket_height, record.view)
    return torch.from_numpy(np.array(cut, dtype=np.uint8))[None].to(torch.float32) / 255.0
