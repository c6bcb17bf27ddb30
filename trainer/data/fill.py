"""Encode what the cache lacks, one kind of encoder at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from trainer.data.cache import Cache, entry_key
from trainer.data.pictures.images import CROP_VERSION
from trainer.data.records import CENTRED, ImageRecord, Record, View
from trainer.data.sets.masks import MASK_VERSION
from trainer.errors import DivergedError

if TYPE_CHECKING:
    import torch


KINDS = ("text", "latents")
"""Order in which kinds are encoded: each one's encoders are gone before the next ones load."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ControlView:
    """A control image as an entry sees it."""

    path: Path
    content_sha256: str
    crop: tuple[int, int] | None
    """Width and height of the bucket that it is cut to as the target is; None: whole, of its own aspect."""
    view: View = CENTRED
    colour: str = ""

    @property
    def key(self) -> str:
        """What identifies its pixels."""
        crop = "" if self.crop is None else f"{self.crop[0]}x{self.crop[1]}"
        return " ".join(part for part in (self.content_sha256, crop, self.view.key, self.colour) if part)


def control_views(record: Record) -> tuple[ControlView, ...]:
    """The control images of a sample: those of the target's size are cut as the target is."""
    if not isinstance(record, ImageRecord):
        return ()
    bucket = (record.bucket_width, record.bucket_height)
    return tuple(
        ControlView(
            path=control.path,
            content_sha256=control.content_sha256,
            crop=bucket if record.crops_alike(control) else None,
            # a whole control is mirrored with its target, and has no cut to move
            view=record.view if record.crops_alike(control) else View(flip=record.view.flip),
            colour=control.colour,
        )
        for control in record.controls
    )


@dataclass(frozen=True, kw_only=True)
class TextEntry:
    """A caption or conversation to encode. The empty caption is an entry like any other."""

    key: str
    caption: str
    controls: tuple[ControlView, ...] = ()
    """Those that the text encoder is shown."""
    prompt: bool = False
    """Of a preview, where that is encoded in another way."""
    kind: str = "text"

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"caption {self.caption!r:.80}"


@dataclass(frozen=True, kw_only=True)
class LatentsEntry:
    """An image to encode at its bucket's size."""

    key: str
    record: ImageRecord
    kind: str = "latents"

    @property
    def name(self) -> str:
        """How messages call it."""
        return str(self.record.path)


Entry = TextEntry | LatentsEntry


class Encode(Protocol):
    """Loaded encoders of one kind: an entry's tensors on the CPU."""

    def __call__(self, entry: Entry) -> Mapping[str, torch.Tensor]: ...


class OpenEncoders(Protocol):
    """Loads the encoders of a kind on entering, frees them on leaving; called only if one is needed."""

    def __call__(self, kind: str) -> AbstractContextManager[Encode]: ...


@dataclass(frozen=True, kw_only=True)
class FillReport:
    """What `fill` did, in entries."""

    reused: int
    encoded: int
    damaged: int
    """How many of the encoded ones replaced a damaged entry."""


def text_entry(
    caption: str, parts: Mapping[str, str], controls: Sequence[ControlView] = (), *, prompt: bool = False
) -> TextEntry:
    """The text entry of a caption.

    `parts` names what else the tensors depend on: encoder identity, revision and precision,
    max_sequence_length, the family's cache_version.
    """
    own = {"caption": caption} | ({"prompt": "yes"} if prompt else {})
    own |= {f"control {number}": view.key for number, view in enumerate(controls)}
    key = entry_key("text", {**parts, **own})
    return TextEntry(key=key, caption=caption, controls=tuple(controls), prompt=prompt)


