"""Random components of which another process has a part: what is left is what a whole one has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer import families
from trainer.modeling.base.random_weights import random_module
from trainer.modeling.base.source import ModelSource
from trainer.modeling.blocks.recompute import repeated_blocks

PARTED = [
    name for name in families.names() if name != "kandinsky5" and families.get(name).sample_kind == "image"
]
"""Kandinsky's modulation is set to zero after it was made; transformers initialises whole models."""


def every_second(kinds: tuple[str, ...]) -> Callable[[torch.nn.Module], set[str]]:
    """Modules of every second repeated block."""

    def absent(module: torch.nn.Module) -> set[str]:
        blocks = list(repeated_blocks(module, kinds))[1::2]
        return {name for name, _ in module.named_modules() if name.startswith(tuple(f"{b}." for b in blocks))
                or name in blocks}  # fmt: skip

    return absent


@pytest.mark.parametrize("fill_zeros", [False, True])
@pytest.mark.parametrize("name", families.names())
def test_what_is_left_has_the_values_of_a_whole_one(
    name: str, fill_zeros: bool, tiny_base: Callable[[str], Path]
) -> None:
    family, base = families.get(name), tiny_base(name)
    source = ModelSource(folder=base, identity="x", revision=None, random_components=frozenset(), seed=0)
    given = (family.model_class(source), base / family.trained_component, "0/x")
    options = {"device": "cpu", "dtype": torch.bfloat16, "fill_zeros": fill_zeros}
    whole = random_module(*given, **options)
    parted = random_module(*given, **options, absent=every_second(family.blocks))
    gone = every_second(family.blocks)(whole) if name in PARTED else set()
    for (key, theirs), (again, ours) in zip(whole.named_parameters(), parted.named_parameters(), strict=True):
        assert key == again
        assert (ours.shape, ours.dtype, ours.stride()) == (theirs.shape, theirs.dtype, theirs.stride())
        assert ours.is_meta == (key.rpartition(".")[0] in gone), key
        assert ours.is_meta or torch.equal(ours, theirs), key
    assert any(one.is_meta for one in parted.parameters()) == (name in PARTED)


class Late(torch.nn.Module):
    """A component that draws its blocks once more when all are there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(2)])
        self.end = torch.nn.Linear(4, 4)
        self.finish()

    def finish(self) -> None:
        for block in self.blocks:
            torch.nn.init.normal_(block.weight)

    @classmethod
    def load_config(cls, folder: Path) -> None:
        """Read nothing: diffusers' models have this method."""

    @classmethod
    def from_config(cls, config: None) -> Late:
        return cls()

    _keep_in_fp32_modules = None


class Reading(Late):
    """A component that takes the values of a block for another layer."""

    def finish(self) -> None:
        with torch.no_grad():
            self.end.weight.copy_(self.blocks[0].weight)


@pytest.mark.parametrize("kind", [Late, Reading])
def test_a_component_that_comes_back_to_its_blocks_keeps_all_its_values(
    kind: type[Late], tmp_path: Path
) -> None:
    options = {"device": "cpu", "dtype": torch.float32, "fill_zeros": False}
    whole = random_module(kind, tmp_path, "0", **options)
    parted = random_module(kind, tmp_path, "0", **options, absent=lambda module: {"blocks.0"})
    for ours, theirs in zip(parted.parameters(), whole.parameters(), strict=True):
        assert torch.equal(ours, theirs)
