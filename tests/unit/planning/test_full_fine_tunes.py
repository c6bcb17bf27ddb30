"""Memory and time of training whole weights: by hand, and beside what a prototype of the step measured."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest

from tests.unit.planning.conftest import GIB, kept, machine
from tests.unit.planning.test_memory import storage
from trainer.config.schema import RunConfig
from trainer.families import get
from trainer.machine.facts import EXCHANGED_BYTES, LinkVerdict
from trainer.planning.cost import memory, roofline, trained_memory, trained_time
from trainer.planning.cost.roofline import Speed, rates, speed
from trainer.planning.cost.storage import Storage
from trainer.planning.shapes.activations import Activations, Held, activations
from trainer.planning.shapes.geometry import Geometry, Linears, Stack
from trainer.planning.shapes.run_shapes import run_geometry

H200 = rates(machine("h200").gpus[0])
FP8: dict[str, Any] = {"weights": "bf16", "compute": "fp8", "weight_copies": 2}
SPLIT = "adamw_split_bf16"
BLOCKS = 3


def three_blocks(head: int = 0) -> Activations:
    """10 bytes each, 1 outside, 5 beyond; recomputed 1 each, 2 outside, 14 beyond."""
    recomputed = Held(fixed=2, blocks=(1,) * BLOCKS, beyond=14)
    whole = Held(fixed=1, blocks=(10,) * BLOCKS, beyond=5)
    return Activations(
        whole=whole, recomputed=recomputed, outside=recomputed, head=head, stacks=("blocks",) * BLOCKS
    )


def full(**changes: Any) -> Storage:
    return storage(method="full", compile=True, **changes)


def parts(chosen: Storage, geometry: Geometry) -> dict[str, int]:
    return {row.name: row.bytes for row in memory.train_rows(chosen, geometry)}


@pytest.mark.parametrize(
    ("each", "stay", "recomputed", "highest"),
    [
        # the last block begins: 1 + 30, 5 beyond, the head's 2, its own 4
        (4, True, 0, 42),
        # large ones are most where the first block ends: 1 + 10, 5 beyond, 2, three times 20
        (20, True, 0, 78),
        # those of earlier micro-batches are counted elsewhere
        (20, False, 0, 56),
        # two recomputed: the first one is left, 1 + 1, 14 beyond, 2 and three times 4
        (4, True, 2, 30),
        # all recomputed: 2 + 1, 14 beyond, 2 and three times 4
        (4, True, 3, 31),
    ],
)
def test_gradients_take_the_place_of_activations(
    each: int, stay: bool, recomputed: int, highest: int
) -> None:
    found, _ = three_blocks().backward([each] * BLOCKS, 2, recomputed=recomputed, stay=stay)
    assert found == highest


def test_a_head_comes_before_all_blocks() -> None:
    assert three_blocks(head=40).backward([4] * BLOCKS, 2, recomputed=0, stay=True) == (31 + 40 + 2, 31)


def with_blocks(geometry: Geometry, size: int) -> Geometry:
    """57 blocks of 1 GiB of gradients in all but `size`, and as many bytes of activations as they had."""
    stack = Stack(name="blocks", blocks=57, quantized=Linears(parameters=size), others=0, fp32=0)
    held = dataclasses.replace(geometry.activations_compiled, stacks=("blocks",) * 57)
    return dataclasses.replace(geometry, stacks=(stack,), activations_compiled=held)


def test_a_step_of_one_micro_batch_holds_less_than_one_of_several(geometry: Geometry) -> None:
    """4 GiB of gradients, 5 of activations, 32 MiB of gradients a block."""
    found, each = with_blocks(geometry, 2**24), 2**25
    one, two = (parts(full(rounds=rounds), found) for rounds in (1, 2))
    assert one["gradients"] == two["gradients"] == 4 * GIB
    assert one["activations"] == pytest.approx(5 * GIB + each - 4 * GIB, rel=1e-3)
    assert two["activations"] == pytest.approx(5 * GIB + each, rel=1e-3)
    # where activations are few the optimizer's step is the highest point, and needs nothing of its own
    few = dataclasses.replace(found, activations_compiled=kept(GIB // 4))
    assert parts(full(rounds=1), few)["activations"] == 0
    # but for the fp32 copy of a parameter that its running mean is made of
    assert parts(full(rounds=1, averaged=True), few)["activations"] == 4 * 2 * GIB
    trained, *others = few.components
    pieces = dataclasses.replace(trained, shapes={"a": (1024, 1024, 1024), "b": (1024,)})
    parted = dataclasses.replace(few, components=(pieces, *others))
    assert parts(full(rounds=1, averaged=True), parted)["activations"] == 4 * GIB


@pytest.mark.parametrize(
    ("checkpointing", "recomputed", "blocks_kept"),
    [(False, 0, 57), (True, 0, 1), (True, 19, 38), (True, 56, 1)],
)
def test_linears_in_rows_keep_what_they_read_in_each_block_that_is_not_recomputed(
    geometry: Geometry, checkpointing: bool, recomputed: int, blocks_kept: int
) -> None:
    """Three linears that read one input keep it three times; of recomputed blocks one is there at a time."""
    found = dataclasses.replace(geometry, linear_values=(57 * 10, 0, 57 * 30))
    chosen = full(**FP8, ranks=2, checkpointing=checkpointing, recomputed=recomputed)
    assert parts(chosen, found)["fp8 inputs"] == 20 * blocks_kept


def test_fp8_has_a_gradient_in_two_layouts_until_it_is_counted(geometry: Geometry) -> None:
    found = dataclasses.replace(geometry, widest_output=1000)
    assert parts(full(**FP8), found)["fp8 gradients"] == 2000
    assert parts(full(**FP8, weight_gradient="bf16"), found)["fp8 gradients"] == 1000
    assert "fp8 gradients" not in parts(full(), found)
    counts = dataclasses.replace(found, activations_fp8=kept(GIB))
    assert "fp8 gradients" not in parts(full(**FP8), counts)
    assert parts(full(**FP8, rounds=2), counts)["activations"] == pytest.approx(GIB, rel=1e-3)


def test_linears_of_one_input_are_one_product_in_memory_too() -> None:
    """Llama-8B's gate and up: 28,672 values of a token, and as many rows of 4,096 weights together."""
    geometry = full_size("llama")
    assert geometry.widest_output == 4096 * 2 * 14336
    assert geometry.largest_product == 2 * 14336 * 4096 == 2 * geometry.quantized.largest
    one = parts(full(**FP8 | {"weight_copies": 1}), geometry)
    assert one["fp8 transposed"] == geometry.largest_product


