"""Floor 4: the few lengths that captions are padded to, and batches that are. See `text_padding`."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Generator, Sequence
from typing import Protocol

import torch

TEXT_LENGTHS = (64, 128, 256, 384, 512, 768, 1024)
"""Tokens that captions are padded to; longer ones become multiples of the last. Of captions of 1 to 300
tokens, as many short as long by their logarithm, 73 % become 64.
"""


def padded_length(tokens: int) -> int:
    """The first of `TEXT_LENGTHS` that holds a caption of so many tokens."""
    place = bisect.bisect_left(TEXT_LENGTHS, tokens)
    if place < len(TEXT_LENGTHS):
        return TEXT_LENGTHS[place]
    most = TEXT_LENGTHS[-1]
    return -(-tokens // most) * most


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
