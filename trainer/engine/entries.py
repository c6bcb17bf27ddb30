"""Floor 6: which cache entries a run needs, and making them: text first, then latents, one kind of encoder
at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data.cache import Cache, entry_key, fill
from trainer.data.images import fit, read_image, to_pixels
from trainer.data.records import ImageRecord
from trainer.engine.context import Context, free_memory
from trainer.families.protocol import Batch, EntryKind, Header
from trainer.telemetry.progress import progress
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

    def prompts(self) -> list[dict[str, torch.Tensor]]:
        """Text entries of the validation prompts."""
        return [self.cache.read("text", key) for key in self.prompt_keys]


def list_entries(context: Context, records: Sequence[ImageRecord]) -> Entries:
    """Keys for all samples, the empty caption and the validation prompts."""
    cache = Cache(context.cache_dir, context.family.name)
    return Entries(
        cache=cache,
        records=tuple(records),
        text_keys=tuple(_text_key(context, record.caption) for record in records),
        latent_keys=tuple(_latent_key(context, record) for record in records),
        empty_key=_text_key(context, ""),
        prompt_keys=tuple(_text_key(context, prompt) for prompt in context.config.validation.prompts),
    )


def _encoder_parts(context: Context, kind: EntryKind, dtype: torch.dtype) -> dict[str, str]:
    source = context.source
    parts = {
        "family": context.family.name,
        "cache_version": str(context.family.cache_version),
        "model": source.identity,
        "revision": source.revision or "",
        "weights": source.weights,
        "components": ",".join(context.family.encoder_components[kind]),
        "dtype": str(dtype),
    }
    return parts | ({"seed": str(source.seed)} if source.weights == "random" else {})


def _text_key(context: Context, caption: str) -> str:
    length = str(context.config.data.max_sequence_length)
    parts = _encoder_parts(context, "text", context.dtype)
    return entry_key("text", {**parts, "caption": caption, "max_sequence_length": length})


def _latent_key(context: Context, record: ImageRecord) -> str:
    parts = _encoder_parts(context, "latents", torch.float32)
    size = f"{record.bucket_width}x{record.bucket_height}"
    tiling = str(context.plan.vae_tiling)
    return entry_key("latents", {**parts, "pixels": record.content_sha256, "bucket": size, "tiling": tiling})


def fill_cache(context: Context, entries: Entries) -> int:
    """Encode what is missing; returns how many entries were written. A stop request raises between samples.

    Text encoders and VAE are never in memory together. The VAE runs in fp32: latents are made once and kept.
    """
    captions = dict(zip(entries.text_keys, (record.caption for record in entries.records), strict=True))
    captions[entries.empty_key] = ""
    captions |= dict(zip(entries.prompt_keys, context.config.validation.prompts, strict=True))
    images = dict(zip(entries.latent_keys, entries.records, strict=True))
    return _fill_kind(context, entries.cache, "text", captions) + _fill_kind(
        context, entries.cache, "latents", images
    )


def _fill_kind(context: Context, cache: Cache, kind: EntryKind, wanted: Mapping[str, Any]) -> int:
    missing = {key: item for key, item in wanted.items() if not cache.has(kind, key)}
    context.say(f"cache {kind}: {len(wanted) - len(missing)} of {len(wanted)} entries are there")
    if missing:
        context.status.beat(Phase.LOAD)
        _encode_all(context, cache, kind, missing)
        free_memory(context.device)
    return len(missing)


def _encode_all(context: Context, cache: Cache, kind: EntryKind, missing: Mapping[str, Any]) -> None:
    """Load the encoders of one kind, write the missing entries; the encoders end with this function."""
    dtype = context.dtype if kind == "text" else torch.float32
    encoders = context.family.load_encoders(
        kind, context.source, device=context.device, dtype=dtype, vae_tiling=context.plan.vae_tiling
    )

    def encode(item: Any) -> dict[str, torch.Tensor]:
        if kind == "text":
            length = context.config.data.max_sequence_length
            return context.family.encode_text(encoders, item, max_sequence_length=length)
        image = fit(read_image(item.path), item.bucket_width, item.bucket_height)
        return context.family.encode_pixels(encoders, to_pixels(image))

    context.status.beat(Phase.CACHE, step=0, total=len(missing))
    with progress(len(missing), f"encoding {kind}") as bar:

        def on_item(done: int) -> None:
            context.status.beat(Phase.CACHE, step=done, total=len(missing))
            bar.advance(1)

        fill(cache, kind, missing, encode, stop_check=context.stop.raise_if_requested, on_item=on_item)


def load_batch(
    entries: Entries, samples: Sequence[tuple[int, bool]], *, dtype: torch.dtype, pin_memory: bool
) -> Batch:
    """Stack samples (record, caption dropped) of one batch key on the CPU; text in the model's dtype."""
    cache = entries.cache
    text = [cache.read("text", entries.empty_key if drop else entries.text_keys[i]) for i, drop in samples]
    latents = [cache.read("latents", entries.latent_keys[i]) for i, _ in samples]

    def stack(rows: Sequence[Mapping[str, torch.Tensor]], to: torch.dtype) -> dict[str, torch.Tensor]:
        stacked = {name: torch.stack([row[name] for row in rows]).to(to) for name in rows[0]}
        return {name: tensor.pin_memory() for name, tensor in stacked.items()} if pin_memory else stacked

    return Batch(latents=stack(latents, torch.float32), text=stack(text, dtype), size=len(samples))


def data_fingerprint(records: Sequence[ImageRecord]) -> str:
    """Hash over everything about the samples that training depends on, in order."""
    digest = hashlib.sha256()
    for record in records:
        row = (record.identifier, record.content_sha256, record.caption, str(record.repeats))
        bucket = f"{record.bucket_width}x{record.bucket_height}"
        digest.update("\0".join((*row, bucket)).encode() + b"\n")
    return digest.hexdigest()[:16]
