"""Parameter updates: fp32 masters, a loss scale for fp16, and the running mean of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from trainer.config.schema import TrainSection
from trainer.engine.optimizing import optimizers
from trainer.engine.optimizing.average import Average
from trainer.engine.optimizing.fp32_masters import FlatMasters
from trainer.engine.optimizing.loss_scale import LossScale

_FLAT = "flat"
_MEAN = "ema"


class HostFlag:
    """A device scalar on its way to the host: reading it waits for the step that made it, nothing later."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value, self._event = value, None
        if value.device.type == "cuda":
            # four pinned bytes, also where the plan pins nothing: a plain copy would wait for all queued work
            self._value = torch.empty((), dtype=value.dtype, pin_memory=True)
            self._value.copy_(value, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> float:
        """The value."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._value.item())


@torch.no_grad()
def clip_gradients(parameters: Sequence[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients to a joint norm of at most `max_norm`; gives the norm before, in fp32 for any type."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32) for gradient in gradients]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(gradients, factor)
    return norm


class Updater:
    """Owns gradients, masters and optimizer state of the trainable parameters, by name.

    `adamw_fused_fp32`: bf16 and fp16 parameters get fp32 masters, gradients accumulate in fp32, and a step
    with a non-finite gradient changes nothing without waiting for the device. `adamw_8bit` and `prodigy` have
    masters too. `adamw_kahan_bf16`: optimi's AdamW with Kahan summation, all state in bf16. In these three
    the flag is read before the step.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], train: TrainSection, kind: str) -> None:
        self.parameters = dict(parameters)
        self.train = train
        self.kind = kind
        types = {parameter.dtype for parameter in self.parameters.values()}
        own = kind == "adamw_kahan_bf16" or types == {torch.float32}
        # parameters in fp32 are their own masters, as are those of the compensated sums
        self.flat = None if own else FlatMasters(self.parameters)
        values = list(self.parameters.values()) if self.flat is None else [self.flat.flat]
        self.optimizer = optimizers.build(kind, values, train)
        self.scale = LossScale(values[0].device) if torch.float16 in types else None
        self.average = None if train.ema_decay is None else Average(values, train.ema_decay)
        self.steps_taken = 0

    @property
    def _masters(self) -> list[torch.nn.Parameter]:
        return list(self.parameters.values()) if self.flat is None else [self.flat.flat]

    @property
    def _names(self) -> list[str]:
        """Of the masters, in their order."""
        return list(self.parameters) if self.flat is None else [_FLAT]

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What backward starts from: in fp16 a multiple of the loss, whose gradients do not vanish."""
        return loss if self.scale is None else self.scale.scaled(loss)

    def accumulate(self) -> None:
        """Add this micro-batch's gradients to the masters' and free them."""
        if self.flat is not None:
            self.flat.accumulate()

    def drop_gradients(self) -> None:
        """Forget a partial accumulation."""
        if self.flat is not None:
            self.flat.drop_gradients()
        for parameter in self.parameters.values():
            parameter.grad = None

    def step(self, rate: float, loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Clip and update; gives (gradient norm before clipping, 1.0 where the run cannot go on), both fp32.

        It cannot where the norm or `loss` is not finite; in fp16 not before the loss scale is at its floor.
        """
        if self.flat is not None:
            self.flat.flat.grad = self.flat.gradient
        if self.scale is not None:
            self.scale.unscale(self._masters)
        norm = clip_gradients(self._masters, self.train.max_grad_norm)
        bad = 1.0 - (torch.isfinite(norm) & torch.isfinite(loss)).float()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._update(bad)
        fatal = bad if self.scale is None else self.scale.update(bad)
        self.steps_taken += 1
        self._update_average(bad)
        if self.flat is not None:
            self.flat.publish()
        self.drop_gradients()
        return norm, fatal

    def _update(self, bad: torch.Tensor) -> None:
        """One step of the optimizer, unless `bad` is 1.0."""
        if self.kind == "adamw_fused_fp32":
            # AdamW's fused kernel reads these two, as torch.amp.GradScaler sets them
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
        elif bad.item() == 0.0:
            self.optimizer.step()

    def _update_average(self, bad: torch.Tensor) -> None:
        """Take the step into the mean of the weights; in fp16 not one that was skipped."""
        if self.average is None:
            return
        if self.scale is None:
            self.average.update(self._masters, self.steps_taken)
        else:
            self.average.update_unless(bad, self._masters, self.scale.applied)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with the mean of its weights, where one is kept, and afterwards as it was."""
        if self.average is None:
            yield
            return
        # with masters the parameters are copies of them already
        kept = [value.detach().clone() for value in self._masters] if self.flat is None else []
        self._publish_average()
        try:
            yield
        finally:
            with torch.no_grad():
                for value, before in zip(self._masters, kept, strict=False):
                    value.copy_(before)
            if self.flat is not None:
                self.flat.publish()

    @torch.no_grad()
    def _publish_average(self) -> None:
        means = self._means()
        torch._foreach_copy_(list(self.parameters.values()), [means[name] for name in self.parameters])

    def _means(self) -> dict[str, torch.Tensor]:
        """The mean of every parameter."""
        assert self.average is not None
        if self.flat is not None:
            return self.flat.by_name(self.average.means[0])
        return dict(zip(self.parameters, self.average.means, strict=True))

    def weights(self) -> dict[str, torch.Tensor]:
        """The masters by name, for a checkpoint."""
        if self.flat is not None:
            return self.flat.views
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state, mean and loss scale as `<parameter>/<key>`; the step count is `steps_taken`."""
        tensors: dict[str, torch.Tensor] = {}
        if self.kind in optimizers.WHOLE_STATE:
            tensors |= optimizers.whole_state(self.optimizer, self._names)
        else:
            tensors |= self._moments()
        if self.average is not None:
            tensors |= {f"{name}/{_MEAN}": mean for name, mean in self._means().items()}
        return tensors if self.scale is None else tensors | self.scale.state()

    def _moments(self) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        if self.flat is not None:
            for key, value in self._tensors(self.flat.flat).items():
                views = self.flat.by_name(value)
                tensors.update({f"{name}/{key}": view for name, view in views.items()})
            return tensors
        for name, parameter in self.parameters.items():
            for key, value in self._tensors(parameter).items():
                tensors[f"{name}/{key}"] = value
        return tensors

    def _tensors(self, master: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        state = self.optimizer.state[master]
        return {key: value for key, value in state.items() if torch.is_tensor(value) and key != "step"}

    @torch.no_grad()
    def load(
        self, weights: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor], steps_taken: int
    ) -> None:
        """Continue from a checkpoint's `weights`, `state` and step count, all of them on any device."""
        for name, master in self.weights().items():
            master.copy_(weights[name])
        state = dict(state)
        if self.average is not None:
            for name, mean in self._means().items():
                mean.copy_(state.pop(f"{name}/{_MEAN}"))
        applied = steps_taken
        if self.scale is not None:
            applied = self.scale.load(state)
        if self.kind in optimizers.WHOLE_STATE:
            optimizers.load_whole_state(self.optimizer, self._names, state)
        else:
            self._load_moments(state, applied)
        self.steps_taken = steps_taken
        if self.flat is not None:
            self.flat.publish()

    def _load_moments(self, state: Mapping[str, torch.Tensor], steps_applied: int) -> None:
        by_key: dict[str, dict[str, torch.Tensor]] = {}
        for label, value in state.items():
            name, _, key = label.rpartition("/")
            by_key.setdefault(name, {})[key] = value
        # a parameter that never had a gradient has no state
        entries: dict[int, dict[str, Any]]
        if self.flat is not None:
            entries = {0: self._joined(self.flat, by_key)} if by_key else {}
        else:
            entries = {i: {**by_key[name]} for i, name in enumerate(self.parameters) if name in by_key}
        plain = self.optimizer.state_dict()
        if self.kind == "adamw_kahan_bf16":
            for group in plain["param_groups"]:
                group.update(setup=True, kahan_sum=True, step=torch.tensor(steps_applied, dtype=torch.int32))
            for entry in entries.values():
                # None for fp32 parameters, which is not saved; without the key optimi zeroes both moments
                entry.setdefault("kahan_comp", None)
        else:
            for entry in entries.values():
                entry["step"] = torch.tensor(float(steps_applied))
        plain["state"] = entries
        self.optimizer.load_state_dict(plain)

    @staticmethod
    def _joined(flat: FlatMasters, by_key: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Any]:
        """Every key's tensors in one of the masters' size."""
        keys = {key for entry in by_key.values() for key in entry}
        joined = {}
        for key in sorted(keys):
            joined[key] = torch.zeros_like(flat.gradient)
            for name, view in flat.by_name(joined[key]).items():
                if name in by_key:  # without a gradient so far its moments are zero
                    view.copy_(by_key[name][key])
        return joined
