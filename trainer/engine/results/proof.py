"""LoRA files, and the proof that a file does what training did: loaded from disk, outputs are equal."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trainer import __version__
from trainer.config.secrets import redacted
from trainer.engine.caching.batches import synthetic
from trainer.engine.context import Context
from trainer.engine.results.chat_files import write_chat_files
from trainer.engine.results.file_check import check_file, grows
from trainer.engine.results.no_effect import NoEffectError
from trainer.errors import DataError, DivergedError
from trainer.families.family import Family
from trainer.families.values import Shape
from trainer.files import atomic
from trainer.files.adapter_kind import adapter_kind
from trainer.files.safetensors import HeaderError, read_header
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.comfyui import by_module, write_comfyui
from trainer.modeling.storage.stored import StoredLinear
from trainer.modeling.tensor_file import rewrite_sorted
from trainer.telemetry.run_folder.results import PROOF_SUFFIX
from trainer.words.plurals import numbered

TOLERANCE: dict[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 1e-3, torch.float16: 1e-3}
"""Largest relative difference between the trained model and the one loaded from the file."""
_SEED = 20_240_801
_INPUTS = 2
TRAIN_MORE = "train more steps, or raise train.learning_rate"
LOWER_RATE = "lower train.learning_rate, and look at the losses in metrics.jsonl"
_MOST_SIDE, _MOST_TOKENS = 512, 512
"""Size of the inputs. A language model's output is tokens x vocabulary: a full row would be gigabytes."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """Measured differences; they are relative: ||a - b|| / ||b||."""

    reload_error: float
    """Trained adapter against the adapter loaded from the file; how exactly the file carries it."""
    effect: float
    """Loaded adapter against no adapter."""
    layers: int

    def __str__(self) -> str:
        return (
            f"reloaded from disk, outputs equal within {self.reload_error:.1e}; "
            f"changes the model's output by {100 * self.effect:.3g} %;"
            f" {numbered(self.layers, 'layer')}, all finite"
        )


def fixed_outputs(context: Context, model: Any) -> list[torch.Tensor]:
    """The model's predictions, fp32 on the CPU, for two fixed inputs that need no data set."""
    data, multiple = context.config.data, context.family.pixel_multiple
    side = min(data.resolution, _MOST_SIDE) // multiple * multiple
    tokens = min(data.max_sequence_length, _MOST_TOKENS)
    shape = Shape(batch_size=1, width=side, height=side, text_tokens=tokens, bytes_per_value=4)
    outputs = []
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for number in range(_INPUTS):
            batch, draw = synthetic(context, shape, seed=_SEED + number, position=number)
            outputs.append(context.family.predict(model, batch, draw, context.settings).float().cpu())
    model.train(was_training)
    return outputs


