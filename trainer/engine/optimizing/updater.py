"""Parameter updates: fp32 masters, a loss scale for fp16, and the running mean of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing import optimizers
from trainer.engine.optimizing.exchange import Exchange
from trainer.engine.optimizing.fp32_masters import FlatGradients, FlatMasters
from trainer.engine.optimizing.split_adamw import SplitAdamW, norm_of
from trainer.engine.ranks import ALONE, Ranks
from trainer.modeling.tensor_file import Writable

if TYPE_CHECKING:
    from trainer.engine.optimizing.row_parameters import RowParameters

_FLAT = "flat"
_MEAN = "ema"
_START, _GROWTH_STEPS = 2.0**16, 2000
FLOOR = 1.0
"""Least loss scale: below it the gradients themselves overflow, and no scale makes them fit."""


class HostFlag:
    """A device scalar, or a few values, on the way to the host: reading waits for the step that made them,
    nothing later.
    """

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self._event = value, None
        if value.device.type == "cuda":
            # a few pinned bytes, also where the plan pins nothing: a plain copy would wait for queued work
            self._value = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """Wait for the copy; gives the scalar's value."""
        return self.values()[0]

    def values(self) -> list[float]:
        """Wait for the copy; gives all values."""
        if self._event is not None:
            self._event.synchronize()
        found: list[float] = self._value.reshape(-1).tolist()
        return found


class Average:
    """A mean of some values over the steps, younger ones weighing more.

    The decay grows to `decay` as (1 + n) / (10 + n) after n steps: the mean of a short run is not the
    untrained start. diffusers' EMAModel has the same values a step later, and 0 in its first one.
    """

    def __init__(self, values: Sequence[torch.Tensor], decay: float) -> None:
        self._least = 1.0 - decay
        self.means = [value.detach().float().clone() for value in values]

    @torch.no_grad()
    def update(
        self,
        values: Sequence[torch.Tensor],
        steps_taken: int | torch.Tensor,
        bad: torch.Tensor | None = None,
    ) -> None:
        """Take the values after another step into the mean; `steps_taken` counts it.

        With `bad` nothing where that is 1.0, without waiting for the device; `steps_taken` is a tensor then,
        which counts the steps that were not bad.
        """
        share: float | torch.Tensor
        if bad is None:
            share = max(self._least, 9.0 / (10.0 + int(steps_taken)))
        else:
            share = (9.0 / (10.0 + torch.as_tensor(steps_taken))).clamp(min=self._least) * (1.0 - bad)
        # one after the other: a full fine-tune would hold fp32 copies of all its weights
        for mean, value in zip(self.means, values, strict=True):
            mean.lerp_(value.detach().float(), share)


class LossScale:
    """Multiplies the loss so that fp16 gradients do not vanish; halved after a step that overflowed, which is
    skipped, and doubled after 2000 steps that did not. Nothing here waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.full((), _START, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self.applied = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps that were not skipped."""

    @torch.no_grad()
    def update(self, bad: torch.Tensor) -> torch.Tensor:
        """Count a step, which overflowed where `bad` is 1.0; gives 1.0 where the scale is below its floor."""
        self.applied += (bad == 0).long()
        # as torch.amp.GradScaler.update; the class itself wants fp32 parameters and a copy of the flag
        torch._amp_update_scale_(self.factor, self._growth, bad, 2.0, 0.5, _GROWTH_STEPS)
        return (self.factor < FLOOR).float()

    def state(self) -> dict[str, torch.Tensor]:
        """Tensors that a checkpoint holds, by name."""
        return {"loss/scale": self.factor, "loss/growth": self._growth, "loss/applied": self.applied}

    def load(self, state: dict[str, Any]) -> int:
        """Take the tensors of `state()` out of `state`; returns the number of steps that were not skipped."""
        for name, held in self.state().items():
            held.copy_(state.pop(name))
        return int(self.applied.item())


