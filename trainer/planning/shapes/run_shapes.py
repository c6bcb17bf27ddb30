"""One run's shapes for the planner: parameters from files or tables, activations from the family, and the
work of one forward pass, from which its time is predicted.

Imports no torch: `trainer plan` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.data.sets.controls import CONTROL_SIDE, control_folders
from trainer.errors import AccessError
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.files.component_shapes import packed_size, stored_as
from trainer.files.weight_files import weight_files
from trainer.modeling.base.base import read_config
from trainer.planning.shapes.adapters import TEXT_SIDE, planned_adapter
from trainer.planning.shapes.controls import control_pixels
from trainer.planning.shapes.geometry import (
    NO_LINEARS,
    ComponentGeometry,
    Geometry,
    Linears,
    Role,
    fp32_parameters,
    kept_in_fp32,
    largest_product,
    linear_blocks,
    linear_values,
    linears_of,
    parted,
    stacks,
    stored_component,
    table_component,
)
from trainer.planning.shapes.meta_shapes import SOURCE, built_shapes
from trainer.planning.shapes.mix import (
    USUAL_PICTURES,
    Captions,
    Pictures,
    padded_length,
    padded_row,
    usual_parts,
)
from trainer.planning.shapes.model_flops import linear_flops
from trainer.planning.shapes.run_activations import run_activations
from trainer.planning.shapes.shape_classes import matmul_shape_class, shape_class
from trainer.ways.storages import VALUE_BYTES

CONFIGS = Path(__file__).parents[2] / "families" / "configs"
# peaks of live tensors, counted by a dispatch mode on diffusers' AutoencoderKL and transformers' T5-XXL at
# 512 tokens: decoding, the larger of the two directions, 3.1 of (widest channels at full size x pixels); T5
# 44.6 of (tokens x ff)
_VAE_UNITS = 3.25
_TEXT_UNITS = 48
# captions of 1 to 300 tokens, as many short as long by their logarithm: 104 on average when they are padded
_CAPTION_TOKENS = 104
_OVER_THE_VOCABULARY = re.compile("embed|shared|lm_head")


def run_geometry(
    family: Family,
    config: RunConfig,
    *,
    model_folder: Path | None,
    dtype: str,
    sources: Mapping[str, str] = MappingProxyType({}),
    downloads: bool = False,
    caption_tokens: int | None = None,
    pictures: Pictures = (),
    alike: float | None = None,
) -> Geometry:
    """Everything that memory and time are computed from, in the run's compute type.

    `model_folder` None is a base that is not here yet: full-size tables stand in. With `downloads` files are
    to come: a component is as large as its config says. `sources` says where keys stand. Memory is that of
    the longest caption, time of `pictures`, how many have each shape (else there are six), with usual ones;
    with `caption_tokens` samples are alike. `alike` as `run_shape`. Raises AccessError for unknown sizes,
    ConfigError for an adapter on no layer.
    """
    values, shown = VALUE_BYTES[dtype], family.control_tokens(model_folder)
    shape = run_shape(config, family, bytes_per_value=values, model_folder=model_folder, alike=alike)
    shown *= shape.controls
    pixels = control_pixels(config.data.resolution, alike)
    geometry, model_config = _held(
        family, config, model_folder, dtype, sources, shape, downloads=downloads, shown=shown
    )
    split = micro_batches(family, config, pictures) if caption_tokens is None else {}
    geometry = dataclasses.replace(
        geometry,
        usual_parts=split,
        pictures_known=bool(split and pictures),
        larger_controls=pixels.why if shape.controls else "",
    )
    usual = dataclasses.replace(shape, control_pixels=pixels.mean)
    if family.caption is not None:
        tokens = _usual_tokens(shown) if caption_tokens is None else caption_tokens
        usual = dataclasses.replace(usual, text_tokens=min(shape.text_tokens, tokens))
    return _with_work(geometry, family, model_config, shape, usual)


def _held(
    family: Family,
    config: RunConfig,
    model_folder: Path | None,
    dtype: str,
    sources: Mapping[str, str],
    shape: Shape,
    *,
    downloads: bool,
    shown: int,
) -> tuple[Geometry, Mapping[str, Any]]:
    """Everything that memory is computed from, and the trained component's config; see `run_geometry`."""
    parts, each = roles(family), functools.partial(_component, family, config, downloads=downloads)
    folders = {name: component_base(model_folder, name, downloads=downloads) for name in parts}
    components = [each(folders[name], name, role) for name, role in parts.items()]
    trained, base = components[0], folders[family.trained_component]
    model_config = component_config(family, base, trained.name)
    adapter = planned_adapter(family, config, trained, model_config, shape, sources)
    packed, modulation, stored, stored_bytes = _packed(family, config, trained, base)
    kept = () if dtype == "fp32" else kept_in_fp32(family.name)
    repeated = stacks(trained, family.high_precision, () if stored_bytes else family.modulation, kept)
    held = run_activations(family, config, model_config, shape, repeated, adapter, dtype=dtype)
    text, vae, tiled = _encoder_peaks(family, config, components, folders, shape.bytes_per_value, shown=shown)
    geometry = Geometry(
        components=tuple(components),
        lora_parameters=adapter.parameters,
        lora_layers=adapter.layers,
        quantized=packed,
        modulation=modulation,
        stored_as=stored,
        stored_bytes=stored_bytes,
        activations=held.eager,
        activations_compiled=held.compiled,
        activations_fp8=held.in_fp8,
        fp32_parameters=fp32_parameters(trained.shapes, kept),
        stacks=repeated,
        text_bytes_peak=text,
        vae_bytes_peak=vae,
        vae_bytes_peak_tiled=tiled,
    )
    return geometry, model_config


