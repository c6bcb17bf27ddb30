"""One Slurm for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import cluster as real
from tests.slurm.cluster import Slurm


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    # a socket's path is short
    folder: Path = tmp_path_factory.mktemp("slurm")
    with real.slurm(folder) as one:
        yield one
