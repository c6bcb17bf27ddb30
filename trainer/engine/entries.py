"""Floor 6: which cache entries a run needs, and making them: text first, then latents, one kind of encoder
at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from trainer.data.cache import Cache
from trainer.data.fill import Encode, FillReport, LatentsEntry, TextEntry, fill, latents_entry, text_entry
from trainer.data.images import fit, read_image, to_pixels
from trainer.data.records import ImageRecord
from trainer.engine.context import Context, free_memory
from trainer.families.protocol import Batch, EntryKind, Header
from trainer.telemetry.progress import Progress, progress
from trainer.telemetry.status import Phase


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Keys of every cache entry of a run; samples by position in `records`."""

    cache: Cache
    records: tuple[ImageRecord, ...]
    text_keys: tuple[str, ...]
    latent_keys: tuple[str, ...]
    empty_key: str
    prompt_keys: tuple[str, ...]

    def headers(self, record: int, *, dropped: bool) -> tuple[Header, Header]:
        """Shapes of one sample's latents and text."""
        text_key = self.empty_key if dropped else self.text_keys[record]
        return self.cache.header("latents", self.latent_keys[record]), self.cache.header("text", text_key)

    def keys(self) -> set[str]:
        """Keys of all entries."""
        return {*self.text_keys, *self.latent_keys, self.empty_key, *self.prompt_keys}

    def prompts(self) -> list[Mapping[str, torch.Tensor]]:
        """Text entries of the validation prompts."""
        return [self.cache.read("text", key) for key in self.prompt_keys]


def list_entries(context: Context, records: Sequence[ImageRecord]) -> Entries:
    """Keys for all samples, the empty caption and the validation prompts."""
    text, latents = _text_parts(context), _latent_parts(context)
    return Entries(
        cache=Cache(context.cache_dir, context.family.name),
        records=tuple(records),
        text_keys=tuple(text_entry(record.caption, text).key for record in records),
        latent_keys=tuple(latents_entry(record, latents).key for record in records),
        empty_key=text_entry("", text).key,
        prompt_keys=tuple(text_entry(prompt, text).key for prompt in context.config.validation.prompts),
    )


def _encoder_parts(context: Context, kind: EntryKind, dtype: torch.dtype) -> dict[str, str]:
    source, components = context.source, context.family.encoder_components[kind]
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


def _text_parts(context: Context) -> dict[str, str]:
    length = str(context.config.data.max_sequence_length)
    return _encoder_parts(context, "text", context.dtype) | {"max_sequence_length": length}


def _latent_parts(context: Context) -> dict[str, str]:
    return _encoder_parts(context, "latents", torch.float32) | {"tiling": str(context.plan.vae_tiling)}


def fill_cache(context: Context, entries: Entries, *, verify: bool = False) -> FillReport:
    """Encode what is missing. A stop request raises between two samples; what is written by then stays valid.

    With `verify` the entries that are there are read and compared with their checksums. Text encoders and VAE
    are never in memory together. The VAE runs in fp32: latents are made once and kept.
    """
    text, latents = _text_parts(context), _latent_parts(context)
    captions = [record.caption for record in entries.records]
    wanted: list[TextEntry | LatentsEntry] = [
        text_entry(caption, text) for caption in ("", *captions, *context.config.validation.prompts)
    ]
    wanted += [latents_entry(record, latents) for record in entries.records]
    bars: dict[str, Progress] = {}
    with contextlib.ExitStack() as open_bars:

        def on_progress(kind: str, done: int, total: int) -> None:
            context.status.beat(Phase.CACHE, step=done, total=total)
            if kind not in bars:
                bars[kind] = open_bars.enter_context(progress(total, f"caching {kind}", start=done - 1))
            bars[kind].advance()

        report = fill(
            entries.cache,
            wanted,
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
    loaded = [
        family.load_encoders(
            which, context.source, device=context.device, dtype=dtype, vae_tiling=context.plan.vae_tiling
        )
    ]

    def encode(entry: TextEntry | LatentsEntry) -> Mapping[str, torch.Tensor]:
        if isinstance(entry, TextEntry):
            length = context.config.data.max_sequence_length
            return family.encode_text(loaded[0], entry.caption, max_sequence_length=length)
        record = entry.record
        picture = read_image(record.path, content_sha256=record.content_sha256)
        image = fit(picture, record.bucket_width, record.bucket_height)
        return family.encode_pixels(loaded[0], to_pixels(image))

    context.status.beat(Phase.CACHE)
    try:
        yield encode
    finally:
        loaded.clear()
        free_memory(context.device)


def load_batch(
    entries: Entries, samples: Sequence[tuple[int, bool]], *, dtype: torch.dtype, pin_memory: bool
) -> Batch:
    """Stack samples (record, caption dropped) of one batch key on the CPU; text in the model's dtype."""
    cache = entries.cache
    text = [cache.read("text", entries.empty_key if drop else entries.text_keys[i]) for i, drop in samples]
    latents = [cache.read("latents", entries.latent_keys[i]) for i, _ in samples]

    def stack(rows: Sequence[Mapping[str, torch.Tensor]], to: torch.dtype) -> dict[str, torch.Tensor]:
        stacked = {}
        for name, first in rows[0].items():
            whole = torch.empty((len(rows), *first.shape), dtype=first.dtype, pin_memory=pin_memory)
            torch.stack([row[name] for row in rows], out=whole)
            stacked[name] = whole if first.dtype == to else _pinned(whole.to(to), pin_memory)
        return stacked

    return Batch(latents=stack(latents, torch.float32), text=stack(text, dtype), size=len(samples))


def _pinned(tensor: torch.Tensor, pin_memory: bool) -> torch.Tensor:
    return tensor.pin_memory() if pin_memory else tensor


def data_fingerprint(records: Sequence[ImageRecord]) -> str:
    """Hash over everything about the samples that training depends on, in order."""
    digest = hashlib.sha256()
    for record in records:
        row = (record.identifier, record.content_sha256, record.caption, str(record.repeats))
        bucket = f"{record.bucket_width}x{record.bucket_height}"
        digest.update("\0".join((*row, bucket)).encode() + b"\n")
    return digest.hexdigest()[:16]
