"""Causal attention over several samples in one row, for transformers' models, without masks.

transformers passes what a model is called with on to its attention layers, and makes no mask for an attention
function that it has no mask function for. So a model that is called with `segments` attends inside each
sample only. A kernel that reads on the device where samples end takes the row in one call, and compiled
blocks serve every row; for the others `segments` are host integers, and each sample is a call of its own.
Nothing has the size tokens x tokens but the mask by which compiled blocks read such ends on a CPU. Position
ids must restart with every sample; that is the caller's part.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import flop_registry

from trainer.modeling.attention.flash_attn_4_rows import attend_by_ends
from trainer.modeling.attention.kernels import ContiguousGradient, attend, selected
from trainer.ways.kernels import KERNELS

Segments = Sequence[int] | torch.Tensor
"""The samples' lengths, or `ends` of the row: see `row_ends`."""
# widths of heads that torch's kernel takes are multiples of this
_WIDTH = 8
# as those of flash-attn 4 that a GPU has tried: 80 it refuses
_WIDTH_4 = 64
# ends of a padded row are a power of two, and at least so many
_FEWEST_ENDS = 16


def row_ends(lengths: Sequence[int]) -> torch.Tensor:
    """The boundaries of a row's samples, int32 (n + 1,): 0, then the end of each sample."""
    return torch.tensor(list(itertools.accumulate(lengths, initial=0)), dtype=torch.int32)


def padded_row_ends(lengths: Sequence[int]) -> torch.Tensor:
    """`row_ends` with the last one repeated up to 16, 32, 64 ... of them: samples without tokens.

    As few as that: a kernel starts as many thread blocks for an empty sample as for one as long as the row.
    """
    ends = row_ends(lengths)
    size = max(_FEWEST_ENDS, 1 << (len(ends) - 1).bit_length())
    return torch.cat([ends, ends[-1:].expand(size - len(ends))])


def segments_of(model: Any, lengths: torch.Tensor, ends: torch.Tensor, *, padded: bool) -> Segments:
    """Segments as the model's attention reads them: `ends` (on its device) or `lengths` (on the host).

    `lengths` add up to the row's tokens; of a row that is `padded` for compiled blocks the last one is the
    padding's.
    """
    names = (implementation(name) for name, kernel in KERNELS.items() if kernel.reads_ends)
    device = ends.device.type
    by_ends = reads_ends(device) and model.config._attn_implementation in names
    # with dropout the row's call would draw other numbers when it is computed again
    if (by_ends or (padded and device == "cpu")) and not model.config.attention_dropout:
        return ends
    return tuple(length for length in lengths.tolist() if length)


def segments_for(kernel: str, lengths: Sequence[int], device: str) -> Segments:
    """The form in which this kernel reads where a row's samples end."""
    if KERNELS[kernel].reads_ends and reads_ends(device):
        return row_ends(lengths).to(device)
    return tuple(lengths)


def reads_ends(device: str) -> bool:
    """True where kernels take `ends`: torch's own kernel has no such form for CPUs."""
    return device == "cuda"


def implementation(kernel: str) -> str:
    """Name of a kernel's attention function in transformers.

    It must not hold the word "flash", from which transformers concludes that its own flash attention is asked
    for.
    """
    return f"trainer_packed_{list(KERNELS).index(kernel)}"


def set_packed_attention(model: Any, kernel: str) -> None:
    """Make every attention layer of a transformers model use the plan's kernel, sample by sample."""
    from transformers import AttentionInterface

    name = implementation(kernel)
    AttentionInterface.register(name, functools.partial(_forward, kernel))
    model.set_attn_implementation(name)
    assert model.config._attn_implementation == name, f"{type(model).__name__} keeps its own attention"


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kernel: str,
    *,
    segments: Segments,
    scale: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Causal attention inside each of `segments`, which add up to the tokens.

    Query (B, heads, tokens, width), key and value (B, key heads, tokens, width); the result is
    (B, tokens, heads, width). Raises RuntimeError when the kernel does not take the inputs.
    """
    if isinstance(segments, torch.Tensor):
        assert dropout == 0.0 and len(query) == 1, "one row, without dropout"
        if query.device.type == "cpu":
            return _masked_by_ends(query, key, value, segments, scale)
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        by_ends = _flash_4_by_ends if kernel == "flash_attn_4" else _flash_by_ends
        row: torch.Tensor = ContiguousGradient.apply(by_ends(query, key, value, segments, scale))
        return row[None]
    lengths = list(segments)
    queries, keys, values = (tensor.transpose(1, 2).split(lengths, dim=1) for tensor in (query, key, value))
    with selected(kernel):
        outputs = [
            attend(*tensors, kernel=kernel, causal=True, scale=scale, dropout=dropout)
            for tensors in zip(queries, keys, values, strict=True)
        ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def _masked_by_ends(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention over a row by a mask of (tokens, tokens): torch has no kernel that reads ends on a CPU.

    Tensors (1, heads, tokens, width); the result is (1, tokens, heads, width).
    """
    places = torch.arange(query.shape[2])
    sample = torch.bucketize(places, ends, right=True)
    mask = (sample[:, None] == sample) & (places[:, None] >= places)
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=grouped)
    return output.transpose(1, 2)


def _flash_by_ends(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """torch's flash kernel over a row, tensors (tokens, heads, width).

    `torch.nn.attention.varlen.varlen_attn` calls this operator too; its own arguments differ by release.
    """
    tokens, _, width = query.shape
    scale = width**-0.5 if scale is None else scale
    query, key, value = (_widened(one, _WIDTH) for one in (query, key, value))
    output, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, ends, ends, tokens, tokens, 0.0, True, False, scale=scale
    )
    return output[..., :width]


def _flash_4_by_ends(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """flash-attn 4 over a row, tensors (tokens, heads, width); zeros widen heads to one of its widths."""
    width = query.shape[-1]
    scale = width**-0.5 if scale is None else scale
    heads = [_widened(one, _WIDTH_4).contiguous() for one in (query, key, value)]
    output, _ = attend_by_ends(heads[0], heads[1], heads[2], ends, scale)
    return output[..., :width]


def _widened(heads: torch.Tensor, multiple: int) -> torch.Tensor:
    """Heads (.., width) whose width is the next multiple, by zeros, which change no score and no output."""
    short = -heads.shape[-1] % multiple
    return torch.nn.functional.pad(heads, (0, short)) if short else heads


def _operations(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of the row as one sample, tensors (tokens, heads, width): a compiler does not know its samples.

    torch's own count takes each sample for as long as the row, and 2.11's knows no heads that share keys.
    """
    tokens, heads, width = query.shape[-3:]
    return 2 * heads * tokens * key.shape[-3] * (width + value.shape[-1])


flop_registry[torch.ops.aten._flash_attention_forward] = _operations


def _forward(
    kernel: str,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **_: Any,  # whatever else the model was called with, as use_cache
) -> tuple[torch.Tensor, None]:
    """transformers' attention signature; without `segments` a row is one sample."""
    assert attention_mask is None, "packed attention knows no masks"
    if query.shape[2] == key.shape[2]:
        lengths = (query.shape[2],) if segments is None else segments
        output = packed_attention(query, key, value, kernel, segments=lengths, scale=scaling, dropout=dropout)
        return output, None
    # generation: the newest token reads all keys of the cache, by whatever kernel takes one query
    assert query.shape[2] == 1 and segments is None, "with a key cache, one token at a time"
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, scale=scaling, enable_gqa=grouped)
    return output.transpose(1, 2), None
