"""Latents and prompt embeddings that another trainer saved as `.pt` files, taken into the cache.

One file a sample, named as the image: `cat.pt` for `cat.png`, in the same sub-folders. Each is a dict of
tensors with `latents`, scaled as the model trains on them, (C, h, w) at the size of the image's bucket here,
and the family's own text tensors, such as `prompt_embeds` and `pooled_prompt_embeds`; both may have a leading
axis of one. Nothing is said in such a file of what made it: the entries stand for this run's encoders.
"""

from __future__ import annotations

import logging
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.data.leftout import MAX_PROBLEMS_SHOWN, capped
from trainer.data.records import ImageRecord
from trainer.engine.caching.entries import Entries, Entry
from trainer.engine.context import Context
from trainer.errors import ConfigError, DataError, Problem, one_line
from trainer.families.values import Shape
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

_LATENTS = "latents"
# raised by torch.load on files that it did not write
_LOAD_ERRORS = (
    pickle.UnpicklingError, RuntimeError, EOFError, ValueError, LookupError, TypeError, OSError, struct.error,
    AssertionError, AttributeError, ArithmeticError,
)  # fmt: skip
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_log = logging.getLogger(__name__)


def import_entries(context: Context, entries: Entries, folder: Path) -> None:
    """Write the entries whose samples have a file in `folder`, and tell how many, and files without one.

    Entries that are there already keep their bytes. Raises DataError with every file that does not fit its
    image, before any is written, and ConfigError where files cannot say enough.
    """
    _require_plain(context, entries, folder)
    # the set's own folder has no part in the name of an image's file
    paths = [
        (folder / entry.record.identifier.partition("/")[2]).with_suffix(".pt") for entry in entries.latents
    ]
    files = {number: path for number, path in enumerate(paths) if path.is_file()}
    if not files:
        what = "none of its .pt files has the name of an image"
        raise DataError(what, where=str(folder), remedy="name them as the images: cat.pt for cat.png")
    problems: list[Problem] = []
    firsts: dict[Path, ImageRecord] = {}
    for number, path in files.items():
        context.alive(Phase.CACHE)
        record = entries.latents[number].record
        first = firsts.setdefault(path, record)
        try:
            # images of two sets, or one that is held out, may have the file's name
            if (record.content_sha256, record.caption) != (first.content_sha256, first.caption):
                raise _refused(path, f"it may be of {first.path} or of {record.path}")
            _tensors(context, record, path)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(capped(problems))
    kept = 0
    for number, path in files.items():
        context.alive(Phase.CACHE)
        both: tuple[Entry, Entry] = entries.latents[number], entries.texts[number]
        for entry, tensors in zip(both, _tensors(context, entries.latents[number].record, path), strict=True):
            if entries.cache.has(entry.kind, entry.key):
                kept += 1
            else:
                entries.cache.write(entry.kind, entry.key, tensors)
    taken = frozenset(files.values())
    written = numbered(2 * len(files) - kept, "entry", "entries")
    said = f"imported {numbered(len(taken), 'file')} from {folder}: {written} written"
    context.say(f"{said}, {kept} were there before and stay" if kept else said)
    others = sorted(str(path) for path in folder.rglob("*.pt") if path not in taken)
    if others:
        shown = [
            *map(one_line, others[:MAX_PROBLEMS_SHOWN]),
            *(["..."] if len(others) > MAX_PROBLEMS_SHOWN else []),
        ]
        _log.warning("%d .pt files have the name of no image:\n%s", len(others), "\n".join(shown))


def _require_plain(context: Context, entries: Entries, folder: Path) -> None:
    """Raise ConfigError for samples that such files do not describe fully."""
    records = [entry.record for entry in entries.latents]
    reasons = {
        "the family trains on conversations": not records,
        "the samples have control images": context.family.control_counts[1] > 0,
        "the sets ask for masks or other views": any(one.mask or one.view.key for one in records),
        "it is not a folder": not folder.is_dir(),
    }
    for what, applies in reasons.items():
        if applies:
            what = f"cannot be imported: {what}"
            raise ConfigError(what, where=str(folder), remedy="leave --import-pt out")


def _tensors(
    context: Context, record: ImageRecord, path: Path
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Tensors of the latents entry and the text entry. Raises DataError."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise _refused(path, f"not a file of plain tensors ({reason:.120})") from error
    if not isinstance(loaded, dict) or not all(isinstance(one, torch.Tensor) for one in loaded.values()):
        raise _refused(path, "not a dict of tensors")
    family, size = context.family, {"width": record.bucket_width, "height": record.bucket_height}
    tokens = context.config.data.max_sequence_length
    shape = Shape(batch_size=1, **size, text_tokens=tokens, bytes_per_value=4)
    expected = family.synthetic_batch(context.source.component_config(family.trained_component), shape, 0)
    if loaded.keys() != {_LATENTS, *expected.text}:
        names = ", ".join(sorted({_LATENTS, *expected.text}))
        raise _refused(
            path, f"it holds {', '.join(map(str, sorted(loaded, key=str)))}, and {names} are needed"
        )
    mean = expected.latents["mean"][0]
    latents = _fitting(path, _LATENTS, loaded[_LATENTS], mean, any_length=False).float()
    text = {
        name: _fitting(path, name, loaded[name], value[0], any_length=value.ndim == 3)
        for name, value in expected.text.items()
    }
    # the file holds one draw, or the mode: there is nothing left to draw
    spread = {"std": torch.zeros_like(latents)} if "std" in expected.latents else {}
    return {"mean": latents, **spread}, text


def _fitting(
    path: Path, name: str, found: torch.Tensor, wanted: torch.Tensor, *, any_length: bool
) -> torch.Tensor:
    """The tensor without its axis of one, which must have the wanted shape but for the number of tokens."""
    if found.dtype not in _DTYPES or found.layout != torch.strided or found.is_meta:
        raise _refused(path, f"`{name}` is {found.dtype}, and plain floating point values are needed")
    one = found[0] if found.ndim == wanted.ndim + 1 and len(found) == 1 else found
    shapes = [tuple(tensor.shape[1:] if any_length else tensor.shape) for tensor in (one, wanted)]
    if one.ndim != wanted.ndim or shapes[0] != shapes[1]:
        raise _refused(path, f"`{name}` is {tuple(found.shape)}, and {tuple(wanted.shape)} is needed")
    if any_length and not 0 < len(one) <= len(wanted):
        raise _refused(path, f"`{name}` has {len(one)} tokens, data.max_sequence_length is {len(wanted)}")
    if not bool(one.isfinite().all()):
        raise _refused(path, f"`{name}` has values that are not finite")
    return one.detach().contiguous()


def _refused(path: Path, what: str) -> DataError:
    """The error of one file that cannot be taken."""
    return DataError(
        what, where=str(path), remedy="leave it out of the folder, and the image is encoded here"
    )
