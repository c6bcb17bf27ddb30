"""The cache entries that a run needs; the key of each is a hash of everything that its tensors depend on."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from trainer.data.pictures.images import CROP_VERSION
from trainer.data.records import CENTRED, Control, ImageRecord, Record, View
from trainer.data.sets.masks import MASK_VERSION
from trainer.engine.caching.store import Cache, entry_key
from trainer.engine.context import Context
from trainer.families.values import EntryKind, Header


@dataclass(frozen=True, kw_only=True)
class ControlView:
    """A control image in the form that an entry's tensors depend on."""

    control: Control
    crop: tuple[int, int] | None = None
    """Width and height of the bucket that it is cut to as the target is; None: whole, of its own aspect."""
    view: View = CENTRED

    @property
    def key(self) -> str:
        """Identity of the control's pixels."""
        crop = "" if self.crop is None else f"{self.crop[0]}x{self.crop[1]}"
        parts = (self.control.content_sha256, crop, self.view.key, self.control.colour)
        return " ".join(part for part in parts if part)


def control_views(record: Record) -> tuple[ControlView, ...]:
    """The control images of a sample; a control of the target's size shows the same things, and is cut as the
    target is.
    """
    if not isinstance(record, ImageRecord):
        return ()
    views = []
    for control in record.controls:
        if (control.width, control.height) == (record.width, record.height):
            bucket = (record.bucket_width, record.bucket_height)
            views.append(ControlView(control=control, crop=bucket, view=record.view))
        else:  # whole: mirrored with its target, and without a cut to move
            views.append(ControlView(control=control, view=View(flip=record.view.flip)))
    return tuple(views)


@dataclass(frozen=True, kw_only=True)
class TextEntry:
    """A caption or conversation to encode. The empty caption is an entry like any other."""

    key: str
    caption: str
    controls: tuple[ControlView, ...] = ()
    """Control images that the text encoder is shown."""
    prompt: bool = False
    """Whether this is a preview's prompt, for families that encode prompts and captions differently."""
    place: str = field(default="", compare=False)
    """File of a sample that has it, with the row of a conversation; empty where it is of no sample."""
    kind: EntryKind = "text"

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"caption {self.caption!r:.80}"


@dataclass(frozen=True, kw_only=True)
class LatentsEntry:
    """An image to encode at its bucket's size."""

    key: str
    record: ImageRecord
    kind: EntryKind = "latents"

    @property
    def name(self) -> str:
        """Its name in messages."""
        return str(self.record.path)


Entry = TextEntry | LatentsEntry


def text_entry(
    caption: str,
    parts: Mapping[str, str],
    controls: Sequence[ControlView] = (),
    *,
    prompt: bool = False,
    place: str = "",
) -> TextEntry:
    """The text entry of a caption; `parts` names everything else that its tensors depend on."""
    own = {"caption": caption} | ({"prompt": "yes"} if prompt else {})
    own |= {f"control {number}": view.key for number, view in enumerate(controls)}
    key = entry_key("text", {**parts, **own})
    return TextEntry(key=key, caption=caption, controls=tuple(controls), prompt=prompt, place=place)


def latents_entry(record: ImageRecord, parts: Mapping[str, str]) -> LatentsEntry:
    """The latents entry of an image; `parts` names everything else that its tensors depend on.

    The file's name and folder are not part of the key.
    """
    own = {
        "content": record.content_sha256,
        "size": f"{record.bucket_width}x{record.bucket_height}",
        "crop_version": str(CROP_VERSION),
    }
    # a property that a picture lacks is no part of its key, so that older keys still hold
    own |= {"colour": record.colour} if record.colour else {}
    own |= {"view": record.view.key} if record.view.key else {}
    if record.mask is not None:
        own |= {**record.mask.key, "mask_version": str(MASK_VERSION)}
    own |= {f"control {number}": view.key for number, view in enumerate(control_views(record))}
    return LatentsEntry(key=entry_key("latents", {**parts, **own}), record=record)


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The entries of one preview."""

    entry: TextEntry
    empty: TextEntry | None
    """The entry of the empty caption, or of a negative prompt in its place; None where a family has none."""
    controls: tuple[Control, ...]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Every cache entry of a run; samples by position in `records`."""

    cache: Cache
    records: tuple[Record, ...]
    texts: tuple[TextEntry, ...]
    empties: tuple[TextEntry, ...]
    """Entries of the empty caption, one a sample; none where no caption is dropped."""
    latents: tuple[LatentsEntry, ...]
    """Latents entries of the samples; None where samples have no images."""
    prompts: tuple[Prompt, ...]
    masked: bool
    """Whether any sample has a loss mask: then every batch has one."""
    weighted: bool
    """Whether any sample's loss has a weight."""

    @functools.cached_property
    def headers(self) -> Mapping[str, Header]:
        """Shapes of the samples' entries by key, texts without padding; read once the cache is full."""
        texts = {one.key: self.cache.header("text", one.key) for one in {*self.texts, *self.empties}}
        return texts | {one.key: self.cache.header("latents", one.key) for one in self.latents}

    def all(self) -> list[Entry]:
        """Every entry, some more than once."""
        prompts = [entry for one in self.prompts for entry in (one.entry, one.empty) if entry is not None]
        return [*self.empties, *self.texts, *prompts, *self.latents]


