"""Conversion of a saved LoRA between diffusers' and ComfyUI's layouts. Needs no base model."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer import families
from trainer.engine.results.file_check import check_file
from trainer.engine.results.proof import save_adapter
from trainer.errors import ConfigError, DataError
from trainer.families.family import Family
from trainer.files import atomic
from trainer.modeling.adapter.adapter_file import AdapterFile, read_adapter
from trainer.modeling.adapter.comfyui import write_comfyui
from trainer.modeling.adapter.peft_config import CONFIG_INSIDE
from trainer.planning.shapes.geometry import TABLES, linear_weights, read_table

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
"""The number of a block in a layer's name."""


def export(path: Path, form: str, target: Path | None, family_name: str | None) -> Path:
    """Write `path` as `form`, into `target` or beside it; returns the new file.

    `family_name` is for files that do not say it. Raises ConfigError for what cannot be converted, DataError
    for a file that is no LoRA, is not finite or zero, NoSpaceError.
    """
    adapter = read_adapter(path)
    _require_other_layout(adapter, form, path)
    check_file(path)
    family = _family(adapter, path, family_name)
    if family.comfyui is None:
        what = f"ComfyUI takes no LoRAs of {family.title}"
        raise ConfigError(what, where=str(path), remedy="PEFT loads its folder as it is")
    if (adapter.kind == "lokr" and form == "diffusers") or adapter.kind == "dora":
        needs = (
            "the weights of its base" if adapter.kind == "dora" else "scales that its ComfyUI file has not"
        )
        remedy = "the run that trained it wrote both files: they are in its folder lora/"
        raise ConfigError(f"a {adapter.kind} needs {needs} for that", where=str(path), remedy=remedy)
    adapter = _own_names(adapter, family, path)
    stem = path.name.removesuffix(".safetensors").removesuffix(".comfyui")
    target = target or path.with_name(f"{stem}.{form}.safetensors")
    if target.exists():
        raise ConfigError(f"{target} exists", where="--to", remedy="name another file, or move it away")
    with atomic.no_space_told(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        # in a folder of its own until it is whole: a full disk leaves nothing that looks like a LoRA
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as folder:
            path = Path(folder) / target.name
            if form == "diffusers":
                path = save_adapter(family, adapter.state, _peft_config(adapter), adapter.metadata, path)
            else:
                write_comfyui(
                    adapter.state,
                    path,
                    adapter.metadata,
                    config=adapter.config,
                    key_of=family.comfyui_keys,
                    weight_of=_no_weight,
                    swapped=family.comfyui_swaps,
                )
            check_file(path)
            path.replace(target)
    atomic.sync_directory(target.parent)
    return target


def _require_other_layout(adapter: AdapterFile, form: str, path: Path) -> None:
    """Raise ConfigError for a file that is laid out as `form`, or as nearly so, without its alphas."""
    if adapter.layout == form and adapter.bare:
        raise ConfigError(
            f"it has diffusers' names and no `{CONFIG_INSIDE}`, which has the alphas: they are not known",
            where=str(path),
            remedy="export the file as its run saved it; where each alpha is its layer's rank, as diffusers"
            " and ComfyUI read this one, `--format diffusers` makes a file that says so: export that",
        )
    if adapter.layout == form:
        raise ConfigError(f"it is laid out for {form} already", where=str(path), remedy="use it as it is")


def _family(adapter: AdapterFile, path: Path, name: str | None) -> Family:
    said = adapter.metadata.get("family")
    if name is not None and said not in (None, name):
        raise ConfigError(f"{path} is a LoRA of {said}", where=f"--family {name}", remedy="leave it out")
    name = name or said
    known = ", ".join(families.names())
    if name is None:
        what = "the file does not say which model family it is for"
        raise ConfigError(what, where=str(path), remedy=f"give --family NAME: {known}")
    if name not in families.names():
        raise ConfigError(f'unknown family "{name}"', where="--family", remedy=f"known: {known}")
    return families.get(name)


def _own_names(adapter: AdapterFile, family: Family, path: Path) -> AdapterFile:
    """The adapter with the model's names for layers that ComfyUI names otherwise.

    Raises DataError for layers that are none of the family's by either name.
    """
    linears = linear_weights(read_table(TABLES / f"{family.name}.json")[family.trained_component])
    # without `transformer.` or `diffusion_model.`, as the file's layers are read
    theirs = {
        key.partition(".")[2]: name for name in linears if (key := family.comfyui_keys(name)) is not None
    }
    # a base may have more blocks than the one of the table
    known = {_NUMBER.sub(".#", name) for name in (*theirs, *linears)}
    strange = sorted(name for name in adapter.layers if _NUMBER.sub(".#", name) not in known)
    if strange:
        raise DataError(
            f"{len(strange)} of its {len(adapter.layers)} layers are none of {family.title}'s by a name that"
            f" is known here, first {strange[0]}",
            where=str(path),
            remedy="is it for this family? Names that other programs give are not converted: use the file"
            " with the program that it is from",
        )
    renamed = {name: theirs[name] for name in adapter.layers if theirs.get(name, name) != name}
    if adapter.layout != "comfyui" or not renamed:
        return adapter
    layers = {renamed.get(name, name): parts for name, parts in adapter.layers.items()}
    # as `read_adapter` writes the patterns of a ComfyUI file
    anchored = {f"^{re.escape(old)}": f"^{re.escape(new)}" for old, new in renamed.items()}
    patterns = {
        kind: {anchored.get(one, one): value for one, value in adapter.config[kind].items()}
        for kind in ("rank_pattern", "alpha_pattern")
    }
    return dataclasses.replace(adapter, layers=layers, config={**adapter.config, **patterns})


def _no_weight(module: str) -> torch.Tensor:
    raise AssertionError(f"{module}: only a DoRA needs its base's weights")


def _peft_config(adapter: AdapterFile) -> Mapping[str, Any]:
    """peft's whole configuration, in the form that diffusers writes into a file's metadata."""
    from peft import LoraConfig

    config = LoraConfig(target_modules=sorted(adapter.layers), **adapter.config).to_dict()
    return {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
