"""A block's frozen tensors in one piece of memory compute what they did apart, and leave nothing behind."""

from __future__ import annotations

import errno
import mmap

import pytest
import torch

from tests.unit.modeling.small_models import Case, Storage, case
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.modeling.storage.block_memory import compact, pages

STORAGES: tuple[Storage, ...] = ("plain", "int8", "fp8", "nf4")
FAMILIES = ("flux1_dev", "kandinsky5", "llama", "qwen_image")


def made(family: str, storage: Storage) -> Case:
    """A small model with joined layers."""
    found = case(family, storage=storage)
    join_siblings(found.model, found.predict)
    return found


def blocks(one: Case) -> list[torch.nn.Module]:
    return [module for module in one.model.modules() if type(module).__name__ in one.family.blocks]


def frozen(block: torch.nn.Module) -> list[torch.Tensor]:
    held = [parameter for parameter in block.parameters() if not parameter.requires_grad]
    return [tensor for tensor in (*held, *block.buffers()) if tensor.numel()]


def storages(block: torch.nn.Module) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in frozen(block)}


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_gradients_are_the_same_bit_for_bit(family: str, storage: Storage) -> None:
    """Before and after all of each block has come to lie in one piece."""
    one = made(family, storage)
    wanted_output, wanted = one.gradients()
    compact_in_one_piece(one)
    output, found = one.gradients()
    assert torch.equal(output, wanted_output)
    assert set(found) == set(wanted) and found
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def compact_in_one_piece(one: Case) -> None:
    before = [storages(block) for block in blocks(one)]
    assert all(len(apart) > 1 for apart in before)
    sizes = [
        sum(tensor.untyped_storage().nbytes() for tensor in first_of_each(block)) for block in blocks(one)
    ]
    compact(blocks(one))
    pieces = [storages(block) for block in blocks(one)]
    assert all(len(piece) == 1 for piece in pieces)
    assert len(set.union(*pieces)) == len(pieces)
    for block, size in zip(blocks(one), sizes, strict=True):
        (whole,) = first_of_each(block)
        # but for what rounds each tensor up
        assert whole.untyped_storage().nbytes() <= size + 256 * len(frozen(block))
        assert all(not parameter.requires_grad or apart(parameter, whole) for parameter in block.parameters())


def first_of_each(block: torch.nn.Module) -> list[torch.Tensor]:
    """One tensor of each storage."""
    return list({tensor.untyped_storage().data_ptr(): tensor for tensor in frozen(block)}.values())


def apart(parameter: torch.Tensor, whole: torch.Tensor) -> bool:
    return parameter.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()


def test_joined_weights_stay_views_of_the_wide_one() -> None:
    one = made("flux1_dev", "int8")
    compact(blocks(one))
    attention = one.model.transformer_blocks[0].attn
    wide = attention.to_q.joint_weight
    start = 0
    for layer in (attention.to_q, attention.to_k, attention.to_v):
        weight = layer.base_layer.weight
        assert weight.data_ptr() == wide.data_ptr() + start
        start += weight.nbytes
    assert start == wide.nbytes


def test_host_memory_that_is_not_there_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError of mmap becomes a MemoryError, which ends with advice like torch's own allocator error."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", full)
    with pytest.raises(MemoryError, match="no 64 MiB of host memory for a block that waits"):
        pages(64 * 2**20)


def test_pages_are_whole_and_stay_as_long_as_a_view_of_them() -> None:
    """Pinned memory shares no page with other memory."""
    memory = pages(mmap.PAGESIZE + 1)
    assert memory.numel() == mmap.PAGESIZE + 1 and not memory.any()
    assert memory.data_ptr() % mmap.PAGESIZE == 0
    kept = memory[: mmap.PAGESIZE].view(torch.float32).fill_(1.0)
    del memory
    assert float(kept.sum()) == mmap.PAGESIZE / 4
