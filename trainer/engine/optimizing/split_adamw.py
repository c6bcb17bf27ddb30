"""AdamW for weights that are bf16 themselves, whose fp32 masters lie in two halves: 10 bytes a parameter.

A master is the bf16 weight and the 16 bits that rounding left of it, exactly. Both moments have 16 bits too,
rounded up or down by chance, so that their mean is right however little a step changes them: rounded to the
nearest, a second moment would stand still under a decay of 0.999. bf16 would spend eight bits on exponents
that no moment has: nine of these are digits here, so that the noise of rounding is a quarter of bf16's.

    weight      bf16   upper half of the master, rounded to nearest
    low         int16  master = (weight << 16) + low, as integers
    exp_avg     int16  sign, 6 bits of exponent from 2^-52 on, 9 bits of fraction; 0 is zero
    exp_avg_sq  int16  7 bits of exponent from 2^-100 on, 9 bits of fraction; 0 is zero

Without masters a weight is rounded by chance as well, up or down to a bf16 number: 8 bytes a parameter, and a
step that is a hundredth of the distance between two numbers is taken once in a hundred times.

Chance is a hash of (step, tensor, place in the whole tensor): a run that goes on from a checkpoint has the
bits of one that was never stopped, and rows of a tensor have those that they have in the whole. Parameters in
fp32 have fp32 moments and nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch

from trainer.engine.optimizing.one_launch import Launch, Launches, Row

if torch.version.cuda is not None:
    from trainer.modeling.triton import split_adamw as kernel

Words = TypeVar("Words", int, torch.Tensor)
MASTER, FIRST, SECOND, COMPENSATION = "low", "exp_avg", "exp_avg_sq", "kahan_comp"
"""Keys of the state; the last one is of the optimizer that came before."""
_DROPPED = 14
"""Bits of fp32's fraction that a moment does not have."""
_FIRST_FROM, _SECOND_FROM = 127 - 52, 127 - 100
"""Smallest exponents of the moments, as fp32 counts them."""
_FIRST_MOST, _SECOND_MOST = 0x7FFF, 0xFFFF
_SIGN = 0x8000
_CHUNK = 2**22
"""Values that are updated together: a step needs some times their fp32 bytes."""
_WORD = 0xFFFFFFFF
_OTHER = 0x5BD1E995
"""Parts the chance of a weight from that of its moments."""


class _Step(NamedTuple):
    """Tensors and numbers of a parameter's step, without the settings of all."""

    weight: torch.Tensor
    state: Mapping[str, torch.Tensor]
    gradient: torch.Tensor
    begin: int
    seed: int

    def row(self) -> Row:
        """The same for the kernel that updates many."""
        low = self.state.get(MASTER, self.weight)
        moments = (self.state[FIRST], self.state[SECOND])
        return Row(self.weight, low, *moments, self.gradient, self.begin, self.seed)


class _Steps(NamedTuple):
    """Steps of all parameters, step `number` of the run."""

    number: int
    alone: Sequence[_Step]
    launches: Sequence[Launch]


