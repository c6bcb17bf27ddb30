"""Gradients that ranks exchange: sums equal to the bit to those of one process, for any number of ranks."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import Workers
from trainer.config.schema import TrainSection
from trainer.engine.optimizing.exchange import Exchange, SlowRanks, Told, agree
from trainer.engine.optimizing.fp32_masters import FlatGradients
from trainer.engine.optimizing.updater import Updater
from trainer.engine.ranks import Ranks

VALUES = 1003
MICRO_BATCHES = 8


def gradients(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over twenty binary orders: sums of them depend on the order of the additions."""
    generator = torch.Generator().manual_seed(number)
    scale = torch.exp2(torch.randint(-12, 8, (VALUES,), generator=generator).float())
    return (torch.randn(VALUES, generator=generator) * scale).to(dtype)


def summed(ranks: Ranks, dtype: torch.dtype, micro_batches: int) -> torch.Tensor:
    """The sum over micro-batches, of which this rank computes every `size`-th."""
    parameter = torch.nn.Parameter(torch.zeros(VALUES, dtype=dtype))
    exchange = Exchange(ranks, FlatGradients({"all": parameter}))
    total = torch.full((VALUES,), float("nan"))
    for _ in range(2):  # the second step starts from nothing
        for start in range(0, micro_batches, ranks.size):
            count = min(ranks.size, micro_batches - start)
            # what an earlier micro-batch left, where there is none for this rank
            if ranks.rank < count:
                parameter.grad = gradients(start + ranks.rank, dtype)
                exchange.collect()
                assert parameter.grad is None
            exchange.add_round(count)
        exchange.take(total)
    return total


def one_process(dtype: torch.dtype, micro_batches: int, order: list[int] | None = None) -> torch.Tensor:
    total = torch.zeros(VALUES)
    for number in order or range(micro_batches):
        total += gradients(number, dtype)
    return total


PAIRS = [
    (size, count, (torch.bfloat16, torch.float32)[(at + size) % 2])
    for size in (2, 3, 4)
    for at, count in enumerate((MICRO_BATCHES, 5, 1))
]
"""Each number of ranks with each of micro-batches; both types with each number."""


@pytest.mark.parametrize(("size", "micro_batches", "dtype"), PAIRS)
def test_sums_are_those_of_one_process(
    pool: Workers, size: int, micro_batches: int, dtype: torch.dtype
) -> None:
    wanted = one_process(dtype, micro_batches)
    for total in pool.call(summed, size, dtype, micro_batches):
        assert torch.equal(total, wanted)


def test_another_order_gives_another_sum() -> None:
    """The values are such that the test above can fail."""
    backwards = one_process(torch.bfloat16, MICRO_BATCHES, list(reversed(range(MICRO_BATCHES))))
    assert not torch.equal(backwards, one_process(torch.bfloat16, MICRO_BATCHES))


def handed_out(ranks: Ranks, steps: int) -> list[torch.Tensor | None]:
    """Gradients of parameters in fp32 after steps of two micro-batches; the last one has none anywhere."""
    held = {name: torch.nn.Parameter(torch.zeros(5)) for name in ("always", "at times", "second", "never")}
    exchange = Exchange(ranks, FlatGradients(held))
    for step in range(steps):
        for parameter in held.values():
            parameter.grad = None  # as the optimizer leaves them after a step
        held["always"].grad = torch.full((5,), 1.0 + ranks.rank + step)
        if ranks.rank == 1:
            held["at times" if step != 1 else "second"].grad = torch.full((5,), 7.0)
        exchange.collect()
        exchange.add_round(2)
        exchange.hand_out()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in held.values()]


def test_parameters_get_their_sums_and_none_where_there_is_none(pool: Workers) -> None:
    """Equal to one process, where a parameter without a gradient is not touched by the optimizer."""
    for steps, with_seven, without in ((1, 1, 2), (2, 2, 1), (3, 1, 2)):
        for found in pool.call(handed_out, 2, steps):
            assert found[without] is found[3] is None
            assert found[0] is not None and found[0].tolist() == [3.0 + 2 * (steps - 1)] * 5
            seven = found[with_seven]
            assert seven is not None and seven.tolist() == [7.0] * 5