def _usual_tokens(shown: int) -> int:
    """Text tokens of a caption of usual length, beside those of the control images that its encoder sees."""
    return padded_length(shown + _CAPTION_TOKENS) if shown else _CAPTION_TOKENS


def _with_work(
    geometry: Geometry, family: Family, model_config: Mapping[str, Any], shape: Shape, usual: Shape
) -> Geometry:
    """The geometry with the work of a batch of `usual` shape, and of `shape` at most."""
    longest, attention = (family.attention_shape(model_config, one) for one in (shape, usual))
    every, text = attention.batch_size * attention.tokens, usual.batch_size * usual.text_tokens
    trained = geometry.components[0]
    blocks = linear_blocks(trained, family.high_precision, TEXT_SIDE)
    flops, calls = linear_flops(blocks, every=every, text=text)
    pairs = attention.batch_size * attention.tokens * (attention.reach or attention.tokens)
    widest, largest = largest_product(trained, family.high_precision)
    talks = family.sample_kind == "conversation"
    return dataclasses.replace(
        geometry,
        linear_values=linear_values(trained, family.high_precision, TEXT_SIDE, every=every, text=text),
        widest_output=longest.batch_size * longest.tokens * widest,
        largest_product=largest,
        head_size=(model_config["vocab_size"], model_config["hidden_size"]) if talks else (0, 0),
        head_tokens=text if talks else 0,
        attention_shape_class=shape_class(longest),
        matmul_shape_class=matmul_shape_class(longest),
        matmul_flops=flops,
        attention_flops=4.0 * pairs * attention.heads * attention.head_width * calls,
        attention_calls=calls,
        products=sum(linears for _, _, linears in blocks),
        blocks=len(blocks),
        usual_share=attention.tokens / longest.tokens,
        captions_vary=family.caption is not None,
        packed=family.packed_by is not None,
    )


def micro_batches(
    family: Family, config: RunConfig, pictures: Pictures
) -> Mapping[Captions, tuple[float, ...]]:
    """Micro-batches of one, two ... of a batch's samples, on average, by how captions are taken.

    `pictures` says how many have each shape; else there are six. Empty where samples are packed into rows.
    """
    if family.packed_by is not None:
        return {}
    size, steps = config.train.train_batch_size, config.train.gradient_accumulation_steps
    known, most = pictures or USUAL_PICTURES, config.data.max_sequence_length
    found: dict[Captions, tuple[float, ...]] = {}
    for captions in typing.get_args(Captions):
        drawn = "alike" if family.caption is None else captions
        if drawn == "padded" and config.features.text_padding is False:
            drawn = "as they are"
        parts = usual_parts(size, size * steps, captions=drawn, pictures=known, most_tokens=most)
        found[captions] = tuple(one / steps for one in parts)
    return found


def _packed(
    family: Family, config: RunConfig, trained: ComponentGeometry, model_folder: Path | None
) -> tuple[Linears, Linears, str, int]:
    """(linears that can be stored in fewer bits, modulation, how files store these and in how many bytes)."""
    packed = linears_of(parted(trained, family.high_precision)[1].values())
    modulation = linears_of(parted(trained, family.modulation)[0].values())
    if model_folder is None or config.model.weights == "random":
        return packed, modulation, "", 0
    folder = model_folder / family.trained_component
    stored, stored_bytes = stored_as(folder), 0
    if stored and weight_files(folder).state == "complete":
        parameters, stored_bytes = packed_size(folder)  # whichever layers these are
        packed, modulation = dataclasses.replace(packed, parameters=parameters), NO_LINEARS
    return packed, modulation, stored, stored_bytes


def run_shape(
    config: RunConfig,
    family: Family,
    *,
    bytes_per_value: int,
    model_folder: Path | None = None,
    alike: float | None = None,
) -> Shape:
    """One micro-batch of the run; buckets of other aspects have about the same area.

    `model_folder` as `run_geometry`; `alike` is the share of control images that have their picture's size,
    None where that is not known.
    """
    tokens, most = config.data.max_sequence_length, family.control_counts[1]
    # one for each folder, else as many as metadata.jsonl may name
    controls = max(len(control_folders(one.control_dir)) or most for one in config.data.sets)
    if family.caption is not None:  # captions are not padded by the family's encoder
        tokens = padded_length(tokens + controls * family.control_tokens(model_folder))
    if family.packed_by is not None:
        tokens = padded_row(tokens)
    return Shape(
        batch_size=config.train.train_batch_size,
        width=config.data.resolution,
        height=config.data.resolution,
        text_tokens=tokens,
        bytes_per_value=bytes_per_value,
        controls=controls,
        control_pixels=control_pixels(config.data.resolution, alike).most if controls else 0,
    )


