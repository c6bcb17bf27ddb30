"""The sample stream: equal counts, no starved bucket, and the same from any point that it is resumed at."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.data.pictures import record
from trainer.data.sampler import MicroBatch, Sampler, SampleRef, held_out_split
from trainer.errors import DataError, ExitCode


def sampler(
    keys: Sequence[object],
    *,
    repeats: Sequence[int] | None = None,
    dropped_keys: Sequence[object] | None = None,
    contents: Sequence[object] | None = None,
    batch_size: int = 1,
    accumulation: int = 1,
    rate: float = 0.0,
    seed: int = 0,
) -> Sampler:
    return Sampler(
        list(map(str, keys)),
        list(map(str, dropped_keys or keys)),
        repeats or [1] * len(keys),
        contents=contents or list(range(len(keys))),
        sizes=[1] * len(keys),
        row_size=1,
        rows=batch_size * accumulation,
        rows_at_once=batch_size,
        caption_dropout_rate=rate,
        seed=seed,
    )


Step = tuple[MicroBatch, ...]


def take(source: Sampler, count: int, start: int = 0) -> list[Step]:
    return [source.step(n) for n in range(start, start + count)]


def of_step(step: Step) -> list[SampleRef]:
    """A step's samples by their position."""
    return sorted((one for part in step for one in part), key=lambda one: one.position)


def flat(steps: Sequence[Step]) -> list[SampleRef]:
    return [sample for step in steps for sample in of_step(step)]


