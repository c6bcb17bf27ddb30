"""Loss masks: the mask file of each image, and its values at the image's bucket."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from trainer.data.pictures.images import fit, read_mask
from trainer.data.records import ImageRecord
from trainer.data.sets.controls import Pairs, its_own, pair_stems
from trainer.data.sets.listing import Listing

if TYPE_CHECKING:
    import torch

MASK_VERSION = 1
"""Part of the keys of masked entries: raise it when `mask_pixels` gives other values."""


def pair_masks(listing: Listing, folder: Path | None) -> Pairs:
    """The mask of every image, by equal stems; none without a folder. What lacks a partner is a problem."""
    pairs = pair_stems(listing, (folder,) if folder is not None else (), "mask")
    own = its_own(pairs.found, "mask", "name a folder of masks in data.sets.mask_dir")
    return dataclasses.replace(pairs, problems=(*pairs.problems, *own))


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
