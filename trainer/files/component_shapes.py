"""Shapes of the tensors in a component's weight files, by their headers, and of weights stored in nf4."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.errors import AccessError, ConfigError
from trainer.files.weight_files import read_header, to_replace, weight_files

Shapes = Mapping[str, tuple[int, ...]]

Stamp = tuple[tuple[Path, int, int], ...]

# bitsandbytes' names: `<layer>.weight` is packed, these lie beside it, the last as JSON with the true shape
_NF4_STATE = ".quant_state.bitsandbytes__nf4"

_NF4_BESIDE = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _NF4_STATE)

# what a component's config.json must say to be read; older files leave the last out
_NF4_CONFIG: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_quant_storage": "uint8",
}


def header_shapes(files: Iterable[Path]) -> Shapes:
    """Name and shape of every tensor in .safetensors files.

    Weights that are packed in nf4 have their true shape, which some bytes of each file's data state; no other
    data is read.
    """
    headers = {file: read_header(file) for file in files}
    shapes = {name: header.shapes[name] for header in headers.values() for name in header.tensors}
    for file, header in headers.items():
        for name, entry in header.tensors.items():
            if name.endswith(_NF4_STATE):
                weight = name.removesuffix(_NF4_STATE)
                for ending in _NF4_BESIDE:
                    shapes.pop(weight + ending, None)
                begin, end = (header.start + offset for offset in entry["data_offsets"])
                shapes[weight] = _packed_shape(file, begin, end)
    return shapes


def stored_as(folder: Path) -> str:
    """`nf4` where the component's config.json says that its files hold 4-bit weights, else empty.

    Raises ConfigError for any other quantisation: such weights cannot be trained on.
    """
    path = folder / "config.json"
    try:
        found = json.loads(path.read_text()).get("quantization_config")
    except (OSError, ValueError) as error:
        raise AccessError(f"the component's config cannot be read ({error})", where=str(path)) from error
    if not found:
        return ""
    said = {"bnb_4bit_quant_storage": "uint8", **found}
    differing = [key for key, value in _NF4_CONFIG.items() if said.get(key) != value]
    if differing:
        kind = ", ".join(f"{key} {said.get(key, 'missing')}" for key in differing)
        raise ConfigError(
            f"the weights are stored quantised in a way that cannot be trained on ({kind})",
            where=str(path),
            remedy="use the model's full-precision files, or nf4 ones of bitsandbytes",
        )
    return "nf4"


def packed_tensors(folder: Path) -> dict[str, tuple[str, ...]]:
    """Names of the tensors that each linear's nf4 weight is stored in, by the linear's name.

    Raises AccessError where there are none, or a packed weight without its scales.
    """
    names = {name for file in weight_files(folder).files for name in read_header(file).tensors}
    weights = sorted(name.removesuffix(_NF4_STATE) for name in names if name.endswith(_NF4_STATE))
    needed = [weight + ending for weight in weights for ending in ("", ".absmax", ".quant_map")]
    missing = [name for name in needed or [f"*{_NF4_STATE}"] if name not in names]
    if missing:
        raise AccessError(
            f"weights are said to be stored in nf4, but there is no tensor {missing[0]}",
            where=str(folder),
            remedy="the download may be incomplete: run `trainer fetch CONFIG` again",
        )
    return {
        weight.removesuffix(".weight"): tuple(
            weight + ending for ending in ("", *_NF4_BESIDE) if weight + ending in names
        )
        for weight in weights
    }


def packed_size(folder: Path) -> tuple[int, int]:
    """(parameters, bytes with scales and tables) of the weights that the folder's files hold in nf4."""
    files, stored = weight_files(folder).files, packed_tensors(folder)
    shapes = header_shapes(files)
    sizes = {
        name: entry["data_offsets"][1] - entry["data_offsets"][0]
        for file in files
        for name, entry in read_header(file).tensors.items()
    }
    parameters = sum(math.prod(shapes[f"{linear}.weight"]) for linear in stored)
    return parameters, sum(sizes[name] for names in stored.values() for name in names)


def stamp_of(files: Iterable[Path]) -> Stamp:
    """Each file with its modification time and size, so that another version has another stamp."""
    stats = [(file, file.stat()) for file in files]
    return tuple((file, stat.st_mtime_ns, stat.st_size) for file, stat in stats)


def _packed_shape(file: Path, begin: int, end: int) -> tuple[int, ...]:
    """The true shape of a packed weight, from the JSON that bitsandbytes stores as a tensor."""
    try:
        with file.open("rb") as stream:
            stream.seek(begin)
            return tuple(json.loads(stream.read(end - begin))["shape"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise AccessError(
            f"the shape of a packed weight cannot be read ({error})",
            where=str(file),
            remedy=to_replace(file),
        ) from error
