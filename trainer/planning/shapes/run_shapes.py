"""One run's shapes for the planner: parameters from files or tables, activations from the family.

Imports no torch: `trainer plan` answers at once.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.data.sets.controls import control_folders
from trainer.errors import AccessError
from trainer.families import language
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.files.component_shapes import packed_size, stored_as
from trainer.files.weight_files import weight_files
from trainer.modeling.base.base import read_config
from trainer.planning.shapes.activations import Activations, Kept, Units, activations, counted
from trainer.planning.shapes.adapters import planned_adapter
from trainer.planning.shapes.blocks import NO_LINEARS, Linears, Stack, fp32_parameters, linears_of, stacks
from trainer.planning.shapes.geometry import ComponentGeometry, Geometry, Role, component_shapes, kept_in_fp32
from trainer.planning.shapes.meta_shapes import SOURCE, built_shapes
from trainer.planning.shapes.mix import padded_length
from trainer.planning.shapes.work import USUAL_MIX, Mix, with_work
from trainer.ways.storages import VALUE_BYTES

CONFIGS = Path(__file__).parents[2] / "families" / "configs"
_ATTENTION_PRESET = "attention"
# peaks of live tensors, counted by a dispatch mode on diffusers' AutoencoderKL and transformers' T5-XXL at
# 512 tokens: decoding, the larger of the two directions, 3.1 of (widest channels at full size x pixels); T5
# 44.6 of (tokens x ff)
_VAE_UNITS = 3.25
_TEXT_UNITS = 48
# what the pipelines scale control images of another size to, and their previews' too
_CONTROL_SIDE = 1024
# text tokens of a control image that the text encoder is shown at 384 x 384 pixels, with what is beside them
_CONTROL_TOKENS = 200
# one logit with its fp32 copy, softmax and gradients, as counted on a GPU
_LOGIT_BYTES = 12.5
_OVER_THE_VOCABULARY = re.compile("embed|shared|lm_head")


def run_geometry(
    family: Family,
    config: RunConfig,
    *,
    model_folder: Path | None,
    dtype: str,
    sources: Mapping[str, str] = MappingProxyType({}),
    downloads: bool = False,
    mix: Mix = USUAL_MIX,
) -> Geometry:
    """Everything that memory is computed from, for the run's model, resolution, batch size and compute type.

    `model_folder` None is a base that is not here yet: committed full-size tables stand in. With `downloads`
    missing files are to come: a component is as large as its config says. `sources` says where keys were
    written. Memory is that of the longest caption, time that of samples of the shapes of `mix`.
    Raises AccessError for unknown sizes, ConfigError for an adapter on a layer that is none.
    """
    folders, components = _components(family, config, model_folder, downloads=downloads)
    trained = components[0]
    model_config = component_config(family, folders[trained.name], trained.name)
    shape = run_shape(config, family, bytes_per_value=VALUE_BYTES[dtype])
    attention = family.attention_shape(model_config, shape)
    kept = kept_in_fp32(family.name) if dtype != "fp32" else ()
    repeated = _stacks(trained, family.high_precision, family.modulation, kept)
    parameters, layers, adapter = planned_adapter(family, config, trained, attention, shape, sources)
    eager, compiled = _activations(family, config, model_config, shape, repeated, adapter)
    packed, modulation, stored, stored_bytes = _packed(family, config, trained, folders[trained.name])
    vae, vae_tiled = _vae_peaks(family, config, folders, shape.bytes_per_value)
    geometry = Geometry(
        components=components,
        lora_parameters=parameters,
        lora_layers=layers,
        quantized=packed,
        modulation=modulation,
        stored_as=stored,
        stored_bytes=stored_bytes,
        activations=eager,
        activations_compiled=compiled,
        fp32_parameters=fp32_parameters(trained.shapes, kept),
        stacks=repeated,
        captions_vary=family.caption is not None,
        packed=family.packed_by is not None,
        text_bytes_peak=_text_peak(components, config.data.max_sequence_length, shape.bytes_per_value),
        vae_bytes_peak=vae,
        vae_bytes_peak_tiled=vae_tiled,
    )
    return with_work(geometry, family, config, model_config, trained, shape, mix)


@functools.lru_cache(maxsize=64)
def _stacks(
    trained: ComponentGeometry,
    high_precision: tuple[str, ...],
    modulation: tuple[str, ...],
    kept: tuple[str, ...],
) -> tuple[Stack, ...]:
    """The repeated blocks of the trained component."""
    return stacks(trained.shapes, trained.quantized(high_precision), kept, trained.matching(modulation))


def _packed(
    family: Family, config: RunConfig, trained: ComponentGeometry, model_folder: Path | None
) -> tuple[Linears, Linears, str, int]:
    """(linears that can be stored in fewer bits, modulation, how files store these and in how many bytes)."""
    packed = linears_of(trained.quantized(family.high_precision).values())
    modulation = linears_of(trained.matching(family.modulation).values())
    if model_folder is None or config.model.weights == "random":
        return packed, modulation, "", 0
    folder = model_folder / family.trained_component
    stored, stored_bytes = stored_as(folder), 0
    if stored and weight_files(folder).state == "complete":
        parameters, stored_bytes = packed_size(folder)  # whichever layers these are
        packed, modulation = dataclasses.replace(packed, parameters=parameters), NO_LINEARS
    return packed, modulation, stored, stored_bytes


def run_shape(config: RunConfig, family: Family, *, bytes_per_value: int) -> Shape:
    """One micro-batch of the run; buckets of other aspects have about the same area."""
    tokens, controls = config.data.max_sequence_length, _controls(config, family)
    if family.caption is not None:  # captions are not padded by the family's encoder
        tokens = padded_length(tokens + (controls * _CONTROL_TOKENS if family.text_sees_controls else 0))
    return Shape(
        batch_size=config.train.train_batch_size,
        width=config.data.resolution,
        height=config.data.resolution,
        text_tokens=tokens,
        bytes_per_value=bytes_per_value,
        controls=controls,
    )


def _activations(
    family: Family,
    config: RunConfig,
    model_config: Mapping[str, Any],
    shape: Shape,
    repeated: Sequence[Stack],
    adapter: Kept,
) -> tuple[Activations, Activations]:
    """Activations of a micro-batch, eager and compiled, from the family's counts."""
    linear_inputs = config.method == "full" or config.lora.target_modules != _ATTENTION_PRESET
    talks = family.sample_kind == "conversation"
    planned = functools.partial(
        activations,
        counted(family.counted_as(model_config)),
        {stack.name: stack.blocks for stack in repeated},
        activation_units(family, model_config, shape),
        linear_inputs=linear_inputs,
        more=language.more_values(model_config, linear_inputs=linear_inputs) if talks else 0.0,
        head=head_bytes(family, model_config, shape),
        adapter=adapter,
    )
    return planned(compiled=False), planned(compiled=True)


