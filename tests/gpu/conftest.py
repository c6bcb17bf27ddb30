"""What every test on a GPU has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing that was compiled, and torch's own limit of recompilations, which `compile_blocks` changes."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=torch._dynamo.config.recompile_limit):
        yield
    torch.compiler.reset()
