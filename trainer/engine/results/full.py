"""The result of a full fine-tune: a folder in diffusers' layout; what was trained is read back and
compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open

from trainer.engine.context import Context
from trainer.engine.records.checkpoint import SHARD_BYTES
from trainer.engine.results.chat_files import write_chat_files
from trainer.engine.results.proof import LOWER_RATE, file_metadata
from trainer.errors import DataError, DivergedError
from trainer.families import components
from trainer.files import atomic
from trainer.files.weight_files import weight_files
from trainer.modeling.base.base import component_texts, is_repository, tokenizer_files
from trainer.modeling.tensor_file import Writable, require_whole, split_shards, take_part, write_files
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

if TYPE_CHECKING:
    from trainer.engine.optimizing.row_parameters import RowParameters

FOLDER = "model"
"""The folder of a run that has its result."""
_TEXTS = re.compile(r"(LICEN[CS]E|NOTICE)[\w.-]*|model_index\.json", re.IGNORECASE)
"""Files beside the components that hold for a model that was made from the base."""
_NOT_WRITTEN = "an older model stays, and so do the checkpoints: look at this disk, then start again"


def export_full(context: Context, model: Any, rows: RowParameters | None = None) -> tuple[Path, int]:
    """Write the folder `model/`, which loads as a base model does; proved as by `prove_full`, it replaces an
    older one. Gives it with the number of tensors that were read back.

    Of a model in rows (`rows`) all ranks call this: rank 0 writes, others give their rows of each tensor.

    The trained component is in `model/<component>/`: config.json, shards of at most 10 GB and their index.
    Configs, tokenizers and the scheduler of the base are copied beside it, and the weights that were not
    trained are links to the base's files.
    """
    target, component = context.run_dir / FOLDER, context.family.trained_component
    state = _written(model, rows)
    if not context.ranks.first:
        context.status.beat(Phase.SAVE)
        take_part(split_shards(state, SHARD_BYTES))
        count = prove_full(context, model, context.ranks.from_first(target), rows)
        return context.ranks.from_first(target), count
    require_whole(state, target, 0 if rows is None else rows.all_bytes)
    with atomic.whole_folder(target) as temporary:
        with atomic.no_space_told(temporary):
            if component:
                (temporary / component).mkdir()
                _write_others(context, temporary)
        _write_shards(context, model, state, temporary / component)
        count = prove_full(context, model, context.ranks.from_first(temporary), rows)
    return context.ranks.from_first(target), count


def _write_others(context: Context, target: Path) -> None:
    """The parts of the base besides the trained component."""
    source = context.source
    with atomic.reading_told(source.folder):
        beside = sorted(source.folder.iterdir())
    for file in beside:
        if file.is_file() and _TEXTS.fullmatch(file.name):
            atomic.copy_file(file, target / file.name)
    for name in components(context.family):
        if name == context.family.trained_component:
            continue
        (target / name).mkdir(parents=True)
        weights = () if name in source.random_components else weight_files(source.folder / name).files
        for file in component_texts(source.folder / name):
            atomic.copy_file(file, target / name / file.name)
        # links: a second copy of the text encoders would take as much room as they do. A link of a link would
        # be lost with the one between, but that of the hub's cache names repository, commit and file
        for file in weights:
            linked = file.absolute() if is_repository(context.config) else file.resolve()
            try:
                (target / name / file.name).symlink_to(linked)
            except OSError as error:
                context.say(f"{name}/{file.name} is not in the saved model: no link ({error.strerror})")


def _written(model: Any, rows: RowParameters | None) -> Mapping[str, Writable]:
    """The tensors of `saved_state`, whole."""
    state = saved_state(model)
    return state if rows is None else rows.whole_state({**state, **rows.own})


def _write_shards(context: Context, model: Any, state: Mapping[str, Writable], folder: Path) -> None:
    """Write the trained component as its library's own files are called."""
    from transformers import PreTrainedModel

    stem = "model" if isinstance(model, PreTrainedModel) else "diffusion_pytorch_model"
    metadata = {"format": "pt", **file_metadata(context)}
    shards = split_shards(state, SHARD_BYTES)
    suffixes = [f"-{number:05d}-of-{len(shards):05d}" for number in range(1, len(shards) + 1)]
    names = [f"{stem}{suffix if len(shards) > 1 else ''}.safetensors" for suffix in suffixes]
    files = {folder / name: shard for name, shard in zip(names, shards, strict=True)}
    write_files(files, metadata, lambda: context.status.beat(Phase.SAVE))
    weight_map = {tensor: path.name for path, shard in files.items() for tensor in shard}
    config = dict(context.source.component_config(context.family.trained_component))
    config.pop("quantization_config", None)
    if not context.family.trained_component:
        # transformers loads in the type that the config names, and would round
        config.pop("torch_dtype", None)
        config["dtype"] = str(context.dtype).removeprefix("torch.")
    texts = {"config.json": config}
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in state.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        texts[f"{stem}.safetensors.index.json"] = index
    for name, content in texts.items():
        atomic.write_text(folder / name, json.dumps(content, indent=1, sort_keys=True))
    if not context.family.trained_component:
        # the folder is the whole model: with its tokenizer it loads by itself
        for file in tokenizer_files(context.source.folder):
            atomic.copy_file(file, folder / file.name)
        write_chat_files(context.source, folder)


def saved_state(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors, tied ones once, as its library's files hold them."""
    every, once = ({n for n, _ in model.named_parameters(remove_duplicate=kind)} for kind in (False, True))
    return {name: tensor for name, tensor in model.state_dict().items() if name not in every - once}


def prove_full(context: Context, model: Any, folder: Path, rows: RowParameters | None = None) -> int:
    """Read every tensor back, compare it bit for bit with the model in memory; returns how many there are.

    Of a model in rows each rank reads and compares its own. Raises DivergedError for a value that is not
    finite, DataError for one that differs or is missing, on all ranks. They name a file by its place in the
    result: `folder` may be the one that is to become it.
    """
    return context.ranks.agreed(lambda: _proved(context, model, folder, rows))[0]


def _proved(context: Context, model: Any, folder: Path, rows: RowParameters | None) -> int:
    state = saved_state(model)
    seen = 0
    result = context.run_dir / FOLDER
    component = folder / context.family.trained_component
    for path in sorted(component.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                saved, trained = _compared(file, name, state, rows)
                where = str(result / path.relative_to(folder))
                if not bool(torch.isfinite(saved).all()):
                    raise DivergedError(f"{name} is not finite", where=where, remedy=LOWER_RATE)
                if trained is None or not torch.equal(saved.to(trained.device), trained):
                    what = f"{name} on disk is not what was trained"
                    raise DataError(what, where=where, remedy=_NOT_WRITTEN)
                context.status.beat(Phase.SAVE)
                seen += 1
    if seen != len(state):
        what = f"{numbered(len(state) - seen, 'tensor is', 'tensors are')} missing"
        raise DataError(what, where=str(result), remedy=_NOT_WRITTEN)
    return seen


def _compared(
    file: Any, name: str, state: Mapping[str, torch.Tensor], rows: RowParameters | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(saved, trained) values of a tensor, or of this rank's rows of it; None for one that is not trained."""
    if rows is None or name not in rows.rows:
        return file.get_tensor(name), state.get(name)
    part, trained, stored = rows.rows[name], rows.own[name].detach(), file.get_slice(name)
    if tuple(stored.get_shape()) != part.shape:
        return torch.zeros(()), None
    if not trained.numel():  # nothing of it is this rank's
        return trained, trained
    return stored[part.start : part.stop], trained
