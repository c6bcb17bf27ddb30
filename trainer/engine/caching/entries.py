"""Which cache entries a run needs, and making them: text first, then latents, one kind of encoder
at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from PIL import Image

from trainer.data.cache import Cache
from trainer.data.fill import (
    ControlView,
    Encode,
    FillReport,
    LatentsEntry,
    TextEntry,
    control_views,
    fill,
    latents_entry,
    text_entry,
)
from trainer.data.pictures.images import fit, read_image, to_pixels
from trainer.data.records import Control, ImageRecord, Record
from trainer.data.sets.masks import mask_pixels
from trainer.engine.context import Context, free_memory
from trainer.families import losses
from trainer.families.family import Family
from trainer.families.values import TEXT_MASK, Batch, EntryKind, Header
from trainer.modeling.attention.text_lengths import pad_text
from trainer.planning.shapes.mix import padded_length
from trainer.telemetry.progress import Progress, progress
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What one preview is drawn from."""

    entry: TextEntry
    empty: TextEntry | None
    """Of the empty caption; None where a family has none."""
    controls: tuple[Control, ...]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Every cache entry of a run; samples by position in `records`."""

    cache: Cache
    records: tuple[Record, ...]
    texts: tuple[TextEntry, ...]
    empties: tuple[TextEntry, ...]
    """Of the empty caption, for every sample; none where captions are not dropped and nothing is drawn."""
    latents: tuple[LatentsEntry, ...]
    """None where samples have no images."""
    prompts: tuple[Prompt, ...]

    @functools.cached_property
    def masked(self) -> bool:
        """Whether any sample has a loss mask: then every batch has one."""
        return any(entry.record.mask is not None for entry in self.latents)

    @functools.cached_property
    def weighted(self) -> bool:
        """Whether any sample's loss has a weight."""
        return any(entry.record.loss_weight != 1 for entry in self.latents)

    def headers(self, record: int, *, dropped: bool) -> tuple[Header, Header]:
        """Shapes of one sample's latents and text."""
        text = self.empties[record] if dropped else self.texts[record]
        latents = self.cache.header("latents", self.latents[record].key) if self.latents else {}
        return latents, self.cache.header("text", text.key)

    def all(self) -> list[TextEntry | LatentsEntry]:
        """Every entry, some more than once."""
        prompts = [entry for one in self.prompts for entry in (one.entry, one.empty) if entry is not None]
        return [*self.empties, *self.texts, *prompts, *self.latents]

    def keys(self) -> set[str]:
        """Keys of all entries."""
        return {entry.key for entry in self.all()}


def list_entries(
    context: Context, records: Sequence[Record], prompt_controls: Sequence[tuple[Control, ...]] = ()
) -> Entries:
    """Entries of all samples, the empty caption and the validation prompts.

    `prompt_controls` are the control images of each prompt; none where the family takes none.
    """
    family, text, latents = context.family, _text_parts(context), _latent_parts(context)
    drawn = "latents" in family.encoder_components
    seen = [control_views(record) if family.text_sees_controls else () for record in records]
    return Entries(
        cache=Cache(context.cache_dir, family.name),
        records=tuple(records),
        texts=tuple(
            text_entry(record.caption, text, views) for record, views in zip(records, seen, strict=True)
        ),
        empties=tuple(text_entry("", text, views) for views in seen) if drawn else (),
        latents=tuple(latents_entry(record, latents) for record in records if isinstance(record, ImageRecord))
        if drawn
        else (),
        prompts=_prompts(context, text, prompt_controls, drawn=drawn),
    )


def _prompts(
    context: Context, parts: Mapping[str, str], controls: Sequence[tuple[Control, ...]], *, drawn: bool
) -> tuple[Prompt, ...]:
    prompts = context.config.validation.prompts
    if context.family.control_counts[0] and not controls:
        return ()  # nothing to edit, nothing to draw: a run's own entries come with them
    found = []
    for caption, own in zip(prompts, controls or [()] * len(prompts), strict=True):
        shown = own if context.family.text_sees_controls else ()
        views = [
            ControlView(path=one.path, content_sha256=one.content_sha256, crop=None, colour=one.colour)
            for one in shown
        ]
        entry = text_entry(caption, parts, views, prompt=not drawn)
        empty = text_entry("", parts, views) if drawn else None
        found.append(Prompt(entry=entry, empty=empty, controls=own))
    return tuple(found)


def _encoder_parts(context: Context, kind: EntryKind, dtype: torch.dtype) -> dict[str, str]:
    source, components = context.source, context.family.encoder_components.get(kind, ())
    built = [name for name in components if name in source.random_components]
    parts = {
        "cache_version": str(context.family.cache_version),
        "model": source.identity,
        "revision": source.revision or "",
        # a snapshot of the hub keeps its revision when learned weights join the configs
        "weights": f"random {','.join(built)}" if built else "pretrained",
        "components": ",".join(components),
        "dtype": str(dtype),
    }
    return parts | ({"seed": str(source.seed)} if built else {})


def _quantized(context: Context) -> str | None:
    """Storage of the text encoders' layers, where that is not the run's type."""
    stored = context.plan.text_encoder_weights
    return None if stored == context.plan.dtype else stored


def _text_parts(context: Context) -> dict[str, str]:
    parts = _encoder_parts(context, "text", context.dtype)
    parts["max_sequence_length"] = str(context.config.data.max_sequence_length)
    quantized = _quantized(context)
    return parts if quantized is None else parts | {"stored": quantized}


def _latent_parts(context: Context) -> dict[str, str]:
    return _encoder_parts(context, "latents", torch.float32) | {"tiling": str(context.plan.vae_tiling)}


