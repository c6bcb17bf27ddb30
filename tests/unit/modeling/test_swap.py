"""Blocks whose frozen weights wait in host memory compute what they compute on the device, bit for bit."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import Case, Storage, case
from trainer.modeling.adapter.joined_lora import join_siblings, part_siblings
from trainer.modeling.adapter.lora import adapter_state, remove_lora
from trainer.modeling.base import structure
from trainer.modeling.base.load import fill_structure
from trainer.modeling.base.structure import Structure
from trainer.modeling.blocks.recompute import Recomputed, recompute_blocks, repeated_blocks
from trainer.modeling.storage import swap
from trainer.modeling.storage.block_memory import Packed, point
from trainer.modeling.storage.swap import Swapped, swap_blocks, waiting, waiting_blocks

BLOCKS = {
    "flux1_dev": {"num_layers": 2, "num_single_layers": 5},
    "qwen_image": {"num_layers": 4},
    "kandinsky5": {"num_text_blocks": 1, "num_visual_blocks": 4},
    "llama": {"num_hidden_layers": 4},
}
FAMILIES = sorted(BLOCKS)


def made(family: str, count: int, storage: Storage = "plain", **options: Any) -> Case:
    """A small model that recomputes its blocks, `count` of which wait."""
    found = case(family, storage=storage, changes=BLOCKS[family], **options)
    if count:
        swap_blocks(repeated_blocks(found.model, found.family.blocks), count, device="cpu")
    recompute_blocks(repeated_blocks(found.model, found.family.blocks))
    return found


def host_blocks(one: Case) -> Swapped | None:
    """The blocks that wait, which each of them knows."""
    return next(
        (vars(module)["swapped"] for module in one.model.modules() if "swapped" in vars(module)), None
    )


def swapped_in(one: Case) -> Swapped:
    swapped = host_blocks(one)
    assert swapped is not None
    return swapped


def join(one: Case) -> None:
    """Join layers like the engine does: the weights of waiting blocks are joined where they wait."""
    swapped = host_blocks(one)

    def run() -> None:
        with torch.no_grad():
            one.predict()
        if swapped is not None:
            swapped.to_host()

    assert join_siblings(one.model, run) > 0
    if swapped is not None:
        swapped.pack()


def test_what_waits_lies_in_pages_of_its_own() -> None:
    """A GPU pins whole pages: two blocks in one would be pinned and unpinned together."""
    swapped = swapped_in(made("flux1_dev", 2))
    starts = [packed.bytes.data_ptr() for packed in swapped._packed]
    assert len(set(starts)) == 2 and not any(start % mmap.PAGESIZE for start in starts)


def assert_same(one: Case, other: Case, *, steps: int = 3) -> None:
    """Several steps in which the adapter moves, with passes without gradients between them."""
    for step in range(steps):
        if step != 1:
            with torch.no_grad():
                assert torch.equal(one.predict(), other.predict())
        output, found = one.gradients()
        wanted_output, wanted = other.gradients()
        assert torch.equal(output, wanted_output)
        assert set(found) == set(wanted) and found
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert any(bool(gradient.any()) for gradient in wanted.values())
        for model in (one.model, other.model):
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.data -= 0.01 * parameter.grad.sign()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_outputs_and_gradients_are_the_same_bit_for_bit(family: str, count: int) -> None:
    assert_same(made(family, count), made(family, 0))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_may_wait(family: str) -> None:
    count = sum(BLOCKS[family].values())
    swapped = made(family, count)
    blocks = [m for m in swapped.model.modules() if type(m).__name__ in swapped.family.blocks]
    assert len(blocks) == count
    assert all(isinstance(block, Recomputed) for block in blocks)
    assert_same(swapped, made(family, 0))


@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
@pytest.mark.parametrize("storage", ["int8", "nf4", "fp8", "fp8_two_copies"])
def test_every_storage_waits(family: str, storage: Storage) -> None:
    assert_same(made(family, 3, storage), made(family, 0, storage))


@pytest.mark.parametrize("family", FAMILIES)
def test_joined_layers_wait(family: str) -> None:
    one, other = made(family, 3), made(family, 0)
    join(one)
    join(other)
    assert_same(one, other)
    for each in (one, other):
        part_siblings(each.model)
    assert_same(one, other, steps=1)


@pytest.mark.parametrize("storage", ["int8", "fp8", "fp8_two_copies"])
def test_joined_layers_of_every_storage_wait(storage: Storage) -> None:
    one, other = made("flux1_dev", 6, storage), made("flux1_dev", 0, storage)
    join(one)
    join(other)
    assert_same(one, other)


def test_an_adapter_can_be_read_removed_and_put_on_again() -> None:
    one, other = made("flux1_dev", 3), made("flux1_dev", 0)
    states = [adapter_state(each.model) for each in (one, other)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for each in (one, other):
        remove_lora(each.model)
    with torch.no_grad():
        assert torch.equal(one.predict(), other.predict())


def test_names_of_the_models_tensors_stay() -> None:
    assert made("flux1_dev", 3).model.state_dict().keys() == made("flux1_dev", 0).model.state_dict().keys()


def test_two_buffers_of_the_largest_block_are_all_that_is_on_the_device() -> None:
    one = made("flux1_dev", 6)
    swapped = swapped_in(one)
    sizes = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in swapped.blocks]
    assert swapped.number == 6
    assert sum(sizes) <= swapped.host_bytes <= sum(sizes) + 6 * 40 * 256
    assert 2 * max(sizes) <= swapped.device_bytes <= 2 * (max(sizes) + 40 * 256)
    for _ in range(2):
        storages = {
            parameter.untyped_storage().data_ptr()
            for block in swapped.blocks
            for parameter in block.parameters()
            if not parameter.requires_grad
        }
        assert 1 <= len(storages) <= 2
        one.gradients()


def test_tensors_that_blocks_share_stay_with_those_that_do_not_wait() -> None:
    """bitsandbytes has one code table for all layers."""
    found = case("flux1_dev", storage="nf4", changes=BLOCKS["flux1_dev"])
    resident = found.model.transformer_blocks[0].ff.net[2]
    before = resident.nested_code.clone()
    pointer = resident.nested_code.data_ptr()
    swap_blocks(repeated_blocks(found.model, found.family.blocks), 5, device="cpu")
    assert resident.nested_code.data_ptr() == pointer
    assert torch.equal(resident.nested_code, before)


def test_every_block_is_copied_once_a_pass_but_for_the_two_at_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = made("llama", 4)
    copied: list[int] = []
    plain = Swapped._copy

    def counted(self: Swapped, number: int, slot: int) -> None:
        copied.append(number)
        plain(self, number, slot)

    monkeypatch.setattr(Swapped, "_copy", counted)
    one.gradients()
    assert copied == [0, 1, 2, 3, 1, 0]
    copied.clear()
    one.gradients()
    assert copied == [2, 3, 1, 0]
    copied.clear()
    with torch.no_grad():
        one.predict()
        one.predict()
    assert copied == [2, 3, 0, 1, 2, 3, 0]


def test_a_block_is_recomputed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    plain = Swapped.stage

    def told(self: Swapped, number: int, turn: Any) -> None:
        calls.append(f"{turn} {number}")
        plain(self, number, turn)

    monkeypatch.setattr(Swapped, "stage", told)
    for family in ("flux1_dev", "llama"):
        calls.clear()
        made(family, 2).gradients()
        assert calls == ["forward 0", "forward 1", "backward 1", "backward 0"]


@pytest.mark.parametrize(
    ("lengths", "count", "places"),
    [
        ([4], 4, [[0, 1, 2, 3]]),
        ([48, 8], 4, [[6, 18, 30, 42], []]),
        ([5, 2], 6, [[0, 1, 2, 3, 4], [1]]),
        ([3], 1, [[1]]),
    ],
)
def test_waiting_blocks_lie_far_from_each_other(
    lengths: list[int], count: int, places: list[list[int]]
) -> None:
    assert waiting(lengths, count) == places


def test_the_longest_stack_waits_first() -> None:
    found = case("flux1_dev", changes=BLOCKS["flux1_dev"])
    assert waiting_blocks(repeated_blocks(found.model, found.family.blocks), 2) == [
        "single_transformer_blocks.1",
        "single_transformer_blocks.3",
    ]
    assert waiting_blocks(repeated_blocks(found.model, found.family.blocks), 6)[0] == "transformer_blocks.1"
    with pytest.raises(AssertionError, match="8 blocks of 7"):
        waiting_blocks(repeated_blocks(found.model, found.family.blocks), 8)


def test_modules_that_wait_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = case("flux1_dev", adapted=False).model
    block = model.single_transformer_blocks[1]
    moved: dict[str, set[torch.nn.Module]] = {"cpu": set(), "cpu:0": set()}
    monkeypatch.setattr(structure, "move", lambda module, device: moved[device].add(module))
    wanted = model.state_dict()
    empty = Structure(module=model, folder=Path(), device="cpu:0", wanted=wanted, random_label="x")
    fill_structure(empty, on_host=["single_transformer_blocks.1"])
    inside = {*block.modules()}
    assert moved["cpu"] == {module for module in inside if [*module.parameters(recurse=False)]}
    assert moved["cpu:0"] == {*model.modules()} - inside


class Told:
    """Stands for streams and events of a GPU and writes down what they are told."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Told) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Told) -> None:
        self.log.append(f"{self.name} waits for {event.name}")

    def record(self, stream: Told) -> None:
        self.log.append(f"{self.name} is recorded on {stream.name}")


def test_on_a_gpu_a_copy_waits_for_what_is_enqueued_and_a_block_for_its_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = made("llama", 3)
    swapped, log = swapped_in(one), []
    swapped._stream = Told("copying", log)  # type: ignore[assignment]
    swapped._copied = [Told(f"buffer {slot}", log) for slot in range(2)]  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Told("computing", log))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)

    def told(packed: Packed, own: list[torch.Tensor]) -> None:
        number = [one is packed for one in swapped._packed].index(True)
        slot = [one is own for one in swapped._views[number]].index(True)
        log.append(f"block {number} in buffer {slot}")
        point(packed, own)

    monkeypatch.setattr(swap, "point", told)
    one.gradients()

    def copied(slot: int) -> list[str]:
        return ["copying waits for computing", f"buffer {slot} is recorded on copying"]

    def used(number: int, slot: int) -> list[str]:
        return [f"computing waits for buffer {slot}", f"block {number} in buffer {slot}"]

    forward = [*copied(1), *used(0, 1), *copied(0), *used(1, 0), *copied(1), *used(2, 1)]
    assert log == [*forward, *used(2, 1), *used(1, 0), *copied(1), *used(0, 1)]