def list_entries(
    context: Context,
    records: Sequence[Record],
    prompt_controls: Sequence[tuple[Control, ...]] = (),
    *,
    negative_prompt: str = "",
) -> Entries:
    """Entries of all samples, the empty caption and the validation prompts.

    `prompt_controls` are the control images of each prompt; none where the family takes none. A negative
    prompt stands in the empty caption's place for what is drawn.
    """
    family, prompts = context.family, context.config.validation.prompts
    text, latents = _parts(context, "text"), _parts(context, "latents")
    learn = context.config.data.learn
    # what is usual is no part of a key, so that older keys still hold; of a prompt nothing is learned
    learned = text if learn == "answers" else {**text, "learn": learn}
    drawn, sees = "latents" in family.encoder_components, family.text_sees_controls
    drops = drawn and context.config.data.caption_dropout_rate > 0
    seen = [control_views(record) if sees else () for record in records]
    listed = []
    # a run's own entries come with the pictures that its prompts edit: without these nothing is drawn
    if prompt_controls or not family.control_counts[0]:
        for caption, own in zip(prompts, prompt_controls or [()] * len(prompts), strict=True):
            views = [ControlView(control=one) for one in (own if sees else ())]
            entry = text_entry(caption, text, views, prompt=not drawn, place="validation.prompts")
            empty = text_entry(negative_prompt, text, views) if drawn else None
            listed.append(Prompt(entry=entry, empty=empty, controls=own))
    images = [record for record in records if isinstance(record, ImageRecord)] if drawn else []
    return Entries(
        cache=Cache(context.cache_dir, family.name),
        records=tuple(records),
        texts=tuple(
            text_entry(one.caption, learned, views, place=str(one.path))
            for one, views in zip(records, seen, strict=True)
        ),
        empties=tuple(text_entry("", text, views) for views in seen) if drops else (),
        latents=tuple(latents_entry(record, latents) for record in images),
        prompts=tuple(listed),
        masked=any(record.mask is not None for record in images),
        weighted=any(record.loss_weight != 1 for record in images),
    )


def _parts(context: Context, kind: EntryKind) -> dict[str, str]:
    """The encoders of one kind, their revision, precision and settings, on which its entries depend."""
    source, (dtype, stored) = context.source, precision(context, kind)
    components = context.family.encoder_components.get(kind, ())
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
    if built:
        parts["seed"] = str(source.seed)
    if kind == "latents":
        return parts | {"tiling": str(context.plan.vae_tiling)}
    if stored is not None:
        parts["stored"] = stored
    if dtype == torch.float16 and (stored is not None or built):
        # the type of T5's last projections: entries without this part are of ones in fp16, which overflow
        parts["kept_in_fp32"] = "yes"
    if (template := template_key(context)) is not None:
        parts["chat_template"] = template
    return parts | {"max_sequence_length": str(context.config.data.max_sequence_length)}


def template_key(context: Context) -> str | None:
    """The chat template by its content, where the run names one; None for the tokenizer's own."""
    text = context.source.chat_template
    return None if text is None else text_key(text)


def text_key(text: str) -> str:
    """A chat template's text as `template_key` names it."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def precision(context: Context, kind: EntryKind) -> tuple[torch.dtype, str | None]:
    """The type that entries are encoded in, and the storage of the encoders' layers where that is another.

    Text is encoded in the run's type; the VAE runs in fp32: latents are made once and kept.
    """
    if kind == "latents":
        return torch.float32, None
    stored = context.plan.text_encoder_weights
    return context.dtype, None if stored == context.plan.dtype else stored


def data_fingerprint(records: Sequence[Record]) -> str:
    """Hash over everything about the samples that training depends on, in order."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(_depends_on(record))
    return digest.hexdigest()[:16]


def sample_rows(records: Sequence[Record]) -> list[tuple[str, str]]:
    """Names of samples, and of each the hash of what `data_fingerprint` reads of it."""
    return [(one.identifier, hashlib.sha256(_depends_on(one)).hexdigest()[:16]) for one in records]


def _depends_on(record: Record) -> bytes:
    """Everything about a sample that training depends on."""
    row = [record.identifier, record.content_sha256, record.caption, str(record.repeats)]
    if isinstance(record, ImageRecord):
        row.append(f"{record.bucket_width}x{record.bucket_height}")
        row += [part for part in (record.colour, record.view.key) if part]
        row += [] if record.mask is None else [" ".join(part) for part in record.mask.key.items()]
        row += [] if record.loss_weight == 1 else [f"loss_weight {record.loss_weight!r}"]
    row += [view.key for view in control_views(record)]
    return "\0".join(row).encode() + b"\n"
