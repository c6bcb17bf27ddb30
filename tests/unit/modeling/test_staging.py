"""Blocks whose frozen weights lie elsewhere compute what they compute on the device, bit for bit."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import Case, Storage, case, modulation
from trainer.modeling.adapter.joined_lora import join_siblings, part_siblings
from trainer.modeling.adapter.lora import adapter_state, remove_lora
from trainer.modeling.base import structure
from trainer.modeling.base.load import fill_structure
from trainer.modeling.base.structure import Structure
from trainer.modeling.blocks.recompute import Recomputed, recompute_blocks, repeated_blocks
from trainer.modeling.storage import staging
from trainer.modeling.storage.host_blocks import HostMemory, spread, spread_blocks
from trainer.modeling.storage.staging import Staged

BLOCKS = {
    "flux1_dev": {"num_layers": 2, "num_single_layers": 5},
    "qwen_image": {"num_layers": 4},
    "kandinsky5": {"num_text_blocks": 1, "num_visual_blocks": 4},
    "llama": {"num_hidden_layers": 4},
}
FAMILIES = sorted(BLOCKS)


def made(
    family: str,
    count: int,
    storage: Storage = "plain",
    *,
    ahead: int = 1,
    recomputed: bool = True,
    by_use: bool = False,
    closed: bool = False,
    **options: Any,
) -> Case:
    """A small model, `count` of whose blocks wait in host memory."""
    found = case(family, storage=storage, changes=BLOCKS[family], **options)
    blocks = repeated_blocks(found.model, found.family.blocks)
    if count:
        waiting = [blocks[name] for name in spread_blocks(blocks, count)]
        home = HostMemory(waiting, pinned=False, forward_only=modulation(found) if by_use else None)
        Staged(home, "cpu", ahead=ahead, closed=closed)
    if recomputed:
        recompute_blocks(blocks)
    return found


def found_in(one: Case) -> Staged | None:
    """The blocks that wait, which each of them knows."""
    return next((vars(module)["staged"] for module in one.model.modules() if "staged" in vars(module)), None)


def staged_in(one: Case) -> Staged:
    staged = found_in(one)
    assert staged is not None
    return staged


def join(one: Case) -> None:
    """Join layers like the engine does: the weights of waiting blocks are joined where they wait."""
    staged = found_in(one)

    def run() -> None:
        with torch.no_grad():
            one.predict()
        if staged is not None:
            staged.unpack()

    assert join_siblings(one.model, run) > 0
    if staged is not None:
        staged.pack()


def test_what_waits_lies_in_pages_of_its_own() -> None:
    """A GPU pins whole pages: two blocks in one would be pinned and unpinned together."""
    home = staged_in(made("flux1_dev", 2)).home
    assert isinstance(home, HostMemory)
    starts = [packed.bytes.data_ptr() for packed in home._packed]
    assert len(set(starts)) == 2 and not any(start % mmap.PAGESIZE for start in starts)


# each kind after the other one, and two passes with gradients in succession
PASSES = ("prediction", "gradients", "gradients", "prediction")
Pass = tuple[torch.Tensor, dict[str, torch.Tensor]]


def trained(one: Case) -> Iterator[Pass]:
    """Outputs and gradients of several passes, between which the adapter moves."""
    for kind in PASSES:
        if kind == "prediction":
            with torch.no_grad():
                predicted = one.predict()
            yield predicted, {}
            continue
        output, gradients = one.gradients()
        assert any(bool(gradient.any()) for gradient in gradients.values())
        yield output, gradients
        for parameter in one.model.parameters():
            if parameter.grad is not None:
                parameter.data -= 0.01 * parameter.grad.sign()


@functools.cache
def wanted_passes(family: str, storage: Storage, *, joins: bool = False) -> tuple[Pass, ...]:
    """`trained` of a model none of whose blocks waits or is recomputed."""
    plain = made(family, 0, storage, recomputed=False)
    if joins:
        join(plain)
    return tuple(trained(plain))


def assert_equal(found: Pass, wanted: Pass) -> None:
    (output, gradients), (wanted_output, wanted_gradients) = found, wanted
    assert torch.equal(output, wanted_output)
    assert gradients.keys() == wanted_gradients.keys()
    assert all(torch.equal(gradients[name], value) for name, value in wanted_gradients.items())


def assert_same(one: Case, family: str, storage: Storage = "plain", *, joins: bool = False) -> None:
    """Several steps in which the adapter moves, with passes without gradients between them."""
    for found, wanted in zip(trained(one), wanted_passes(family, storage, joins=joins), strict=True):
        assert_equal(found, wanted)


@pytest.mark.parametrize(
    ("family", "count", "recomputed"),
    [
        *(("flux1_dev", count, count in (2, 3)) for count in (1, 2, 3, 4)),
        *((family, 1, False) for family in FAMILIES if family != "flux1_dev"),
        *((family, 3, True) for family in FAMILIES if family != "flux1_dev"),
    ],
)
def test_outputs_and_gradients_are_the_same_bit_for_bit(family: str, count: int, recomputed: bool) -> None:
    """Where activations are kept, autograd keeps views of weights whose memory is given back meanwhile."""
    assert_same(made(family, count, recomputed=recomputed), family)


@pytest.mark.parametrize(
    ("family", "ahead"), [*((FAMILIES[0], ahead) for ahead in (0, 9)), *((one, 2) for one in FAMILIES)]
)
def test_more_or_fewer_blocks_may_be_ahead(family: str, ahead: int) -> None:
    one = made(family, 4, ahead=ahead, recomputed=False)
    assert_same(one, family)
    assert len(staged_in(one)._window) == min(ahead + 1, 4)


@pytest.mark.parametrize(
    ("family", "recomputed"),
    [("flux1_dev", True), *((family, family == "kandinsky5") for family in FAMILIES)],
)
def test_a_closed_pass_copies_nothing_for_the_next_one(
    family: str, recomputed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(family, 4, closed=True, recomputed=recomputed)
    staged, filled = staged_in(one), list[staging._Page]()
    fill = staging._Page.fill

    def counted(self: staging._Page, stream: torch.cuda.Stream | None) -> None:
        filled.extend([] if self._is_filled else [self])
        fill(self, stream)

    monkeypatch.setattr(staging._Page, "fill", counted)
    prediction, wanted, *_ = wanted_passes(family, "plain")
    for _ in range(2):
        assert_equal(one.gradients(), wanted)
        staged.empty()
        assert not any(page._whole.untyped_storage().nbytes() for pages in staged._pages for page in pages)
    # the last two stay for backward, and all are copied twice but these
    assert len(filled) == 2 * (2 * len(staged._pages) - 2)
    with torch.no_grad():
        assert torch.equal(one.predict(), prediction[0])
    assert len(filled) == 2 * (2 * len(staged._pages) - 2) + len(staged._pages)


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "llama"])  # which has no graphs
def test_the_first_copies_of_a_closed_pass_begin_with_the_model(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the blocks that compute before the first one that waits."""
    one = made(family, 2, closed=True, recomputed=False)
    staged, order = staged_in(one), list[str]()
    blocks = repeated_blocks(one.model, one.family.blocks)
    first, *_ = (block for block in blocks.values() if block not in staged.blocks)
    first.register_forward_pre_hook(lambda *_: order.append("a block of the device"))
    fill = staging._Page.fill

    def told(self: staging._Page, stream: torch.cuda.Stream | None) -> None:
        order.extend([] if self._is_filled else ["copy"])
        fill(self, stream)

    monkeypatch.setattr(staging._Page, "fill", told)
    one.model.register_forward_pre_hook(lambda *_: staged.begin())
    prediction, wanted, *_ = wanted_passes(family, "plain")
    for _ in range(2):
        assert_equal(one.gradients(), wanted)
        staged.empty()
        with torch.no_grad():
            assert torch.equal(one.predict(), prediction[0])
        # of a pass with gradients both blocks stay; a prediction begins nothing for the next pass
        assert order == 2 * ["copy", "copy", "a block of the device"]
        order.clear()
        staged.empty()


