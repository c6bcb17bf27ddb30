"""Counts with their noun."""

from __future__ import annotations

import pytest

from trainer.words.plurals import numbered


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 steps"),
        (1, "1 step"),
        (1.0, "1 step"),
        (2, "2 steps"),
        (0.5, "0.5 steps"),
        (1234567, "1234567 steps"),
    ],
)
def test_one_is_singular(count: float, words: str) -> None:
    assert numbered(count, "step") == words


def test_a_verb_goes_with_its_noun() -> None:
    assert [numbered(n, "loss is", "losses are") for n in (1, 3)] == ["1 loss is", "3 losses are"]
