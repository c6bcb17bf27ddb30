"""Rows as columns of text and as Markdown."""

from __future__ import annotations

from trainer.words.tables import aligned, markdown

ROWS = [("name", "ms", "why"), ("a", "12.5", "as it is fast"), ("longer", "7", "")]


def test_columns_are_as_wide_as_their_widest_cell_and_no_line_ends_in_spaces() -> None:
    assert aligned(ROWS) == ["name    ms    why", "a       12.5  as it is fast", "longer  7"]


def test_numbers_stand_on_the_right() -> None:
    assert aligned(ROWS, right=(1,)) == ["name      ms  why", "a       12.5  as it is fast", "longer     7"]


def test_the_last_column_is_wrapped_below_itself() -> None:
    lines = aligned([("a", "word " * 12), ("bb", "")], width=20)
    assert lines == ["a   " + " ".join(["word"] * 8), "    " + " ".join(["word"] * 4), "bb"]


def test_a_bar_in_a_cell_ends_no_cell() -> None:
    assert markdown(("a", "b"), [("1|2", "3")]) == "| a | b |\n| --- | --- |\n| 1\\|2 | 3 |\n"
