"""Sizes in bytes, printed and read."""

from __future__ import annotations

import pytest

from trainer.words.sizes import GIB, gib, size_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0.0 MiB"),
        (5 * 2**20, "5.0 MiB"),
        (GIB // 10, "0.1 GiB"),
        (1.25 * GIB, "1.2 GiB"),
        (80 * GIB, "80.0 GiB"),
    ],
)
def test_bytes_as_text(count: float, text: str) -> None:
    assert gib(count) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * GIB),
        ("24 GB", 24 * 10**9),
        ("1.5 gib", 3 * GIB // 2),
        ("512MiB", 2**29),
        (" 8 mb", 8 * 10**6),
    ],
)
def test_text_as_bytes(text: str, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["24", "GiB", "-1GiB", "0 GiB", "24 TiB", "24GiBs", ""])
def test_a_text_that_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size such as 24GiB or 24 GB"):
        size_bytes(text)
