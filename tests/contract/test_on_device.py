"""A micro-batch of sizes that were seen before takes nothing from the host: else no CUDA graph could hold it.

The models are on the meta device: it stands for a GPU, as a device that is not the host. What has to know a
value of it raises, so does indexing with a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import TINY_MODELS
from trainer import families
from trainer.config.schema import FlowSection
from trainer.engine.building.fast import move_plain_tensors
from trainer.families import draws
from trainer.families.values import Draw, Shape
from trainer.modeling.base.source import ModelSource

DEVICE = "meta"
SETTINGS = draws.FlowSettings(
    sigmas=torch.linspace(1000, 1, 1000) / 1000,
    flow=FlowSection(),
    seed=0,
    scheduler={"use_dynamic_shifting": False},
)
# packed rows are never captured
CAPTURED = [
    (name, controls)
    for name in TINY_MODELS
    if families.get(name).packed_by is None
    for controls in sorted(set(families.get(name).control_counts))
]


class Copies(TorchDispatchMode):
    """Keeps the names of operators whose tensors are on both devices."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [one for one in tree_leaves((args, kwargs, result)) if isinstance(one, torch.Tensor)]
        if len({one.device for one in tensors}) > 1:
            self.found.append(str(func))
        return result


class Made(TorchFunctionMode):
    """Keeps the calls that make a tensor on the device of the host's numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.scalar_tensor) and result.device.type == DEVICE:
            self.found.append(f"{func.__name__}{args}")
        return result


def watched(run: Callable[[], torch.Tensor]) -> list[str]:
    with Made() as made, Copies() as copies:
        run().sum().backward()
    return made.found + copies.found


def test_the_watch_sees_what_cannot_be_captured() -> None:
    table, leaf = torch.ones(3), torch.ones(3, device=DEVICE, requires_grad=True)
    assert watched(lambda: leaf * torch.ones(3, device=DEVICE)) == []
    assert watched(lambda: leaf * table.to(DEVICE)) == ["aten._to_copy.default"]
    assert "tensor" in watched(lambda: leaf * torch.tensor([1.0, 2.0, 3.0], device=DEVICE))[0]
    for unknown in (lambda: leaf * leaf.sum().item(), lambda: leaf[leaf > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            watched(unknown)


@pytest.mark.parametrize(("name", "controls"), CAPTURED)
def test_a_seen_size_takes_nothing_from_the_host(
    name: str, controls: int, tiny_base: Callable[[str], Path]
) -> None:
    family = families.get(name)
    source = ModelSource(
        folder=tiny_base(name), identity="tiny", revision=None, random_components=frozenset(), seed=0
    )
    kind = family.model_class(source)
    model = kind.from_config(source.component_config(family.trained_component)).to(DEVICE)
    move_plain_tensors(model, DEVICE)
    shape = Shape(batch_size=2, width=64, height=128, text_tokens=16, bytes_per_value=4)
    batch = family.synthetic_batch(source.component_config(family.trained_component), shape, 0)
    # controls of several sizes
    more = {f"control_{index}": batch.latents["mean"][..., : 8 - 2 * index] for index in range(controls)}
    latents = {**batch.latents, **more}
    header = {name: tuple(tensor.shape[1:]) for name, tensor in latents.items()}
    draw = family.draw(SETTINGS, [0, 1], header)
    batch = replace(
        batch,
        latents={name: tensor.to(DEVICE) for name, tensor in latents.items()},
        text={name: tensor.to(DEVICE) for name, tensor in batch.text.items()},
    )
    draw = Draw(**{name: tensor.to(DEVICE) for name, tensor in vars(draw).items()})

    def run() -> torch.Tensor:
        loss: torch.Tensor = family.loss(model, batch, draw, SETTINGS)
        return loss

    watched(run)
    assert watched(run) == []
