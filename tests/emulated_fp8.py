"""FP8 on a CPU: products in fp32 from the same quantised values, counted as they are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.modeling.storage import fp8_product, fp8_trained


@contextlib.contextmanager
def emulated() -> Iterator[SimpleNamespace]:
    """Stands for the count of products that torch dispatches: of those that a CPU emulates."""
    seen, multiply = SimpleNamespace(count=0), fp8_product.multiply

    def counted(*given: Any, **more: Any) -> torch.Tensor:
        seen.count += 1
        return multiply(*given, **more)

    with pytest.MonkeyPatch.context() as patch:
        for module in (fp8_product, fp8_trained):
            patch.setattr(module, "multiply", counted)
        yield seen
