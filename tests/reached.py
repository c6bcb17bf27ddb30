"""Models whose first blocks' inputs have gradients, as those of blocks behind: one graph for all of a kind.

A compiler traces a block with such inputs and one without apart, which takes as long again.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.engine.training import loop

EMBEDDERS = (
    "x_embedder",
    "context_embedder",
    "img_in",
    "txt_in",
    "visual_embeddings",
    "text_embeddings",
    "embed_tokens",
)
"""Modules whose outputs the first blocks take, by the last part of their names."""


def reach(model: torch.nn.Module) -> None:
    """Give weights before the first blocks gradients. No optimizer takes them."""
    found = [one for name, one in model.named_modules() if name.rpartition(".")[2] in EMBEDDERS]
    assert found
    for module in found:
        module.requires_grad_(True)


def reach_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do this to the model of every run, before its first micro-batch."""
    compute = loop.compute

    def reaching(context: Any, built: Any, *arguments: Any) -> Any:
        reach(built.model)
        return compute(context, built, *arguments)

    monkeypatch.setattr(loop, "compute", reaching)