@pytest.mark.parametrize("family", FAMILIES)
def test_all_blocks_may_wait(family: str) -> None:
    count = sum(BLOCKS[family].values())
    one = made(family, count)
    blocks = [m for m in one.model.modules() if type(m).__name__ in one.family.blocks]
    assert len(blocks) == count
    assert all(isinstance(block, Recomputed) for block in blocks)
    assert_same(one, family)


@pytest.mark.parametrize(
    ("family", "storage", "recomputed"),
    [
        ("flux1_dev", "int8", True),
        ("flux1_dev", "nf4", False),
        ("flux1_dev", "fp8", True),
        ("flux1_dev", "fp8_two_copies", False),
        ("llama", "int8", False),
        ("llama", "nf4", True),
        ("llama", "fp8", False),
        ("llama", "fp8_two_copies", True),
    ],
)
def test_every_storage_waits(family: str, storage: Storage, recomputed: bool) -> None:
    assert_same(made(family, 3, storage, recomputed=recomputed), family, storage)


@pytest.mark.parametrize(
    ("family", "recomputed"), [("flux1_dev", False), *((family, family != "llama") for family in FAMILIES)]
)
def test_joined_layers_wait(family: str, recomputed: bool) -> None:
    one, other = made(family, 3, recomputed=recomputed), made(family, 0, recomputed=False)
    for each in (one, other):
        join(each)
    for found, wanted in zip(trained(one), trained(other), strict=True):
        assert_equal(found, wanted)
    for each in (one, other):
        part_siblings(each.model)
    assert_equal(one.gradients(), other.gradients())


