"""Fixtures of every test on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo
import torch._inductor.config


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Reset compiled code and torch's own settings, which `compile_blocks` changes."""
    torch.compiler.reset()
    with (
        torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit),
        torch._inductor.config.patch({"triton.coalesce_tiling_analysis": True}),
    ):
        yield
    torch.compiler.reset()
