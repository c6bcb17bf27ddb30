"""The sample stream: equal counts, no starved bucket, and the same from any point that it is resumed at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.data.pictures import record
from trainer.data.sampler import MicroBatch, Sampler, SampleRef, held_out_split
from trainer.errors import DataError, ExitCode


def sampler(
    keys: Sequence[object],
    *,
    repeats: Sequence[int] | None = None,
    dropped_keys: Sequence[object] | None = None,
    batch_size: int = 1,
    rate: float = 0.0,
    seed: int = 0,
) -> Sampler:
    return Sampler(
        list(map(str, keys)),
        list(map(str, dropped_keys or keys)),
        repeats or [1] * len(keys),
        sizes=[1] * len(keys),
        capacity=batch_size,
        caption_dropout_rate=rate,
        seed=seed,
    )


def take(source: Sampler, count: int, start: int = 0) -> list[MicroBatch]:
    return [source.micro_batch(n) for n in range(start, start + count)]


def flat(batches: Sequence[MicroBatch]) -> list[SampleRef]:
    return [sample for batch in batches for sample in batch.samples]


MIXED = st.fixed_dictionaries(
    {
        "keys": st.lists(st.integers(0, 3), min_size=1, max_size=12),
        "batch_size": st.integers(1, 5),
        "rate": st.sampled_from([0.0, 0.3, 1.0]),
        "seed": st.integers(0, 2**32 - 1),
    }
)


def test_the_stream_is_pinned() -> None:
    # these numbers are what a checkpoint of an older version resumes into: they must never change
    samples = flat(take(sampler("aabb", rate=0.5, seed=7), 12))
    assert [sample.record for sample in samples] == [2, 0, 1, 3, 3, 1, 2, 0, 0, 1, 3, 2]
    assert [sample.position for sample in samples if sample.dropped] == [1, 2, 6, 9, 10, 11]


@given(MIXED, st.integers(0, 40))
def test_resuming_at_any_point_gives_the_uninterrupted_stream(case: dict, start: int) -> None:
    whole = take(sampler(**case), start + 5)
    assert take(sampler(**case), 5, start) == whole[start:]


@given(MIXED, st.lists(st.integers(0, 25), max_size=6))
def test_jumping_to_and_fro_changes_nothing(case: dict, jumps: list[int]) -> None:
    whole = take(sampler(**case), 26)
    source = sampler(**case)
    assert [source.micro_batch(n) for n in jumps] == [whole[n] for n in jumps]


@given(st.integers(1, 9), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.4]))
def test_four_at_once_are_four_after_another(count: int, seed: int, rate: float) -> None:
    keys = ["k"] * count
    together = take(sampler(keys, batch_size=4, seed=seed, rate=rate), 6)
    single = take(sampler(keys, batch_size=1, seed=seed, rate=rate), 24)
    assert flat(together) == flat(single)


@given(MIXED)
def test_a_micro_batch_has_one_key(case: dict) -> None:
    keys = case["keys"]
    case = {**case, "dropped_keys": [key + 10 for key in keys]}
    for batch in take(sampler(**case), 12):
        assert len(batch.samples) == case["batch_size"]
        assert len({keys[sample.record] + 10 * sample.dropped for sample in batch.samples}) == 1


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
)
def test_every_position_is_drawn_once_and_every_image_as_often_as_it_should(
    repeats: list[int], batch_size: int, seed: int, epochs: int
) -> None:
    source = sampler(["k"] * len(repeats), repeats=repeats, batch_size=batch_size, seed=seed)
    assert source.samples_per_epoch == sum(repeats)
    samples = flat(take(source, -(-epochs * sum(repeats) // batch_size)))
    assert [sample.position for sample in samples] == list(range(len(samples)))
    for epoch in range(epochs):
        part = samples[epoch * sum(repeats) : (epoch + 1) * sum(repeats)]
        assert Counter(sample.record for sample in part) == Counter(dict(enumerate(repeats)))


@given(MIXED)
def test_nothing_waits_longer_than_batch_size_epochs(case: dict) -> None:
    case = {**case, "rate": 0.0}
    keys, batch_size = case["keys"], case["batch_size"]
    last = -1
    seen: dict[int, int] = {}
    for batch in take(sampler(**case), 8 * len(keys)):
        # a batch leaves when its last sample is drawn, and that order is the stream's
        assert batch.samples[-1].position > last
        last = batch.samples[-1].position
        waited = last - batch.samples[0].position
        assert waited < batch_size * len(keys)
        for sample in batch.samples:
            seen[sample.position] = seen.get(sample.position, 0) + 1
    assert set(seen.values()) == {1}
    # what was drawn long enough ago has been handed out
    assert set(range(last - batch_size * len(keys) + 1)) <= set(seen)


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


def packing(sizes: Sequence[int], capacity: int, seed: int = 0) -> Sampler:
    keys = ["k"] * len(sizes)
    ones = [1] * len(sizes)
    return Sampler(keys, keys, ones, sizes=sizes, capacity=capacity, caption_dropout_rate=0.0, seed=seed)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(0, 2**32 - 1))
def test_rows_are_never_too_full_and_nobody_is_left_out(sizes: list[int], seed: int) -> None:
    batches = take(packing(sizes, 40, seed), 120)
    assert all(sum(sizes[sample.record] for sample in batch.samples) <= 40 for batch in batches)
    positions = [sample.position for sample in flat(batches)]
    assert len(set(positions)) == len(positions)
    # what waits is in a few open rows
    assert len(set(range(max(positions) + 1)) - set(positions)) <= 8 * 40
    again = packing(sizes, 40, seed)
    assert [again.micro_batch(n) for n in (70, 3, 100)] == [batches[n] for n in (70, 3, 100)]


def test_a_short_sample_among_long_ones_does_not_wait_for_ever() -> None:
    batches = take(packing([4000] * 50 + [100], 4096), 120)
    assert any(sample.record == 50 for sample in flat(batches))


def test_rows_are_nearly_full() -> None:
    sizes = [3, 5, 7, 11, 13, 17]
    batches = take(packing(sizes, 40), 200)
    filled = sum(sizes[sample.record] for sample in flat(batches))
    assert filled / (200 * 40) > 0.95