@pytest.mark.parametrize(("changes", "joined"), [({}, True), ({"dtype": "fp32", "weights": "fp32"}, False)])
def test_eager_gradients_of_a_later_micro_batch_come_a_product_at_a_time(
    changes: dict[str, Any], joined: bool
) -> None:
    """FLUX.1: 21,504 rows of q, k, v and the MLP in a single block, whose widest layer has 15,360 columns."""
    geometry = full_size("flux1_dev")
    apart = dataclasses.replace(geometry, largest_product=0)
    chosen = dataclasses.replace(full(rounds=2, **changes), compile=False)
    together, single = (parts(chosen, each)["activations"] for each in (geometry, apart))
    assert together - single == joined * 2 * (21504 - 15360) * 3072


def counts(*ways: str) -> dict[str, Any]:
    """Counts of one stack: 1 more a block with each way."""
    names = ("compiled", "compiled, all linears", "compiled, recomputed", *ways)
    return {
        "stacks": ["blocks"],
        "captions": [],
        "beside": {},
        "ways": {
            name: {"fixed": 0.0, "blocks": [10.0 + number], "beyond": 100.0 * number}
            for number, name in enumerate(names)
        },
    }


def of_counts(table: dict[str, Any], products: str) -> Activations:
    given: dict[str, Any] = {"compiled": True, "linear_inputs": True, "head": 0, "trained": products}
    return activations(table, {"blocks": 2}, (1, 1), **given)


