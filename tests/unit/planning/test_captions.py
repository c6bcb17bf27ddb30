"""Padding captions and rows of conversations: the decision, its row in the plan, and the planned time."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.errors import HardwareError
from trainer.families import get, names
from trainer.modeling.storage.fp8_product import ROW_MULTIPLE
from trainer.planning.shapes.geometry import Geometry
from trainer.planning.shapes.mix import padded_length, padded_row
from trainer.planning.shapes.run_shapes import _CAPTION_TOKENS, run_geometry

VARYING = {"qwen_image", "qwen_image_edit", "kandinsky5"}


@pytest.fixture
def varying(geometry: Geometry) -> Geometry:
    return dataclasses.replace(geometry, captions_vary=True)


@pytest.fixture
def packed(geometry: Geometry) -> Geometry:
    return dataclasses.replace(geometry, packed=True)


def test_captions_are_padded_where_blocks_are_compiled(config: Config, varying: Geometry) -> None:
    found = plan(config(features__compile=True), machine("h200"), varying)
    assert found.text_padding and row(found, "text_padding").value == "on"
    eager = plan(config(features__compile=False), machine("h200"), varying)
    assert not eager.text_padding and "as it comes" in row(eager, "text_padding").reason


def test_captions_of_one_length_have_no_row(config: Config, geometry: Geometry) -> None:
    found = plan(config(features__compile=True), machine("h200"), geometry)
    assert not found.text_padding
    assert "text_padding" not in {decision.feature for decision in found.decisions}


def test_false_keeps_captions_as_they_are(config: Config, varying: Geometry) -> None:
    asked = config(features__compile=True, features__text_padding=False)
    assert not plan(asked, machine("h200"), varying).text_padding


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"features__compile": False}, "compiled"), ({"method": "full"}, "frozen base")],
)
def test_padding_that_cannot_be_had_is_refused(
    config: Config, varying: Geometry, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(HardwareError, match=why) as caught:
        plan(config(features__text_padding=True, **changes), machine("h200"), varying)
    assert "features.text_padding" in str(caught.value)


@pytest.mark.parametrize("method", ["lora", "full"])
def test_rows_are_padded_to_a_whole_micro_batch_where_blocks_are_compiled(
    config: Config, packed: Geometry, method: str
) -> None:
    asked = config(
        **{"features__compile": True, "features__text_padding": True, "method": method},
        data__max_sequence_length=1000,
        train__train_batch_size=2,
    )
    found = plan(asked, machine("h200"), packed)
    assert found.text_padding and found.attention == "flash"
    sizes = {"data__max_sequence_length": 1000, "train__train_batch_size": 2}
    on_a_cpu = plan(config(features__compile=True, **sizes), machine("cpu"), packed)
    assert "row padded to 2048 tokens (one graph for all packings)" in row(on_a_cpu, "text_padding").reason
    by_itself = plan(config(features__compile=True, method=method), machine("h200"), packed)
    assert not by_itself.text_padding
    assert "no faster with it" in row(by_itself, "text_padding").reason
    eager = plan(config(features__compile=False), machine("h200"), packed)
    assert not eager.text_padding and "every row as it comes" in row(eager, "text_padding").reason
    assert plan(config(features__compile=True), machine("cpu"), packed).text_padding
    written = config(features__compile=True, features__text_padding=False)
    assert not plan(written, machine("cpu"), packed).text_padding
    long = config(features__compile=True, features__text_padding="auto", data__max_sequence_length=8200)
    assert "masks of 8256 x 8256" in row(plan(long, machine("cpu"), packed), "text_padding").reason


def test_rows_that_are_read_one_by_one_are_not_padded(config: Config, packed: Geometry) -> None:
    """Each conversation is a call of its own, and each packing a graph, whatever the row's length."""
    asked = {"features__compile": True, "features__attention": "cudnn"}
    found = plan(config(**asked), machine("h200"), packed)
    assert not found.text_padding
    assert row(found, "text_padding").reason == "cudnn takes a row conversation by conversation"
    with pytest.raises(HardwareError, match="cudnn takes a row conversation by conversation"):
        plan(config(**asked, features__text_padding=True), machine("h200"), packed)
    with pytest.raises(HardwareError, match="compiled"):
        plan(config(features__compile=False, features__text_padding=True), machine("h200"), packed)


def test_memory_and_time_are_those_of_the_padded_row(config: Config) -> None:
    """A row of 1000 tokens counts as one of 1024: FP8 products take multiples of 64."""
    assert padded_row(1) == ROW_MULTIPLE and padded_row(4096) == 4096
    odd, even = (
        run_geometry(
            get("llama"),
            config(family="llama", data__max_sequence_length=tokens),
            model_folder=None,
            dtype="bf16",
        )
        for tokens in (1000, 1024)
    )
    assert odd == even


@pytest.mark.parametrize("family", names())
def test_geometry_says_whose_captions_vary(config: Config, family: str) -> None:
    found = run_geometry(get(family), config(family=family), model_folder=None, dtype="bf16")
    assert found.captions_vary == (family in VARYING)
    assert found.packed == (get(family).pad_row is not None)
    if family not in VARYING:
        assert found.usual_share == 1.0


def test_time_is_that_of_the_stated_mix_and_memory_that_of_the_longest(config: Config) -> None:
    """1 to 300 tokens, as many short as long by their logarithm, as the plan's row says."""
    weights = {tokens: math.log((tokens + 1) / tokens) for tokens in range(1, 301)}
    mean = sum(padded_length(tokens) * weight for tokens, weight in weights.items()) / sum(weights.values())
    assert round(mean) == _CAPTION_TOKENS
    asked = config(family="qwen_image", data__max_sequence_length=512)
    usual, longest = (
        run_geometry(get("qwen_image"), asked, model_folder=None, dtype="bf16", caption_tokens=tokens)
        for tokens in (None, 512)
    )
    assert usual.activations == longest.activations
    assert usual.usual_share == pytest.approx((4096 + 104) / (4096 + 512))
    assert usual.attention_flops / longest.attention_flops == pytest.approx(usual.usual_share**2)
    assert usual.matmul_flops < longest.matmul_flops