class SplitAdamW:
    """The optimizer of parameters by name, bf16 and fp32 ones."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        first_values: Mapping[str, int] = MappingProxyType({}),
        masters: bool = True,
    ) -> None:
        """`first_values` are the places of the parameters' first values, where these are rows of others."""
        self._masters = masters
        self._parameters, self._first_values = dict(parameters), first_values
        self._betas, self._eps, self._decay = betas, eps, weight_decay
        self._state: dict[str, dict[str, torch.Tensor]] = {}
        """By parameter; of those that had a gradient."""
        self._launches = Launches()
        self._steps: _Steps | None = None
        """Between `norm` and `step`."""

    @torch.no_grad()
    def norm(self, number: int) -> torch.Tensor:
        """The norm of all gradients of step `number`, a scalar in fp32: `step` comes next."""
        self._steps = self._gathered(number)
        together = [launch.squares().sqrt() for launch in self._steps.launches]
        return norm_of([one.gradient for one in self._steps.alone], together)

    @torch.no_grad()
    def step(self, rate: float, number: int, factor: torch.Tensor, bad: torch.Tensor) -> None:
        """Update by the parameters' gradients times `factor`, as step `number`, counted from 1.

        `factor` and `bad` are scalars on the device, for which nothing waits; where `bad` is 1.0 nothing
        changes. The step is that of all: a parameter whose first gradient comes later is not told apart.
        """
        first, second = self._betas
        settings: dict[str, Any] = {
            "betas": self._betas,
            "keep": 1.0 - rate * self._decay,
            "size": rate / (1.0 - first**number),
            "scale": (1.0 - second**number) ** 0.5,
            "eps": self._eps,
        }
        steps, self._steps = self._steps or self._gathered(number), None
        assert steps.number == number, f"gradients of step {steps.number} in step {number}"
        for one in steps.alone:
            if not one.weight.numel():  # rows of which this rank has none
                continue
            moments = (one.state[FIRST], one.state[SECOND], one.gradient, factor, bad)
            if one.weight.dtype == torch.float32:
                update_fp32(one.weight, *moments, **settings)
            else:
                update = kernel.update if one.weight.is_cuda else update_halves
                low = one.state.get(MASTER)
                update(one.weight, low, *moments, **settings, seed=one.seed, begin=one.begin)
        for launch in steps.launches:
            kernel.update_all(
                launch.table, launch.parts, factor, bad, masters=self._masters, fp32=launch.fp32, **settings
            )

    def _gathered(self, number: int) -> _Steps:
        """The steps of all parameters that have a gradient: by one launch, of what CUDA has in bf16."""
        alone, rows = list[_Step](), list[Row]()
        for place, (name, parameter) in enumerate(self._parameters.items()):
            if parameter.grad is None:
                continue
            state = self._state.get(name)
            if state is None:
                state = self._state[name] = _fresh(parameter, masters=self._masters)
            one = _Step(
                weight=parameter.detach(),
                state=state,
                gradient=parameter.grad.contiguous(),
                begin=self._first_values.get(name, 0),
                seed=seed_of(number, place),
            )
            row = one.row() if one.weight.is_cuda and one.weight.dtype == torch.bfloat16 else None
            if row is not None and row.fits and one.weight.numel():
                rows.append(row)
            else:
                alone.append(one)
        return _Steps(number, alone, self._launches.of(rows) if rows else [])

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint holds, as `<parameter>/<key>`."""
        return {f"{name}/{key}": held for name, own in self._state.items() for key, held in own.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Take the tensors of `state()`, or those of optimi's AdamW with compensated sums after so many
        steps, which earlier versions trained with: the compensation becomes the lower half of the masters,
        and the moments, which it keeps free of their bias towards zero (`optimi.utils.debias_beta`), get it.
        """
        by_name: dict[str, dict[str, torch.Tensor]] = {}
        for label, value in state.items():
            name, _, key = label.rpartition("/")
            by_name.setdefault(name, {})[key] = value
        compensated = any(COMPENSATION in found for found in by_name.values())
        for name, found in by_name.items():
            parameter = self._parameters[name]
            own = self._state[name] = _fresh(parameter, masters=self._masters)
            if compensated:
                found = self._converted(parameter, found, steps)
            for key, held in own.items():
                held.copy_(found[key])

    def _converted(
        self, parameter: torch.Tensor, found: Mapping[str, torch.Tensor], steps: int
    ) -> dict[str, torch.Tensor]:
        """The state of a parameter out of one of AdamW with compensated sums; fp32 has no compensation."""
        first, second = (
            found[key].to(parameter.device).float() * (1.0 - beta**steps)
            for key, beta in zip((FIRST, SECOND), self._betas, strict=True)
        )
        if parameter.dtype == torch.float32:
            return {FIRST: first, SECOND: second}
        weight, low = split(parameter.detach().float() + found[COMPENSATION].to(parameter.device).float())
        parameter.copy_(weight)
        none = torch.zeros_like(low, dtype=torch.int64)
        return {MASTER: low, FIRST: encoded_first(first, none), SECOND: encoded_second(second, none)}