def test_a_full_fine_tunes_own_counts_come_first() -> None:
    table = counts("full, compiled", "full, compiled, recomputed", "full, compiled, fp8")
    plain, fp8 = (of_counts(table, products) for products in ("bf16", "fp8"))
    assert (plain.whole.blocks, plain.whole.beyond, plain.recomputed.beyond) == ((13, 13), 300, 400)
    assert (fp8.whole.blocks, fp8.stand_in, plain.stand_in) == ((15, 15), "", "")


def test_without_them_those_of_a_lora_on_all_linears_stand_in_and_the_plan_says_so(
    geometry: Geometry,
) -> None:
    found = of_counts(counts(), "bf16")
    assert (found.whole.blocks, found.stand_in) == ((11, 11), "compiled, all linears")
    # a recomputed block needs the inputs of its linears too
    assert found.recomputed.beyond == 200 + 1
    whole = dataclasses.replace(geometry, activations_compiled=found)
    (row,) = [one for one in memory.train_rows(full(rounds=2), whole) if one.name == "activations"]
    assert row.detail == "saved for backward, as counted of compiled, all linears"


@functools.cache
def full_size(family: str) -> Geometry:
    talks = family == "llama"
    config = RunConfig.model_validate(
        {
            "family": family,
            "method": "full",
            "model": {"pretrained_model_name_or_path": "x/y"},
            "data": {"sets": [{"chat_file": "a.jsonl"} if talks else {"img_dir": "/data"}]}
            | ({"max_sequence_length": 4096} if talks else {}),
            "output_dir": "/out",
        }
    )
    tokens = None if talks else 512
    return run_geometry(get(family), config, model_folder=None, dtype="bf16", caption_tokens=tokens)


def predicted(family: str, attention_ms: float, **changes: Any) -> float:
    assert H200 is not None
    found = Speed(rates=H200, attention="cudnn", attention_ms=attention_ms)
    return roofline.milliseconds(full(**changes), full_size(family), found)


# a prototype's steps on one H200, with the times of attention there (cuDNN's: of Llama-8B's one conversation
# of 4,096 tokens 28 ms). Its head and loss took 19 ms, where 32 are counted of the trainer's
LLAMA, FLUX, LIKE_OURS = 28 / 32, 1.85, 19 - 32
RECOMPUTED: dict[str, Any] = {"checkpointing": True}


@pytest.mark.parametrize(
    ("family", "attention_ms", "changes", "apart", "measured"),
    [
        # its bf16 steps had another optimizer, which took 75 and 111 ms; this one took 45.6 there
        ("llama", LLAMA, {"optimizer": SPLIT}, LIKE_OURS, 405 - 75 + 45.6),
        ("llama", LLAMA, FP8 | {"optimizer": SPLIT}, LIKE_OURS, 281),
        ("llama", LLAMA, FP8 | {"optimizer": SPLIT, "rounds": 4}, LIKE_OURS, 1012 / 4),
        ("llama", LLAMA, {"optimizer": SPLIT, "rounds": 4}, LIKE_OURS, 1425 / 4),
        ("flux1_dev", FLUX, {"optimizer": SPLIT} | RECOMPUTED, 0, 671 - 111 + 67.6),
        ("flux1_dev", FLUX, FP8 | {"optimizer": SPLIT, "weight_copies": 1} | RECOMPUTED, 0, 520),
    ],
)
def test_steps_are_predicted_within_10_percent_of_the_prototypes(
    family: str, attention_ms: float, changes: dict[str, Any], apart: float, measured: float
) -> None:
    assert predicted(family, attention_ms, **changes) + apart == pytest.approx(measured, rel=0.1)