class Updater:
    """Owns gradients, masters and optimizer state of the trainable parameters, by name.

    `adamw_fused_fp32`: bf16 and fp16 parameters get fp32 masters, gradients accumulate in fp32, and a step
    with a non-finite gradient changes nothing without waiting for the device. `adamw_8bit` and `prodigy` have
    masters too, and the flag is read before their step. `adamw_split_bf16` and
    `adamw_stochastic_bf16`: see `split_adamw`; clipping and the flag are part of their step.

    Of parameters in rows (`in_rows`) each rank owns its own: `parameters` are these.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        train: TrainSection,
        kind: str,
        ranks: Ranks = ALONE,
        in_rows: RowParameters | None = None,
    ) -> None:
        self.parameters = dict(parameters if in_rows is None else in_rows.own)
        self.in_rows = in_rows
        self.train = train
        self.kind = kind
        types = {parameter.dtype for parameter in self.parameters.values()}
        own = kind in optimizers.OF_BF16 or types == {torch.float32}
        # parameters in fp32, with split masters and without masters are their own
        self.flat = None if own else FlatMasters(self.parameters)
        self.exchange: Exchange | None = None
        """Sums of gradients over the ranks, where several share the micro-batches of a step."""
        if ranks.size > 1 and in_rows is None:
            latest = self.flat.latest if self.flat is not None else FlatGradients(self.parameters)
            self.exchange = Exchange(ranks, latest)
        self._masters = {_FLAT: self.flat.flat} if self.flat is not None else self.parameters
        values = list(self._masters.values())
        self.optimizer: torch.optim.Optimizer | SplitAdamW
        if kind in optimizers.OF_BF16:
            rows = {} if in_rows is None else in_rows.rows
            first_values = {name: one.first_value for name, one in rows.items()}
            self.optimizer = optimizers.build_split(kind, self.parameters, train, first_values)
        else:
            self.optimizer = optimizers.build(kind, values, train)
        self.scale = LossScale(values[0].device) if torch.float16 in types else None
        self.average = None if train.ema_decay is None else Average(values, train.ema_decay)
        self.steps_taken = 0
        self.follow: Callable[[], object] | None = None
        """Called after each change of the parameters, such as of what is made of them once a step."""

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that backward starts from: in fp16 multiplied, so that gradients do not vanish."""
        return loss if self.scale is None else loss * self.scale.factor

    def accumulate(self) -> None:
        """Add this micro-batch's gradients to the masters' and free them; several ranks add by rounds."""
        if self.exchange is not None:
            self.exchange.collect()
        elif self.flat is not None:
            self.flat.accumulate()

    def drop_gradients(self) -> None:
        """Forget a partial accumulation."""
        if self.exchange is not None:
            self.exchange.drop()
        if self.flat is not None:
            self.flat.drop_gradients()
        if self.in_rows is not None:
            self.in_rows.drop_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, rate: float, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update; gives (gradient norm before clipping, 1.0 where the run cannot go on), both fp32.

        It cannot where the norm or `loss` is not finite; in fp16 not before the loss scale is at its floor.
        """
        masters = list(self._masters.values())
        if self.exchange is not None and self.flat is not None:
            self.exchange.take(self.flat.gradient)
        elif self.exchange is not None:
            self.exchange.hand_out()
        elif self.in_rows is not None:
            self.in_rows.take_gradients()
        if self.flat is not None:
            self.flat.flat.grad = self.flat.gradient
        gradients = [master.grad for master in masters if master.grad is not None]
        if self.scale is not None:  # fp32 gradients of the loss itself
            torch._foreach_mul_(gradients, self.scale.factor.reciprocal())
        if isinstance(self.optimizer, SplitAdamW):
            norm = self.optimizer.norm(self.steps_taken + 1)
        else:
            norm = norm_of(gradients)
        if self.in_rows is not None:
            norm = self.in_rows.norm(norm)
        factor = (self.train.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        bad = 1.0 - (torch.isfinite(norm) & torch.isfinite(loss)).float()
        if isinstance(self.optimizer, SplitAdamW):
            self.optimizer.step(rate, self.steps_taken + 1, factor, bad)
        else:
            torch._foreach_mul_(gradients, factor)
            self._step(self.optimizer, rate, bad)
        fatal = bad if self.scale is None else self.scale.update(bad)
        self.steps_taken += 1
        if self.average is not None and self.scale is None:
            self.average.update(masters, self.steps_taken)
        elif self.average is not None and self.scale is not None:
            self.average.update(masters, self.scale.applied, bad)
        if self.flat is not None:
            self.flat.publish()
        if self.follow is not None:
            self.follow()
        self.drop_gradients()
        return norm, fatal

    def _step(self, optimizer: torch.optim.Optimizer, rate: float, bad: torch.Tensor) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        if self.kind == "adamw_fused_fp32":
            # AdamW's fused kernel reads these two, as torch.amp.GradScaler sets them
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = bad  # type: ignore[attr-defined]
            optimizer.step()
        elif bad.item() == 0.0:  # the others wait for it
            optimizer.step()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the mean of its weights, where one is kept, and afterwards as it was."""
        if self.average is None:
            yield
            return
        # with masters the parameters are copies of them already
        kept = {} if self.flat is not None else {n: p.detach().clone() for n, p in self.parameters.items()}
        means = self._by_name(self.average.means)
        with torch.no_grad():
            torch._foreach_copy_(list(self.parameters.values()), [means[name] for name in self.parameters])
        try:
            yield
        finally:
            with torch.no_grad():
                for name, before in kept.items():
                    self.parameters[name].copy_(before)
            if self.flat is not None:
                self.flat.publish()

    def _by_name(self, values: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Views of tensors of the masters' sizes, with the parameters' names and shapes."""
        if self.flat is not None:
            return self.flat.by_name(values[0])
        return dict(zip(self.parameters, values, strict=True))

    def weights(self) -> dict[str, torch.Tensor]:
        """The masters by name; in rows this rank's."""
        return self._by_name([master.detach() for master in self._masters.values()])

    def saved(self) -> tuple[Mapping[str, Writable], Mapping[str, Writable]]:
        """(`weights()`, `state()`) as a checkpoint holds them, which does not know of ranks: whole."""
        weights, state = self.weights(), self.state()
        if self.in_rows is None:
            return weights, state
        return self.in_rows.whole_state(weights), self.in_rows.whole_state(state)

    @property
    def saved_bytes(self) -> int:
        """Bytes of all masters, on all ranks."""
        if self.in_rows is not None:
            return self.in_rows.all_bytes
        return sum(one.nbytes for one in self.weights().values())

    @torch.no_grad()
    def digest(self) -> torch.Tensor:
        """A number that differs where one bit of the masters does, a scalar on the device in float64; 0 of
        rows, which no two ranks have in common.
        """
        masters = [master.detach() for master in self._masters.values()]
        if self.in_rows is not None:
            return torch.zeros((), device=masters[0].device, dtype=torch.float64)
        bits = [one.view(torch.int32 if one.element_size() == 4 else torch.int16) for one in masters]
        return (torch.stack([one.sum(dtype=torch.int64) for one in bits]).sum() % 2**52).double()

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state, mean and loss scale as `<parameter>/<key>`; the step count is `steps_taken`."""
        tensors: dict[str, torch.Tensor] = {}
        if isinstance(self.optimizer, SplitAdamW):
            tensors |= self.optimizer.state()
        elif self.kind in optimizers.WHOLE_STATE:
            tensors |= optimizers.whole_state(self.optimizer, list(self._masters))
        else:
            for name, master in self._masters.items():
                for key, value in self.optimizer.state[master].items():
                    if torch.is_tensor(value) and key != "step":
                        views = {name: value} if self.flat is None else self.flat.by_name(value)
                        tensors |= {f"{own}/{key}": view for own, view in views.items()}
        if self.average is not None:
            means = self._by_name(self.average.means)
            tensors |= {f"{name}/{_MEAN}": mean for name, mean in means.items()}
        return tensors if self.scale is None else tensors | self.scale.state()

    @torch.no_grad()
    def load(
        self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], steps_taken: int
    ) -> None:
        """Continue from a checkpoint's `weights`, `state` and step count, all of them on any device."""
        for name, master in self.weights().items():
            master.copy_(weights[name])
        state = dict(state)
        if self.average is not None:
            for name, mean in self._by_name(self.average.means).items():
                mean.copy_(state.pop(f"{name}/{_MEAN}"))
        applied = steps_taken if self.scale is None else self.scale.load(state)
        if isinstance(self.optimizer, SplitAdamW):
            self.optimizer.load(state, applied)
        elif self.kind in optimizers.WHOLE_STATE:
            optimizers.load_whole_state(self.optimizer, list(self._masters), state)
        else:
            self._load_moments(self.optimizer, state, applied)
        self.steps_taken = steps_taken
        if self.flat is not None:
            self.flat.publish()
        if self.follow is not None:
            self.follow()

    def _load_moments(
        self, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor], steps_applied: int
    ) -> None:
        by_name: dict[str, dict[str, Any]] = {}
        for label, value in state.items():
            name, _, key = label.rpartition("/")
            by_name.setdefault(name, {})[key] = value
        if self.flat is not None and by_name:
            joined = {key: torch.zeros_like(self.flat.gradient) for one in by_name.values() for key in one}
            for key, value in joined.items():
                for name, view in self.flat.by_name(value).items():
                    if name in by_name:  # without a gradient so far its moments are zero
                        view.copy_(by_name[name][key])
            by_name = {_FLAT: joined}
        # a parameter that never had a gradient has no state
        found = {number: by_name[name] for number, name in enumerate(self._masters) if name in by_name}
        plain = optimizer.state_dict()
        for entry in found.values():
            entry["step"] = torch.tensor(float(steps_applied))  # one each: the optimizer counts in it
        plain["state"] = found
        optimizer.load_state_dict(plain)
