"""A family's own loader of LoRAs and models: diffusers' pipeline, or peft's PeftModel."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from tests.contract.conftest import Finished
from tests.contract.runs import Job, draws
from trainer.modeling.adapter.lora import effective_change

PEFT_PREFIX = "base_model.model"


@dataclass(frozen=True, kw_only=True)
class Own:
    """A base model as its users load it."""

    model: Any
    """The component that trains."""
    output: Callable[[], torch.Tensor]
    """A picture or logits."""
    load: Callable[[Path], None]
    """Load a LoRA."""
    fuse: Callable[[], None]
    """Add the LoRA to the weights and take it off."""
    replace: Callable[[Any], None]
    """Take another model in place of `model`."""


def lora_file(done: Finished | Job) -> Path:
    """The LoRA that diffusers or peft load."""
    files = [path for path in done.folder.glob("lora/*.safetensors") if ".comfyui." not in path.name]
    assert len(files) == 1
    return files[0]


def own(job: Job) -> Own:
    """The run's base model in its own loader."""
    return _pipeline(job) if draws(job.context.family.name) else _language_model(job)


def _pipeline(job: Job) -> Own:
    from diffusers import DiffusionPipeline

    component = job.context.family.trained_component
    pipeline: Any = DiffusionPipeline.from_pretrained(job.context.source.folder)
    pipeline.set_progress_bar_config(disable=True)

    def fuse() -> None:
        pipeline.fuse_lora(components=[component])
        pipeline.unload_lora_weights()

    return Own(
        model=pipeline.components[component],
        output=lambda: _picture(pipeline, job),
        load=lambda path: pipeline.load_lora_weights(path),
        fuse=fuse,
        replace=lambda model: pipeline.register_modules(**{component: model}),
    )


def _picture(pipeline: Any, job: Job) -> torch.Tensor:
    """One picture at a fixed seed."""
    arguments: dict[str, Any] = {"width": 64, "height": 64, "max_sequence_length": 16}
    if job.samples.prompt_controls:
        arguments["image"] = [Image.open(one.path) for one in job.samples.prompt_controls[0]]
        if len(arguments["image"]) == 1:
            (arguments["image"],) = arguments["image"]
    if "Kandinsky" in type(pipeline).__name__:
        pipeline.resolutions = [(64, 64)]  # it takes the nearest of these
    pictures = pipeline(
        prompt="an apple",
        num_inference_steps=2,
        generator=torch.Generator().manual_seed(0),
        output_type="pt",
        return_dict=False,
        **arguments,
        **SMALL_PICTURES.get(type(pipeline).__name__, {}),
    )[0]
    return torch.as_tensor(pictures[0])


SMALL_PICTURES: dict[str, dict[str, Any]] = {
    "FluxKontextPipeline": {"max_area": 64 * 64, "_auto_resize": False},
}
"""Arguments beside the size that keep a pipeline from drawing large pictures, by pipeline class."""


def _language_model(job: Job) -> Own:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = job.context.source.folder
    held: list[Any] = [AutoModelForCausalLM.from_pretrained(folder)]
    inputs = AutoTokenizer.from_pretrained(folder)("an apple", return_tensors="pt")

    def output() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = held[-1](input_ids=inputs.input_ids).logits
        return logits

    return Own(
        model=held[0],
        output=output,
        load=lambda path: held.append(PeftModel.from_pretrained(held[0], path.parent)),
        fuse=lambda: held.append(held[-1].merge_and_unload()),
        replace=held.append,
    )


def adapter_config(path: Path) -> dict[str, Any]:
    """The peft configuration: in a file's metadata where diffusers keeps it, or beside it."""
    beside = path.with_name("adapter_config.json")
    if beside.exists():
        config: dict[str, Any] = json.loads(beside.read_text())
        return config
    with safe_open(path, framework="pt") as file:
        rows = json.loads(file.metadata()["lora_adapter_metadata"])
    return {key.partition(".")[2]: value for key, value in rows.items()}


def changes_of_file(path: Path, component: str) -> dict[str, torch.Tensor]:
    """The change of every weight by module, as diffusers and peft compute it."""
    config, tensors, prefix = adapter_config(path), load_file(path), component or PEFT_PREFIX
    scale = config["lora_alpha"] / config["r"]
    changes = {}
    for key, up in tensors.items():
        if ".lora_B." in key:
            down = tensors[key.replace(".lora_B.", ".lora_A.")]
            module = key.partition(".lora_B.")[0].removeprefix(f"{prefix}.")
            changes[module] = effective_change(down, up, scale)
    return changes


def changes_of_comfyui(path: Path, component: str) -> dict[str, torch.Tensor]:
    """The change of every weight by module, as ComfyUI computes it."""
    tensors = load_file(path)
    changes = {}
    for key, alpha in tensors.items():
        if key.endswith(".alpha"):
            name = key.removesuffix(".alpha")
            down, up = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
            module = name.removeprefix(f"{component}.").removeprefix("diffusion_model.")
            changes[module] = effective_change(down, up, alpha / down.shape[0])
    return changes