def roles(family: Family) -> dict[str, Role]:
    """Each component with weights and what it is for, first what trains."""
    found: dict[str, Role] = {family.trained_component: "trained"}
    found.update({name: "text_encoder" for name in family.encoder_components.get("text", ())})
    found.update({name: "vae" for name in family.encoder_components.get("latents", ())})
    return found


def component_base(model_folder: Path | None, component: str, *, downloads: bool) -> Path | None:
    """The base model's folder, None for a component whose download has not begun."""
    if model_folder is None or (downloads and not (model_folder / component / "config.json").exists()):
        return None
    return model_folder


def component_config(family: Family, model_folder: Path | None, component: str) -> Mapping[str, Any]:
    """A component's config.json from the base model, else the family's committed one."""
    folder = CONFIGS / family.name if model_folder is None else model_folder
    return read_config(folder / component / "config.json")


def trained_geometry(family: Family, config: RunConfig, model_folder: Path) -> ComponentGeometry:
    """The component that a run trains, as its base model in this folder has it. Raises as `run_geometry`."""
    return _component(family, config, model_folder, family.trained_component, "trained", downloads=False)


def _component(
    family: Family, config: RunConfig, model_folder: Path | None, name: str, role: Role, *, downloads: bool
) -> ComponentGeometry:
    """One component: headers of the files that are loaded, else what its config says."""
    table = functools.partial(table_component, family.name, name, role)
    if model_folder is None:
        return table()
    scratch = config.model.weights == "random"
    folder = model_folder / name
    # files of what trains from nothing are not read, and need not fit its config
    read = not (scratch and role == "trained")
    found = weight_files(folder)
    if read and found.state == "complete":
        return stored_component(model_folder, name, role, base=config.model.pretrained_model_name_or_path)
    if read and found.state == "partial" and not downloads:
        raise AccessError(found.lacking, where=str(folder), remedy="copy the missing files into the folder")
    lacking = f", because {found.lacking} of {name}" if read and found.state == "partial" else ""
    ours = component_config(family, None, name)
    theirs = component_config(family, model_folder, name)
    # a key that ours leaves to the class' default changes shapes too
    keys = [key for key in ({**ours, **theirs} if scratch else ours) if not key.startswith("_")]
    differing = [key for key in keys if theirs.get(key) != ours.get(key)]
    if not differing:
        return dataclasses.replace(table(), source=table().source + lacking) if lacking else table()
    if not scratch and not downloads:
        raise AccessError(
            f"no .safetensors file to read sizes from, and the config differs from {family.title}'s in"
            f" {', '.join(differing)}",
            where=str(folder),
            remedy="name a folder with weights; model.weights: random trains from nothing",
        )
    absent = [key for key in differing if key not in theirs]
    if scratch and absent and role == "trained" and name:
        # the class has defaults, but the family's arithmetic reads the file; configs of language models have
        # several spellings of what does not matter here
        raise AccessError(
            f"the config leaves out {', '.join(absent)}",
            where=str(folder / "config.json"),
            remedy="write every key out, as the library's save_config does",
        )
    shapes = built_shapes(model_folder, name, environment.user_cache_dir())
    return ComponentGeometry(name=name, role=role, shapes=shapes, source=f"{name} {SOURCE}{lacking}")


def _encoder_peaks(
    family: Family,
    config: RunConfig,
    components: Sequence[ComponentGeometry],
    folders: Mapping[str, Path | None],
    size: int,
    *,
    shown: int,
) -> tuple[int, int, int]:
    """Activations of one caption in the widest text encoder, or of the `shown` tokens of its pictures where
    these are more, and of the run's largest image in the VAE, whole and in tiles of its own sample size;
    `size` are the bytes of a value.
    """
    widths = [
        shape[0]
        for part in components
        if part.role == "text_encoder"
        for name, shape in part.shapes.items()
        if len(shape) == 2 and not _OVER_THE_VOCABULARY.search(name)
    ]
    # decoders need less than half of T5's units, so that caption and pictures have room together
    tokens = max(config.data.max_sequence_length, shown)
    text = _TEXT_UNITS * tokens * max(widths, default=0) * size
    names = family.encoder_components.get("latents", ())
    if not names:
        return text, 0, 0
    side = max(config.data.resolution, config.validation.resolution or 0)
    if family.control_counts[1]:
        side = max(side, CONTROL_SIDE)
    channels, tile = family.vae_shape(component_config(family, folders[names[0]], names[0]))
    unit, tile = _VAE_UNITS * channels * size, min(side, tile)
    return text, int(unit * side * side), int(unit * tile * tile)