def agreed(ranks: Ranks, micro_batches: int, asked: int, odd: int) -> tuple[float, Told]:
    """Rank 1 was asked to end, rank 0 for two orders; weights of rank `odd`, if there is one, differ by a
    bit.
    """
    parameter = torch.nn.Parameter(torch.ones(3))
    updater = Updater({"all": parameter}, TrainSection(max_train_steps=1), "adamw_fused_fp32", ranks)
    if ranks.rank == odd:
        parameter.data.view(torch.int32)[1] ^= 1
    own = [torch.tensor(0.1 * n) for n in range(ranks.rank, micro_batches, ranks.size)]
    loss, said = agree(
        ranks,
        own,
        micro_batches,
        asked=asked * (ranks.rank == 1),
        orders=3 if ranks.first else 0,
        computed=3.0 - ranks.rank,
        seconds=1.0 + ranks.rank,
        digest=updater.digest(),
    )
    return float(loss), Told.of(said.tolist())


@pytest.mark.parametrize("micro_batches", [1, 2, 5, 8])
def test_ranks_agree_on_the_loss_and_on_ending(pool: Workers, micro_batches: int) -> None:
    wanted = torch.zeros((), dtype=torch.float64)
    for number in range(micro_batches):
        wanted += torch.tensor(0.1 * number)
    three = Told(asked=75, unequal=False, orders=3, computed=3.0, seconds=(1.0, 2.0, 3.0))
    assert pool.call(agreed, 3, micro_batches, 75, -1) == [(float(wanted), three)] * 3
    two = Told(asked=0, unequal=False, orders=3, computed=3.0, seconds=(1.0, 2.0))
    assert pool.call(agreed, 2, micro_batches, 0, -1) == [(float(wanted), two)] * 2


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_bit_of_one_rank_is_seen_by_all(pool: Workers, odd: int) -> None:
    assert all(said.unequal for _, said in pool.call(agreed, 3, 3, 0, odd))


def test_a_slow_rank_is_named_once() -> None:
    slow = SlowRanks()
    said = [slow.look((0.335, 0.640, 0.330)) for _ in range(60)]
    assert [number for number, line in enumerate(said, 1) if line] == [20]
    assert said[19].startswith("rank 1 takes 1.9 times as long as the others, 640 against 332 ms a sample")


@pytest.mark.parametrize("times", [(1.0, 1.4), (0.0, 5.0), (1.0, 1.0, 1.0, 1.45)])
def test_ranks_that_differ_little_or_have_no_time_yet_are_not_named(times: tuple[float, ...]) -> None:
    slow = SlowRanks()
    assert not any(slow.look(times) for _ in range(60))


@pytest.mark.parametrize(
    ("times", "named"),
    [
        ((1.0, 1.5), []),
        ((1.0, 1.51), [1]),
        # the median of the others: one that is slower still hides none, and a fast one makes none slow
        ((1.0, 1.0, 1.6, 9.0), [2, 3]),
        ((0.1, 1.0, 1.0, 1.0), []),
    ],
)
def test_a_rank_is_slow_from_one_and_a_half_times_the_others_median_on(
    times: tuple[float, ...], named: list[int]
) -> None:
    """From the 20th step on end; at 19 a short disturbance is over."""
    slow = SlowRanks()
    assert not any(slow.look(times) for _ in range(19))
    said = slow.look(times)
    assert [rank for rank in range(len(times)) if f"rank {rank} takes" in said] == named


def test_a_rank_that_was_named_is_not_named_again_and_others_are() -> None:
    slow, even = SlowRanks(), (1.0, 1.0, 1.0)
    second, third = (1.0, 2.0, 1.0), (1.0, 1.0, 2.0)
    named = []
    for times in (second, even, second, third):
        lines = [line for line in (slow.look(times) for _ in range(25)) if line]
        named.append([line.partition(" takes")[0] for line in lines])
    assert named == [["rank 1"], [], [], ["rank 2"]]


def test_only_steps_on_end_make_a_rank_slow() -> None:
    slow = SlowRanks()
    assert not any(slow.look((1.0, 9.0) if step % 19 else (1.0, 1.0)) for step in range(200))


def shared(ranks: Ranks) -> tuple[object, ...]:
    told = ranks.from_first({"step": 7, "from": ranks.rank})
    return told, ranks.gathered(ranks.rank * 10), ranks.first


def test_what_ranks_tell_each_other(pool: Workers) -> None:
    answers = pool.call(shared, 3)
    assert answers == [({"step": 7, "from": 0}, [0, 10, 20], rank == 0) for rank in range(3)]


def test_one_process_needs_no_others() -> None:
    assert shared(Ranks()) == ({"step": 7, "from": 0}, [0], True)
    Ranks().meet()
