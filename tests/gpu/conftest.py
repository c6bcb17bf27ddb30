"""Fixtures of every test on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._inductor.config

SPARE_BYTES = 2**30
"""Memory that a process of the suite may keep from test to test."""


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset compiled code and torch's own settings, which `compile_blocks` changes."""
    torch.compiler.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),
        torch._inductor.config.patch({"triton.coalesce_tiling_analysis": True, "shape_padding": True}),
    ):
        yield
    torch.compiler.reset()


@pytest.fixture(autouse=True)
def freed_memory() -> Iterator[None]:
    """Give the device's memory back after a test: other processes of the suite take turns on the GPU."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > SPARE_BYTES:
        gc.collect()
        torch.cuda.empty_cache()