def activation_units(family: Family, model_config: Mapping[str, Any], shape: Shape) -> Units:
    """Bytes of one value of every token of a micro-batch."""
    attention = family.attention_shape(model_config, shape)
    width = model_config.get("hidden_size", attention.heads * attention.head_width)
    value = width * shape.bytes_per_value
    return attention.batch_size * attention.tokens * value, shape.batch_size * shape.text_tokens * value


def head_bytes(family: Family, model_config: Mapping[str, Any], shape: Shape) -> int:
    """The most that a language model's logits take; 0 for others, whose heads are no larger than a block."""
    if family.sample_kind != "conversation":
        return 0
    tokens = min(shape.batch_size * shape.text_tokens, language.LOGITS_TOKENS)
    return int(tokens * model_config["vocab_size"] * _LOGIT_BYTES)


def _controls(config: RunConfig, family: Family) -> int:
    """Most control images of a sample: one for each folder, else as many as metadata.jsonl may name."""
    folders = (control_folders(one.control_dir) for one in config.data.sets)
    return max(len(found) or family.control_counts[1] for found in folders)


def roles(family: Family) -> dict[str, Role]:
    """Each component with weights and what it is for, first what trains."""
    found: dict[str, Role] = {family.trained_component: "trained"}
    found.update({name: "text_encoder" for name in family.encoder_components.get("text", ())})
    found.update({name: "vae" for name in family.encoder_components.get("latents", ())})
    return found


def _folder(model_folder: Path | None, component: str, downloads: bool) -> Path | None:
    """The base model's folder, None for a component whose download has not begun."""
    if model_folder is None or (downloads and not (model_folder / component / "config.json").exists()):
        return None
    return model_folder


def trained_config(family: Family, model_folder: Path | None, *, downloads: bool) -> Mapping[str, Any]:
    """`component_config` of what trains, as far as it is here."""
    name = family.trained_component
    return component_config(family, _folder(model_folder, name, downloads), name)


def component_config(family: Family, model_folder: Path | None, component: str) -> Mapping[str, Any]:
    """A component's config.json from the base model, else the family's committed one."""
    folder = CONFIGS / family.name if model_folder is None else model_folder
    return read_config(folder / component / "config.json")


def _components(
    family: Family, config: RunConfig, model_folder: Path | None, *, downloads: bool
) -> tuple[Mapping[str, Path | None], tuple[ComponentGeometry, ...]]:
    """(the folder that each component with weights is below, their sizes, first of what trains)."""
    folders = {name: _folder(model_folder, name, downloads) for name in roles(family)}
    sizes = (
        _component(family, config, folders[name], name, role, downloads=downloads)
        for name, role in roles(family).items()
    )
    return folders, tuple(sizes)


def _component(
    family: Family, config: RunConfig, model_folder: Path | None, name: str, role: Role, *, downloads: bool
) -> ComponentGeometry:
    """One component: headers of the files that are loaded, else what its config says."""
    table = functools.partial(component_shapes, None, family.name, name, role)
    if model_folder is None:
        return table()
    scratch = config.model.weights == "random"
    folder = model_folder / name
    # files of what trains from nothing are not read, and need not fit its config
    read = not (scratch and role == "trained")
    found = weight_files(folder)
    if read and found.state == "complete":
        base = config.model.pretrained_model_name_or_path
        return component_shapes(model_folder, family.name, name, role, base=base)
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


def _text_peak(components: Sequence[ComponentGeometry], tokens: int, size: int) -> int:
    """Activations of one caption in the widest text encoder."""
    widths = [
        shape[0]
        for part in components
        if part.role == "text_encoder"
        for name, shape in part.shapes.items()
        if len(shape) == 2 and not _OVER_THE_VOCABULARY.search(name)
    ]
    return _TEXT_UNITS * tokens * max(widths, default=0) * size


def _vae_peaks(
    family: Family, config: RunConfig, folders: Mapping[str, Path | None], size: int
) -> tuple[int, int]:
    """Activations of the VAE for the largest image of the run, whole and in tiles of its own sample size."""
    side = max(config.data.resolution, config.validation.resolution or 0)
    if family.control_counts[1]:
        side = max(side, _CONTROL_SIDE)
    names = family.encoder_components.get("latents", ())
    if not names:
        return 0, 0
    channels, tile = family.vae_shape(component_config(family, folders[names[0]], names[0]))
    unit = _VAE_UNITS * channels * size
    tile = min(side, tile)
    return int(unit * side * side), int(unit * tile * tile)
