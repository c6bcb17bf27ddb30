"""The few lengths that captions are padded to, and batches that are. See `text_padding`."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

import torch


def pad_text(tokens: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(L, D) with zeros after it, (length, D), and its mask (length,): True for the caption's L tokens."""
    mask = torch.arange(length) < len(tokens)
    return torch.nn.functional.pad(tokens, (0, 0, 0, length - len(tokens))), mask


class TextReader(Protocol):
    """An attention layer's processor that leaves padding out."""

    text_mask: torch.Tensor | None


@contextlib.contextmanager
def padded_text(readers: Sequence[TextReader], mask: torch.Tensor | None) -> Generator[None, None, None]:
    """Forward and backward of batches whose captions are padded as `mask` (B, text tokens) says.

    Around backward too: recomputed blocks attend again there.
    """
    assert mask is None or readers, "a padded caption, and no layer that leaves padding out"
    for reader in readers:
        reader.text_mask = mask
    try:
        yield
    finally:
        for reader in readers:
            reader.text_mask = None
