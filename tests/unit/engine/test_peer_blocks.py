"""Blocks whose frozen weights lie with several ranks compute what blocks of one's own do, to the bit."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from tests.ranks import Workers
from tests.unit.modeling.small_models import Case, Storage
from trainer.engine.ranks import Ranks
from trainer.errors import HardwareError, PeerLostError
from trainer.modeling.storage.shared_memory import Offer, open_offer, share

CPU = torch.device("cpu")


def sharded(ranks: Ranks, one: Case, *, count: int, on_host: bool = False, by_use: bool = False) -> Case:
    """The model with `count` blocks over all ranks; of those of others it keeps no value."""
    from tests.unit.modeling.small_models import modulation
    from trainer.modeling.blocks.recompute import repeated_blocks
    from trainer.modeling.storage.block_memory import frozen, replace_values, without_values
    from trainer.modeling.storage.host_blocks import spread_blocks
    from trainer.modeling.storage.peer_blocks import PeerMemory
    from trainer.modeling.storage.staging import Staged

    blocks = repeated_blocks(one.model, one.family.blocks)
    shared = [blocks[name] for name in spread_blocks(blocks, count)]
    for number, block in enumerate(shared):
        if number % ranks.size != ranks.rank:
            for _, tensor in frozen(block):
                replace_values(tensor, without_values(tensor))
    home = PeerMemory(
        shared,
        member=ranks.rank,
        size=ranks.size,
        agree=ranks.agreed,
        device="cpu",
        on_host=on_host,
        forward_only=modulation(one) if by_use else None,
    )
    staged = Staged(home, "cpu")
    assert len(staged.blocks) + len(home.kept) == count
    assert not (on_host and home.kept)
    return one


def is_the_same(
    ranks: Ranks,
    family: str,
    storage: Storage,
    count: int,
    recomputed: bool,
    joins: bool,
    on_host: bool = False,
) -> bool:
    from tests.unit.modeling.small_models import case
    from tests.unit.modeling.test_staging import BLOCKS, assert_same, join, recompute_blocks, repeated_blocks

    one = case(family, storage=storage, changes=BLOCKS[family])
    sharded(ranks, one, count=count, on_host=on_host, by_use=not recomputed)
    if recomputed:
        recompute_blocks(repeated_blocks(one.model, one.family.blocks))
    if joins:
        join(one)
    assert_same(one, family, storage, joins=joins)
    return True


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [
        # without recomputed blocks flux1_dev is below, in every storage
        ("kandinsky5", False),
        ("llama", False),
        ("qwen_image", False),
        ("flux1_dev", True),
        ("kandinsky5", True),
    ],
)
def test_outputs_and_gradients_are_those_of_a_whole_base(
    pool: Workers, family: str, recomputed: bool
) -> None:
    assert pool.call(is_the_same, 2, family, "plain", 4, recomputed, False) == [True] * 2


@pytest.mark.parametrize(
    "storage",
    [
        "plain",
        "fp8",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "nf4", "fp8_two_copies")),
    ],
)
def test_every_storage_may_lie_with_several(pool: Workers, storage: Storage) -> None:
    """Three ranks, seven blocks: the first has one more."""
    assert pool.call(is_the_same, 3, "flux1_dev", storage, 7, False, False) == [True] * 3


@pytest.mark.parametrize(
    ("storage", "recomputed"),
    [("plain", True), ("plain", False), ("int8", True), ("fp8_two_copies", False)],
)
def test_layers_are_joined_where_their_owner_has_them(
    pool: Workers, storage: Storage, recomputed: bool
) -> None:
    assert pool.call(is_the_same, 2, "flux1_dev", storage, 5, recomputed, True) == [True] * 2


@pytest.mark.parametrize(
    ("storage", "joins"), [("plain", False), ("plain", True), ("int8", False), ("fp8_two_copies", True)]
)
def test_ranks_share_one_copy_in_host_memory(pool: Workers, storage: Storage, joins: bool) -> None:
    assert pool.call(is_the_same, 3, "flux1_dev", storage, 5, True, joins, True) == [True] * 3


def shared_bytes(ranks: Ranks) -> tuple[int, int]:
    """Bytes of blocks in host memory that this rank made, and of all."""
    from tests.unit.modeling.small_models import case
    from tests.unit.modeling.test_staging import BLOCKS, staged_in
    from trainer.modeling.storage.peer_blocks import PeerMemory

    staged = staged_in(sharded(ranks, case("llama", changes=BLOCKS["llama"]), count=4, on_host=True))
    assert isinstance(staged.home, PeerMemory)
    return staged.home.own_bytes, staged.home_bytes


def test_each_rank_makes_its_share_of_the_copy(pool: Workers) -> None:
    (one, whole), (other, whole_again) = pool.call(shared_bytes, 2)
    assert one == other == whole / 2 == whole_again / 2


def held(ranks: Ranks) -> tuple[int, int, int]:
    """Bytes of frozen weights of the blocks that a rank holds between steps, of its own, and of all."""
    from tests.unit.modeling.small_models import case
    from tests.unit.modeling.test_staging import BLOCKS, staged_in, storages

    one = case("flux1_dev", changes=BLOCKS["flux1_dev"])
    blocks = [*one.model.transformer_blocks, *one.model.single_transformer_blocks]
    whole = sum(storages(blocks))
    sharded(ranks, one, count=7)
    staged = staged_in(one)
    one.gradients()
    staged.empty()
    return sum(storages(blocks)), sum(storages(staged.home.kept)), whole


def test_a_rank_holds_the_blocks_of_its_turn_alone(pool: Workers) -> None:
    found = pool.call(held, 2)
    for between, own, _ in found:
        assert between == own > 0
    assert sum(own for _, own, _ in found) == pytest.approx(found[0][2], rel=0.05)


def read_while_the_owner_works(ranks: Ranks) -> bool:
    """Rank 1 computes ten times as many passes as rank 0, which is at its barrier meanwhile: nobody waits."""
    from tests.unit.modeling.small_models import case
    from tests.unit.modeling.test_staging import BLOCKS

    one, other = (case("llama", changes=BLOCKS["llama"]) for _ in range(2))
    sharded(ranks, one, count=4)
    wanted, _ = other.gradients()
    for _ in range(1 + 9 * ranks.rank):
        output, _ = one.gradients()
        assert torch.equal(output, wanted)
    ranks.meet()
    return True


def test_ranks_need_not_work_in_step(pool: Workers) -> None:
    assert pool.call(read_while_the_owner_works, 2) == [True, True]


def write_and_read(ranks: Ranks) -> list[int]:
    offers: list[Offer] = []
    if ranks.rank == 0:
        memory, offer = share(1 << 20, CPU)
        memory.bytes.fill_(7)
        memory.bytes[-1] = 9
        offers.append(offer)
    (offer,) = ranks.from_first(offers)
    found = open_offer(offer, CPU).bytes
    ranks.meet()
    return [int(found[0]), int(found[-1]), found.numel()]


def test_shared_memory_is_read_by_another_process(pool: Workers) -> None:
    assert pool.call(write_and_read, 3) == [[7, 9, 1 << 20]] * 3


def test_shared_memory_ends_with_its_tensor() -> None:
    memory, offer = share(4096, CPU)
    reader = open_offer(offer, CPU)
    memory.bytes.fill_(3)
    del memory
    left = Path(offer.path)
    assert not left.is_symlink() or "trainer-weights" not in str(left.readlink())
    assert int(reader.bytes.sum()) == 3 * 4096  # what is open stays


def test_memory_whose_owner_is_gone_is_a_lost_rank() -> None:
    memory, offer = share(4096, CPU)
    del memory
    with pytest.raises(PeerLostError, match="is gone"):
        open_offer(Offer(count=offer.count, path=f"{offer.path}999"), CPU)


def test_memory_that_a_container_keeps_from_other_processes_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer of hidepid, of a profile of AppArmor, or of a Python with capabilities of its own."""
    _held, offer = share(4096, CPU)

    def refused(path: Path, mode: str) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(HardwareError, match="may not read each other's memory: Permission denied") as caught:
        open_offer(offer, CPU)
    (problem,) = caught.value.problems
    assert problem.where == "features.block_swap" and "features.block_swap: 0" in problem.remedy
