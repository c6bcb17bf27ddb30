"""Triton kernels for CUDA: AdamW over bf16 weights whose fp32 masters lie in two halves, in one pass.

Only imported where torch was built for CUDA. The formats and the random bits are those of
`engine.optimizing.split_adamw`, which computes the same in plain torch.

    weight    bf16    read and written; with `low` the fp32 master, (weight << 16) + low
    low       int16   read and written; without MASTERS there is none, and weights are rounded by chance
    first     int16   read and written: sign, 6 bits of exponent from 2^-52 on, 9 of fraction
    second    int16   read and written: 7 bits of exponent from 2^-100 on, 9 of fraction
    gradient  bf16 or fp32, read; times `factor`, a scalar on the device
    bad       fp32 scalar on the device: nothing is written where it is not 0

`_update`: program p updates BLOCK values of one parameter, from p * BLOCK on. EXACT: the values are whole
blocks; a mask would part each access of 16 bytes.

`_update_all`: one launch for many parameters, as the host takes longer to begin a kernel than a small one
runs. `table` (parameters, 8) int64 has a row for each: addresses of weight, low, first, second and gradient,
all of them multiples of 16, number of values, place of the first one, seed. `parts` (programs, 2) int32 has
each program's row, and which PART of its parameter it updates: BLOCK values after each other, the last ones
masked. `_squares` sums the squares of a part's gradient in fp32, for the norm of all.

18 bytes a parameter pass through the GPU's memory where gradients are bf16, 14 without masters; 2 for a norm.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 1024, 4
PART = 64 * _BLOCK
"""Values of a parameter that one program of a launch for many updates."""
ALIGNED = 16
"""Bytes of which addresses in a table are multiples."""
_COLUMNS = tl.constexpr(8)


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


def update_all(
    table: torch.Tensor,
    parts: torch.Tensor,
    factor: torch.Tensor,
    bad: torch.Tensor,
    *,
    masters: bool,
    fp32: bool,
    betas: tuple[float, float],
    keep: float,
    size: float,
    scale: float,
    eps: float,
) -> None:
    """Update the parameters of a table in place, by gradients in fp32 or bf16; settings as in `update`."""
    _update_all[(parts.shape[0],)](
        table, parts, factor, bad,
        betas[0], 1.0 - betas[0], betas[1], 1.0 - betas[1], keep, size, 1.0 / scale, eps,
        MASTERS=masters, FP32=fp32, BLOCK=_BLOCK, PART=PART, num_warps=_WARPS,
    )  # fmt: skip


def squares(table: torch.Tensor, parts: torch.Tensor, *, fp32: bool) -> torch.Tensor:
    """Sums of the squares of the gradients of a table, fp32 (programs,)."""
    sums = torch.empty(parts.shape[0], dtype=torch.float32, device=parts.device)
    _squares[(parts.shape[0],)](table, parts, sums, FP32=fp32, BLOCK=_BLOCK, PART=PART, num_warps=_WARPS)
    return sums


@triton.jit(do_not_specialize=["count", "seed", "begin"])
def _update(  # type: ignore[no-untyped-def]
    weight, low, first, second, gradient, factor, bad, count, seed, begin,
    beta_1, other_1, beta_2, other_2, keep, size, inverse, eps,
    MASTERS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    if tl.load(bad) == 0.0:
        start = tl.program_id(0).to(tl.int64) * BLOCK
        _block(
            weight + start, low + start, first + start, second + start, gradient + start, tl.load(factor),
            count - start, start + begin, seed.to(tl.uint32, bitcast=True),
            beta_1, other_1, beta_2, other_2, keep, size, inverse, eps, MASTERS, BLOCK, EXACT,
        )  # fmt: skip


@triton.jit
def _update_all(  # type: ignore[no-untyped-def]
    table, parts, factor, bad,
    beta_1, other_1, beta_2, other_2, keep, size, inverse, eps,
    MASTERS: tl.constexpr, FP32: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    if tl.load(bad) == 0.0:
        program = tl.program_id(0)
        row = table + tl.load(parts + 2 * program) * _COLUMNS
        begin = tl.load(parts + 2 * program + 1).to(tl.int64) * PART
        weight = _address(row, 0, tl.bfloat16) + begin
        low = _address(row, 1, tl.int16) + begin
        first = _address(row, 2, tl.int16) + begin
        second = _address(row, 3, tl.int16) + begin
        gradient = _address(row, 4, tl.float32 if FP32 else tl.bfloat16) + begin
        count = tl.minimum(tl.load(row + 5) - begin, PART)
        place = tl.load(row + 6) + begin
        seed = tl.load(row + 7).to(tl.uint32)
        times = tl.load(factor)
        whole = count // BLOCK * BLOCK
        for start in range(0, whole, BLOCK):
            _block(
                weight + start, low + start, first + start, second + start, gradient + start, times,
                count - start, place + start, seed,
                beta_1, other_1, beta_2, other_2, keep, size, inverse, eps, MASTERS, BLOCK, True,
            )  # fmt: skip
        if whole < count:
            _block(
                weight + whole, low + whole, first + whole, second + whole, gradient + whole, times,
                count - whole, place + whole, seed,
                beta_1, other_1, beta_2, other_2, keep, size, inverse, eps, MASTERS, BLOCK, False,
            )  # fmt: skip


@triton.jit
def _squares(  # type: ignore[no-untyped-def]
    table, parts, sums, FP32: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr
):
    program = tl.program_id(0)
    row = table + tl.load(parts + 2 * program) * _COLUMNS
    begin = tl.load(parts + 2 * program + 1).to(tl.int64) * PART
    gradient = _address(row, 4, tl.float32 if FP32 else tl.bfloat16) + begin
    count = tl.minimum(tl.load(row + 5) - begin, PART)
    place = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    whole = count // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        values = tl.load(gradient + start + place).to(tl.float32)
        total += values * values
    if whole < count:
        values = tl.load(gradient + whole + place, mask=place < count - whole, other=0).to(tl.float32)
        total += values * values
    tl.store(sums + program, tl.sum(total))


@triton.jit
def _address(row, column: tl.constexpr, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    address = tl.load(row + column).to(tl.pointer_type(kind))
    return tl.multiple_of(address, [16])


@triton.jit
def _block(  # type: ignore[no-untyped-def]
    weight, low, first, second, gradient, factor, left, begin, seed,
    beta_1, other_1, beta_2, other_2, keep, size, inverse, eps,
    MASTERS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Update BLOCK values at these addresses, or the `left` ones; `begin` is the first one's place."""
    place = tl.arange(0, BLOCK)
    inside = place < left
    given = _load(gradient, place, inside, EXACT).to(tl.float32) * factor
    upper = _load(weight, place, inside, EXACT).to(tl.int16, bitcast=True).to(tl.int32)
    lower = _load(low, place, inside, EXACT).to(tl.int32) if MASTERS else 0
    master = ((upper << 16) + lower).to(tl.float32, bitcast=True)
    code = _load(first, place, inside, EXACT).to(tl.int32)
    one = _value(code & 0x7FFF, 75)
    one = tl.where(code < 0, -one, one)
    two = _value(_load(second, place, inside, EXACT).to(tl.int32) & 0xFFFF, 27)

    one = beta_1 * one + other_1 * given
    two = beta_2 * two + other_2 * given * given
    master = master * keep - size * one / (tl.sqrt(two) * inverse + eps)

    word = (begin & 0xFFFFFFFF).to(tl.uint32) + place.to(tl.uint32)
    word = word ^ seed
    noise = _mixed(word)
    bits = master.to(tl.int32, bitcast=True)
    up = 0x8000 if MASTERS else (_mixed(word ^ 0x5BD1E995) & 0xFFFF).to(tl.int32)
    upper = ((bits + up) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    magnitude = _code(tl.abs(one), 75, 0x7FFF, (noise & 0x3FFF).to(tl.int32))
    code = tl.where(one < 0, magnitude | 0x8000, magnitude)
    _store(weight, place, upper, inside, EXACT)
    if MASTERS:
        _store(low, place, bits.to(tl.int16), inside, EXACT)
    _store(first, place, code.to(tl.int16), inside, EXACT)
    code = _code(two, 27, 0xFFFF, ((noise >> 16) & 0x3FFF).to(tl.int32))
    _store(second, place, code.to(tl.int16), inside, EXACT)


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
