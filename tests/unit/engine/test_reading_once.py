"""Ranks of one host that load one base: each file is read once, and each rank has all of it."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Workers
from trainer.engine.ranks import Ranks
from trainer.modeling.base import load, reading
from trainer.modeling.base.ring import RingSize
from trainer.modeling.base.source import ModelSource

RUN, SHARDS = 8 * 4096, 4
SHARED = "single_transformer_blocks.0"


PAGE = mmap.PAGESIZE
SMALL = RingSize(piece_bytes=PAGE, pieces=8, threads=2)


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Reading that one rank did to have its base."""

    asked: dict[str, int]
    """Bytes of the tensors that it asked its files for."""
    read: int
    """Bytes that it read of their tensors, in whole pages."""
    digest: str
    """Of all that it has but the parted blocks."""


def loaded(ranks: Ranks, base: Path, weights: str, parted: tuple[str, ...]) -> Loaded:
    """The base as a rank loads it by parallel reads, as on a GPU."""
    from diffusers import FluxTransformer2DModel

    from tests.unit.modeling.test_load import KEEP
    from trainer.modeling.base.load import Readers, build_structure, fill_structure
    from trainer.modeling.storage.layers import replacer
    from trainer.ways.storages import find

    asked: dict[str, int] = {}
    read: list[int] = []
    plain, preadv = reading.Shard, os.preadv

    def watched(*, get_tensor: Callable[[str], torch.Tensor], **others: Any) -> reading.Shard:
        def asking(name: str) -> torch.Tensor:
            found = get_tensor(name)
            asked[name] = found.nbytes
            return found

        return plain(get_tensor=asking, **others)

    def counted(*given: Any) -> int:
        read.append(preadv(*given))
        return read[-1]

    source = ModelSource(folder=base, identity="x", revision=None, random_components=frozenset(), seed=0)
    structure = build_structure(
        FluxTransformer2DModel,
        source,
        "transformer",
        device="cpu",
        dtype=torch.bfloat16,
        replace=replacer(find(weights), KEEP),
    )
    readers = Readers(member=ranks.rank, size=ranks.size, send=ranks.send, parted=parted, run_bytes=RUN)
    elsewhere = dict.fromkeys(parted if ranks.rank else (), "meta")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "Shard", watched)
        patch.setattr(reading, "choose", lambda *_, **__: reading.Choice(method="parallel", reason="test"))
        patch.setattr(reading, "DISCRETE", SMALL)
        patch.setattr(os, "preadv", counted)
        module = fill_structure(structure, elsewhere=elsewhere, readers=readers)
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if not name.startswith(SHARED):
            digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return Loaded(asked=asked, read=sum(read), digest=digest.hexdigest())


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A transformer in four shards."""
    from diffusers import FluxTransformer2DModel

    from tests.unit.modeling.test_load import CONFIG, shards

    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")
    shards(tmp_path / "transformer", SHARDS)
    return tmp_path


def runs(asked: dict[str, int]) -> int:
    """The most runs of neighbours that so many bytes can be: each reads a piece more at either end."""
    return 1 + sum(asked.values()) // RUN


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize("size", [2, 3])
def test_every_tensor_is_read_by_one_and_held_by_all(
    pool: Workers, base: Path, weights: str, size: int
) -> None:
    (one,) = pool.call(loaded, 1, base, weights, ())
    found = pool.call(loaded, size, base, weights, ())
    assert [each.digest for each in found] == [one.digest] * size
    assert sorted(name for each in found for name in each.asked) == sorted(one.asked)
    total = sum(one.asked.values())
    largest = max(one.asked.values())
    for each in found:  # of tensors as they are, and of the files too: the disk is asked for nothing twice
        assert abs(sum(each.asked.values()) - total / size) <= RUN + largest
        assert each.read <= sum(each.asked.values()) + 2 * PAGE * (runs(each.asked) + SHARDS)
    assert sum(each.read for each in found) < 1.2 * one.read


def test_blocks_that_ranks_have_in_turn_are_read_by_their_owner_alone(pool: Workers, base: Path) -> None:
    (one,) = pool.call(loaded, 1, base, "bf16", ())
    first, second = pool.call(loaded, 2, base, "bf16", (SHARED,))
    assert first.digest == second.digest == one.digest
    assert sorted([*first.asked, *second.asked]) == sorted(one.asked)
    own = {name for name in one.asked if name.startswith(f"{SHARED}.")}
    assert own <= set(first.asked) and own.isdisjoint(second.asked)
    assert first.read + second.read < 1.2 * one.read


def test_turns_are_runs_of_neighbours_and_equal_bytes() -> None:
    """Weights and biases alternate in files: tensor by tensor in turn one rank would read all weights."""
    turns = load._Turns(load.Readers(size=2, run_bytes=100))
    taken = [(turns.next(size), size) for size in (1, 60, 1, 60, 1, 60, 1, 60, 1, 60, 1, 60)]
    assert [member for member, _ in taken] == [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 0]
    uneven = load._Turns(load.Readers(size=2, run_bytes=1))
    assert [uneven.next(size) for size in (100, 30, 30, 30, 30, 5)] == [0, 1, 1, 1, 1, 0]
