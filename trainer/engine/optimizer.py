"""Floor 6: parameter updates: fp32 masters with fused AdamW, or compensated bf16 AdamW for full
fine-tunes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.config.schema import TrainSection
from trainer.engine.masters import FlatMasters


def learning_rate(train: TrainSection, step: int) -> float:
    """Learning rate of optimizer step `step` (1 is the first): linear warm-up, then constant or half a
    cosine to 0.
    """
    if step <= train.lr_warmup_steps:
        return train.learning_rate * step / train.lr_warmup_steps
    if train.lr_scheduler == "constant":
        return train.learning_rate
    rest = max(1, train.max_train_steps - train.lr_warmup_steps)
    progress = min(1.0, (step - 1 - train.lr_warmup_steps) / rest)
    return train.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


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

    `adamw_fused_fp32`: bf16 parameters get fp32 masters, gradients accumulate in fp32, and a step with a
    non-finite gradient changes nothing without waiting for the device. `adamw_kahan_bf16`: optimi's AdamW
    with Kahan summation, all state in bf16; the flag is read before the step.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], train: TrainSection, kind: str) -> None:
        self.parameters = dict(parameters)
        self.train = train
        self.kahan = kind == "adamw_kahan_bf16"
        types = {parameter.dtype for parameter in self.parameters.values()}
        # parameters in fp32 are their own masters, as are those of the compensated sums
        self.flat = None if self.kahan or types == {torch.float32} else FlatMasters(self.parameters)
        self.optimizer = self._build()
        self.steps_taken = 0

    def _build(self) -> torch.optim.Optimizer:
        train = self.train
        betas = (train.adam_beta1, train.adam_beta2)
        values = list(self.parameters.values()) if self.flat is None else [self.flat.flat]
        if not self.kahan:
            return torch.optim.AdamW(
                values,
                lr=train.learning_rate,
                betas=betas,
                eps=train.adam_epsilon,
                weight_decay=train.weight_decay,
                fused=True,
            )
        from optimi import AdamW

        on_gpu = values[0].device.type == "cuda"
        optimizer: torch.optim.Optimizer = AdamW(
            values,
            lr=train.learning_rate,
            betas=betas,
            eps=train.adam_epsilon,
            weight_decay=train.weight_decay,
            kahan_sum=True,
            # one kernel a tensor; foreach would hold copies of all of them at once
            triton=on_gpu,
            foreach=False,
        )
        return optimizer

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
        """Clip and update; returns (gradient norm before clipping, 1.0 where it or `loss` is not finite),
        both fp32.
        """
        norm = self._clip()
        bad = 1.0 - (torch.isfinite(norm) & torch.isfinite(loss)).float()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        if self.kahan:
            if bad.item() == 0.0:
                self.optimizer.step()
        else:
            # AdamW's fused kernel reads these two, as torch.amp.GradScaler sets them
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = bad  # type: ignore[attr-defined]
            self.optimizer.step()
        self.steps_taken += 1
        if self.flat is not None:
            self.flat.publish()
        self.drop_gradients()
        return norm, bad

    def _clip(self) -> torch.Tensor:
        if self.flat is None:
            return clip_gradients(list(self.parameters.values()), self.train.max_grad_norm)
        self.flat.flat.grad = self.flat.gradient
        return clip_gradients([self.flat.flat], self.train.max_grad_norm)

    def weights(self) -> dict[str, torch.Tensor]:
        """The masters by name, for a checkpoint."""
        if self.flat is not None:
            return self.flat.views
        return {name: parameter.detach() for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, torch.Tensor]:
        """Optimizer state as `<parameter>/<key>`; the step count is `steps_taken`."""
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
        by_key: dict[str, dict[str, torch.Tensor]] = {}
        for label, value in state.items():
            name, _, key = label.rpartition("/")
            by_key.setdefault(name, {})[key] = value
        # a parameter that never had a gradient has no state
        entries: dict[int, dict[str, Any]]
        if self.flat is not None:
            entries = {0: self._joined(self.flat, by_key)}
        else:
            entries = {i: {**by_key[name]} for i, name in enumerate(self.parameters) if name in by_key}
        plain = self.optimizer.state_dict()
        if self.kahan:
            for group in plain["param_groups"]:
                group.update(setup=True, kahan_sum=True, step=torch.tensor(steps_taken, dtype=torch.int32))
        else:
            for entry in entries.values():
                entry["step"] = torch.tensor(float(steps_taken))
        plain["state"] = entries
        self.optimizer.load_state_dict(plain)
        self.steps_taken = steps_taken
        if self.flat is not None:
            self.flat.publish()

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
