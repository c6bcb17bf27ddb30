"""Gradients of the same weights on the same samples under two settings, and their cosines tensor by tensor.

A process for each setting builds the model as a run of it does, puts the weights of a state into it, and has
the training loop's own functions read the samples of a step and go forward and backward. Gradients are taken
as the optimizer would find them, before clipping; nothing is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from bench import jobs
from trainer.engine.building.build import Built, build
from trainer.engine.caching.batches import to_device
from trainer.engine.caching.entries import Entries, list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.engine.caching.samples import scan_samples
from trainer.engine.context import Context
from trainer.engine.training import loop
from trainer.engine.training.feed import feed, varies
from trainer.files.weight_files import weight_files


def measure(spec: str, states: Mapping[str, Mapping[str, Any]], kept: str, reference: bool) -> dict[str, Any]:
    """For each state its loss, and the cosines of gradients with those of the reference, by tensor.

    A state has `step`, whose samples are taken, and `weights`, a folder of safetensors of the trained
    component; none are those that the run starts with. The reference writes its gradients into the folder
    `kept`, where the others read them.
    """
    context = jobs.make_context(spec)
    samples = scan_samples(context.family, context.config)
    entries = list_entries(context, samples.training, samples.prompt_controls)
    fill_cache(context, list_entries(context, samples.all, samples.prompt_controls))
    built = build(context, varies(context, entries))
    found: dict[str, Any] = {}
    for name, state in states.items():
        if state["weights"]:
            put_weights(built, Path(state["weights"]))
        loss = _pass(built.context, built, entries, int(state["step"]))
        gradients = {
            key: value.grad for key, value in built.model.named_parameters() if value.grad is not None
        }
        file = Path(kept) / f"{name}.safetensors"
        answer: dict[str, Any] = {"loss": loss}
        if reference:
            save_file({key: one.cpu().contiguous() for key, one in gradients.items()}, file)
        else:
            answer["cosines"] = cosines_with(file, gradients)
        found[name] = answer
        built.updater.drop_gradients()
    return found


def put_weights(built: Built, folder: Path) -> None:
    """Give a built model the weights of an exported one, and what is made of them once a step."""
    parameters = dict(built.model.named_parameters())
    with torch.no_grad():
        for path in weight_files(folder).files:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    parameters.pop(name).copy_(file.get_tensor(name))
    assert not parameters, f"{folder} lacks {', '.join(sorted(parameters))}"
    if built.updater.follow is not None:
        built.updater.follow()


def _pass(context: Context, built: Built, entries: Entries, number: int) -> float:
    """Forward and backward of the samples of step `number`, counted from 0; gives the step's loss."""
    steps = feed(context, entries, context.settings, number, number + 1)
    (step,) = steps
    weight, loss = sum(fed.weight for fed in step), 0.0
    for fed in step:
        assert fed.batch is not None, "one process reads all of its samples"
        batch, draw = to_device(fed.batch, fed.draw, context.device, context.dtype)
        loss += float(loop.compute(context, built, batch, draw, weight))
    return loss


def cosines_with(file: Path, gradients: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Cosines of gradients with those of a file, which has the same tensors."""
    with safe_open(file, framework="pt") as kept:
        names = set(kept.keys())
        assert names == gradients.keys(), f"gradients in one alone: {sorted(names ^ gradients.keys())}"
        return cosines(gradients, kept.get_tensor)


def cosines(
    gradients: Mapping[str, torch.Tensor], reference: Callable[[str], torch.Tensor]
) -> dict[str, float]:
    """Cosines by name. Tensors that are zero in both are left out, as there is no direction."""
    found: dict[str, float] = {}
    for name, gradient in sorted(gradients.items()):
        one = gradient.double().flatten()
        other = reference(name).to(one.device).double().flatten()
        lengths = one.norm() * other.norm()
        if one.any() or other.any():
            found[name] = float(one @ other / lengths) if bool(lengths > 0) else 0.0
    return found