def test_the_optimizers_step_passes_its_bytes_through_the_memory() -> None:
    """Of 1.07 B parameters: 5.37 ms were measured (docs/benchmarks/2026-11-h200-trained.json)."""
    geometry, terabytes = full_size("llama"), 4.8
    count = sum(math.prod(shape) for shape in geometry.components[0].shapes.values())
    assert count == pytest.approx(8.03e9, rel=1e-3)
    split = trained_time.optimizer_ms(full(optimizer=SPLIT), geometry, terabytes)
    assert split == pytest.approx(5.37 * count / 2**30, rel=0.01)
    # the weights' bytes follow: two read, one or two written
    twice, once = (
        trained_time.optimizer_ms(full(**FP8 | {"weight_copies": copies}, optimizer=SPLIT), geometry, 4.8)
        for copies in (2, 1)
    )
    assert (twice - split) / (once - split) == pytest.approx(4 / 3)
    # of rows each rank has its own
    assert trained_time.optimizer_ms(full(optimizer=SPLIT, ranks=4), geometry, terabytes) == split / 4
    assert trained_time.optimizer_ms(storage(), geometry, terabytes) == 0.0
    # the weight is read, its fp32 copy written and read, the mean read and written
    averaged = trained_time.optimizer_ms(full(optimizer=SPLIT, averaged=True), geometry, terabytes)
    assert averaged / split == pytest.approx((20 + 2 + 4 + 4 + 4 + 4) / 20)


def test_a_batch_has_its_share_of_the_optimizers_step_and_of_adding_gradients(geometry: Geometry) -> None:
    assert H200 is not None
    found = Speed(rates=H200, attention="cudnn")
    one, four = (roofline.milliseconds(full(rounds=n, optimizer=SPLIT), geometry, found) for n in (1, 4))
    step = roofline.optimizer_ms(full(optimizer=SPLIT), geometry, found)
    # 2 bytes of gradient read twice and written once, of 2 Gi parameters, at 0.8 of the memory's rate
    adding = 6 * 2 * GIB / (0.8 * 4.8e12) * 1e3
    assert one - four == pytest.approx(0.75 * step - 0.75 * adding)


def test_a_head_has_three_products_where_it_trains_and_two_else() -> None:
    geometry = dataclasses.replace(full_size("llama"), head_size=(1000, 100), head_tokens=600)
    trained, frozen = (
        trained_time.head_ms(one, geometry, rate=1e6, bytes_ms=0.0) for one in (full(), storage())
    )
    assert trained == pytest.approx(3 * 2 * 600 * 1000 * 100 / 1e6)
    assert frozen == pytest.approx(2 / 3 * trained)
    # a logit's 46 bytes; of the weight's gradient 22, and 4 for each of two parts of the tokens
    passed = trained_time.head_ms(full(), geometry, rate=math.inf, bytes_ms=1.0)
    assert passed == 46 * 600 * 1000 + (22 + 4 * 2) * 1000 * 100
    assert trained_time.head_ms(full(), full_size("flux1_dev"), rate=1e6, bytes_ms=1.0) == 0.0


def test_inputs_are_quantised_once_and_gradients_twice() -> None:
    geometry = dataclasses.replace(full_size("llama"), linear_values=(100, 10, 130))
    chosen = full(**FP8)
    by_rows, by_columns = 3 * 100 + 3 * 10, 2 * 100 + 3 * 10
    once = trained_time.quantising_ms(chosen, geometry, 1e-9, forwards=1.0, probed=False)
    assert once == pytest.approx((by_rows + by_columns) / 0.66)
    # a recomputed pass quantises its inputs again
    again = trained_time.quantising_ms(chosen, geometry, 1e-9, forwards=2.0, probed=False)
    assert again - once == pytest.approx(3 * 100 / 0.66)
    # a probe's time has what a frozen layer quantises in it
    probed = trained_time.quantising_ms(chosen, geometry, 1e-9, forwards=1.0, probed=True)
    assert probed == pytest.approx(by_columns / 0.66)


def test_values_of_the_blocks_linears_are_those_of_their_sides() -> None:
    """Llama-8B: q, k and v read 4,096 values of a token once, gate and up, and o as many, down 14,336."""
    read, given, _ = full_size("llama").linear_values
    tokens, blocks = 4096, 32
    assert read == tokens * blocks * (3 * 4096 + 14336)
    assert given == tokens * blocks * (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)


