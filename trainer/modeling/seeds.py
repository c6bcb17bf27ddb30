"""Global random state, set for one block of code and put back."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def seeded(label: str, device: str) -> Iterator[None]:
    """Seed torch's global generators of the CPU and of `device` from a label; restore them afterwards."""
    devices = [torch.cuda.current_device()] if device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        digest = hashlib.blake2b(label.encode(), digest_size=8).digest()
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        yield
