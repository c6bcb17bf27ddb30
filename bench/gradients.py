"""Gradients of the same weights on the same samples under two settings, and their cosines tensor by tensor.

A process for each setting builds the model as a run of it does, puts the weights of a state into it, and has
the training loop's own functions read the samples of a step and go forward and backward. Gradients are taken
as the optimizer would find them, before clipping; nothing is updated.

Between two whole passes the rounding of all layers adds up. So the gradients of a pass in FP8 are also
compared with what each layer alone would have made in fp32, of the inputs and gradients that it was given.
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
from trainer.engine.building.fast import uncompiled
from trainer.engine.caching.batches import to_device
from trainer.engine.caching.entries import Entries, list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.engine.caching.samples import scan_samples
from trainer.engine.context import Context
from trainer.engine.training import loop
from trainer.engine.training.feed import feed, varies
from trainer.files.weight_files import weight_files
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear


def measure(spec: str, states: Mapping[str, Mapping[str, Any]], kept: str, reference: bool) -> dict[str, Any]:
    """For each state its loss, and the cosines of gradients with those of the reference, by tensor.

    A state has `step`, whose samples are taken, and `weights`, a folder of safetensors of the trained
    component; none are those that the run starts with. The reference writes its gradients into the folder
    `kept`, where the others read them. A setting in FP8 has `alone`, the cosines of `layers_alone`, too.
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
        built.updater.drop_gradients()
        if context.plan.weight_gradient:
            answer["alone"] = layers_alone(built, entries, int(state["step"]))
        found[name] = answer
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


def layers_alone(built: Built, entries: Entries, number: int) -> dict[str, float]:
    """Cosines, by weight, of the gradients of a pass in FP8 with products in fp32 of the inputs and gradients
    that the same layers were given in it. The pass is not compiled, so that these can be seen.
    """
    expected: dict[str, torch.Tensor] = {}
    found: dict[str, float] = {}
    handles: list[Any] = []

    def watch(name: str, layer: Fp8TrainedLinear) -> None:
        def forward(_: object, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            rows = inputs[0].detach().flatten(0, -2)

            def backward(gradient: torch.Tensor) -> None:
                made = gradient.detach().flatten(0, -2).float().T @ rows.float()
                expected[name] = expected[name] + made if name in expected else made

            output.register_hook(backward)

        def made(weight: torch.Tensor) -> None:
            assert weight.grad is not None
            found.update(cosines({name: weight.grad}, expected.__getitem__))
            del expected[name]

        handles.append(layer.register_forward_hook(forward))
        handles.append(layer.weight.register_post_accumulate_grad_hook(made))

    for name, module in built.model.named_modules():
        if isinstance(module, Fp8TrainedLinear):
            watch(f"{name}.weight", module)
    try:
        with uncompiled(built.context):
            _pass(built.context, built, entries, number, most=1)
    finally:
        for handle in handles:
            handle.remove()
        built.updater.drop_gradients()
    return found


def _pass(context: Context, built: Built, entries: Entries, number: int, most: int | None = None) -> float:
    """Forward and backward of the samples of step `number`, counted from 0; gives the step's loss.

    `most` stops after so many micro-batches.
    """
    steps = feed(context, entries, context.settings, number, number + 1)
    (step,) = steps
    weight, loss = sum(fed.weight for fed in step), 0.0
    for fed in step[:most]:
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
