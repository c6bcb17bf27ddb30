"""docs/coming-from.md comes from the table in the code."""

from __future__ import annotations

from scripts.render_coming_from import PAGE, page
from trainer.config import elsewhere


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run make docs"


def test_every_word_of_the_table_is_on_the_page() -> None:
    text = page()
    rows = [row for group in elsewhere.keys().values() for row in group] + list(elsewhere.files())
    assert not [name for row in rows for name in row.names if f"`{name}`" not in text]
    assert "`CUDA_VISIBLE_DEVICES=all` | an error" in text
