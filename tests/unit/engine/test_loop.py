"""The loop of training around its steps: counts of a log line, and what is required before a save."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.engine.ranks import ALONE
from trainer.engine.stopwatch import Stopwatch
from trainer.engine.training import loop, rounds, together
from trainer.engine.training.feed import Fed
from trainer.engine.training.state import State
from trainer.errors import HardwareError


def nothing(*_: object, **__: object) -> None:
    """Stands for work that this test is not about."""


def state_of(updater: Any, step: int = 0) -> State:
    return State(
        updater=updater,
        watch=Stopwatch("cpu"),
        interval_loss=torch.zeros((), dtype=torch.float64),
        interval_steps=torch.zeros((), dtype=torch.int64),
        step=step,
    )


def fed(weight: float, tokens: int, samples: int = 1) -> Fed:
    micro_batch: Any = (None,) * samples
    return Fed(micro_batch=micro_batch, weight=weight, tokens=tokens, batch=None, draw=None)


TRAIN = SimpleNamespace(
    max_train_steps=9, learning_rate=1e-4, lr_scheduler="constant", lr_warmup_steps=0, log_every_steps=2
)


@pytest.mark.parametrize(
    ("steps", "tokens", "learned"),
    [
        # of conversations the weight is the number of tokens that the loss is on, for which others are read
        ([[fed(3.0, 10), fed(2.5, 8)], [fed(4.0, 7)]], 25, 9),
        # pictures have weights, and no tokens
        ([[fed(4.0, 0, 4)], [fed(2.0, 0, 2)]], 0, 0),
        ([[fed(math.nan, 10)]], 10, 0),
    ],
    ids=["conversations", "pictures", "a weight that is no number"],
)
def test_a_line_counts_the_steps_since_the_one_before(
    steps: list[list[Fed]], tokens: int, learned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[dict[str, Any]] = []
    losses = itertools.count(1.0)  # of each step another
    monkeypatch.setattr(
        loop, "_micro_batches", lambda *_: (torch.tensor(next(losses), dtype=torch.float64), [])
    )
    updater = SimpleNamespace(step=lambda rate, loss: (torch.tensor(1.0), torch.tensor(0.0)))
    context = SimpleNamespace(
        config=SimpleNamespace(train=TRAIN),
        plan=SimpleNamespace(in_rows=False),
        ranks=ALONE,
        status=SimpleNamespace(beat=nothing),
    )
    run: Any = SimpleNamespace(
        context=context,
        journal=SimpleNamespace(log_step=lambda **given: counts.append(given)),
        flops=lambda micro_batch: 100.0 * len(micro_batch),
    )
    state = state_of(updater)
    for _ in range(2):  # the second line has nothing of the first one's steps
        taken: Any = SimpleNamespace(take=iter(map(tuple, steps)).__next__)
        for _ in steps:
            loop._one_step(run, state, taken)
        loop._log(run, state, None)
    samples = sum(len(one.micro_batch) for step in steps for one in step)
    for number, given in enumerate(counts, start=1):
        assert (given["tokens"], given["learned_tokens"]) == (tokens, learned)
        assert (given["samples"], given["flops"]) == (samples, 100.0 * samples)
        assert (given["step"], given["steps"]) == (number * len(steps), len(steps))
        assert given["loss"] == statistics.mean(range(given["step"] - len(steps) + 1, given["step"] + 1))
    assert len(counts) == 2


@pytest.mark.parametrize("first", [True, False], ids=["the first rank", "another"])
def test_weights_that_differ_after_the_last_step_are_not_saved(
    first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No next step tells it, and without held-out samples nothing else has asked."""
    saved: list[int] = []
    for module, name, stands_for in (
        (loop, "feed", lambda *_: iter(())),
        (loop, "save", lambda run, state: saved.append(state.step)),
        (loop, "take_part_in_save", lambda run, state: saved.append(state.step)),
        (loop, "progress", lambda *_, **__: contextlib.nullcontext()),
        (rounds, "look_before", nothing),
        (rounds, "follow_before", nothing),
        (together, "look_ahead", nothing),
        (together.Steps, "close", nothing),
    ):
        monkeypatch.setattr(module, name, stands_for)
    digests = [1.0, 1.0]
    ranks = SimpleNamespace(
        size=2, first=first, gathered=lambda own: digests, together=contextlib.nullcontext
    )
    checkpoint = SimpleNamespace(checkpointing_steps=1000)
    context = SimpleNamespace(
        config=SimpleNamespace(
            train=TRAIN, method="lora", checkpoint=checkpoint, validation=SimpleNamespace(every_steps=1000)
        ),
        plan=SimpleNamespace(in_rows=False, compile=False),
        ranks=ranks,
        settings=None,
        status=SimpleNamespace(beat=nothing),
        say=nothing,
    )
    journal = SimpleNamespace(publish=nothing, start_clock=nothing)
    work: Any = SimpleNamespace(context=context, entries=None, journal=journal)
    state = state_of(SimpleNamespace(digest=lambda: 1.0, drop_gradients=nothing), TRAIN.max_train_steps)
    ended = loop.train if first else loop.follow
    ended(work, state)
    assert saved == [9]
    digests[1] = 2.0
    with pytest.raises(HardwareError, match="step 9: the processes of this run do not hold equal weights"):
        ended(work, state)
    assert saved == [9]
