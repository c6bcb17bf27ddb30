"""In how many micro-batches a step's samples go, against the sampler itself, and what plans make of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Literal

import pytest

from tests.unit.hardware.conftest import machine
from tests.unit.hardware.test_resolve import Config, plan, row
from trainer.data.sampler import Sampler
from trainer.engine.geometry import run_geometry
from trainer.engine.work import Work, parted
from trainer.families import get
from trainer.hardware.batching import usual_parts
from trainer.hardware.captions import padded_length
from trainer.hardware.plan import Plan

Captions = Literal["alike", "padded", "as they are"]
STEPS, RECORDS = 1500, 40_000
WORK = Work(matmul_flops=1.0, attention_flops=1.0, attention_calls=1, products=1, blocks=1, share=1.0)
CAPTIONS: dict[Captions, Callable[[int], int]] = {
    "alike": lambda tokens: 0,
    "padded": padded_length,
    "as they are": lambda tokens: tokens,
}


@pytest.mark.parametrize("captions", CAPTIONS)
@pytest.mark.parametrize(("size", "samples"), [(2, 2), (4, 4), (2, 8), (4, 16), (4, 256), (8, 2048)])
def test_parts_are_those_of_the_sampler(captions: Captions, size: int, samples: int) -> None:
    """Pictures of six shapes, captions of 1 to 300 tokens, as many short as long by their logarithm."""
    chooser = random.Random(0)
    keys = [
        (chooser.randrange(6), CAPTIONS[captions](int(math.exp(chooser.random() * math.log(301)))))
        for _ in range(RECORDS)
    ]
    sampler = Sampler(
        keys, keys, [1] * RECORDS, contents=range(RECORDS), sizes=[1] * RECORDS, row_size=1, rows=samples,
        rows_at_once=size, caption_dropout_rate=0.0, seed=0,
    )  # fmt: skip
    steps = min(STEPS, 20_000 // samples)
    found = Counter(len(one.samples) for n in range(steps) for one in sampler.step(n))
    expected = usual_parts(size, samples, captions=captions)
    assert len(expected) == size
    assert sum(expected) == pytest.approx(found.total() / steps, rel=0.03)
    for number, count in enumerate(expected, 1):
        assert count == pytest.approx(found[number] / steps, rel=0.1, abs=0.01 * sum(expected))
    assert sum(number * count for number, count in enumerate(expected, 1)) == pytest.approx(samples)


@pytest.mark.parametrize("captions", CAPTIONS)
def test_single_samples_are_their_own_micro_batches(captions: Captions) -> None:
    assert usual_parts(1, 7, captions=captions) == (7,)
    assert usual_parts(4, 6, captions="alike", pictures=(1.0,)) == (0, 1, 0, 1)


def planned(config: Config, family: str, batch: int, **features: object) -> Plan:
    values = {f"features__{name}": value for name, value in features.items()}
    asked = config(family=family, train__train_batch_size=batch, **values)
    geometry = run_geometry(get(family), asked, model_folder=None, dtype="bf16")
    return plan(asked, machine("h200"), geometry)


@pytest.mark.parametrize(("family", "parts"), [("flux1_dev", "3.1"), ("qwen_image", "4.0")])
def test_the_host_begins_every_micro_batch(config: Config, family: str, parts: str) -> None:
    """Eager blocks of several shapes take as long as the host takes for each of them."""
    written = {"compile": False, "weights": "fp8", "compute": "fp8"}
    one, four = (planned(config, family, batch, **written) for batch in (1, 4))
    assert four.step_milliseconds > 0.95 * float(parts) * one.step_milliseconds
    assert (
        f"4 samples, {parts} micro-batches where pictures are of six shapes" in row(four, "step_time").reason
    )
    assert "one micro-batch" in row(one, "step_time").reason
    compiled = planned(config, family, 4, compile=True, weights="fp8", compute="fp8")
    assert compiled.step_milliseconds < 0.8 * four.step_milliseconds


def test_rows_of_conversations_are_of_one_shape(config: Config) -> None:
    work = parted(WORK, get("llama"), config(train__train_batch_size=4).train, ())
    assert (work.parts, work.parts_padded) == ((), ())
