"""A saved adapter of any layout that this project writes, as peft's tensors and configuration."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import DataError
from trainer.files.adapter_kind import adapter_kind
from trainer.files.safetensors import UNREADABLE
from trainer.modeling.adapter.comfyui import Parts, alpha_and_rank
from trainer.modeling.adapter.lora import effective_change, lokr_factor
from trainer.modeling.adapter.peft_config import (
    CONFIG_INSIDE,
    PEFT_PREFIX,
    config_beside,
    config_inside,
    require_rank_and_alpha,
)

Layout = Literal["diffusers", "comfyui", "peft"]
_PREFIXES: Mapping[Layout, tuple[str, ...]] = {
    "diffusers": ("transformer.",),
    "comfyui": ("transformer.", "diffusion_model."),
    "peft": (PEFT_PREFIX,),
}
"""Prefixes of a layer's name in the file."""
_TENSOR = re.compile(r"(.+?)\.((?:lora_|lokr_).+|alpha|dora_scale)")
"""A layer with what stands before it, and a part of its adapter."""
_PARTS = frozenset(
    {"lora_A.weight", "lora_B.weight", "lora_magnitude_vector"}
    | {f"lokr_w{number}{end}" for number in (1, 2) for end in ("", "_a", "_b")}
)
_PARTS_OF_COMFYUI = _PARTS | {"alpha", "dora_scale"}
"""The parts that are read; another one changes what the adapter computes."""
_ALPHA = ".alpha"
_RESIDUAL = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""How `init_lora_weights` begins of adapters that peft starts by changing the base under them."""
OTHER_PROGRAM = (
    f"it has no `{CONFIG_INSIDE}`, so that it does not say how it was trained: it is laid out for ComfyUI, of"
    " another program, or was saved again without it"
)
"""Words for an adapter without peft's configuration, and the remedy where one is needed."""
NAME_A_RUNS = (
    "name a file that a run saved, without `.comfyui` in its name; of others `trainer export FILE"
    " --format diffusers` writes one with the rank and alpha that ComfyUI reads in it"
)


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """One adapter."""

    layout: Layout
    layers: Mapping[str, Parts]
    """Tensors by module, without ComfyUI's alphas, which are in `config`."""
    config: Mapping[str, Any]
    """peft's configuration; for a ComfyUI file it follows from shapes and alphas."""
    metadata: Mapping[str, str]
    """The file's safetensors metadata, without peft's configuration."""
    bare: bool = False
    """Whether it has diffusers' names and says no alphas, as one that was saved again without its metadata;
    its layout is `comfyui`, since ComfyUI takes its ranks for them, and so does diffusers.
    """

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """peft's tensors by name."""
        return {
            f"{module}.{part}": tensor
            for module, parts in self.layers.items()
            for part, tensor in parts.items()
        }

    @property
    def kind(self) -> str:
        """`lora`, `dora` or `lokr`."""
        return adapter_kind(self.state)


def read_adapter(path: Path) -> AdapterFile:
    """Read a file. Raises DataError for no adapter of ours, AccessError where peft's config is missing."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except (OSError, SafetensorError) as error:
        what = f"cannot be read as safetensors ({error})"
        raise DataError(what, where=str(path), remedy=UNREADABLE) from error
    layout = _layout(tensors, metadata, path)
    layers = _by_layer(tensors, layout, path)
    inside = metadata.pop(CONFIG_INSIDE, None)
    metadata.pop("format", None)
    bare = layout == "comfyui" and _is_bare(tensors)
    if layout == "comfyui":
        config = _config_of_comfyui(layers)
    elif inside is not None:
        config = config_inside(inside, path)
    else:
        config = config_beside(path)
    if config.get("use_rslora"):
        what = "its layers are scaled by the root of their rank (use_rslora), which is not read"
        raise DataError(what, where=str(path), remedy="name a LoRA that this trainer saved")
    begun = config.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_RESIDUAL):
        raise DataError(
            f"it began with `init_lora_weights: {begun}`, which changes the base as well: over the base as it"
            " is the adapter means something else",
            where=str(path),
            remedy="save it with peft's path_initial_model_for_weight_conversion, which makes a plain LoRA",
        )
    config = {"rank_pattern": {}, "alpha_pattern": {}, **config}
    if layout == "diffusers":
        require_rank_and_alpha(config, path)
    return AdapterFile(layout=layout, layers=layers, config=config, metadata=metadata, bare=bare)


def _layout(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], path: Path) -> Layout:
    if any(name.startswith(PEFT_PREFIX) for name in tensors):
        return "peft"
    if CONFIG_INSIDE in metadata:
        return "diffusers"
    require_known_names(tensors, path)
    return "comfyui"


def _is_bare(tensors: Iterable[str]) -> bool:
    """True for a LoRA's names that are diffusers', without an alpha, which ComfyUI's file of a LoRA has."""
    names, (prefix,) = list(tensors), _PREFIXES["diffusers"]
    diffusers = all(name.startswith(prefix) and not name.endswith(_ALPHA) for name in names)
    return diffusers and any(".lora_A." in name for name in names)


