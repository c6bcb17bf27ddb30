"""Memory of a GPU that lies outside torch's allocator: how much a process has held."""

from __future__ import annotations

import pytest
import torch

from trainer.modeling.storage import shared_memory
from trainer.modeling.storage.shared_memory import peak_bytes


def test_the_peak_counts_what_is_shared_beside_torchs_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 12)
    assert peak_bytes() == 12
    monkeypatch.setattr(shared_memory, "_held", {1000: 20, 2000: 9})
    assert peak_bytes() == 41
    # loading had them all in torch's: they are not counted twice
    assert (peak_bytes(31), peak_bytes(50)) == (41, 50)
