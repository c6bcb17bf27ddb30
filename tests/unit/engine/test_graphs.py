"""Sizes after which CUDA graphs are given up: none of them reads what is no longer kept."""

from __future__ import annotations

import itertools

import torch

from trainer.engine.training.graphs import MOST_SIZES, Sizes
from trainer.families.diffusion import kept_on_device
from trainer.families.values import Batch


def made(*key: object) -> torch.Tensor:
    return torch.zeros(1)


def batch(target: int, *controls: int, size: int = 1) -> Batch:
    pictures = {"mean": target, **{f"control_{place}": one for place, one in enumerate(controls, 1)}}
    latents = {name: torch.empty(size, 4, side, 4, device="meta") for name, side in pictures.items()}
    return Batch(latents=latents, text={}, size=size, weight=float(size))


def test_what_is_kept_of_each_set_of_sizes_stays_as_long_as_graphs() -> None:
    """A few sizes of controls, of which two are in a sample: sets of them are many."""
    kept_on_device.cache_clear()
    sizes, kept = Sizes(), dict[tuple[int, ...], torch.Tensor]()
    for sides in itertools.product(range(13), range(13), range(13)):
        sizes.add(batch(*sides))
        if sizes.many:
            break
        kept[sides] = kept_on_device(made, "pictures", sides)
        kept_on_device(made, "texts", sides)
    assert 256 < len(kept) < 13**3  # some hundred sets are usual, and their graphs a fifth of the time
    assert all(kept_on_device(made, "pictures", sides) is one for sides, one in kept.items())


def test_sizes_of_one_picture_are_counted_by_themselves() -> None:
    sizes = Sizes()
    for side in range(MOST_SIZES):
        sizes.add(batch(side))
        sizes.add(batch(side))
    assert not sizes.many
    sizes.add(batch(MOST_SIZES))
    assert sizes.many