def norm_of(gradients: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """The norm of all values of some gradients, and of others whose norms (scalars) are known, in fp32."""
    # one by one is faster than torch's over lists: 3.3 TB/s where that reads 2.1, on an H200
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    return torch.linalg.vector_norm(torch.stack([*norms, *others]))


def _fresh(parameter: torch.Tensor, *, masters: bool) -> dict[str, torch.Tensor]:
    """State of a parameter before its first step."""
    if parameter.dtype == torch.float32:
        return {key: torch.zeros_like(parameter) for key in (FIRST, SECOND)}
    assert parameter.dtype == torch.bfloat16, parameter.dtype
    keys = (MASTER, FIRST, SECOND) if masters else (FIRST, SECOND)
    return {key: torch.zeros_like(parameter, dtype=torch.int16) for key in keys}


def update_halves(
    weight: torch.Tensor,
    low: torch.Tensor | None,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    factor: torch.Tensor,
    bad: torch.Tensor,
    *,
    seed: int,
    begin: int = 0,
    **settings: Any,
) -> None:
    """Update contiguous tensors of one shape in place, as `triton.split_adamw.update` does in one kernel."""
    tensors = [one.view(-1) for one in (weight, first, second, gradient)]
    lower = None if low is None else low.view(-1)
    for start in range(0, weight.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        weight, first, second, gradient = (one[part] for one in tensors)
        low = None if lower is None else lower[part]
        master = weight.float() if low is None else joined(weight, low)
        one, two = decoded_first(first), decoded_second(second)
        _adamw(master, one, two, gradient.float() * factor, **settings)
        first_place = begin + start
        places = torch.arange(first_place, first_place + weight.numel(), device=weight.device)
        chance = noise(seed, places)
        codes = encoded_first(one, chance & 0x3FFF), encoded_second(two, chance >> 16 & 0x3FFF)
        if low is None:
            new: tuple[torch.Tensor, ...] = (rounded(master, noise(seed ^ _OTHER, places) & 0xFFFF),)
        else:
            new = split(master)
        held = (weight, first, second) if low is None else (weight, low, first, second)
        for kept, value in zip(held, (*new, *codes), strict=True):
            kept.copy_(torch.where(bad == 0.0, value, kept))


def update_fp32(
    weight: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    factor: torch.Tensor,
    bad: torch.Tensor,
    **settings: Any,
) -> None:
    """Update a parameter and its moments, all in fp32."""
    new = weight.clone(), first.clone(), second.clone()
    _adamw(*new, gradient.float() * factor, **settings)
    for held, value in zip((weight, first, second), new, strict=True):
        held.copy_(torch.where(bad == 0.0, value, held))


def _adamw(
    master: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    gradient: torch.Tensor,
    *,
    betas: tuple[float, float],
    keep: float,
    size: float,
    scale: float,
    eps: float,
) -> None:
    """AdamW in fp32, in place; the settings are `triton.split_adamw.update`'s."""
    first.lerp_(gradient, 1.0 - betas[0])
    second.mul_(betas[1]).addcmul_(gradient, gradient, value=1.0 - betas[1])
    master.mul_(keep).addcdiv_(first, (second.sqrt() / scale).add_(eps), value=-size)


# ---- formats


def joined(weight: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The fp32 masters of bf16 weights and their lower halves (int16)."""
    return ((weight.view(torch.int16).int() << 16) + low.int()).view(torch.float32)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bf16 weights, lower halves) of fp32 masters: `joined` gives these again, to the bit."""
    bits = master.view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def rounded(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """fp32 as bf16, rounded up or down by `noise` (int64, 16 random bits)."""
    return ((values.view(torch.int32).long() + noise) >> 16).to(torch.int16).view(torch.bfloat16)


def encoded_first(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """First moments (fp32) as int16, with `noise` (int64, 14 random bits) for rounding; 0 to round down."""
    size = _code(values.abs(), _FIRST_FROM, _FIRST_MOST, noise)
    return torch.where(values < 0, size | _SIGN, size).to(torch.int16)


def decoded_first(codes: torch.Tensor) -> torch.Tensor:
    """First moments in fp32."""
    size = _value(codes.int() & _FIRST_MOST, _FIRST_FROM)
    return torch.where(codes < 0, -size, size)


def encoded_second(values: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Second moments (fp32, not negative) as int16, with `noise` as `encoded_first`."""
    return _code(values, _SECOND_FROM, _SECOND_MOST, noise).to(torch.int16)


def decoded_second(codes: torch.Tensor) -> torch.Tensor:
    """Second moments in fp32."""
    return _value(codes.int() & _SECOND_MOST, _SECOND_FROM)


def _code(values: torch.Tensor, lowest: int, most: int, noise: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32).long() - (lowest << 23)
    return ((bits + noise) >> _DROPPED).clamp(0, most)


def _value(codes: torch.Tensor, lowest: int) -> torch.Tensor:
    found = ((codes << _DROPPED) + (lowest << 23)).view(torch.float32)
    return torch.where(codes == 0, torch.zeros_like(found), found)


# ---- chance


def seed_of(step: int, place: int) -> int:
    """32 random bits of a step and a tensor."""
    return _mixed(step * 0x9E3779B1 + place * 0x85EBCA77 & _WORD)


def noise(seed: int, places: torch.Tensor) -> torch.Tensor:
    """32 random bits (int64) of each of a tensor's places (int64)."""
    return _mixed(places & _WORD ^ seed)


def _mixed(words: Words) -> Words:
    """32-bit words with every bit spread over all others (Wellons' lowbias32)."""
    words = (words ^ (words >> 16)) * 0x7FEB352D & _WORD
    words = (words ^ (words >> 15)) * 0x846CA68B & _WORD
    return words ^ (words >> 16)
