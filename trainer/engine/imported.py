"""Floor 6: latents and prompt embeddings that another trainer saved as `.pt` files, taken into the cache.

One file a sample, named as the image: `cat.pt` for `cat.png`, in the same sub-folders. Each is a dict of
tensors with `latents`, scaled as the model trains on them, (C, h, w) at the size of the image's bucket here,
and the family's own text tensors, such as `prompt_embeds` and `pooled_prompt_embeds`; both may have a leading
axis of one. Nothing is said in such a file of what made it: the entries stand for this run's encoders.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch

from trainer.data.leftout import capped
from trainer.data.records import ImageRecord
from trainer.engine.context import Context
from trainer.engine.entries import Entries
from trainer.errors import ConfigError, DataError, Problem
from trainer.families.protocol import Shape
from trainer.telemetry.status import Phase

_LATENTS = "latents"
_REMEDY = "leave it out of the folder, and the image is encoded here"
# what torch.load raises on files that are not what it wrote
_LOAD_ERRORS = (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, TypeError, OSError)


class _FileError(Exception):
    """One file that cannot be taken; says why."""


def import_entries(context: Context, entries: Entries, folder: Path) -> int:
    """Write the entries whose samples have a file in `folder`; gives the number of files that were taken.

    Entries that are there already keep their bytes. Raises DataError with every file that does not fit its
    image, before any is written, and ConfigError where files cannot say enough.
    """
    context.status.beat(Phase.CACHE)
    _require_plain(context, entries, folder)
    problems: list[Problem] = []
    files: dict[int, Path] = {}
    for number, entry in enumerate(entries.latents):
        name = entry.record.identifier.partition("/")[2]
        path = (folder / name).with_suffix(".pt")
        if not path.is_file():
            continue
        context.stop.raise_if_requested()
        files[number] = path
        try:
            _tensors(context, entry.record, path)
        except _FileError as error:
            problems.append(Problem(what=str(error), where=str(path), remedy=_REMEDY))
    if problems:
        raise DataError(capped(problems))
    if not files:
        what = "none of its .pt files has the name of an image"
        raise DataError(what, where=str(folder), remedy="name them as the images: cat.pt for cat.png")
    for number, path in files.items():
        context.stop.raise_if_requested()
        latents, text = _tensors(context, entries.latents[number].record, path)
        keys = ("latents", entries.latents[number].key), ("text", entries.texts[number].key)
        for (kind, key), tensors in zip(keys, (latents, text), strict=True):
            if not entries.cache.has(kind, key):
                entries.cache.write(kind, key, tensors)
        context.status.beat(Phase.CACHE)
    return len(files)


def _require_plain(context: Context, entries: Entries, folder: Path) -> None:
    """Raise ConfigError for what such files say nothing of."""
    records = [entry.record for entry in entries.latents]
    reasons = {
        "the family trains on conversations": not records,
        "the samples have control images": context.family.control_counts[1] > 0,
        "the sets ask for masks or other views": any(one.mask or one.view.key for one in records),
        "it is not a folder": not folder.is_dir(),
    }
    for what, applies in reasons.items():
        if applies:
            raise ConfigError(
                f"cannot be imported: {what}", where=str(folder), remedy="leave --import-pt out"
            )


def _tensors(
    context: Context, record: ImageRecord, path: Path
) -> tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]:
    """Tensors of the latents entry and the text entry. Raises _FileError."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _LOAD_ERRORS as error:
        raise _FileError(f"not a file of plain tensors ({str(error).splitlines()[0]:.120})") from error
    if not isinstance(loaded, dict) or not all(isinstance(one, torch.Tensor) for one in loaded.values()):
        raise _FileError("not a dict of tensors")
    family, data = context.family, context.config.data
    shape = Shape(
        batch_size=1,
        width=record.bucket_width,
        height=record.bucket_height,
        text_tokens=data.max_sequence_length,
        bytes_per_value=4,
    )
    config = context.source.component_config(family.trained_component)
    expected = family.synthetic_batch(config, shape, 0)
    if loaded.keys() != {_LATENTS, *expected.text}:
        names = ", ".join(sorted({_LATENTS, *expected.text}))
        raise _FileError(f"it holds {', '.join(map(str, sorted(loaded, key=str)))}, and {names} are needed")
    mean = expected.latents["mean"][0]
    latents = _fitting(_LATENTS, loaded[_LATENTS], mean, any_length=False).float()
    text = {
        name: _fitting(name, loaded[name], value[0], any_length=value.ndim == 3)
        for name, value in expected.text.items()
    }
    # what was saved is one draw, or the mode: there is nothing left to draw
    spread = {"std": torch.zeros_like(latents)} if "std" in expected.latents else {}
    return {"mean": latents, **spread}, text


def _fitting(name: str, found: torch.Tensor, wanted: torch.Tensor, *, any_length: bool) -> torch.Tensor:
    """The tensor without its axis of one, which must have the wanted shape but for the number of tokens."""
    one = found[0] if found.ndim == wanted.ndim + 1 and len(found) == 1 else found
    shapes = [tuple(tensor.shape[1:] if any_length else tensor.shape) for tensor in (one, wanted)]
    if one.ndim != wanted.ndim or shapes[0] != shapes[1]:
        raise _FileError(f"`{name}` is {tuple(found.shape)}, and {tuple(wanted.shape)} is needed")
    if any_length and len(one) > len(wanted):
        raise _FileError(f"`{name}` has {len(one)} tokens, data.max_sequence_length is {len(wanted)}")
    if not bool(one.isfinite().all()):
        raise _FileError(f"`{name}` has values that are not finite")
    return one.contiguous()
