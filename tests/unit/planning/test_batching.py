"""Number of micro-batches of a step's samples, against the sampler itself, and its use in plans."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_memory import storage
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.config.schema import RunConfig
from trainer.data.sampler import Sampler
from trainer.families import get
from trainer.machine.facts import Facts
from trainer.planning.choose.batching import smaller
from trainer.planning.cost import roofline
from trainer.planning.plan import Plan
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.mix import Captions, Pictures, padded_length, usual_parts
from trainer.planning.shapes.run_shapes import micro_batches, run_geometry

CAPTIONS: dict[Captions, Callable[[int], int]] = {
    "alike": lambda tokens: 0,
    "padded": padded_length,
    "as they are": lambda tokens: tokens,
}
SAMPLES = 20_000


def once(*counts: int) -> Pictures:
    """Pictures of each shape, by their counts, each once in an epoch."""
    return tuple((shape, count, 1) for shape, count in enumerate(counts))


def sampled(pictures: Pictures, captions: Captions, size: int, samples: int) -> list[float]:
    """Mean number of micro-batches of 1 to `size` samples in a sampler step, for the usual captions."""
    chooser = random.Random(1)
    shapes = [(shape, repeats) for shape, count, repeats in pictures for _ in range(count)]
    keys = [
        (shape, CAPTIONS[captions](int(math.exp(chooser.random() * math.log(301))))) for shape, _ in shapes
    ]
    count = len(keys)
    sampler = Sampler(
        keys, keys, [repeats for _, repeats in shapes], contents=range(count), sizes=[1] * count, row_size=1,
        rows=samples, rows_at_once=size, caption_dropout_rate=0.0, seed=0,
    )  # fmt: skip
    steps = max(10, SAMPLES // samples)
    found = Counter(len(one) for n in range(steps) for one in sampler.step(n))
    return [found[number] / steps for number in range(1, size + 1)]


@pytest.mark.parametrize(
    ("captions", "size", "samples"),
    [
        ("alike", 2, 2),
        ("alike", 4, 16),
        ("alike", 4, 256),
        ("padded", 4, 4),
        ("padded", 2, 8),
        ("padded", 8, 2048),
        ("as they are", 2, 2),
        ("as they are", 2, 8),
        ("as they are", 4, 256),
    ],
)
def test_parts_of_a_large_set_are_those_of_the_sampler(captions: Captions, size: int, samples: int) -> None:
    expected = usual_parts(size, samples, captions=captions)
    found = sampled(once(*(5000,) * 6), captions, size, samples)
    assert expected == pytest.approx(found, rel=0.1, abs=0.02 * sum(found))
    assert sum(expected) == pytest.approx(sum(found), rel=0.03)
    assert sum(number * count for number, count in enumerate(expected, 1)) == pytest.approx(samples)


@pytest.mark.parametrize(
    ("pictures", "size", "samples"),
    [
        (once(8, 8), 8, 16),  # a step is an epoch
        (once(8, 8, 8), 8, 24),
        (once(1, 1, 1, 1, 1, 1), 4, 4),
        (once(10, 10, 10, 10, 10, 10), 4, 4),
        (once(1, 99), 8, 256),
        (once(5, 95), 16, 64),
        (once(300, 700), 4, 2000),
        (once(1, 4, 20), 4, 8),
        (once(3), 2, 8),  # a step is more than an epoch
        (tuple((shape, 1, 20) for shape in range(4)), 4, 4),
        (tuple((shape, 2, 10) for shape in range(3)), 4, 4),
        (((0, 1, 10), (1, 1, 10)), 2, 2),
        (((0, 20, 1), (1, 5, 6)), 4, 8),
    ],
)
def test_parts_of_a_small_set_are_those_of_the_sampler(pictures: Pictures, size: int, samples: int) -> None:
    expected = usual_parts(size, samples, captions="alike", pictures=pictures)
    found = sampled(pictures, "alike", size, samples)
    assert expected == pytest.approx(found, rel=0.1, abs=0.03 * sum(found))
    assert sum(expected) == pytest.approx(sum(found), rel=0.04)


@pytest.mark.parametrize("captions", CAPTIONS)
def test_single_samples_are_their_own_micro_batches(captions: Captions) -> None:
    assert usual_parts(1, 7, captions=captions) == (7,)
    assert usual_parts(4, 6, captions="alike", pictures=once(90)) == (0, 1, 0, 1)


def planned(config: Config, family: str, batch: int, **features: object) -> Plan:
    values = {f"features__{name}": value for name, value in features.items()}
    asked = config(family=family, train__train_batch_size=batch, **values)
    geometry = run_geometry(get(family), asked, model_folder=None, dtype="bf16")
    return plan(asked, machine("h200"), geometry)


@pytest.mark.parametrize("size", range(1, 13))
def test_smaller_micro_batches_leave_the_samples_of_a_step(config: Config, size: int) -> None:
    asked = config(train__train_batch_size=size, train__gradient_accumulation_steps=3)
    found = [(one.train.train_batch_size, one.train.gradient_accumulation_steps) for one in smaller(asked)]
    pairs = [(less, steps) for less in range(1, size) for steps in range(1, 37) if less * steps == size * 3]
    assert found == [(less, steps) for less, steps in reversed(pairs) if steps % 3 == 0]


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
    hours = one.step_milliseconds / 1000 / 3600 * 1500
    assert f"; {hours:.1f} h for all 1500" in row(one, "step_time").reason and hours > 0.1
    compiled = planned(config, family, 4, compile=True, weights="fp8", compute="fp8")
    assert compiled.step_milliseconds < 0.8 * four.step_milliseconds


def test_rows_of_conversations_are_of_one_shape(config: Config) -> None:
    assert micro_batches(get("llama"), config(train__train_batch_size=4), ()) == {}


def test_captions_are_no_longer_than_the_run_reads(config: Config) -> None:
    asked = config(train__train_batch_size=4, data__max_sequence_length=64)
    parts = micro_batches(get("qwen_image"), asked, once(50))
    assert parts["padded"] == parts["alike"] == (0, 0, 0, 1)


def test_captions_that_are_not_padded_make_more(config: Config) -> None:
    asked = {"train__train_batch_size": 4, "features__compile": True}
    found = micro_batches(get("qwen_image"), config(**asked), ())
    parts, padded = found["as they are"], found["padded"]
    unpadded = micro_batches(get("qwen_image"), config(**asked, features__text_padding=False), ())
    assert unpadded["as they are"] == unpadded["padded"] == parts
    assert sum(padded) < 0.95 * sum(parts)
    geometry = run_geometry(
        get("qwen_image"), config(family="qwen_image", **asked), model_folder=None, dtype="bf16"
    )
    made = storage(compile=True)
    assert roofline.usual_parts(made, geometry, "flash") == padded
    assert roofline.usual_parts(made, geometry, "flash_attn_2") == parts
    assert roofline.usual_parts(replace(made, compile=False), geometry, "flash") == parts


MIXED = once(10, 10, 10, 10, 10, 10)


def splits(
    config: Config,
    family: str,
    *,
    facts: Facts | None = None,
    pictures: Pictures = MIXED,
    **features: object,
) -> Plan:
    values = {f"features__{name}": value for name, value in features.items()}
    asked = config(family=family, train__train_batch_size=4, **values)

    def geometry_of(changed: RunConfig, dtype: str) -> Geometry:
        return run_geometry(get(family), changed, model_folder=None, dtype=dtype, pictures=pictures)

    # nothing was probed: what was would count for its own batch only
    unprobed = replace(machine("h200"), verdicts=())
    return plan(asked, facts or unprobed, geometry_of(asked, "bf16"), geometry_of=geometry_of)


@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image", "kandinsky5"])
def test_batches_that_are_rarely_full_are_taken_one_by_one(config: Config, family: str) -> None:
    """Graphs of single samples are fewer, and memory is that of one."""
    mixed, alike = (
        splits(config, family, compile=True),
        splits(config, family, compile=True, pictures=once(50)),
    )
    assert (mixed.micro_batch_size, mixed.accumulation_steps) == (1, 4)
    assert row(mixed, "micro_batch").value == "1 x 4"
    assert "one by one takes about as long" in row(mixed, "micro_batch").reason
    single = plan(
        config(family=family, features__compile=True), replace(machine("h200"), verdicts=()),
        run_geometry(get(family), config(family=family), model_folder=None, dtype="bf16"),
    )  # fmt: skip
    assert mixed.train_memory == single.train_memory
    assert alike.micro_batch_size > 1


def test_uncompiled_batches_that_save_the_host_s_time_stay(config: Config) -> None:
    written = {"compile": False, "weights": "fp8", "compute": "fp8", "attention": "cudnn"}
    assert splits(config, "flux1_dev", **written).micro_batch_size == 4
    # captions as they are: hardly two are of one length
    assert splits(config, "qwen_image", **written).micro_batch_size == 1


@pytest.mark.parametrize("pictures", [(), once(20, 20, 20), once(50)])
def test_only_what_is_known_of_pictures_parts_a_batch(config: Config, pictures: Pictures) -> None:
    """Captions may be all alike: they are not looked at."""
    assert splits(config, "kandinsky5", compile=True, pictures=pictures).micro_batch_size > 1


@pytest.mark.parametrize("measured", [(1,), (4,)])
def test_what_was_measured_of_one_batch_alone_decides_nothing(
    config: Config, measured: tuple[int, ...]
) -> None:
    facts = machine("h200")
    shapes = {
        size: run_geometry(
            get("flux1_dev"), config(train__train_batch_size=size), model_folder=None, dtype="bf16"
        )
        for size in (1, 4)
    }
    here = shapes[1].attention_shape_class
    moved = [
        replace(row, shape_class=shapes[size].attention_shape_class)
        for row in facts.verdicts
        for size in measured
        if row.shape_class == here
    ]
    assert moved
    found = splits(config, "flux1_dev", facts=replace(facts, verdicts=tuple(moved)), compile=True)
    assert found.micro_batch_size == 1


def test_trained_weights_are_not_taken_one_by_one(config: Config) -> None:
    """Sums of many small gradients in bf16 lose what they add up."""
    asked = config(family="kandinsky5", method="full", train__train_batch_size=2)

    def geometry_of(changed: RunConfig, dtype: str) -> Geometry:
        return run_geometry(get("kandinsky5"), changed, model_folder=None, dtype=dtype)

    assert (
        plan(asked, machine("h200"), geometry_of(asked, "bf16"), geometry_of=geometry_of).micro_batch_size
        == 2
    )
