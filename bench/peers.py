"""A LoRA step as others write it, timed: what ours is compared with. One variant in one process.

    python -m bench.peers diffusers flux1_dev --base FOLDER --steps 20

diffusers  as diffusers' and peft's own examples: eager, activation checkpointing, flash attention, bf16
           autocast over an fp32 adapter, AdamW
compiled   every block by torch.compile, no checkpointing, cuDNN attention on contiguous tensors, the adapter
           in bf16 without autocast, fused AdamW: what a reader of torch's manuals would end with
torchao    as `compiled`, over frozen layers that torchao.float8 multiplies in FP8, scaled by rows
quanto     as `diffusers`, over frozen layers that optimum-quanto stores in int8

Weights are random. Prints one line of JSON: the steps' milliseconds and peak device memory.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from trainer import families
from trainer.config.schema import DataSet, RunConfig
from trainer.engine.caching.batches import to_device
from trainer.families.family import Family
from trainer.families.values import Batch, Draw, Shape
from trainer.modeling.adapter.lora import linear_names
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.base.source import ModelSource, resolve_source
from trainer.modeling.vision import make_torchvision_importable

_GIB = 1024**3
_MOST_GRAPHS = 64
"""So that no block falls back to eager execution unseen."""
_FP8_MULTIPLE = 16
"""Sides that the FP8 product takes are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """How one of the others sets up its step."""

    package: str = ""
    """Module that must be importable besides torch, diffusers and peft."""
    precision: str
    """What frozen layers multiply in."""
    compiled: bool
    """Blocks compiled, cuDNN attention, bf16 adapter, fused AdamW; else as diffusers' examples."""
    settings: str
    """For the record's readers."""