def test_a_weights_gradient_in_bf16_takes_longer_and_still_less_than_all_in_bf16() -> None:
    fp8, mixed, bf16 = (
        predicted("llama", LLAMA, optimizer=SPLIT, **one)
        for one in (FP8, FP8 | {"weight_gradient": "bf16"}, {})
    )
    assert fp8 < mixed < bf16


@pytest.mark.parametrize(
    ("gib_per_second", "exchange_ms", "rate"),
    [
        (340.0, 0.3, 270e9),  # what is exchanged beside fast copies is too little to tell
        (340.0, 1.4, 270e9),  # 108 GB/s
        (340.0, 3.0, 0.75 * 3 * EXCHANGED_BYTES / 3e-3),  # by another way than copies
        (340.0, 0.0, 270e9),
        (20.0, 0.3, 20 * GIB),
        (0.0, 3.0, 0.75 * 3 * EXCHANGED_BYTES / 3e-3),  # they do not read each other
        (0.0, 0.3, 270e9),
        (0.0, 0.0, 270e9),
    ],
)
def test_rows_of_several_gpus_are_gathered_at_the_rate_of_their_way(
    gib_per_second: float, exchange_ms: float, rate: float
) -> None:
    """A rank of four receives three quarters of the weights twice, and of their gradients in fp32 once."""
    geometry = full_size("llama")
    link = LinkVerdict(gpus=4, works=True, gib_per_second=gib_per_second, exchange_ms=exchange_ms, reason="")
    found = speed(machine("h200").gpus[0], (), geometry, "cudnn", link=link)
    count = sum(math.prod(shape) for shape in geometry.components[0].shapes.values())
    travel = 0.75 * count * (2 * 2 + 4) / rate * 1e3
    alone, rows = (full(optimizer=SPLIT, ranks=ranks) for ranks in (1, 4))
    passes = [
        roofline.milliseconds(one, geometry, found) - roofline.optimizer_ms(one, geometry, found)
        for one in (alone, rows)
    ]
    # the work waits for nearly all of it: H200s measured no less
    assert passes[1] - passes[0] == pytest.approx(0.95 * travel)
    elsewhere = speed(machine("h200").gpus[0], (), geometry, "cudnn", way_known=False)
    assert roofline.milliseconds(rows, geometry, elsewhere) - passes[0] == pytest.approx(
        roofline.optimizer_ms(rows, geometry, elsewhere)
    )


@pytest.mark.parametrize(
    ("family", "ranks", "rounds", "peak", "step"),
    [
        ("flux1_dev", 2, 4, 86.8, 2385.9 / 4),
        ("flux1_dev", 2, 1, 86.5, 659.8),
        ("flux1_dev", 4, 1, 58.4, 663.8),
        ("flux1_dev", 4, 1, 58.4, 652.9),
        ("qwen_image", 4, 1, 82.0, 951.3),
        ("qwen_image", 4, 1, 82.0, 909.1),
    ],
)
def test_rows_are_predicted_as_they_were_measured(
    family: str, ranks: int, rounds: int, peak: float, step: float
) -> None:
    """H200s, bf16, 1024 px (docs/benchmarks/2026-11-h200x2-ranks.json, x4-groups, x4-pairs)."""
    assert H200 is not None
    geometry, chosen = full_size(family), full(optimizer=SPLIT, ranks=ranks, rounds=rounds)
    found = Speed(rates=H200, attention="cudnn", attention_ms=1.566)
    assert memory.total(memory.train_rows(chosen, geometry)) / GIB == pytest.approx(peak, rel=0.05)
    assert roofline.milliseconds(chosen, geometry, found) == pytest.approx(step, rel=0.07)


