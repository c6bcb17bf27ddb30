"""Pictures of entries, read from their files and cut, ahead of the encoders that wait for them."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from PIL import Image

from trainer.data.pictures import opened
from trainer.data.pictures.images import fit, read_image, to_pixels
from trainer.data.sets.masks import mask_pixels
from trainer.engine.ahead import in_turn
from trainer.engine.caching.entries import ControlView, Entry, TextEntry, control_views

if TYPE_CHECKING:
    import torch

_one_large = threading.Lock()


class Pictures(NamedTuple):
    """Everything of an entry that is read from pictures; none of a conversation, or of a caption alone."""

    seen: tuple[Image.Image, ...] = ()
    """Control images that the text encoder sees."""
    pixels: torch.Tensor | None = None
    """The picture at its bucket, (3, H, W) in [-1, 1]."""
    controls: tuple[torch.Tensor, ...] = ()
    """Control images beside it, (3, H, W) each."""
    mask: torch.Tensor | None = None
    """Its part that the loss counts, (1, H, W) in [0, 1]."""


ControlSize = Callable[[int, int], tuple[int, int]]
"""Width and height of a control image -> those that the family's pipeline gives it."""


def read_pictures(entry: Entry, control_size: ControlSize) -> Pictures:
    """The pictures of one entry. Raises DataError for a file that has changed or cannot be decoded."""
    if isinstance(entry, TextEntry):
        return Pictures(seen=tuple(_control_image(view) for view in entry.controls))
    record, controls = entry.record, []
    with _turn(record.width * record.height):
        picture = read_image(record.path, content_sha256=record.content_sha256)
        pixels = to_pixels(fit(picture, record.bucket_width, record.bucket_height, record.view))
        del picture
        mask = None if record.mask is None else mask_pixels(record)
    for view in control_views(record):
        control = _control_image(view)
        if view.crop is None:  # whole: of the size that the family's pipeline gives it
            control = control.resize(control_size(*control.size), Image.Resampling.LANCZOS)
        controls.append(to_pixels(control))
    return Pictures(pixels=pixels, controls=tuple(controls), mask=mask)


def read_ahead(
    entries: Sequence[Entry], read: Callable[[Entry], Pictures], *, threads: int = opened.MOST_THREADS
) -> Generator[tuple[Entry, Pictures], None, None]:
    """Each entry with its pictures, in order, while threads read those of the next ones.

    What `read` raises is raised in its entry's turn. Entries without pictures wait for no thread.
    """
    work = ((entry, functools.partial(read, entry) if _has_pictures(entry) else None) for entry in entries)
    found = in_turn(work, threads=min(threads, os.cpu_count() or 1), ahead=threads, name="pictures")
    # decoders set the process' filters aside for a moment, which threads may undo in another order
    with warnings.catch_warnings(), contextlib.closing(found):
        for entry, pictures in found:
            yield entry, Pictures() if pictures is None else pictures


def _has_pictures(entry: Entry) -> bool:
    return not isinstance(entry, TextEntry) or bool(entry.controls)


def _control_image(view: ControlView) -> Image.Image:
    """A control image as the encoders see it: cut as its target is, or whole."""
    with _turn(view.control.width * view.control.height):
        picture = read_image(view.control.path, content_sha256=view.control.content_sha256)
        if view.crop is not None:
            return fit(picture, *view.crop, view.view)
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.view.flip else picture


def _turn(pixels: int) -> contextlib.AbstractContextManager[object]:
    """The turn to decode a picture: of large ones one at a time."""
    return _one_large if pixels > opened.LARGE_PIXELS else contextlib.nullcontext()
