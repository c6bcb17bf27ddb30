"""The base model judged by its own libraries, before minutes of loading and hours of training.

Every component with weights is built on the meta device and compared with its files' headers, tokenizers and
the scheduler are opened: some seconds, whatever the model's size.
"""

from __future__ import annotations

import heapq
import importlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from trainer import families
from trainer.errors import AccessError, Problem
from trainer.families.family import Family
from trainer.files.component_shapes import header_shapes
from trainer.files.weight_files import read_header, weight_files
from trainer.modeling.base.load import renaming
from trainer.modeling.base.source import ModelSource
from trainer.modeling.base.structure import built_empty
from trainer.planning.base_check import INDEX, named_class
from trainer.planning.shapes.run_shapes import CONFIGS, roles

# raised by the libraries' classes on configs and files that are not theirs
_REFUSED = (
    OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RuntimeError,
    AssertionError, ImportError, StrictDataclassError,
)  # fmt: skip
_WORDS = "a red apple on the table"
_REMEDY = "copy the component again, or run `trainer fetch` for a repository"
# of a file: enough to tell weights from a file that was made and never filled
_SAMPLED_TENSORS, _SAMPLED_BYTES = 16, 64 * 1024


def check_loadable(family: Family, source: ModelSource) -> None:
    """Raise one AccessError with every component that would not load, or would load as something else."""
    problems: list[Problem] = []
    for name in families.components(family):
        has_weights = name in roles(family)
        faults = [*_weights(family, source, name)] if has_weights else []
        if name == "scheduler":
            faults += _scheduler(source.folder / name)
        elif not name or not has_weights:  # the folder of a language model holds its tokenizer as well
            faults += _tokenizer(family, source, name)
        where = str(source.folder / name)
        problems += [Problem(what=fault, where=where, remedy=_REMEDY) for fault in faults]
    if problems:
        raise AccessError(problems)


# ---- weights


def _weights(family: Family, source: ModelSource, name: str) -> Iterator[str]:
    """A component's class, its config and its files must be of one model."""
    folder, class_name = source.folder / name, named_class(family, name)
    index = json.loads((CONFIGS / family.name / INDEX).read_text()) if name else {}
    library = str(index[name][0]) if name else "transformers"
    try:
        component_class = getattr(importlib.import_module(library), class_name)
        module = built_empty(component_class, folder, torch.bfloat16)
    except _REFUSED as error:
        yield f"{class_name} cannot be built from its config ({_line(error)})"
        return
    # a component that is stored quantised has shapes of its own, which its loader knows
    foreign = name != family.trained_component and "quantization_config" in source.component_config(name)
    if name not in source.random_components and not foreign:
        yield from _files(folder, module)


def _files(folder: Path, module: torch.nn.Module) -> Iterator[str]:
    """Shapes by the files' headers against the module's, and whether anything is in the files."""
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    rename = renaming(module)
    files = weight_files(folder).files
    found = {rename(name): shape for name, shape in header_shapes(files).items()}
    kind = type(module).__name__
    if not wanted.keys() & found.keys():
        yield f"none of the {len(found)} tensors of its files belongs to a {kind}"
        return
    differing = [name for name, shape in found.items() if wanted.get(name, shape) != shape]
    if differing:
        first = differing[0]
        is_not = [" x ".join(map(str, held[first])) or "one value" for held in (found, wanted)]
        yield (
            f"{len(differing)} tensors of its files have another shape than its config says, first {first}:"
            f" {', not '.join(is_not)}"
        )
    for file in files:
        if _is_empty(file):
            yield f"{file.name} holds nothing but zeros"


def _is_empty(file: Path) -> bool:
    """True if the largest tensors of a file are zeros, judged by their first bytes."""
    header = read_header(file)
    with file.open("rb") as stream:
        sizes = {name: math.prod(entry["shape"]) for name, entry in header.tensors.items()}
        largest = heapq.nlargest(_SAMPLED_TENSORS, sizes, key=sizes.__getitem__)
        for name in largest:
            begin, end = header.tensors[name]["data_offsets"]
            stream.seek(header.start + begin)
            if any(stream.read(min(end - begin, _SAMPLED_BYTES))):
                return False
    return bool(largest)


# ---- components without weights


def _scheduler(folder: Path) -> Iterator[str]:
    from diffusers import FlowMatchEulerDiscreteScheduler

    try:
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder)
        levels = scheduler.sigmas
    except _REFUSED as error:
        yield f"its config is not that of a scheduler ({_line(error)})"
        return
    if levels.numel() < 2 or not bool(torch.isfinite(levels).all()):
        yield "its config gives no noise levels"


def _tokenizer(family: Family, source: ModelSource, name: str) -> Iterator[str]:
    """A tokenizer without its vocabulary opens without a word, and reads every caption as nothing."""
    import transformers

    class_name = named_class(family, name) if name else "AutoTokenizer"
    try:
        loaded: Any = getattr(transformers, class_name).from_pretrained(
            source.folder / name, local_files_only=True
        )
        # a processor reads pictures besides
        reader = loaded.tokenizer if isinstance(loaded, transformers.ProcessorMixin) else loaded
        special = {reader.unk_token, *reader.all_special_tokens}
        ids, text = [], ""
        # the library behind it ends without a class of error where there is no word at all
        if reader.get_vocab().keys() - special:
            ids = list(reader(_WORDS).input_ids)
            text = reader.decode([one for one in ids if reader.convert_ids_to_tokens(one) not in special])
    except _REFUSED as error:
        yield f"{class_name} cannot be opened ({_line(error)})"
        return
    if not any(letter.isalpha() for letter in text):
        yield f"it knows none of the words {_WORDS!r}: its vocabulary is missing"
        return
    encoder = source.folder / (name.replace("tokenizer", "text_encoder") if name else "")
    file = encoder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    # some say it of their language model alone
    size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    if isinstance(size, int) and max(ids) >= size:
        yield f"it gives the token {max(ids)}, and {encoder.name or 'the model'} knows {size}"


def _line(error: BaseException) -> str:
    """An error of a library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