def test_a_batch_of_several_shapes_is_several_micro_batches() -> None:
    """A part of three beside all gradients is more than four alone; of one shape there is no second part."""
    geometry = full_size("flux1_dev")
    plain = dataclasses.replace(geometry, usual_parts={"as they are": (0.0, 0.0, 0.0, 1.0)})
    mixed = dataclasses.replace(geometry, usual_parts={"as they are": (1.0, 0.0, 1.0, 0.2)})
    chosen = full()
    (alone, said), (parted, told) = (trained_memory.beside_gradients(chosen, one) for one in (plain, mixed))
    assert parted > alone
    assert "gradients take the place of" in said and "of a batch's second part" in told
    # by hand: three quarters of the activations, and a block's new gradients beside all others
    kept = geometry.activations_compiled.whole
    gradients = max((one.quantized.parameters + one.others) * 2 for one in geometry.stacks)
    share = int(0.75 * kept.fixed) + sum(int(0.75 * one) for one in kept.blocks)
    assert parted == pytest.approx(share + int(0.75 * kept.beyond) + gradients, rel=0.01)
    # adding: of 2.2 micro-batches 1.2 come after another
    several, one = (trained_time.adding_ms(chosen, of, 1.0) for of in (mixed, plain))
    assert one == 0.0 and several == pytest.approx(1.2 * 6 * 11.9e9, rel=0.01)


def test_gradients_of_a_batch_are_added_once_whatever_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """`adding_ms` is of the whole batch: counted for each of eight parts it was most of the step."""
    assert H200 is not None
    mixed = dataclasses.replace(full_size("flux1_dev"), usual_parts={"as they are": (1.0,) * 8})
    found = Speed(rates=H200, attention="cudnn")
    whole = roofline.milliseconds(full(), mixed, found)
    added = trained_time.adding_ms(full(), mixed, 1e-9 / (H200.bandwidth * 0.8))
    monkeypatch.setattr(trained_time, "adding_ms", lambda *_: 0.0)
    assert whole - roofline.milliseconds(full(), mixed, found) == pytest.approx(added)


# three blocks of 20 weights in linears and 9 others; two of 60, 40 of them in the largest, and 5; 11 outside
UNEVEN = (
    Stack(name="single", blocks=3, quantized=Linears(parameters=20, rows=2, largest=20), others=9, fp32=0),
    Stack(name="double", blocks=2, quantized=Linears(parameters=60, rows=6, largest=40), others=5, fp32=2),
)
OUTSIDE = 11
ORDER = ("double",) * 2 + ("single",) * 3
ALL = 2 * 65 + 3 * 29 + OUTSIDE


def uneven(geometry: Geometry, *, of_double: int = 0, of_single: int = 0, head: int = 0) -> Geometry:
    """A base of `UNEVEN`, of which 7 weights stay in fp32, and bytes of activations of its blocks."""
    whole = Held(fixed=3, blocks=(of_double,) * 2 + (of_single,) * 3, beyond=1)
    held = Activations(whole=whole, recomputed=whole, outside=whole, head=head, stacks=ORDER)
    trained, *others = geometry.components
    part = dataclasses.replace(trained, shapes={"all": (ALL,)})
    linears = Linears(parameters=2 * 60 + 3 * 20, rows=18, largest=40)
    return dataclasses.replace(
        geometry,
        components=(part, *others),
        stacks=UNEVEN,
        quantized=linears,
        blocks=5,
        activations=held,
        activations_compiled=held,
        activations_fp8=held,
        fp32_parameters=7,
        head_size=(4, 2) if head else (0, 0),
    )


@pytest.mark.parametrize("of_double", [0, 50, 400])
@pytest.mark.parametrize("of_single", [0, 30, 200])
@pytest.mark.parametrize("head", [0, 90])
def test_the_highest_point_of_a_step_is_that_of_playing_it_through(
    geometry: Geometry, of_double: int, of_single: int, head: int
) -> None:
    """Blocks compute one after another, the last one's gradients come first; then there are all of them."""
    chosen = full(previews=False)
    found = parts(chosen, uneven(geometry, of_double=of_double, of_single=of_single, head=head))
    left = [of_double] * 2 + [of_single] * 3
    gradients, made = [2 * 65 + 2 * 2] * 2 + [2 * 29] * 3, 4 * 2 * 2 if head else 0
    highest = 3 + sum(left) + head + made
    while left:
        made += gradients.pop()
        highest = max(highest, 3 + sum(left) + 1 + made)
        left.pop()
    every = 2 * ALL + 2 * 7
    assert found["gradients"] == every
    assert found["gradients"] + found["activations"] == max(highest, every)