MIXED = st.fixed_dictionaries(
    {
        "keys": st.lists(st.integers(0, 3), min_size=1, max_size=12),
        "batch_size": st.integers(1, 5),
        "accumulation": st.integers(1, 3),
        "rate": st.sampled_from([0.0, 0.3, 1.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def test_the_stream_is_pinned() -> None:
    # these numbers are what a checkpoint of an older version resumes into: they must never change
    samples = flat(take(sampler("aabb", rate=0.5, seed=7), 12))
    assert [sample.record for sample in samples] == [2, 0, 1, 3, 3, 1, 2, 0, 0, 1, 3, 2]
    assert [sample.position for sample in samples if sample.dropped] == [1, 2, 6, 9, 10, 11]
    steps = take(sampler("abcba", batch_size=2, accumulation=2, seed=7), 5)
    assert [[[one.position for one in part] for part in step] for step in steps] == [
        [[0], [1, 3], [2]],
        [[4, 6], [7], [8]],  # 5 shows what 4 does: an epoch ended between them
        [[5, 12], [9, 10]],
        [[11], [13, 17], [14]],
        [[15], [16, 18], [19]],
    ]


def test_rows_copies_and_what_is_held_out_are_pinned() -> None:
    # as above: a resume goes on with the rows, and the split, of the version that began the run
    packed = packing([3, 5, 7, 11, 13, 17] * 2, 40, 7, batch_size=2, accumulation=2)
    assert [[[one.position for one in part] for part in step] for step in take(packed, 3)] == [
        [[0, 1, 2, 3, 4, 5, 20, 6, 7, 8, 12], [9, 10, 13, 11, 14, 15, 19, 22]],
        [[16, 17, 26, 35, 18, 21, 23, 24], [25, 27, 28, 29, 30, 31, 32]],
        [[33, 34, 36, 37, 38, 39, 40, 41, 42, 44], [43, 45, 47, 49, 46, 48, 50, 57]],
    ]
    views = sampler("aabbcc", repeats=[3, 1, 2, 1, 1, 2], contents=[0, 0, 1, 2, 3, 3], seed=7)
    assert [one.record for one in flat(take(views, 20))] == [
        5, 1, 3, 2, 0, 5, 0, 4, 0, 2,
        4, 0, 2, 5, 0, 0, 2, 1, 3, 5,
    ]  # fmt: skip
    _, held_out = held_out_split([record(index) for index in range(10)], 3, seed=5)
    assert [one.identifier for one in held_out] == ["0/3.png", "0/4.png", "0/5.png"]


@given(MIXED, st.integers(0, 40))
def test_resuming_at_any_point_gives_the_uninterrupted_stream(case: dict, start: int) -> None:
    whole = take(sampler(**case), start + 5)
    assert take(sampler(**case), 5, start) == whole[start:]


@given(MIXED, st.lists(st.integers(0, 25), max_size=6))
def test_jumping_to_and_fro_changes_nothing(case: dict, jumps: list[int]) -> None:
    whole = take(sampler(**case), 26)
    source = sampler(**case)
    assert [source.step(n) for n in jumps] == [whole[n] for n in jumps]


@given(MIXED)
def test_four_at_once_are_four_after_another(case: dict) -> None:
    """Whatever the keys: a step learns from the same samples however they are parted."""
    case = {**case, "dropped_keys": [key + 10 for key in case["keys"]]}
    total = case["batch_size"] * case["accumulation"]
    single = take(sampler(**{**case, "batch_size": 1, "accumulation": total}), 12)
    parted = take(sampler(**case), 12)
    assert [of_step(step) for step in parted] == [of_step(step) for step in single]
    assert all(len(of_step(step)) == total for step in parted)


@given(MIXED)
def test_a_micro_batch_has_one_key_and_no_more_than_asked_for(case: dict) -> None:
    keys = case["keys"]
    case = {**case, "dropped_keys": [key + 10 for key in keys]}
    for step in take(sampler(**case), 12):
        by_key = Counter()
        for part in step:
            (key,) = {keys[sample.record] + 10 * sample.dropped for sample in part}
            assert 1 <= len(part) <= case["batch_size"]
            by_key[key] += 1
        counts = Counter(keys[one.record] + 10 * one.dropped for one in of_step(step))
        # no more forward passes than there have to be
        assert by_key == {key: -(-count // case["batch_size"]) for key, count in counts.items()}


def test_samples_of_unequal_shapes_are_no_copies_of_one() -> None:
    """Forty pictures in four buckets, each caption of its own length, four at once."""
    for keys in (list(range(40)), [n % 4 for n in range(40)], [0] * 40):
        for step in take(sampler(keys, batch_size=4), 40):
            assert len({sample.record for sample in of_step(step)}) == 4


@given(
    count=st.integers(1, 12),
    rows=st.integers(1, 6),
    repeats=st.integers(1, 4),
    views=st.integers(1, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_nothing_is_twice_in_a_step_unless_the_set_is_smaller(
    count: int, rows: int, repeats: int, views: int, seed: int
) -> None:
    """Also where an epoch ends within a step, and where a picture has several views."""
    contents = [number % count for number in range(count * views)]
    source = sampler(
        contents, repeats=[repeats] * len(contents), contents=contents, accumulation=rows, seed=seed
    )
    epoch = repeats * len(contents)
    steps = take(source, 2 * epoch // rows + 4)
    for step in steps:
        assert len(of_step(step)) == rows
        assert len({contents[one.record] for one in of_step(step)}) == rows or count < rows
    positions = [one.position for step in steps for one in of_step(step)]
    assert len(set(positions)) == len(positions)
    # what waits is soon taken
    assert set(range(len(positions) - 2 * rows)) <= set(positions)


@given(st.lists(st.integers(1, 9), min_size=2, max_size=6), st.integers(1, 5), st.integers(0, 2**32 - 1))
@settings(max_examples=50)
def test_shares_of_repeats_hold_and_few_wait(repeats: list[int], rows: int, seed: int) -> None:
    source = sampler(["k"] * len(repeats), repeats=repeats, batch_size=rows, seed=seed)
    count = 4 * -(-sum(repeats) // rows) + 2 * max(8, 2 * rows)
    taken = {sample.position: sample.record for sample in flat(take(source, count))}
    assert len(taken) == count * rows
    waiting = set(range(max(taken))) - taken.keys()
    assert len(waiting) <= max(8, 2 * rows)
    first = [taken[position] for position in range(sum(repeats))]
    assert Counter(first) == Counter(dict(enumerate(repeats)))


def test_each_part_of_an_epoch_holds_a_copy_of_everything() -> None:
    source = sampler(["k"] * 12, repeats=[3] * 12, contents=[number % 4 for number in range(12)])
    for epoch in range(20):
        order = [number % 4 for number in source.epoch_order(epoch)]
        assert all(sorted(order[n : n + 4]) == [0, 1, 2, 3] for n in range(0, 36, 4))


def test_epochs_and_seeds_differ() -> None:
    source = sampler(["k"] * 20)
    first, second = source.epoch_order(0), source.epoch_order(1)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    assert sampler(["k"] * 20, seed=1).epoch_order(0) != first


def test_the_shuffle_is_fair() -> None:
    source = sampler(["k"] * 5)
    places = Counter(source.epoch_order(epoch).index(0) for epoch in range(2000))
    assert all(abs(places[place] - 400) < 80 for place in range(5))  # 4.5 standard deviations


def test_dropout_hits_its_rate_and_every_image() -> None:
    samples = flat(take(sampler(["k"] * 10, rate=0.1), 5000))
    dropped = [sample.record for sample in samples if sample.dropped]
    assert abs(len(dropped) - 500) < 90
    assert set(dropped) == set(range(10))
    assert not any(sample.dropped for sample in flat(take(sampler("ab", rate=0.0), 200)))
    assert all(sample.dropped for sample in flat(take(sampler("ab", rate=1.0), 200)))


def test_held_out_images_are_picked_by_content() -> None:
    records = [record(index) for index in range(10)]
    train, held_out = held_out_split(records, 3, seed=5)
    assert (len(train), len(held_out)) == (7, 3)
    assert sorted([*train, *held_out], key=lambda item: item.identifier) == records
    backwards = held_out_split(records[::-1], 3, seed=5)[1]
    assert set(held_out) == set(backwards)
    assert list(train) == [item for item in records if item not in held_out]
    assert {held_out_split(records, 3, seed=seed)[1] for seed in range(6)} != {held_out}
    assert held_out_split(records, 0, seed=5) == (tuple(records), ())


def test_copies_of_a_held_out_image_are_not_trained() -> None:
    records = [record(index, content=f"{index // 2:064x}") for index in range(8)]
    for seed in range(8):
        train, held_out = held_out_split(records, 2, seed=seed)
        assert len(held_out) == 2
        assert not {item.content_sha256 for item in train} & {item.content_sha256 for item in held_out}
    with pytest.raises(DataError, match="4 of them copies of others"):
        held_out_split(records, 1, seed=0)


@pytest.mark.parametrize("count", [4, 5])
def test_holding_out_everything_is_refused(count: int) -> None:
    with pytest.raises(DataError) as caught:
        held_out_split([record(index) for index in range(4)], count, seed=0)
    assert caught.value.exit_code == ExitCode.BAD_DATA
    assert caught.value.problems[0].where == "validation.held_out"
    assert caught.value.problems[0].remedy


def packing(
    sizes: Sequence[int],
    capacity: int,
    seed: int = 0,
    *,
    repeats: Sequence[int] | None = None,
    batch_size: int = 1,
    accumulation: int = 1,
) -> Sampler:
    keys = ["k"] * len(sizes)
    return Sampler(
        keys,
        keys,
        repeats or [1] * len(sizes),
        contents=range(len(sizes)),
        sizes=sizes,
        row_size=capacity,
        rows=batch_size * accumulation,
        rows_at_once=batch_size,
        caption_dropout_rate=0.0,
        seed=seed,
    )


def test_the_packed_stream_is_pinned() -> None:
    # a resumed run draws the steps before its checkpoint again: another order gets another SAMPLE_ORDER
    source = packing([9, 17, 30, 4, 25, 12, 8], 40, seed=7, batch_size=2)
    assert [[one.record for part in step for one in part] for step in take(source, 8)] == [
        [2, 6, 0, 1, 3],
        [4, 5, 3, 1, 0, 6],
        [5, 4, 2, 0],
        [4, 5, 1, 3, 6, 0],
        [2, 6, 4, 3, 0],
        [2, 3, 1, 5, 6],
        [4, 5, 2, 0],
        [1, 6, 3, 0, 4, 5],
    ]


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)
SHAPES = st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 2), (3, 2)])


@given(SIZES, st.integers(0, 2**32 - 1), SHAPES)
def test_rows_are_never_too_full_and_nobody_is_left_out(
    sizes: list[int], seed: int, shape: tuple[int, int]
) -> None:
    batch_size, accumulation = shape
    source = packing(sizes, 40, seed, batch_size=batch_size, accumulation=accumulation)
    steps = take(source, 30)
    for step in steps:
        assert 1 <= len(step) <= accumulation
        assert all(sum(sizes[one.record] for one in part) <= 40 * batch_size for part in step)
    positions = [sample.position for sample in flat(steps)]
    assert len(set(positions)) == len(positions)
    missing = set(range(max(positions) + 1)) - set(positions)
    limit = max(8, 2 * batch_size * accumulation)
    assert len(missing) <= limit + max(limit, 2 * max(len(of_step(step)) for step in steps))
    again = packing(sizes, 40, seed, batch_size=batch_size, accumulation=accumulation)
    assert [again.step(n) for n in (15, 3, 25)] == [steps[n] for n in (15, 3, 25)]


@given(SIZES, st.integers(0, 2**32 - 1), SHAPES)
def test_rows_at_once_change_nothing_that_a_step_learns(
    sizes: list[int], seed: int, shape: tuple[int, int]
) -> None:
    batch_size, accumulation = shape
    parted = packing(sizes, 40, seed, batch_size=batch_size, accumulation=accumulation)
    single = packing(sizes, 40, seed, batch_size=1, accumulation=batch_size * accumulation)
    assert [of_step(step) for step in take(parted, 30)] == [of_step(step) for step in take(single, 30)]


def test_rows_that_are_packed_have_one_key_each() -> None:
    """Samples of two keys, each of which would leave room for the other's; a dropped caption has its own."""
    keys, dropped_keys = ["a", "b"] * 6, ["c", "d"] * 6
    source = Sampler(
        keys,
        dropped_keys,
        [1] * 12,
        contents=range(12),
        sizes=[4] * 12,
        row_size=10,
        rows=4,
        rows_at_once=2,
        caption_dropout_rate=0.5,
        seed=0,
    )
    for step in take(source, 20):
        for part in step:
            assert len({(dropped_keys if one.dropped else keys)[one.record] for one in part}) == 1


def test_a_short_sample_among_long_ones_does_not_wait_for_ever() -> None:
    batches = take(packing([4000] * 50 + [100], 4096), 120)
    assert any(sample.record == 50 for sample in flat(batches))


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_are_nearly_full(rows: int) -> None:
    sizes = [3, 5, 7, 11, 13, 17] * 6
    batches = take(packing(sizes, 40, accumulation=rows), 200 // rows)
    filled = sum(sizes[sample.record] for sample in flat(batches))
    assert filled / (200 * 40) > 0.95


@given(SIZES, st.integers(1, 60), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_nothing_is_twice_in_packed_rows_unless_the_set_is_smaller(
    sizes: list[int], capacity: int, rows: int, repeats: int, seed: int
) -> None:
    capacity = min(max(capacity, *sizes, 1), sum(sizes))
    rows = min(rows, sum(sizes) // capacity)
    source = packing(sizes, capacity, seed, repeats=[repeats] * len(sizes), accumulation=rows)
    steps = take(source, 60)
    for step in steps:
        taken = [one.record for one in of_step(step)]
        assert len(set(taken)) == len(taken)
    # the one that waits longest is always taken
    first = range(max(one.position for one in of_step(steps[15])))
    assert set(first) <= {one.position for one in flat(steps)}


@pytest.mark.parametrize(("shortest", "longest"), [(1, 4000), (50, 1500), (600, 2400)])
def test_rows_are_as_full_as_plans_say(shortest: int, longest: int) -> None:
    """Of 4096 tokens 1 to 8 % is padding: conversations as many short as long by their logarithm."""
    drawn = random.Random(0)
    sizes = [int(shortest * (longest / shortest) ** drawn.random()) for _ in range(1000)]
    steps = take(packing(sizes, 4096, accumulation=4), 75)
    assert 0.92 < sum(sizes[one.record] for one in flat(steps)) / (300 * 4096) < 0.995


def test_conversations_of_many_lengths_are_once_in_a_step_and_fill_it() -> None:
    """Forty conversations that are hardly two steps: an epoch ends in most steps."""
    sizes = [100 + 397 * number % 700 for number in range(40)]
    steps = take(packing(sizes, 8192, seed=3), 400)
    assert all(len({one.record for one in of_step(step)}) == len(of_step(step)) for step in steps)
    assert sum(sizes[one.record] for one in flat(steps)) > 0.95 * 400 * 8192


def test_many_short_samples_fill_every_step_without_one_that_is_there_twice() -> None:
    """A step holds most of the set: dozens of copies wait where a new part of the epoch begins."""
    steps = take(packing([1] * 300, 64, repeats=[3] * 300, accumulation=4), 35)
    assert [len({one.record for one in of_step(step)}) for step in steps] == [256] * 35
    assert [len(of_step(step)) for step in steps] == [256] * 35


def test_one_that_is_repeated_far_more_often_than_others_still_fills_rows() -> None:
    """The repeated sample has the requested share of all samples, though a step may hold it twice."""
    sizes = [200, *[3900] * 6]
    repeats = [200, *[1] * 6]
    steps = take(packing(sizes, 4096, repeats=repeats), 400)
    assert sum(sizes[one.record] for one in flat(steps)) > 0.5 * 400 * 4096
    taken = Counter(one.record for one in flat(steps))
    assert taken[0] / taken.total() == pytest.approx(200 / 206, abs=0.01)