def require_known_names(names: Iterable[str], path: Path) -> None:
    """Raise DataError for tensors with the names of other trainers."""
    if any(".lora_down" in name or ".lora_up" in name for name in names):
        raise DataError(
            "laid out as other trainers do (lora_down, lora_up): it is not converted",
            where=str(path),
            remedy="ComfyUI takes it as it is; name a file that this trainer saved",
        )


def _by_layer(
    tensors: Mapping[str, torch.Tensor], layout: Layout, path: Path
) -> dict[str, dict[str, torch.Tensor]]:
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".base_layer.weight"):  # an earlier version wrote the base's head beside its adapter
            continue
        prefix = next((one for one in _PREFIXES[layout] if name.startswith(one)), None)
        parted = _TENSOR.fullmatch(name)
        if prefix is None or parted is None:
            remedy = "name a LoRA that this trainer saved"
            raise DataError(f"{name} is no tensor of an adapter", where=str(path), remedy=remedy)
        found.setdefault(parted[1].removeprefix(prefix), {})[parted[2]] = tensor
    for module, parts in found.items():
        _require_parts(module, parts, _PARTS_OF_COMFYUI if layout == "comfyui" else _PARTS, path)
    if not found:
        raise DataError("holds no tensor", where=str(path), remedy="name a LoRA that this trainer saved")
    return found


def _require_parts(module: str, parts: Parts, known: Set[str], path: Path) -> None:
    """Raise DataError for a part that is not `known`, and where a factor is missing."""
    if strange := min(parts.keys() - known, default=None):
        remedy = "name a LoRA that this trainer saved, or use the file with the program that it is from"
        what = f"{module}.{strange} is a part of an adapter that is not read"
        raise DataError(what, where=str(path), remedy=remedy)
    if ("lora_A.weight" in parts) != ("lora_B.weight" in parts):
        raise DataError(f"{module} has only one of lora_A and lora_B", where=str(path))
    factors = (name in parts or {f"{name}_a", f"{name}_b"} <= parts.keys() for name in ("lokr_w1", "lokr_w2"))
    if "lora_A.weight" not in parts and not all(factors):
        remedy = "copy or download the file again, or name one that this trainer saved"
        raise DataError(
            f"{module} has nothing but {', '.join(sorted(parts))}", where=str(path), remedy=remedy
        )


