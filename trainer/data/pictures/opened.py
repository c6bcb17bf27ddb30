"""Every picture of a data set, opened once to see that it can be read, in a few threads."""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType

from PIL import Image

from trainer.data.leftout import capped
from trainer.data.pictures.images import Measured, claimed_pixels, measure, read_bytes, read_mask
from trainer.data.records import Control
from trainer.errors import DataError, Problem

MIN_SIDE_PIXELS = 16
MAX_IMAGE_ASPECT = 3.0
"""Beyond this, the squarest cut of 2:1 would throw away more than a third of the picture."""

MOST_THREADS = 4
"""Threads that decode, which release the GIL; few, because each holds a whole decoded picture."""
LARGE_PIXELS = 40_000_000
"""Pictures of more are decoded one at a time: each takes 0.2 to 0.8 GB."""


def open_all(
    files: Iterable[Path],
    *,
    masks: Collection[Path] = (),
    known: Mapping[Path, Measured] = MappingProxyType({}),
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[Path, Measured], list[Problem]]:
    """Open every file once, those in `masks` as masks; gives (the usable ones, the faults of the others).

    Files in `known`, which were usable before and have not changed, are not opened. `progress(done, total)`
    runs in the calling thread and may raise to stop.
    """
    paths, as_masks = tuple(dict.fromkeys(files)), frozenset(masks)
    opened: dict[Path, Measured] = {}
    problems: list[Problem] = []
    one_at_a_time = threading.Lock()

    def one(path: Path) -> Measured | tuple[Problem, ...]:
        if path in known:
            return known[path]
        try:
            data = read_bytes(path)
            with one_at_a_time if claimed_pixels(data) > LARGE_PIXELS else contextlib.nullcontext():
                measured = measure(data, str(path))
                what, remedy = _unusable_mask(path) if path in as_masks else _unusable_size(measured)
        except DataError as error:
            return error.problems
        return (Problem(what=what, where=str(path), remedy=remedy),) if what else measured

    executor = ThreadPoolExecutor(max_workers=min(MOST_THREADS, os.cpu_count() or 1))
    try:
        # Pillow warns from 89 million pixels on and refuses at twice that; large photos are no reason to
        # warn, and odd metadata changes no pixel
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            warnings.simplefilter("ignore", UserWarning)
            for done, (path, result) in enumerate(zip(paths, executor.map(one, paths), strict=True), start=1):
                if isinstance(result, Measured):
                    opened[path] = result
                else:
                    problems += result
                if progress is not None:
                    progress(done, len(paths))
    finally:
        executor.shutdown(cancel_futures=True)
    return opened, problems


def measure_controls(paths: Sequence[Path]) -> tuple[Control, ...]:
    """Control images that are named by themselves. Raises one DataError with every problem."""
    opened, problems = open_all(paths)
    if problems:
        raise DataError(capped(problems))
    return tuple(control_of(path, opened[path]) for path in paths)


def control_of(path: Path, measured: Measured) -> Control:
    """A control image that was opened."""
    return Control(
        path=path,
        width=measured.width,
        height=measured.height,
        content_sha256=measured.content_sha256,
        colour=measured.colour,
    )


def _unusable_size(measured: Measured) -> tuple[str, str]:
    """Why a picture of that size is not trained on, and what to do; empty for any other."""
    sides = (measured.width, measured.height)
    size = f"the picture has {sides[0]}x{sides[1]} pixels"
    if min(sides) < MIN_SIDE_PIXELS:
        return f"{size}, less than {MIN_SIDE_PIXELS} on a side", "use a larger picture, or remove it"
    if max(sides) > MAX_IMAGE_ASPECT * min(sides):
        what = f"{size}, more than {MAX_IMAGE_ASPECT:g} times as long as wide"
        return what, "crop it to what matters, or remove it"
    return "", ""


def _unusable_mask(path: Path) -> tuple[str, str]:
    """Why a mask of those values is of no use, and what to do; empty for any other."""
    _, brightest = read_mask(path).getextrema()
    if brightest not in (0, 1):
        return "", ""
    # ones and zeros are what programs write that mean yes and no
    found = "nowhere brighter than 1 of 255" if brightest else "black everywhere"
    return f"the mask is {found}: nothing would be learned", "paint white (255) what counts"
