"""What a configuration asks of its family, and the family cannot give. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.reading.load import Loaded
from trainer.config.schema import DataSet, RunConfig, ValidationSection
from trainer.errors import ConfigError, Problem
from trainer.families.family import Family

Found = Iterator[tuple[str, str, str]]
"""(key, what is wrong, what to do)."""


def check_family(family: Family, loaded: Loaded) -> None:
    """Raise one ConfigError with everything in the configuration that the family does not take."""
    problems = [
        Problem(what=f"`{key}`: {what}", where=loaded.sources.get(key, key), remedy=remedy)
        for check in (_sets, _controls, _length, _captions, _image_keys)
        for key, what, remedy in check(family, loaded.config)
    ]
    if problems:
        raise ConfigError(problems)


def _sets(family: Family, config: RunConfig) -> Found:
    """Images for families of images, conversations for families of language."""
    images = family.sample_kind == "image"
    wrong, right = ("chat_file", "img_dir: DIR") if images else ("img_dir", "chat_file: FILE.jsonl")
    for key, section in _sources(config):
        if (section.chat_file if images else section.img_dir) is not None:
            what = f"{family.title} trains on {family.sample_kind}s"
            yield f"{key}.{wrong}", what, f"write `{right}`, or use another family"


def _sources(config: RunConfig) -> Iterator[tuple[str, DataSet | ValidationSection]]:
    """Where samples come from."""
    for number, one in enumerate(config.data.sets):
        yield f"data.sets.{number}", one
    yield "validation", config.validation


def _controls(family: Family, config: RunConfig) -> Found:
    """Control images only where the family edits."""
    if family.control_counts[1] > 0:
        return
    for key, section in _sources(config):
        if section.control_dir is not None:
            yield f"{key}.control_dir", f"{family.title} takes no control images", "leave it out"
    if config.validation.control_images:
        yield "validation.control_images", f"{family.title} takes no control images", "leave it out"


def _length(family: Family, config: RunConfig) -> Found:
    """No more text than the family's model takes."""
    if config.data.max_sequence_length > family.max_sequence_length:
        what = f"{family.title} takes {family.max_sequence_length} tokens at most"
        yield "data.max_sequence_length", what, f"write {family.max_sequence_length} or less"


def _captions(family: Family, config: RunConfig) -> Found:
    """What is done to captions needs captions."""
    if family.sample_kind == "image":
        return
    if config.data.caption_dropout_rate:
        yield "data.caption_dropout_rate", "a conversation has no caption to leave out", "write 0"
    if config.data.trigger_word:
        what = "a conversation has no caption to put a word before"
        yield "data.trigger_word", what, "leave it out"


_IMAGE_KEYS: tuple[tuple[str, str], ...] = (
    ("mask_dir", "a language model learns from the assistant's words, and takes no mask besides"),
    ("loss_weight", "the loss is a mean over tokens: write `repeats` to weigh a set"),
    ("is_reg", "there is no trigger word to keep away"),
    ("flip", "a conversation cannot be mirrored"),
    ("random_crop", "a conversation is never cut"),
)
"""Keys of a set that are about images -> why a conversation has none of it."""


def _image_keys(family: Family, config: RunConfig) -> Found:
    """What is done to images needs images."""
    if family.sample_kind == "image":
        return
    for number, one in enumerate(config.data.sets):
        values, standard = one.model_dump(), DataSet().model_dump()
        for key, reason in _IMAGE_KEYS:
            if values[key] != standard[key]:
                what = f"{family.title} trains on conversations, and {reason}"
                yield f"data.sets.{number}.{key}", what, "leave it out"