def relative_difference(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> float:
    """Largest ||left - right|| / ||right|| over pairs; NaN where a value is not finite."""
    differences = [
        (a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)
        for a, b in zip(left, right, strict=True)
    ]
    return float(torch.stack(differences).max().item())


def export_lora(context: Context, model: Any, step: int) -> tuple[Path, Path | None, Proof]:
    """Write the LoRA into `lora/` through the family's pipeline, proved first, then its ComfyUI twin if any.

    Layers that compute together are parted before. Files of an earlier run stay until the new ones are
    proved; what is proved stays whatever becomes of its twin. The proof's file has the figures and the `step`
    that the adapter is of. Raises DivergedError for an adapter that is not
    finite or is zero, as `prove_lora`, and StorageError.
    """
    _part(context, model)
    state = lora.adapter_state(model)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in state.values()):
        raise DivergedError("the trained LoRA is not finite", where=str(context.run_dir), remedy=LOWER_RATE)
    if not any(bool(tensor.any()) for name, tensor in state.items() if grows(name)):
        what = "the trained LoRA is zero: it changes nothing"
        raise NoEffectError(what, where=str(context.run_dir), remedy=TRAIN_MORE)
    folder = context.run_dir / "lora"
    temporary = context.run_dir / "lora.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with atomic.no_space_told(folder):
            temporary.mkdir(parents=True)
            folder.mkdir(exist_ok=True)
        path = write_lora(context, model, temporary)
        proof = prove_lora(context, model, path, where=context.run_dir)
        figures = json.dumps({**asdict(proof), "step": step}, indent=1, sort_keys=True) + "\n"
        atomic.write_text(path.with_suffix(PROOF_SUFFIX), figures)
        # it belongs to another LoRA from here on
        (folder / path.with_suffix(".comfyui.safetensors").name).unlink(missing_ok=True)
        renamed = not (folder / path.name).exists()
        _move(temporary, folder)
        if renamed:
            _remove_renamed(context, folder, path.name)
        comfyui = write_twin(context, model, temporary)
        _move(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        with contextlib.suppress(OSError):  # what is proved is in it, mostly
            folder.rmdir()
    return folder / path.name, None if comfyui is None else folder / comfyui.name, proof


def _remove_renamed(context: Context, folder: Path, name: str) -> None:
    """Remove the LoRA of fewer steps that this run left here before its folder was renamed: the file `name`
    replaces it. Files that are not this run's by their metadata stay, and all where several are: of these one
    is a copy of somebody's.
    """
    ours, found = _of_any_step(file_metadata(context)), list[Path]()
    for proof in folder.glob(f"*{PROOF_SUFFIX}"):
        older = folder / f"{proof.name.removesuffix(PROOF_SUFFIX)}.safetensors"
        if older.name == name or not older.is_file():
            continue
        try:
            theirs = _of_any_step(read_header(older).metadata)
        except HeaderError:
            continue
        if theirs.items() >= ours.items():
            found.append(older)
    if len(found) != 1:
        return
    (older,) = found
    with atomic.no_space_told(folder):
        for file in (older.with_suffix(".comfyui.safetensors"), older.with_suffix(PROOF_SUFFIX), older):
            file.unlink(missing_ok=True)
    context.say(f"{name} replaces {older.name}, which this run left under its folder's earlier name")


def _of_any_step(metadata: Mapping[str, str]) -> dict[str, str]:
    """Metadata of a LoRA's file without what another start of its run may change."""
    return {
        key: value for key, value in metadata.items() if key not in ("max_train_steps", "trainer_version")
    }


def _part(context: Context, model: Any) -> None:
    """Part layers that compute together: a proof is about the plain model that others load the file into."""
    if context.plan.compile:
        # peft must not be imported before torchvision can be, see quiet_libraries
        from trainer.modeling.adapter.joined_lora import part_siblings

        part_siblings(model)


def take_back(context: Context, model: Any, path: Path) -> None:
    """Put the adapter of the exported file in the place of the trained one, as `export_lora` leaves it."""
    _part(context, model)
    lora.remove_lora(model)
    load_lora(context, model, path)


def _move(source: Path, folder: Path) -> None:
    with atomic.no_space_told(folder):
        for file in sorted(source.iterdir()):
            file.replace(folder / file.name)
        atomic.sync_directory(folder)


def write_lora(context: Context, model: Any, folder: Path, name: str = "") -> Path:
    """Write the adapter on `model` into `folder`, not proved, with the tokenizer of a chat template that the
    run names. The file has the `name` of the run's folder if none is given. Raises StorageError.
    """
    write_chat_files(context.source, folder)
    state, config = lora.adapter_state(model), lora.adapter_config(model)
    path = folder / f"{name or context.run_dir.resolve().name}.safetensors"
    return save_adapter(context.family, state, config, file_metadata(context), path)


def write_twin(context: Context, model: Any, folder: Path, name: str = "") -> Path | None:
    """Write the adapter on `model` into `folder` as ComfyUI reads it, named as by `write_lora`. Raises
    StorageError, and DataError where it reads back otherwise.

    None where ComfyUI takes no LoRA of the family, or has no name for one of its layers, which is said.
    """
    family, state = context.family, lora.adapter_state(model)
    if family.comfyui is None:
        return None
    nameless = [module for module in by_module(state) if family.comfyui_keys(module) is None]
    if nameless:
        context.say(
            f"no file for ComfyUI: it has no name for {numbered(len(nameless), 'layer')}, first {nameless[0]}"
        )
        return None
    path = folder / f"{name or context.run_dir.resolve().name}.comfyui.safetensors"
    write_comfyui(
        state,
        path,
        file_metadata(context),
        config=lora.adapter_config(model),
        key_of=family.comfyui_keys,
        weight_of=lambda module: model.get_submodule(module).get_base_layer().weight,
        swapped=family.comfyui_swaps,
    )
    return path


def save_adapter(
    family: Family,
    state: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    metadata: Mapping[str, str],
    path: Path,
) -> Path:
    """Write an adapter as the family's library does, with equal bytes for equal tensors; returns the file.

    `config` is peft's; a language model's file has PEFT's name in place of `path`'s. Raises StorageError.
    """
    try:
        written = family.save_adapter(state, config, path.parent, path.name)
    except SafetensorError as error:
        # the library has no error class for a full or failing disk
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        with atomic.no_space_told(path):
            raise OSError(int(found[1]), str(error)) from error
    rewrite_sorted(written, metadata)
    return written


def file_metadata(context: Context) -> dict[str, str]:
    """Metadata of a saved file: its base model and how it was trained. No path, time or host."""
    config, source = context.config, context.source
    metadata = {
        "family": config.family,
        "base_model": source.identity,
        "base_revision": source.revision or "",
        "base_weights": source.weights,
        "max_train_steps": str(config.train.max_train_steps),
        "seed": str(config.train.seed),
        "trainer_version": __version__,
    }
    metadata |= {"trigger_word": config.data.trigger_word} if config.data.trigger_word else {}
    return {name: redacted(value) for name, value in metadata.items()}


def prove_lora(
    context: Context,
    model: Any,
    path: Path,
    *,
    untouched: Sequence[torch.Tensor] | None = None,
    where: Path | None = None,
) -> Proof:
    """Take the adapter off, load the file onto the same base, compare; the file's adapter stays on.

    Errors name `where`, the file itself if it is not given. `untouched` are outputs of the base before it had
    any adapter, which it must give again without one.
    Raises DivergedError for NaN or a zero adapter, DataError when the file does not carry what was trained.
    """
    layers, tolerance, named = check_file(path), TOLERANCE[context.dtype], str(where or path)
    trained = fixed_outputs(context, model)
    lora.remove_lora(model)
    base = fixed_outputs(context, model)
    load_lora(context, model, path)
    loaded = fixed_outputs(context, model)
    reload_error, effect = relative_difference(loaded, trained), relative_difference(loaded, base)
    if untouched is not None:
        reload_error = max(reload_error, relative_difference(base, untouched))
    if math.isnan(reload_error) or math.isnan(effect):
        raise DivergedError(
            "the model's output with the saved LoRA is not finite", where=named, remedy=LOWER_RATE
        )
    if reload_error > tolerance:
        raise DataError(
            f"loaded from disk, the LoRA gives other outputs (relative difference {reload_error:.2e}, "
            f"allowed {tolerance:.0e})",
            where=named,
            remedy="this is a defect of the trainer: please report it; the checkpoints stay",
        )
    require_effect(effect, "the LoRA does not change the model's output", named)
    return Proof(reload_error=reload_error, effect=effect, layers=layers)


def require_effect(effect: float, unchanged: str, where: str) -> None:
    """Raise DivergedError where the model's output is moved to what is no number, NoEffectError where it is
    moved by nothing: that is `unchanged` in words.
    """
    if not math.isfinite(effect):
        raise DivergedError("the model's output is not finite", where=where, remedy=LOWER_RATE)
    if effect == 0.0:
        raise NoEffectError(unchanged, where=where, remedy=TRAIN_MORE)


def load_lora(context: Context, model: Any, path: Path) -> None:
    """Put the file's adapter on, in the type it was trained in: FP8 products magnify any other rounding.

    Raises DataError for a DoRA or a LoKr on a base that is not stored as numbers: both read its weights.
    """
    header = read_header(path)
    if (kind := adapter_kind(header.tensors)) != "lora":
        stored = next((one.kind for one in model.modules() if isinstance(one, StoredLinear)), "")
        if stored:
            raise DataError(
                f"it is a {kind}, which reads the base's weights, and they are stored in {stored}",
                where=str(path),
                remedy=f"load the base with lora.type: {kind}, which leaves its weights as they are",
            )
    context.family.load_adapter(model, path)
    lora.to_model_type(model)


def require_written(path: Path, model: Any) -> None:
    """Read a file back: finite, not zero in all, and the adapter on `model` bit for bit, under whatever names
    its library gives. Raises DataError.
    """
    check_file(path)
    state = lora.adapter_state(model)
    written, trained = (Counter(map(_values, one.values())) for one in (load_file(path), state))
    if written != trained:
        count = (trained - written).total()
        differ = numbered(count, "tensor read back from disk differs", "tensors read back from disk differ")
        raise DataError(f"{differ} from the trained ones", where=str(path))


def _values(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
