"""Triton kernel for CUDA: AdamW over bf16 weights whose fp32 masters lie in two halves, in one pass.

Only imported where torch was built for CUDA. The formats and the random bits are those of
`engine.optimizing.split_adamw`, which computes the same in plain torch.

`_update`: program p updates BLOCK values of a parameter, from p * BLOCK on.

    weight    bf16    read and written; with `low` the fp32 master, (weight << 16) + low
    low       int16   read and written; without MASTERS there is none, and weights are rounded by chance
    first     int16   read and written: sign, 6 bits of exponent from 2^-52 on, 9 of fraction
    second    int16   read and written: 7 bits of exponent from 2^-100 on, 9 of fraction
    gradient  bf16 or fp32, read; times `factor`, a scalar on the device
    bad       fp32 scalar on the device: nothing is written where it is not 0
    EXACT     the values are whole blocks: a mask would part each access of 16 bytes

18 bytes a parameter pass through the GPU's memory where gradients are bf16, 14 without masters.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4


def update(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    factor: torch.Tensor,
    bad: torch.Tensor,
    *,
    betas: tuple[float, float],
    keep: float,
    size: float,
    scale: float,
    eps: float,
    seed: int,
    begin: int = 0,
) -> None:
    """Update contiguous tensors of one shape in place.

    A master is multiplied by `keep`, and the first moment * `size` / (root of the second / `scale` + `eps`)
    is taken from it; `seed` (32 bits, mixed) is of the step and the tensor, `begin` the place of the first
    value in the tensor of which these are rows.
    """
    count = weight.numel()
    # signed, as Triton takes whole numbers of 32 bits
    seed = seed - 2**32 if seed >= 2**31 else seed
    _update[(triton.cdiv(count, _BLOCK),)](
        weight, weight if low is None else low, first, second, gradient, factor, bad, count, seed, begin,
        betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], keep, size, 1.0 / scale, eps,
        MASTERS=low is not None, BLOCK=_BLOCK, EXACT=count % _BLOCK == 0, num_warps=_WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "seed", "begin"])
def _update(  # type: ignore[no-untyped-def]
    weight, low, first, second, gradient, factor, bad, count, seed, begin,
    beta_1, other_1, beta_2, other_2, keep, size, inverse, eps,
    MASTERS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    if tl.load(bad) == 0.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        place = tl.arange(0, BLOCK)
        inside = place < count - start
        given = _load(gradient + start, place, inside, EXACT).to(tl.float32) * tl.load(factor)
        upper = _load(weight + start, place, inside, EXACT).to(tl.int16, bitcast=True).to(tl.int32)
        lower = _load(low + start, place, inside, EXACT).to(tl.int32) if MASTERS else 0
        master = ((upper << 16) + lower).to(tl.float32, bitcast=True)
        code = _load(first + start, place, inside, EXACT).to(tl.int32)
        one = _value(code & 0x7FFF, 75)
        one = tl.where(code < 0, -one, one)
        two = _value(_load(second + start, place, inside, EXACT).to(tl.int32) & 0xFFFF, 27)

        one = beta_1 * one + other_1 * given
        two = beta_2 * two + other_2 * given * given
        master = master * keep - size * one / (tl.sqrt(two) * inverse + eps)

        word = ((start + begin) & 0xFFFFFFFF).to(tl.uint32) + place.to(tl.uint32)
        word = word ^ seed.to(tl.uint32, bitcast=True)
        noise = _mixed(word)
        bits = master.to(tl.int32, bitcast=True)
        up = 0x8000 if MASTERS else (_mixed(word ^ 0x5BD1E995) & 0xFFFF).to(tl.int32)
        upper = ((bits + up) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        magnitude = _code(tl.abs(one), 75, 0x7FFF, (noise & 0x3FFF).to(tl.int32))
        code = tl.where(one < 0, magnitude | 0x8000, magnitude)
        _store(weight + start, place, upper, inside, EXACT)
        if MASTERS:
            _store(low + start, place, bits.to(tl.int16), inside, EXACT)
        _store(first + start, place, code.to(tl.int16), inside, EXACT)
        code = _code(two, 27, 0xFFFF, ((noise >> 16) & 0x3FFF).to(tl.int32))
        _store(second + start, place, code.to(tl.int16), inside, EXACT)


@triton.jit
def _load(tensor, place, inside, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        return tl.load(tensor + place)
    return tl.load(tensor + place, mask=inside, other=0)


@triton.jit
def _store(tensor, place, values, inside, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        tl.store(tensor + place, values)
    else:
        tl.store(tensor + place, values, mask=inside)


@triton.jit
def _value(code, LOWEST: tl.constexpr):  # type: ignore[no-untyped-def]
    value = ((code << 14) + (LOWEST << 23)).to(tl.float32, bitcast=True)
    return tl.where(code == 0, 0.0, value)


@triton.jit
def _code(value, LOWEST: tl.constexpr, MOST: tl.constexpr, noise):  # type: ignore[no-untyped-def]
    code = (value.to(tl.int32, bitcast=True) - (LOWEST << 23) + noise) >> 14
    return tl.minimum(tl.maximum(code, 0), MOST)


@triton.jit
def _mixed(word):  # type: ignore[no-untyped-def]
    """Word of 32 bits with every bit spread over all others (Wellons' lowbias32)."""
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)