def latents_entry(record: ImageRecord, parts: Mapping[str, str]) -> LatentsEntry:
    """The latents entry of an image.

    `parts` names what else the tensors depend on: VAE identity, revision, precision and tiling, the family's
    cache_version. The file's name and folder are not part of the key.
    """
    own = {
        "content": record.content_sha256,
        "size": f"{record.bucket_width}x{record.bucket_height}",
        "crop_version": str(CROP_VERSION),
    }
    # what a picture does not have is no part of its key: keys of before there was such a thing hold
    own |= {"colour": record.colour} if record.colour else {}
    own |= {"view": record.view.key} if record.view.key else {}
    if record.mask is not None:
        own |= {"mask": record.mask.content_sha256, "mask_version": str(MASK_VERSION)}
    own |= {f"control {number}": view.key for number, view in enumerate(control_views(record))}
    return LatentsEntry(key=entry_key("latents", {**parts, **own}), record=record)


def fill(
    cache: Cache,
    entries: Iterable[Entry],
    open_encoders: OpenEncoders,
    *,
    stop_check: Callable[[], None],
    on_progress: Callable[[str, int, int], None],
    verify: bool = False,
) -> FillReport:
    """Make every entry valid: texts first, then latents; entries of equal key are encoded once.

    Entries that are there keep their bytes; with `verify` their tensors are read and compared too. Damaged
    ones are named in a warning and encoded again. `stop_check()` runs before every entry and may raise;
    `on_progress(kind, done, total)` runs after every one. Raises NoSpaceError, and what encoders raise;
    entries finished by then stay valid.
    """
    distinct = {(entry.kind, entry.key): entry for entry in entries}
    reports = []
    for kind in KINDS:
        wanted = [entry for entry in distinct.values() if entry.kind == kind]
        progress = _Progress(kind=kind, total=len(wanted), stop_check=stop_check, on_progress=on_progress)
        reports.append(_fill_kind(cache, wanted, open_encoders, progress, verify=verify))
    return FillReport(
        reused=sum(report.reused for report in reports),
        encoded=sum(report.encoded for report in reports),
        damaged=sum(report.damaged for report in reports),
    )


class _Progress:
    """Counts entries of one kind that are known to be valid."""

    def __init__(
        self,
        *,
        kind: str,
        total: int,
        stop_check: Callable[[], None],
        on_progress: Callable[[str, int, int], None],
    ) -> None:
        self.kind = kind
        self.stop_check = stop_check
        self._total = total
        self._done = 0
        self._on_progress = on_progress

    def one_done(self) -> None:
        """One more entry is valid."""
        self._done += 1
        self._on_progress(self.kind, self._done, self._total)


def _fill_kind(
    cache: Cache, wanted: Sequence[Entry], open_encoders: OpenEncoders, progress: _Progress, *, verify: bool
) -> FillReport:
    """Check all entries of one kind, then encode those that are missing or damaged."""
    missing: list[Entry] = []
    damaged = 0
    for entry in wanted:
        progress.stop_check()
        try:
            damage = cache.damage(entry.kind, entry.key, thorough=verify)
        except FileNotFoundError:
            missing.append(entry)
            continue
        if damage is None:
            progress.one_done()
        else:
            path = cache.path(entry.kind, entry.key)
            _log.warning(
                "cache entry %s of %s is damaged (%s) and is encoded again", path, entry.name, damage
            )
            damaged += 1
            missing.append(entry)
    if missing:
        with open_encoders(progress.kind) as encode:
            for entry in missing:
                progress.stop_check()
                tensors = encode(entry)
                _require_finite(entry, tensors)
                cache.write(entry.kind, entry.key, tensors)
                progress.one_done()
    return FillReport(reused=len(wanted) - len(missing), encoded=len(missing), damaged=damaged)


def _require_finite(entry: Entry, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise DivergedError rather than cache NaN or infinite values, which would poison every later run."""
    for name, tensor in tensors.items():
        if not bool(tensor.isfinite().all()):
            raise DivergedError(
                f"encoding {entry.name} gave values in `{name}` that are not finite",
                where=f"{entry.kind} encoder",
                remedy="encode in a wider type (model.dtype: fp32), and check the encoder's weights",
            )
