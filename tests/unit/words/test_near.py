"""The known word that a misspelt one was meant to be."""

from __future__ import annotations

import pytest

from trainer.words.near import closest, did_you_mean

KNOWN = ("attention", "all-linear", "to_q")


@pytest.mark.parametrize(
    ("word", "near"),
    [("atention", "attention"), ("ALL_LINEAR", "all-linear"), ("to-q", "to_q"), ("xyzzy", None), ("", None)],
)
def test_case_hyphens_and_underscores_do_not_count(word: str, near: str | None) -> None:
    assert closest(word, KNOWN) == near


def test_a_higher_cutoff_wants_more_letters_alike() -> None:
    assert closest("attentive", KNOWN) == "attention"
    assert closest("attentive", KNOWN, cutoff=0.9) is None


def test_the_question() -> None:
    assert did_you_mean("atention", KNOWN) == "did you mean `attention`? "
    assert did_you_mean("xyzzy", KNOWN) == ""
