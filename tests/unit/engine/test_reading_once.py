"""Ranks of one host that load one base: each file is read once, and each rank has all of it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Workers
from trainer.engine.ranks import Ranks
from trainer.modeling.base import reading
from trainer.modeling.base.source import ModelSource

SHARED = "single_transformer_blocks.0"


def loaded(ranks: Ranks, base: Path, weights: str, parted: tuple[str, ...]) -> tuple[list[str], str]:
    """The tensors that this rank asked its files for, and a digest of all that it has but those `parted`."""
    from diffusers import FluxTransformer2DModel

    from tests.unit.modeling.test_load import KEEP
    from trainer.modeling.base.load import Readers, build_structure, fill_structure
    from trainer.modeling.storage.quantize import replacer
    from trainer.ways.storages import find

    asked: list[str] = []
    plain = reading.Shard

    def watched(*, get_tensor: Callable[[str], torch.Tensor], **others: Any) -> reading.Shard:
        def asking(name: str) -> torch.Tensor:
            asked.append(name)
            return get_tensor(name)

        return plain(get_tensor=asking, **others)

    source = ModelSource(folder=base, identity="x", revision=None, random_components=frozenset(), seed=0)
    structure = build_structure(
        FluxTransformer2DModel,
        source,
        "transformer",
        device="cpu",
        dtype=torch.bfloat16,
        replace=replacer(find(weights), KEEP),
    )
    readers = Readers(member=ranks.rank, size=ranks.size, send=ranks.send, parted=parted)
    elsewhere = dict.fromkeys(parted if ranks.rank else (), "meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "Shard", watched)
        module = fill_structure(structure, elsewhere=elsewhere, readers=readers)
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not name.startswith(SHARED):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return asked, digest.hexdigest()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A transformer in four shards."""
    from diffusers import FluxTransformer2DModel

    from tests.unit.modeling.test_load import CONFIG, shards

    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")
    shards(tmp_path / "transformer", 4)
    return tmp_path


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_tensor_is_read_by_one_and_held_by_all(
    pool: Workers, base: Path, weights: str, size: int
) -> None:
    ((every, wanted),) = pool.call(loaded, 1, base, weights, ())
    found = pool.call(loaded, size, base, weights, ())
    assert [digest for _, digest in found] == [wanted] * size
    assert sorted(name for asked, _ in found for name in asked) == sorted(every)
    assert all(len(asked) >= len(every) // size for asked, _ in found)


def test_blocks_that_ranks_have_in_turn_are_read_by_their_owner_alone(pool: Workers, base: Path) -> None:
    ((every, wanted),) = pool.call(loaded, 1, base, "bf16", ())
    (first, digest), (second, other) = pool.call(loaded, 2, base, "bf16", (SHARED,))
    assert digest == other == wanted
    assert sorted([*first, *second]) == sorted(every)
    own = {name for name in every if name.startswith(f"{SHARED}.")}
    assert own <= set(first) and own.isdisjoint(second)