def test_blocks_of_weights_in_rows_are_gathered_two_at_a_time(geometry: Geometry) -> None:
    """In bf16 whole; in FP8 bytes of linears, the others in bf16, and room for a gradient of the largest."""
    bf16, fp8 = (parts(full(ranks=2, **way), uneven(geometry)) for way in ({}, {**FP8, "weight_copies": 1}))
    assert bf16["gathered blocks"] == 2 * (60 + 5) * 2 + OUTSIDE * 2
    assert fp8["gathered blocks"] == 2 * (60 + 5 * 2 + 40 * 2) + OUTSIDE * 2
    # gradients of the largest block and of what lies outside, the larger of the two summed in fp32 and a half
    assert bf16["gradients on their way"] == (65 + OUTSIDE) * 2 + 65 * 4 + 65 * 4 // 2
    assert bf16["trained weights"] == ALL // 2 * 2 + 7 * 2 // 2


@pytest.mark.parametrize("of_double", [0, 50, 400])
@pytest.mark.parametrize("of_single", [0, 30, 200])
def test_sums_of_rows_take_the_room_of_activations_that_are_gone(
    geometry: Geometry, of_double: int, of_single: int
) -> None:
    """Blocks' gradients whole, in fp32, and half of that, one block after another, the last one first."""
    found, fp8 = (
        parts(
            full(ranks=2, previews=False, **way), uneven(geometry, of_double=of_double, of_single=of_single)
        )
        for way in ({}, {**FP8, "weight_copies": 1})
    )
    left = [(65, of_double)] * 2 + [(29, of_single)] * 3
    highest, saved = 0, sum(kept for _, kept in left)
    while left:
        count, _ = left[-1]
        highest = max(highest, sum(kept for _, kept in left) + count * 2 + count * 4 + count * 4 // 2)
        left.pop()
    highest = max(highest, OUTSIDE * 4 + OUTSIDE * 4 // 2)
    assert found["gradients on their way"] == OUTSIDE * 2 + highest - saved
    # of FP8 more was measured than planned, for reasons that nobody knows
    assert fp8["gradients on their way"] == (65 + OUTSIDE) * 2 + 65 * 4 + 65 * 4 // 2


def test_moments_in_8_bits_have_the_bytes_of_bitsandbytes(geometry: Geometry) -> None:
    import bitsandbytes
    import torch

    parameter = torch.nn.Parameter(torch.zeros(1024, 1024, dtype=torch.bfloat16))
    made = bitsandbytes.optim.AdamW8bit([parameter])
    parameter.grad = torch.zeros_like(parameter)
    made.init_state(made.param_groups[0], parameter, 0, 0)
    tables = ("qmap1", "qmap2")  # all parameters share them
    real = sum(one.nbytes for name, one in made.state[parameter].items() if name not in (*tables, "step"))
    trained, *others = geometry.components
    part = dataclasses.replace(trained, shapes={"all": (1024, 1024)})
    found = parts(full(optimizer="adamw_8bit"), dataclasses.replace(geometry, components=(part, *others)))
    assert found["optimizer state"] == real


def test_linears_in_rows_are_products_of_their_own(geometry: Geometry) -> None:
    """Linears of one input are one product but where each has rows of its own."""
    found = dataclasses.replace(uneven(geometry), largest_product=55)
    for changes, size in (({}, 55), ({"ranks": 2}, 40)):
        assert parts(full(**FP8 | {"weight_copies": 1}, **changes), found)["fp8 transposed"] == size