def _config_of_comfyui(layers: Mapping[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Rank and alpha that most layers have, and patterns for the others; takes the alphas out of `layers`."""
    ranks, alphas = {}, {}
    for name, parts in layers.items():
        said = parts.pop("alpha", None)
        if "lora_A.weight" in parts:
            ranks[name] = parts["lora_A.weight"].shape[0]
            # ComfyUI takes the rank where a file has no alpha
            alphas[name] = float(ranks[name] if said is None else said)
    rank = Counter(ranks.values()).most_common(1)[0][0] if ranks else 0
    alpha = Counter(alphas.values()).most_common(1)[0][0] if alphas else 0.0
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{re.escape(name)}": one for name, one in ranks.items() if one != rank},
        "alpha_pattern": {f"^{re.escape(name)}": one for name, one in alphas.items() if one != alpha},
    }


def require_shape(shape: Sequence[int], parts: Parts, module: str) -> None:
    """Raise DataError unless a layer's adapter changes a weight of `shape`, (out, in)."""
    try:
        changed = _change({part: tensor.to("meta") for part, tensor in parts.items()}, 1.0).shape
    except RuntimeError as error:
        shapes = ", ".join(f"{part} {tuple(tensor.shape)}" for part, tensor in sorted(parts.items()))
        remedy = "copy or download the file again, or name one that this trainer saved"
        raise DataError(f"the factors of {module} do not fit each other: {shapes}", remedy=remedy) from error
    if tuple(changed) != tuple(shape):
        what = f"{module} changes a weight of {tuple(changed)}, the base's is {tuple(shape)}"
        raise DataError(what, remedy="the adapter is of another base model")


def merged_weight(weight: torch.Tensor, parts: Parts, config: Mapping[str, Any], module: str) -> torch.Tensor:
    """A layer's weight (out, in) with its adapter in it, fp32: W + s B A; DoRA gives each row its length.

    Source: peft's tuners/lora and tuners/lokr, `get_delta_weight` and `merge`. Raises DataError for another
    layer's shapes.
    """
    require_shape(weight.shape, parts, module)
    alpha, rank = alpha_and_rank(config, module)
    changed = weight.float() + _change(parts, alpha / rank)
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is None:
        return changed
    return changed * (magnitude.float() / changed.norm(dim=1))[:, None]


def _change(parts: Parts, scale: float) -> torch.Tensor:
    """The change of one weight, (out, in) fp32."""
    if "lora_A.weight" in parts:
        return effective_change(parts["lora_A.weight"], parts["lora_B.weight"], scale)
    return scale * torch.kron(lokr_factor(parts, "lokr_w1"), lokr_factor(parts, "lokr_w2"))


def require_fits(model: torch.nn.Module, path: Path, prefix: str) -> None:
    """Raise DataError where a tensor of an adapter's file fits no linear layer of `model`.

    Libraries leave such tensors out, and say little of it or nothing. Names begin with `prefix`.
    """
    # what had an adapter before keeps its wrapper
    layers = {
        prefix + name.removesuffix(".base_layer"): module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    with safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
        said = file.metadata() or {}
    strange = [name for name, shape in shapes.items() if not _fits(layers, name, shape)]
    if not strange:
        return
    what = f"{len(strange)} of its {len(shapes)} tensors fit no layer of this model, first {strange[0]}"
    base = ", ".join(dict.fromkeys(said[key] for key in ("family", "base_model") if key in said))
    remedy = "is it a LoRA of this base model? A run's is in its folder lora/"
    if CONFIG_INSIDE not in said and any(map(_is_comfyui_s, shapes)):
        what = f"it has ComfyUI's layout: {what}"
        remedy = (
            "`trainer export FILE --format diffusers` makes one that is loaded here, where it is of this base"
        )
    raise DataError(
        what + (f"; the file says that it is for {base}" if base else ""), where=str(path), remedy=remedy
    )


def _is_comfyui_s(name: str) -> bool:
    """True for a tensor's name that ComfyUI's layout has, and no other one."""
    return name.startswith("diffusion_model.") or name.endswith((_ALPHA, ".dora_scale"))


def _fits(layers: Mapping[str, torch.nn.Linear], name: str, shape: Sequence[int]) -> bool:
    """True for a tensor that belongs to the adapter of one of the layers; ComfyUI's alphas are not read."""
    parted = _TENSOR.fullmatch(name)
    layer = None if parted is None else layers.get(parted[1])
    if parted is None or layer is None or not parted[2].startswith(("lora_", "lokr_")):
        return False
    if parted[2].startswith("lora_A"):
        return shape[-1] == layer.in_features
    return not parted[2].startswith("lora_B") or shape[0] == layer.out_features
