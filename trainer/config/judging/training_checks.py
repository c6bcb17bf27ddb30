"""Contradictions among kinds of adapters, optimizers, precisions, and views of sets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from trainer.config.schema import RunConfig

if TYPE_CHECKING:
    from trainer.config.judging.found import Context, Found

_LEAST_PRODIGY_RATE = 0.1
_MOST_VIEWS_TOGETHER = 64


def _validates(config: RunConfig) -> bool:
    held_out = config.validation
    return bool(held_out.held_out or held_out.img_dir is not None or held_out.chat_file is not None)


def keeps_best(config: RunConfig) -> bool:
    """Whether the run keeps the LoRA of its lowest held-out loss."""
    return config.method == "lora" and config.checkpoint.keep_best and _validates(config)


UNUSED: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    (
        "train.lr_num_cycles",
        lambda config: config.train.lr_scheduler != "cosine_with_restarts",
        "without `train.lr_scheduler: cosine_with_restarts`",
    ),
    (
        "train.lr_power",
        lambda config: config.train.lr_scheduler != "polynomial",
        "without `train.lr_scheduler: polynomial`",
    ),
    (
        "train.tracker_project_name",
        lambda config: config.train.report_to != "wandb",
        "without `train.report_to: wandb`",
    ),
    (
        "features.modulation",
        lambda config: "fp8" not in (config.features.weights, config.features.compute),
        "without `features.weights: fp8`",
    ),
    (
        "checkpoint.keep_best",
        lambda config: config.method == "full" or not _validates(config),
        "without held-out samples and `method: lora`",
    ),
)
"""Key, when it has no effect, and what it needs, in words."""


def _half_precision(context: Context) -> Found:
    config, key = context.config, "model.dtype"
    if config.model.dtype == "fp16" and config.method == "full":
        what = "`model.dtype: fp16` is for `method: lora`: a full fine-tune in it would lose small updates"
        yield context.blame(key, "method"), what, "write bf16 or fp32, or `method: lora`"


def _kind_of_adapter(context: Context) -> Found:
    config, key = context.config, "lora.type"
    lora, features = config.lora, config.features
    if config.method == "full":
        return
    if lora.type != "lora":
        for name, clashes in (
            ("weights", features.weights in ("int8", "nf4", "fp8")),
            ("compute", features.compute == "fp8"),
        ):
            if clashes:
                source = context.source(f"features.{name}")
                written = f"`features.{name}: {vars(features)[name]}` ({source})"
                what = f"`{key}: {lora.type}` contradicts {written}: its file could not be proved"
                yield context.blame(key, f"features.{name}"), what, "remove one of them"
    if lora.type == "lokr" and lora.dropout:
        where = context.blame("lora.dropout", key)
        yield where, "`lora.dropout` has no effect with `lora.type: lokr`", "remove it, or write dora or lora"


def _patterns(context: Context) -> Found:
    lora = context.config.lora
    if context.config.method == "full":
        return
    for name, keys in (("rank_pattern", lora.rank_pattern), ("alpha_pattern", lora.alpha_pattern)):
        for key in keys:
            try:
                re.compile(f"(.*)({key})")  # as peft puts it into a larger one
            except re.error as error:
                what = f"`lora.{name}`: {key!r} is no regular expression ({error.msg})"
                remedy = "write the end of a layer's name, or escape what is meant literally by a backslash"
                yield context.source(f"lora.{name}"), what, remedy


def _plain_path(context: Context) -> Found:
    config, features = context.config, context.config.features
    options = {
        "lora.type": config.method == "lora" and config.lora.type != "lora",
        "lora.dropout": config.method == "lora" and config.lora.dropout > 0,
        "model.dtype": config.model.dtype == "fp16",
    }
    asked = {
        "compile": features.compile is True,
        "cuda_graphs": features.cuda_graphs is True,
        "activation_budget": features.activation_budget not in ("auto", 1.0),
        "block_swap": features.block_swap not in ("auto", 0),
    }
    for key in (key for key, taken in options.items() if taken):
        section, _, name = key.partition(".")
        for feature in (feature for feature, written in asked.items() if written):
            other = f"`features.{feature}` ({context.source(f'features.{feature}')})"
            what = f"`{key}: {vars(vars(config)[section])[name]}` keeps to the plain path, without {other}"
            yield context.blame(key, f"features.{feature}"), what, "remove one of them"


def _prodigy_rate(context: Context) -> Found:
    train, key = context.config.train, "train.learning_rate"
    if train.optimizer == "prodigy" and train.learning_rate < _LEAST_PRODIGY_RATE:
        what = (
            f"`{key}` is {train.learning_rate:g} ({context.source(key)}): prodigy finds the rate itself and"
            " multiplies it by this"
        )
        yield context.blame("train.optimizer", key), what, f"write `{key}: 1`"


def _init_from(context: Context) -> Found:
    path, key = context.config.lora.init_from, "lora.init_from"
    if context.config.method == "full" or path is None:
        return
    try:
        found = path.is_file()
    except OSError:  # a name that is too long, or a folder that may not be entered
        found = False
    if not found:
        yield context.source(key), f"`{key}`: {path} is no file", "name a .safetensors file of an earlier run"


def _views_together(context: Context) -> Found:
    sets = context.config.data.sets
    counts = [max(1, one.random_crop) * (2 if one.flip else 1) for one in sets]
    if math.lcm(*counts) > _MOST_VIEWS_TOGETHER:
        longer, listed = math.lcm(*counts), ", ".join(map(str, counts))
        what = f"sets with {listed} views an image: with their shares kept an epoch is {longer} times as long"
        key = next(f"data.sets.{index}.random_crop" for index, one in enumerate(sets) if one.random_crop)
        yield context.source(key), what, "give the sets counts that divide one another: 2, 4, 8, 16"


CHECKS: tuple[tuple[tuple[str, ...], Callable[[Context], Iterator[tuple[str, str, str]]]], ...] = (
    (("method", "model.dtype"), _half_precision),
    (("method", "lora.type", "lora.dropout", "features.weights", "features.compute"), _kind_of_adapter),
    (("method", "lora.rank_pattern", "lora.alpha_pattern"), _patterns),
    (("method", "model.dtype", "lora.type", "lora.dropout", "features"), _plain_path),
    (("train.optimizer", "train.learning_rate"), _prodigy_rate),
    (("method", "lora.init_from"), _init_from),
    (("data.sets",), _views_together),
)
"""Keys that a check looks at -> the check."""
