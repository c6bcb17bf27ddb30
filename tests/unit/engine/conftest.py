"""Processes that meet as ranks, for all tests of this folder: they start slowly."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Workers, workers


@pytest.fixture(scope="package")
def pool() -> Iterator[Workers]:
    with workers() as made:
        yield made