_EXAMPLES = "eager, checkpointing, flash, autocast over fp32 adapter"
_COMPILED = "compiled blocks, cuDNN, bf16 adapter, fused AdamW"
PEERS: dict[str, Peer] = {
    "diffusers": Peer(precision="bf16", compiled=False, settings=_EXAMPLES),
    "compiled": Peer(precision="bf16", compiled=True, settings=_COMPILED),
    "torchao": Peer(
        package="torchao", precision="fp8", compiled=True, settings=f"float8 rowwise, {_COMPILED}"
    ),
    "quanto": Peer(
        package="optimum.quanto", precision="bf16", compiled=False, settings=f"int8 weights, {_EXAMPLES}"
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse arguments, train, print."""
    options = parser().parse_args(arguments)
    print(json.dumps(measure(options.variant, options)))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    one.add_argument("variant", choices=sorted(PEERS))
    add_step_arguments(one)
    return one


def add_step_arguments(one: argparse.ArgumentParser) -> None:
    """What every variant is told."""
    one.add_argument("family", choices=families.names())
    one.add_argument("--base", required=True, help="folder with the full-size configs")
    one.add_argument("--resolution", type=int, default=1024)
    one.add_argument("--batch", type=int, default=1)
    one.add_argument("--tokens", type=int, default=512, help="text tokens")
    one.add_argument("--rank", type=int, default=16)
    one.add_argument("--steps", type=int, default=20)
    one.add_argument("--warmup", type=int, default=3)
    one.add_argument("--profile", action="store_true", help="then profile three further steps")


def measure(variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """One variant's figures; `problem` says in words why there are none."""
    peer = PEERS[variant]
    if peer.package and not _importable(peer.package):
        return {"problem": "not installed"}
    family = families.get(options.family)
    source, config = random_source(family, Path(options.base))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = base_model(family, source, device)
        _set_up(model, family, variant, options.rank)
        step = make_step(model, family, source, config, options, compiled=peer.compiled, device=device)
        times = timed_steps(step, options.warmup, options.steps, device)
    except torch.OutOfMemoryError:
        return {"problem": "out of memory"}
    row: dict[str, Any] = {"times": times, "settings": peer.settings}
    if device == "cuda":
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / _GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / _GIB
    if options.profile:
        row |= profiled(step)
    return row


def _importable(package: str) -> bool:
    """Whether a module is there, without importing more than its parent."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def random_source(family: Family, base: Path) -> tuple[ModelSource, RunConfig]:
    """The base model of a folder with configs, whose weights are random, and the least configuration."""
    make_torchvision_importable()
    config = RunConfig.model_validate(
        {
            "family": family.name,
            "model": {"pretrained_model_name_or_path": str(base), "weights": "random"},
            "data": {"sets": [DataSet(img_dir=Path()).model_dump()]},
            "output_dir": ".",
        }
    )
    components = families.components(family)
    return resolve_source(config, components, trained=family.trained_component), config


def base_model(family: Family, source: ModelSource, device: str) -> Any:
    """The trained component with random bf16 weights on the device, frozen, in training mode."""
    from transformers import PreTrainedModel

    model_class, folder = family.model_class(source), source.component(family.trained_component)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        if issubclass(model_class, PreTrainedModel):
            config = model_class.config_class.from_pretrained(folder)
            model = model_class._from_config(config, attn_implementation="sdpa", dtype=torch.bfloat16)
        else:
            model = model_class.from_config(model_class.load_config(folder))
    torch.set_default_dtype(torch.float32)
    model.requires_grad_(False)
    return model.to(device).train()


def _set_up(model: Any, family: Family, variant: str, rank: int) -> None:
    """Everything that parts the variants, in the order in which their users write it."""
    from transformers import PreTrainedModel

    of_transformers = isinstance(model, PreTrainedModel)
    if variant == "torchao":
        _convert_torchao(model, family)
    elif variant == "quanto":
        _convert_quanto(model, family)
    add_adapter(model, family, rank, torch.bfloat16 if PEERS[variant].compiled else torch.float32)
    if PEERS[variant].compiled:
        if not of_transformers:
            set_attention(model, "cudnn" if torch.cuda.is_available() else "native")
        torch._dynamo.config.recompile_limit = _MOST_GRAPHS
        for module in model.modules():
            if type(module).__name__ in family.blocks:
                module.compile(dynamic=False)
    elif of_transformers:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        model.enable_gradient_checkpointing()
        if torch.cuda.is_available():
            model.set_attention_backend("_native_flash")


def add_adapter(model: Any, family: Family, rank: int, dtype: torch.dtype) -> None:
    """peft's LoRA on the family's attention layers."""
    from peft import LoraConfig

    pattern = re.compile(family.lora_targets["attention"])
    targets = [name for name in linear_names(model) if pattern.fullmatch(name)]
    model.add_adapter(
        LoraConfig(r=rank, lora_alpha=rank, target_modules=targets, init_lora_weights="gaussian")
    )
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


def _frozen_linears(model: torch.nn.Module, family: Family) -> Iterator[str]:
    """Names of the layers of blocks that quantising leaves the model's quality with, as ours chooses them."""
    keep = re.compile("|".join(f"(?:{pattern})" for pattern in family.high_precision))
    blocks = [name for name, module in model.named_modules() if type(module).__name__ in family.blocks]
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{block}.") for block in blocks)
        if inside and type(module) is torch.nn.Linear and not keep.fullmatch(name):
            yield name


def _convert_torchao(model: Any, family: Family) -> None:
    """torchao's training conversion, with its recipe that scales by rows."""
    float8 = importlib.import_module("torchao.float8")

    chosen = frozenset(_frozen_linears(model, family))

    def wanted(module: torch.nn.Module, name: str) -> bool:
        if name not in chosen or not isinstance(module, torch.nn.Linear):
            return False
        return module.in_features % _FP8_MULTIPLE == 0 and module.out_features % _FP8_MULTIPLE == 0

    recipe = float8.Float8LinearConfig.from_recipe_name("rowwise")
    float8.convert_to_float8_training(model, module_filter_fn=wanted, config=recipe)


def _convert_quanto(model: Any, family: Family) -> None:
    """optimum-quanto's int8 weights."""
    from optimum.quanto import freeze, qint8, quantize

    quantize(model, weights=qint8, include=list(_frozen_linears(model, family)))
    freeze(model)
    model.requires_grad_(False)


def make_step(
    model: Any,
    family: Family,
    source: ModelSource,
    config: RunConfig,
    options: argparse.Namespace,
    *,
    compiled: bool,
    device: str,
) -> Callable[[], None]:
    """A function that trains one step on one synthetic batch and waits for its loss, as the examples do."""
    shape = Shape(
        batch_size=options.batch,
        width=options.resolution,
        height=options.resolution,
        text_tokens=options.tokens,
        bytes_per_value=2,
        controls=family.control_counts[0],
    )
    settings = family.settings(source, config)
    batch = family.synthetic_batch(source.component_config(family.trained_component), shape, 0)
    header = {name: tuple(tensor.shape[1:]) for name, tensor in batch.latents.items()}
    count = batch.size
    draws = [family.draw(settings, list(range(n * count, (n + 1) * count)), header) for n in range(4)]
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True if compiled else None)
    number = 0

    def step() -> None:
        nonlocal number
        moved, draw = to_device(batch, draws[number % len(draws)], device, torch.bfloat16)
        number += 1
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not compiled):
            loss = loss_of(model, family, settings, moved, draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def loss_of(model: Any, family: Family, settings: Any, batch: Batch, draw: Draw | None) -> torch.Tensor:
    """The family's loss; of a language model transformers' own, over one row."""
    if family.sample_kind == "image":
        return family.loss(model, batch, draw, settings).mean()
    ids = batch.text["input_ids"]
    loss: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
    return loss


def timed_steps(step: Callable[[], None], warmup: int, steps: int, device: str) -> list[float]:
    """Milliseconds of each step after the first `warmup`."""
    times = []
    for number in range(warmup + steps):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if number >= warmup:
            times.append(1e3 * (time.perf_counter() - started))
    return times


def profiled(step: Callable[[], None]) -> dict[str, float]:
    """Busy fraction and copy share over three steps under torch's profiler."""
    from bench.profile_step import record_trace
    from bench.trace import read_trace, summarize

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        record_trace(step, 3, path, operators=False)
        summary = summarize(read_trace(path), 3)
    return {"busy_fraction": summary.busy_fraction, "copy_share": summary.copy_share}


if __name__ == "__main__":
    sys.exit(main())
