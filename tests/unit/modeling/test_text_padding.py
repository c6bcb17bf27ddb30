"""Models whose captions are padded, against diffusers' own models without padding, one caption at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch._dynamo

from tests.unit.modeling.small_models import Case, case, difference, relative
from trainer.families.values import TEXT_MASK, Batch, Draw
from trainer.modeling.adapter.joined_lora import join_siblings
from trainer.modeling.attention.text_lengths import pad_text, padded_text
from trainer.modeling.attention.text_padding import text_readers
from trainer.modeling.blocks.compiled import compile_blocks, graphs_compiled
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.fused.rotary import fuse_rotary

# of sums in fp32 that are made in another order
ROUNDING = 2e-5
# Kandinsky's rotation is rounded to bf16, to the other side where a sum in fp32 is made in another order
COMPILED = 2e-3
VARYING = ("qwen_image", "kandinsky5")


@pytest.fixture(autouse=True)
def whole_process() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_caption(given: Case, tokens: int) -> Case:
    """The case with its caption cut to so many tokens."""
    name = given.family.caption
    text = {**given.batch.text, name: given.batch.text[name][:, :tokens]}
    return dataclasses.replace(given, batch=dataclasses.replace(given.batch, text=text))


def padded(given: Case, length: int) -> Case:
    name = given.family.caption
    caption, mask = pad_text(given.batch.text[name][0], length)
    text = {**given.batch.text, name: caption[None], TEXT_MASK: mask[None]}
    return dataclasses.replace(given, batch=dataclasses.replace(given.batch, text=text))


def prepared(given: Case) -> tuple[Any, ...]:
    """The layers that leave padding out, as a run has them."""
    fuse_rotary(given.model)
    return text_readers(given.model, given.family.text_keys)


def run(given: Case, readers: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    with padded_text(readers, given.batch.text.get(TEXT_MASK)):
        return given.gradients()


Found = tuple[torch.Tensor, Mapping[str, torch.Tensor]]
"""An output, and gradients by parameter."""


def assert_alike(found: Found, wanted: Found, within: float = ROUNDING) -> None:
    assert relative(found[0], wanted[0]) < within
    # nothing reads the last block's text: eager it has no gradient, compiled one of zeros
    unread = set(found[1]) - set(wanted[1])
    assert not any(found[1][name].any() for name in unread)
    read = {name: gradient for name, gradient in found[1].items() if name not in unread}
    assert difference(read, wanted[1]) < within


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("family", VARYING)
def test_padding_changes_neither_output_nor_gradients(family: str, tokens: int) -> None:
    wanted = with_caption(case(family), tokens).gradients()
    given = with_caption(case(family), tokens)
    readers = prepared(given)
    assert_alike(run(padded(given, 24), readers), wanted)
    # and a caption that is not padded is as it was
    assert_alike(run(given, readers), wanted)


@pytest.mark.parametrize("family", VARYING)
def test_a_mask_that_is_left_out_is_seen(family: str) -> None:
    """Guards the other tests: padding must have an effect on these small models."""
    given = with_caption(case(family), 5)
    wanted, _ = given.gradients()
    found, _ = run(
        dataclasses.replace(padded(given, 24), batch=_unmasked(padded(given, 24).batch)), prepared(given)
    )
    assert relative(found, wanted) > 100 * ROUNDING


def _unmasked(batch: Batch) -> Batch:
    return dataclasses.replace(batch, text={n: t for n, t in batch.text.items() if n != TEXT_MASK})


@pytest.mark.parametrize("family", VARYING)
def test_captions_of_different_lengths_share_a_batch(family: str) -> None:
    """Padded to one length, two samples of a batch are what each is alone."""
    given = case(family)
    readers = prepared(given)
    short, long = (padded(with_caption(given, tokens), 16) for tokens in (3, 11))
    both = dataclasses.replace(short, batch=_stacked(short.batch, long.batch), draw=_twice(given.draw))
    with torch.no_grad(), padded_text(readers, both.batch.text.get(TEXT_MASK)):
        found = both.predict()
    for number, one in enumerate((short, long)):
        with torch.no_grad(), padded_text((), None):
            alone = with_caption(given, (3, 11)[number]).predict()
        assert relative(found[number], alone[0]) < ROUNDING
        assert TEXT_MASK in one.batch.text


def _stacked(left: Batch, right: Batch) -> Batch:
    def joined(
        first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        return {name: torch.cat([first[name], second[name]]) for name in first}

    return Batch(
        latents=joined(left.latents, right.latents), text=joined(left.text, right.text), size=2, weight=2.0
    )


def _twice(draw: Draw | None) -> Draw:
    assert draw is not None
    return Draw(**{name: torch.cat([value, value]) for name, value in vars(draw).items()})


def _forward(given: Case) -> None:
    given.predict()


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("family", VARYING)
def test_compiled_blocks_serve_all_captions_of_a_length(family: str) -> None:
    wanted = {tokens: with_caption(case(family), tokens).gradients() for tokens in (2, 9, 15)}
    given = case(family)
    join_siblings(given.model, lambda: _forward(given))
    readers = prepared(given)
    compile_blocks(repeated_blocks(given.model, given.family.blocks), activation_budget=1.0)
    run(padded(with_caption(given, 4), 16), readers)
    before = graphs_compiled()
    for tokens, right in wanted.items():
        assert_alike(run(padded(with_caption(given, tokens), 16), readers), right, COMPILED)
    assert graphs_compiled() == before
