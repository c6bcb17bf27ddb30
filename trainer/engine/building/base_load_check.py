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
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from PIL import Image

from trainer import families
from trainer.errors import AccessError, Problem
from trainer.families.draws import dynamic_shift
from trainer.families.family import Family
from trainer.files.component_shapes import header_shapes
from trainer.files.weight_files import read_header, weight_files
from trainer.modeling.base.load import renaming
from trainer.modeling.base.source import ModelSource
from trainer.modeling.base.structure import built_empty
from trainer.planning.base_check import INDEX, named_class
from trainer.planning.shapes.run_shapes import CONFIGS, roles
from trainer.words.plurals import numbered

# raised by the libraries' classes on configs and files that are not theirs
_REFUSED = (
    OSError, ValueError, TypeError, KeyError, AttributeError, IndexError, ArithmeticError, RuntimeError,
    AssertionError, ImportError, StrictDataclassError,
)  # fmt: skip
_PICTURE = (112, 112)
_WORDS = "a red apple on the table"
_REMEDY = "copy the component again; of a download delete what its files link to, run `trainer fetch CONFIG`"
_TOKENS = 4096  # a picture of 1024 x 1024
_ROUNDING = 1e-5
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
            f"{numbered(len(differing), 'tensor of its files has', 'tensors of its files have')} another"
            f" shape than its config says, first {first}:"
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
    """Noise levels of training and of previews, made as the families and pipelines make them."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    try:
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder)
        trained = scheduler.sigmas.clone()
        scheduler.set_timesteps(sigmas=[1.0, 0.5], mu=dynamic_shift(scheduler.config, _TOKENS))
    except _REFUSED as error:
        yield f"its config is not that of a scheduler ({_line(error)})"
        return
    if trained.numel() < 2 or not _are_levels(trained) or not bool(trained.all()):
        yield "its config gives no noise levels"
    elif not _are_levels(scheduler.sigmas):
        yield "its config gives no noise levels for previews"


def _are_levels(levels: torch.Tensor) -> bool:
    """True for finite shares of noise of which not all are equal."""
    low, high = levels.min().item(), levels.max().item()  # NaN is neither
    return low >= 0 and high <= 1 + _ROUNDING and low < high


class _Refusal(AbstractContextManager["_Refusal"]):
    """Ends its block at an error of the libraries' making, and holds it.

    The library behind tokenizers raises Exception itself for a tokenizer.json that is not one.
    """

    error: BaseException | None = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, _REFUSED) or kind is Exception:
            self.error = error
        return self.error is not None


def _tokenizer(family: Family, source: ModelSource, name: str) -> Iterator[str]:
    """A tokenizer without its vocabulary opens without a word, and reads every caption as nothing."""
    import transformers

    class_name = named_class(family, name) if name else "AutoTokenizer"
    ids, text = [], ""
    with _Refusal() as refusal:
        loaded: Any = getattr(transformers, class_name).from_pretrained(
            source.folder / name, local_files_only=True
        )
        reader = loaded
        if isinstance(loaded, transformers.ProcessorMixin):  # it reads pictures besides
            reader = loaded.tokenizer
            loaded.image_processor(images=[Image.new("RGB", _PICTURE)], return_tensors="pt")
        special = {reader.unk_token, *reader.all_special_tokens}
        # the library behind it ends without a class of error where there is no word at all
        if reader.get_vocab().keys() - special:
            ids = list(reader(_WORDS).input_ids)
            text = reader.decode([one for one in ids if reader.convert_ids_to_tokens(one) not in special])
            # a name that the vocabulary lacks becomes a token behind its last one; only encoders pad
            named = (reader.bos_token_id, reader.eos_token_id, reader.pad_token_id if name else None)
            ids += [one for one in named if one is not None]
    if refusal.error is not None:
        yield f"{class_name} cannot be opened ({_line(refusal.error)})"
        return
    if not any(letter.isalpha() for letter in text):
        yield f"it knows none of the words {_WORDS!r}: its vocabulary is missing"
        return
    encoder = source.folder / (name.replace("tokenizer", "text_encoder") if name else "")
    file = encoder / "config.json"
    config = json.loads(file.read_text()) if file.is_file() else {}
    # some say it of their language model alone
    size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    if isinstance(size, int) and max(ids) >= size:
        yield f"it gives the token {max(ids)}, and {encoder.name if name else 'the model'} knows {size}"


def _line(error: BaseException) -> str:
    """An error of a library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
