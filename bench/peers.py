"""Time a LoRA step as others write it, to compare ours with. One variant in one process.

diffusers  as diffusers' and peft's own examples: eager, activation checkpointing, flash attention, bf16
           autocast over an fp32 adapter, AdamW
compiled   every block by torch.compile, no checkpointing, cuDNN attention on contiguous tensors, the adapter
           in bf16 without autocast, fused AdamW: what a reader of torch's manuals would end with
torchao    as `compiled`, over frozen layers that torchao.float8 multiplies in FP8, scaled by rows
quanto     as `diffusers`, over frozen layers that optimum-quanto stores in int8

Weights are random.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from bench.ours import Job
from bench.processes import GIB
from bench.steps import record_trace, synthetic, timed
from bench.trace import read_trace, summarize
from trainer import families
from trainer.config.schema import DataSet, RunConfig
from trainer.engine.caching.batches import to_device
from trainer.families.family import Family
from trainer.families.values import Batch, Draw
from trainer.modeling.adapter.lora import linear_names
from trainer.modeling.attention.setting import set_attention
from trainer.modeling.base.source import ModelSource, resolve_source
from trainer.modeling.vision import make_torchvision_importable

_MOST_GRAPHS = 64
"""Graphs at most, so that no block falls back to eager execution unseen."""
_FP8_MULTIPLE = 16
"""Sides that the FP8 product takes are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """The set-up of one of the others' steps."""

    package: str = ""
    """Module that must be importable besides torch, diffusers and peft."""
    compiled: bool
    """Blocks compiled, cuDNN attention, bf16 adapter, fused AdamW; else as diffusers' examples."""
    settings: str
    """Settings of a run, for readers of the record."""


_EXAMPLES = "eager, checkpointing, flash, autocast over fp32 adapter"
_COMPILED = "compiled blocks, cuDNN, bf16 adapter, fused AdamW"
PEERS: dict[str, Peer] = {
    "diffusers": Peer(compiled=False, settings=_EXAMPLES),
    "compiled": Peer(compiled=True, settings=_COMPILED),
    "torchao": Peer(package="torchao", compiled=True, settings=f"float8 rowwise, {_COMPILED}"),
    "quanto": Peer(compiled=False, settings=f"int8 weights, {_EXAMPLES}"),
}


def measure(variant: str, job: Mapping[str, Any], profile: bool) -> dict[str, Any]:
    """One variant's figures, or under `problem` why there are none; `job` has the fields of `ours.Job`."""
    peer, given = PEERS[variant], Job(**{**job, "base": Path(job["base"])})
    if peer.package and importlib.util.find_spec(peer.package) is None:
        return {"problem": "not installed"}
    family = families.get(given.family)
    source, config = random_source(family, given.base)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        model = base_model(family, source, device)
        _set_up(model, family, variant, given.rank)
        step = _make_step(model, family, synthetic(family, source, config, given.shape), peer, device)
        timed(step, given.warmup)
        times = timed(step, given.steps)
    except torch.OutOfMemoryError:
        return {"problem": "out of memory"}
    row: dict[str, Any] = {"times": times, "settings": peer.settings}
    if device == "cuda":
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    return row | (_profiled(step) if profile else {})


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


def _make_step(
    model: Any, family: Family, given: tuple[Any, Batch, list[Draw | None]], peer: Peer, device: str
) -> Callable[[], None]:
    """A function that trains one step on a synthetic batch and waits for its loss, as the examples do."""
    settings, batch, draws = given
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, fused=True if peer.compiled else None)
    cycle = itertools.cycle(draws)

    def step() -> None:
        moved, draw = to_device(batch, next(cycle), device, torch.bfloat16)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=not peer.compiled):
            if family.sample_kind == "image":
                loss = family.loss(model, moved, draw, settings).mean()
            else:  # transformers' own, over one row
                ids = moved.text["input_ids"]
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def _profiled(step: Callable[[], None]) -> dict[str, float]:
    """Busy fraction and copy share over three steps under torch's profiler."""
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "trace.json"
        record_trace(step, 3, path, operators=False)
        summary = summarize(read_trace(path), 3)
    return {"busy_fraction": summary.busy_fraction, "copy_share": summary.copy_share}