def fill_cache(context: Context, entries: Entries, *, verify: bool = False) -> FillReport:
    """Encode what is missing. A stop request raises between two samples; what is written by then stays valid.

    With `verify` the entries that are there are read and compared with their checksums. Text encoders and VAE
    are never in memory together. The VAE runs in fp32: latents are made once and kept.
    """
    bars: dict[str, Progress] = {}
    with contextlib.ExitStack() as open_bars:

        def on_progress(kind: str, done: int, total: int) -> None:
            context.status.beat(Phase.CACHE, step=done, total=total)
            if kind not in bars:
                bars[kind] = open_bars.enter_context(progress(total, f"caching {kind}", start=done - 1))
            bars[kind].advance()

        report = fill(
            entries.cache,
            entries.all(),
            lambda kind: _encoders(context, kind),
            stop_check=context.stop.raise_if_requested,
            on_progress=on_progress,
            verify=verify,
        )
    context.say(f"cache: {report.reused} entries were there, {report.encoded} encoded")
    return report


@contextlib.contextmanager
def _encoders(context: Context, kind: str) -> Iterator[Encode]:
    """The family's encoders of one kind, on the device for as long as the block runs."""
    family, which = context.family, cast(EntryKind, kind)
    dtype = context.dtype if kind == "text" else torch.float32
    context.status.beat(Phase.LOAD)
    quantized = _quantized(context) if kind == "text" else None
    source = dataclasses.replace(context.source, quantized_to=quantized)
    tiling = context.plan.vae_tiling
    loaded = [family.load_encoders(which, source, device=context.device, dtype=dtype, vae_tiling=tiling)]

    def encode(entry: TextEntry | LatentsEntry) -> Mapping[str, torch.Tensor]:
        if isinstance(entry, TextEntry):
            return family.encode_text(
                loaded[0],
                entry.caption,
                [_control_image(view) for view in entry.controls],
                prompt=entry.prompt,
                max_sequence_length=context.config.data.max_sequence_length,
            )
        record = entry.record
        picture = read_image(record.path, content_sha256=record.content_sha256)
        image = fit(picture, record.bucket_width, record.bucket_height, record.view)
        controls = [_control_pixels(family, view) for view in control_views(record)]
        encoded = family.encode_pixels(loaded[0], to_pixels(image), controls)
        return encoded if record.mask is None else encoded | losses.mask_entry(mask_pixels(record), encoded)

    context.status.beat(Phase.CACHE)
    try:
        yield encode
    finally:
        loaded.clear()
        free_memory(context.device)


def _control_image(view: ControlView) -> Image.Image:
    """A control image as the encoders see it: cut as its target is, or whole."""
    picture = read_image(view.path, content_sha256=view.content_sha256)
    if view.crop is not None:
        return fit(picture, *view.crop, view.view)
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.view.flip else picture


def _control_pixels(family: Family, view: ControlView) -> torch.Tensor:
    """Pixels of a control image; a whole one has the size that the family's pipeline gives it."""
    picture = _control_image(view)
    if view.crop is None:
        picture = picture.resize(family.control_size(*picture.size), Image.Resampling.LANCZOS)
    return to_pixels(picture)


def load_batch(
    context: Context,
    entries: Entries,
    samples: Sequence[tuple[int, bool]],
    *,
    pin_memory: bool,
    text_padding: bool = False,
) -> Batch:
    """One batch of samples (record, caption dropped) on the CPU; text values in the model's type.

    With `text_padding` captions are padded to a few lengths, and the batch has their mask.
    """
    cache = entries.cache
    text = [cache.read("text", (entries.empties if drop else entries.texts)[i].key) for i, drop in samples]
    if text_padding:
        text = [_padded(row, context.family) for row in text]
    latents = [
        losses.weighed(
            cache.read("latents", entries.latents[i].key),
            entries.latents[i].record.loss_weight if entries.weighted else None,
            masked=entries.masked,
        )
        for i, _ in (samples if entries.latents else ())
    ]
    batch = context.family.collate(text, latents)

    def ready(tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        cast = {name: one.to(dtype) if one.is_floating_point() else one for name, one in tensors.items()}
        return {name: one.pin_memory() if pin_memory else one for name, one in cast.items()}

    return dataclasses.replace(
        batch, latents=ready(batch.latents, torch.float32), text=ready(batch.text, context.dtype)
    )


def _padded(row: Mapping[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """A text entry whose caption is padded, with its mask."""
    assert family.caption is not None, "a family whose captions are padded as they are encoded"
    caption = row[family.caption]
    padded, mask = pad_text(caption, padded_length(len(caption)))
    return {**row, family.caption: padded, TEXT_MASK: mask}


def padded_header(header: Header, family: Family) -> dict[str, tuple[int, ...]]:
    """Shapes of a text entry whose caption is padded."""
    assert family.caption is not None, "a family whose captions are padded as they are encoded"
    length, *rest = header[family.caption]
    return {**header, family.caption: (padded_length(length), *rest)}


def data_fingerprint(records: Sequence[Record]) -> str:
    """Hash over everything about the samples that training depends on, in order."""
    digest = hashlib.sha256()
    for record in records:
        row = [record.identifier, record.content_sha256, record.caption, str(record.repeats)]
        if isinstance(record, ImageRecord):
            row.append(f"{record.bucket_width}x{record.bucket_height}")
            row += [part for part in (record.colour, record.view.key) if part]
            row += [] if record.mask is None else [f"mask {record.mask.content_sha256}"]
            row += [] if record.loss_weight == 1 else [f"loss_weight {record.loss_weight!r}"]
        row += [view.key for view in control_views(record)]
        digest.update("\0".join(row).encode() + b"\n")
    return digest.hexdigest()[:16]
