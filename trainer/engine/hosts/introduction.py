"""Values that must be the same on all hosts of a run: the trainer, the configuration, the plan, the base."""

from __future__ import annotations

import functools
import hashlib
import json
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import trainer
from trainer.config.schema import RunConfig
from trainer.modeling.base.source import ModelSource
from trainer.planning.plan import Plan

_OF_THE_PLAN = (
    "device", "dtype", "weights", "compute", "weight_gradient", "weight_copies", "modulation",
    "text_encoder_weights", "compile", "text_padding", "attention", "in_rows", "micro_batch_size",
    "accumulation_steps", "vae_tiling", "tf32", "optimizer",
)  # fmt: skip
"""Decisions by which hosts would train differently. What lies where and is recomputed is each one's."""
_OF_EACH_HOST = frozenset({
    "output_dir", "model.pretrained_model_name_or_path", "model.download", "data.cache_dir",
    "data.cache_in_memory", "parallel.gpus", "parallel.shard", "features.memory_budget", "features.loader",
    "features.block_swap", "features.activation_checkpointing", "features.activation_budget",
    "features.cuda_graphs", "train.report_to", "train.tracker_project_name",
})  # fmt: skip
"""Keys that may differ; so may every path, since files are compared by their content."""
_DECIDED = frozenset({
    "model.dtype", "features.weights", "features.compute", "features.modulation", "features.attention",
    "features.compile", "features.text_padding", "features.tf32", "features.vae_tiling",
    "features.weight_gradient", "train.train_batch_size", "train.gradient_accumulation_steps",
})  # fmt: skip
"""Keys whose values are compared as the plan decides them: a host whose own folder holds the run's first plan
writes here what that says."""
_LONGEST = 120


def introduction(config: RunConfig, plan: Plan, source: ModelSource, hosts: int) -> dict[str, str]:
    """The values of this host by name, as they are told to people."""
    return {
        "the number of hosts (TRAINER_NODES)": str(hosts),
        "the number of processes on each host": str(plan.ranks // hosts),
        "the trainer": f"{trainer.__version__} ({code_digest()})",
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
        **{f"{name} in the plan": str(vars(plan)[name]) for name in _OF_THE_PLAN},
        "the base model": f"{source.identity} {source.revision or ''} {source.weights}".strip(),
        **_files(config, source),
        **dict(_configured(config.model_dump(), "")),
    }


def _files(config: RunConfig, source: ModelSource) -> dict[str, str]:
    """Digests of the files that change what is trained, besides the base and the data."""
    found = {}
    if config.lora.init_from is not None and config.lora.init_from.is_file():
        found["the file of lora.init_from"] = _digest(config.lora.init_from.read_bytes())
    if source.chat_template is not None:
        found["the chat template"] = _digest(source.chat_template.encode())
    return found


def _configured(values: Mapping[str, Any], section: str) -> Iterator[tuple[str, str]]:
    """Values by dotted key; long ones as a hash of their text."""
    for name, value in values.items():
        key = f"{section}{name}"
        if key in _OF_EACH_HOST | _DECIDED:
            continue
        if isinstance(value, Mapping):
            yield from _configured(value, f"{key}.")
        else:
            text = json.dumps(_without_paths(value), sort_keys=True)
            short = len(text) <= _LONGEST
            yield key, text if short else f"{text[:_LONGEST]}... ({_digest(text.encode())})"


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _without_paths(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(one) for one in value]
    return None if isinstance(value, Path) else value


@functools.cache
def code_digest() -> str:
    """Eight letters that follow from the package's source files."""
    folder = Path(trainer.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:8]