@pytest.mark.parametrize("storage", ["int8", "fp8", "fp8_two_copies"])
def test_joined_layers_of_every_storage_wait(storage: Storage) -> None:
    one = made("flux1_dev", 6, storage)
    join(one)
    assert_same(one, "flux1_dev", storage, joins=True)


@pytest.mark.parametrize(("joins", "ahead"), [(False, 0), (False, 1), (True, 1), (True, 3)])
def test_each_pass_copies_the_copy_of_weights_that_it_reads(
    joins: bool, ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made("flux1_dev", 4, "fp8_two_copies", ahead=ahead, recomputed=False, by_use=True)
    if joins:
        join(one)
    assert_same(one, "flux1_dev", "fp8_two_copies", joins=joins)
    sizes = dict.fromkeys(("forward", "backward", "both"), 0)
    for pages in staged_in(one)._pages:
        assert {page.use for page in pages} == {"forward", "backward", "both"}
        for page in pages:
            sizes[page.use] += page._source.numel()
    waiting = {id(module) for block in staged_in(one).blocks for module in block.modules()}
    linears = [module for module in modulation(one) if id(module) in waiting]
    beside = sum(p.numel() * p.itemsize for module in linears for p in module.parameters())
    assert beside and sizes["forward"] - beside == pytest.approx(sizes["backward"], rel=0.01)
    copied: list[int] = []
    fill = staging._Page.fill

    def counted(self: staging._Page, stream: None) -> None:
        if not self._is_filled:
            copied.append(self._source.numel())
        fill(self, stream)

    staged_in(one).empty()
    monkeypatch.setattr(staging._Page, "fill", counted)
    one.gradients()
    once = sum(sizes.values())
    assert sum(copied) <= once + sizes["both"] + (ahead + 1) * once / 4


@pytest.mark.parametrize(
    ("family", "storage"), [("flux1_dev", "int8"), ("qwen_image", "plain"), ("qwen_image", "fp8_two_copies")]
)
def test_backward_copies_no_modulation(
    family: str, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = made(family, 4, storage, recomputed=False, by_use=True, closed=True)
    assert_same(one, family, storage)
    staged, passes = staged_in(one), list[str]()
    staged.empty()
    fill = staging._Page.fill

    def noted(self: staging._Page, stream: None) -> None:
        passes.extend([] if self._is_filled else [self.use])
        fill(self, stream)

    monkeypatch.setattr(staging._Page, "fill", noted)
    one.gradients()
    blocks = len(staged._pages)
    # a part that forward alone reads is copied once a micro-batch, in its turn
    assert passes.count("forward") == blocks
    assert passes.count("both") == 2 * blocks - 2


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


def storages(blocks: Iterable[torch.nn.Module]) -> list[int]:
    """Bytes of the storages of frozen tensors."""
    found = {
        id(storage): storage.nbytes()
        for block in blocks
        for parameter in block.parameters()
        if not parameter.requires_grad
        for storage in [parameter.untyped_storage()]
    }
    return [size for size in found.values() if size]


@pytest.mark.parametrize("ahead", [1, 2])
def test_as_many_blocks_as_are_ahead_and_one_are_on_the_device(ahead: int) -> None:
    one = made("flux1_dev", 6, ahead=ahead, recomputed=False)
    staged, most = staged_in(one), []
    sizes = [sum(p.nbytes for p in block.parameters() if not p.requires_grad) for block in staged.blocks]
    assert len(staged.blocks) == 6
    assert sum(sizes) <= staged.home_bytes <= sum(sizes) + 6 * 40 * 256
    largest = (1 + ahead) * max(sizes)
    assert largest <= staged.device_bytes <= largest + (1 + ahead) * 40 * 256
    assert storages(staged.blocks) == []

    def look(*_: Any) -> None:
        most.append(live())

    def live() -> int:
        return sum(page._whole.untyped_storage().nbytes() for pages in staged._pages for page in pages)

    for block in staged.blocks:
        block.register_forward_hook(look)
        block.register_full_backward_hook(look)
    for _ in range(2):
        one.gradients()
    assert len(most) == 2 * 2 * 6
    assert 0 < max(most) <= staged.device_bytes


STORAGES: tuple[Storage, ...] = ("plain", "int8", "nf4", "fp8", "fp8_two_copies")


@pytest.mark.parametrize("storage", STORAGES)
def test_a_weight_that_is_not_staged_cannot_be_read(storage: Storage) -> None:
    """torch has an error for some products; others end the process by a fault, and none gives an output."""
    one = made("flux1_dev", 3, storage)
    one.gradients()
    staged_in(one).empty()
    linear = staged_in(one).blocks[0].get_submodule("attn.to_q.base_layer")
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        with contextlib.suppress(RuntimeError):
            linear(torch.ones(1, 64))
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) in (1, -signal.SIGSEGV)


def test_joined_weights_leave_no_holes_at_home() -> None:
    plain, one = made("flux1_dev", 3), made("flux1_dev", 3)
    join(one)
    few = 3 * 40 * 256
    assert abs(staged_in(one).home_bytes - staged_in(plain).home_bytes) < few


def test_tensors_that_blocks_share_stay_with_those_that_do_not_wait() -> None:
    """bitsandbytes has one code table for all layers."""
    found = case("flux1_dev", storage="nf4", changes=BLOCKS["flux1_dev"])
    resident = found.model.transformer_blocks[0].ff.net[2]
    before = resident.nested_code.clone()
    pointer = resident.nested_code.data_ptr()
    blocks = repeated_blocks(found.model, found.family.blocks)
    waiting = [blocks[name] for name in spread_blocks(blocks, 5)]
    assert resident not in {module for block in waiting for module in block.modules()}
    Staged(HostMemory(waiting, pinned=False), "cpu")
    assert resident.nested_code.data_ptr() == pointer
    assert torch.equal(resident.nested_code, before)


def test_every_block_is_copied_once_a_pass_but_for_the_two_at_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = made("llama", 4)
    copied: list[int] = []
    pages = [page for (page,) in staged_in(one)._pages]
    fill = staging._Page.fill

    def counted(self: staging._Page, stream: None) -> None:
        if not self._is_filled:
            copied.append(pages.index(self))
        fill(self, stream)

    monkeypatch.setattr(staging._Page, "fill", counted)
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
    plain = Staged.stage

    def told(self: Staged, number: int, turn: Any) -> None:
        calls.append(f"{turn} {number}")
        plain(self, number, turn)

    monkeypatch.setattr(Staged, "stage", told)
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
    assert spread(lengths, count) == places


def test_the_longest_stack_waits_first() -> None:
    found = case("flux1_dev", changes=BLOCKS["flux1_dev"])
    assert spread_blocks(repeated_blocks(found.model, found.family.blocks), 2) == [
        "single_transformer_blocks.1",
        "single_transformer_blocks.3",
    ]
    assert spread_blocks(repeated_blocks(found.model, found.family.blocks), 6)[0] == "transformer_blocks.1"
    with pytest.raises(AssertionError, match="8 blocks of 7"):
        spread_blocks(repeated_blocks(found.model, found.family.blocks), 8)


def test_modules_that_wait_are_left_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = case("flux1_dev", adapted=False).model
    block = model.single_transformer_blocks[1]
    moved: dict[str, set[torch.nn.Module]] = {"cpu": set(), "cpu:0": set()}
    monkeypatch.setattr(structure, "move", lambda module, device: moved[device].add(module))
    wanted = model.state_dict()
    empty = Structure(module=model, folder=Path(), device="cpu:0", wanted=wanted, random_label="x")
    fill_structure(empty, elsewhere={"single_transformer_blocks.1": "cpu"})
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
    staged, log = staged_in(one), []
    staged._stream = Told("copying", log)  # type: ignore[assignment]
    for number, (page,) in enumerate(staged._pages):
        page._copied = Told(f"copy {number}", log)  # type: ignore[assignment]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Told("computing", log))
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    one.gradients()

    def copied(number: int) -> list[str]:
        return ["copying waits for computing", f"copy {number} is recorded on copying"]

    def used(number: int) -> str:
        return f"computing waits for copy {number}"

    # the second is what a page waits for before its memory is given back, whoever asks for it
    forward = [*copied(0), *copied(1), used(0), used(0), *copied(2), used(1), used(2)]
    assert log[: len(forward)] == [*copied(0), *copied(1), used(0), used(0), *copied(2), used(1), used(2)]
    assert log[len(forward) :] == [used(2), used(2), *copied(0), used(1), used(0)]
