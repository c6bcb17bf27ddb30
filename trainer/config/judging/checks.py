"""What each key alone cannot tell: contradictions, settings without effect, nested folders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.config import fields
from trainer.config.judging import path_checks, training_checks
from trainer.config.judging.found import Context, Found
from trainer.config.schema import DataSet, RunConfig, ValidationSection
from trainer.errors import Problem
from trainer.words.near import closest


@dataclass(frozen=True, kw_only=True)
class Unused:
    """Keys that have no effect under a condition; writing them anyway is a mistake."""

    keys: tuple[str, ...]
    applies: Callable[[RunConfig], bool]
    reason: str
    remedy: str


_UNUSED: tuple[Unused, ...] = (
    Unused(
        keys=tuple(key for key in fields.dotted_keys() if key.startswith("lora.")),
        applies=lambda config: config.method == "full",
        reason="no effect with `method: full`",
        remedy="remove it, or write `method: lora`",
    ),
    Unused(
        keys=("flow.logit_mean", "flow.logit_std"),
        applies=lambda config: config.flow.weighting_scheme != "logit_normal",
        reason="no effect without `flow.weighting_scheme: logit_normal`",
        remedy="remove it, or write that scheme",
    ),
    Unused(
        keys=("flow.mode_scale",),
        applies=lambda config: config.flow.weighting_scheme != "mode",
        reason="no effect without `flow.weighting_scheme: mode`",
        remedy="remove it, or write that scheme",
    ),
    Unused(
        keys=("validation.control_dir",),
        applies=lambda config: config.validation.img_dir is None,
        reason="no effect without `validation.img_dir`",
        remedy="remove it, or write img_dir",
    ),
    *(
        Unused(keys=(key,), applies=applies, reason=f"no effect {reason}", remedy="remove it")
        for key, applies, reason in training_checks.UNUSED
    ),
)


def unused_keys(config: RunConfig) -> frozenset[str]:
    """Keys without effect in this configuration; `dump` leaves them out so that its text loads again."""
    return frozenset(key for rule in _UNUSED if rule.applies(config) for key in rule.keys)


def check(context: Context, bad: frozenset[str]) -> list[Problem]:
    """Run every check whose keys are all good."""
    return [
        Problem(what=what, where=where, remedy=remedy)
        for keys, function in _CHECKS
        if not any(_related(key, name) for key in keys for name in bad)
        for where, what, remedy in function(context)
    ]


def _related(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _unused(context: Context) -> Found:
    for rule in _UNUSED:
        if rule.applies(context.config):
            for key in filter(context.written, rule.keys):
                yield context.source(key), f"`{key}` has {rule.reason}", rule.remedy


def _quantized_full(context: Context) -> Found:
    if context.config.method == "full" and context.config.features.weights in ("int8", "nf4", "fp8"):
        weights = context.config.features.weights
        what = (
            f"`features.weights: {weights}` cannot be trained by `method: full`: {weights} weights are frozen"
        )
        where = context.blame("features.weights", "method")
        yield where, what, "write `method: lora`, or leave features.weights out"


def _fp8_compute(context: Context) -> Found:
    features, where = context.config.features, context.blame("features.compute", "features.weights", "method")
    if features.compute != "fp8":
        return
    if features.weights not in ("auto", "fp8"):
        other = f"`features.weights: {features.weights}` ({context.source('features.weights')})"
        remedy = "leave features.weights out, or write fp8 there too"
        yield where, f"`features.compute: fp8` multiplies FP8 weights, but {other}", remedy
    elif context.config.method == "full":
        what = "`features.compute: fp8` is for a frozen base, and `method: full` trains it"
        yield where, what, "write `method: lora`, or leave features.compute out"


def _budget_alone(context: Context) -> Found:
    features, key = context.config.features, "features.activation_budget"
    if features.activation_budget in ("auto", 1.0):
        return
    asked = features.activation_checkpointing
    recomputing = asked != "auto" and asked is not False
    for other, clashes, why in (
        ("compile", features.compile is False, "only compiled blocks keep a share of their activations"),
        ("activation_checkpointing", recomputing, "checkpointing recomputes blocks whole"),
    ):
        if clashes:
            value = str(vars(features)[other]).lower()
            written = f"`features.{other}: {value}` ({context.source(f'features.{other}')})"
            yield context.source(key), f"`{key}` contradicts {written}: {why}", "remove one of them"


def _swap_alone(context: Context) -> Found:
    config, key = context.config, "features.block_swap"
    features, asked = config.features, config.features.activation_checkpointing
    if features.block_swap in ("auto", 0):
        return
    if config.method == "full":
        what = f"`{key}` is for a frozen base, and `method: full` trains it"
        yield context.blame(key, "method"), what, f"write `method: lora`, or leave {key} out"
    for other, clashes in (
        ("activation_checkpointing", asked != "auto" and asked is not True),  # 1 is not true
        ("activation_budget", features.activation_budget not in ("auto", 1.0)),
    ):
        if clashes:
            value = str(vars(features)[other]).lower()
            written = f"`features.{other}: {value}` ({context.source(f'features.{other}')})"
            what = f"`{key}` contradicts {written}: all blocks are recomputed where some wait in host memory"
            yield context.source(key), what, "remove one of them"


def _weights_against_dtype(context: Context) -> Found:
    dtype, weights = context.config.model.dtype, context.config.features.weights
    if dtype != "auto" and weights in ("bf16", "fp32") and dtype != weights:
        other = f"`model.dtype: {dtype}` ({context.source('model.dtype')})"
        where = context.blame("features.weights", "model.dtype")
        remedy = "write the same in both, or leave features.weights out"
        yield where, f"`features.weights: {weights}` contradicts {other}", remedy


def _warmup(context: Context) -> Found:
    warmup, steps = context.config.train.lr_warmup_steps, context.config.train.max_train_steps
    if warmup >= steps:
        source = context.source("train.max_train_steps")
        what = f"`train.lr_warmup_steps` is {warmup}, but `train.max_train_steps` is {steps} ({source})"
        where = context.blame("train.lr_warmup_steps", "train.max_train_steps")
        yield where, what, "a run must be longer than its warm-up: a tenth of the steps is plenty"


def _trigger_dropped(context: Context) -> Found:
    key, rate = "data.trigger_word", "data.caption_dropout_rate"
    if context.config.data.trigger_word is not None and context.config.data.caption_dropout_rate == 1.0:
        what = f"`{key}` is never seen: `{rate}` is 1 ({context.source(rate)}), which drops every caption"
        yield context.source(key), what, f"remove it, or lower `{rate}`: it is a share, 0.01 means 1 %"


def _model_name(context: Context) -> Found:
    key, name = "model.pretrained_model_name_or_path", context.config.model.pretrained_model_name_or_path
    where = context.source(key)
    if "://" in name:
        repository = "/".join(name.partition("://")[2].split("/")[1:3])
        remedy = f"write the repository id `{repository}`" if repository else "write a repository id"
        yield where, f"`{key}` is an address", remedy
    elif Path(name).suffix.lower() in (".safetensors", ".ckpt", ".gguf", ".pt", ".bin"):
        remedy = "name a folder in diffusers' layout (with model_index.json), or a repository id"
        yield where, f"`{key}` is a single file", remedy
    elif (
        context.written("model.revision") and context.config.model.revision and path_checks.is_dir(Path(name))
    ):
        what = f"`model.revision` has no effect on a folder ({name})"
        yield context.source("model.revision"), what, "remove it, or name a repository"


def _target_preset(context: Context) -> Found:
    presets = context.lora_presets.get(context.config.family)
    target = context.config.lora.target_modules
    if presets is None or not isinstance(target, str) or target in presets or context.config.method == "full":
        return
    near = closest(target, presets)
    hint = f"did you mean `{near}`?" if near else f"presets: {', '.join(presets)}."
    what = f'`lora.target_modules`: "{target}" is no preset of {context.config.family}'
    where = context.source("lora.target_modules")
    yield where, what, f"{hint} Module name suffixes are written as a list: [to_q, to_v]"


def _set_of_nothing(context: Context) -> Found:
    for index, one in enumerate(context.config.data.sets):
        key = f"data.sets.{index}"
        if one.img_dir is None and one.chat_file is None:
            where = context.blame(
                *(name for name in context.sources if name.startswith(f"{key}.")), "data.sets"
            )
            yield where, f"`{key}.img_dir` is missing", "add `img_dir: DIR`"
        elif one.img_dir is not None and one.chat_file is not None:
            what = f"`{key}` has both `img_dir` and `chat_file`"
            yield context.source(f"{key}.chat_file"), what, "make it two sets, or remove one of them"


def _only_regularising(context: Context) -> Found:
    if all(one.is_reg for one in context.config.data.sets):
        what = "every one of `data.sets` is a regularisation set"
        yield context.source("data.sets.0.is_reg"), what, "add the set to be learned, or leave is_reg out"


def _set_path(one: DataSet) -> Path | None:
    return one.chat_file if one.img_dir is None else one.img_dir


def _set_key(index: int, one: DataSet) -> str:
    return f"data.sets.{index}.{'chat_file' if one.img_dir is None else 'img_dir'}"


def _same_set_twice(context: Context) -> Found:
    seen: dict[str, tuple[int, DataSet]] = {}
    for index, one in enumerate(context.config.data.sets):
        path = _set_path(one)
        if path is None:
            continue
        first, other = seen.setdefault(path_checks.real(path), (index, one))
        if first != index:
            key, where_first = _set_key(index, one), context.source(_set_key(first, other))
            what = f"`{key}`: {path} is a set already ({where_first})"
            yield context.source(key), what, "remove it, and write `repeats: 2` in the other"


def _held_out_path(validation: ValidationSection) -> tuple[str, Path | None]:
    if validation.img_dir is None and validation.chat_file is not None:
        return "validation.chat_file", validation.chat_file
    return "validation.img_dir", validation.img_dir


def _held_out_two_ways(context: Context) -> Found:
    validation = context.config.validation
    key, path = _held_out_path(validation)
    if path is not None and validation.held_out:
        other = f"`validation.held_out: {validation.held_out}` ({context.source('validation.held_out')})"
        what = f"`{key}` and {other} both say what is held out"
        yield context.source(key), what, "choose one: remove the other, or write `held_out: 0`"


def _held_out_trained(context: Context) -> Found:
    key, held_out = _held_out_path(context.config.validation)
    for index, one in enumerate(context.config.data.sets):
        path = _set_path(one)
        if held_out is not None and path is not None and path_checks.real(held_out) == path_checks.real(path):
            what = f"`{key}`: {held_out} is a training set ({context.source(_set_key(index, one))})"
            things = "conversations" if one.img_dir is None else "images"
            kind = "file" if one.img_dir is None else "folder"
            remedy = f"name a {kind} of other {things}, or write `held_out: 2` to keep two of these out"
            yield context.source(key), what, remedy


_CHECKS: tuple[tuple[tuple[str, ...], Callable[[Context], Found]], ...] = (
    (("method", "flow.weighting_scheme", "validation.img_dir", "features.weights"), _unused),
    (("method", "features.weights"), _quantized_full),
    (("method", "features.weights", "features.compute"), _fp8_compute),
    (("features.activation_budget", "features.compile", "features.activation_checkpointing"), _budget_alone),
    (
        (
            "method",
            "features.block_swap",
            "features.activation_checkpointing",
            "features.activation_budget",
        ),
        _swap_alone,
    ),
    (("model.dtype", "features.weights"), _weights_against_dtype),
    (("train.lr_warmup_steps", "train.max_train_steps"), _warmup),
    (("data.trigger_word", "data.caption_dropout_rate"), _trigger_dropped),
    (("model.pretrained_model_name_or_path", "model.revision"), _model_name),
    (("family", "method", "lora.target_modules"), _target_preset),
    (("data.sets",), _set_of_nothing),
    (("data.sets",), _same_set_twice),
    (("data.sets",), _only_regularising),
    (("validation.img_dir", "validation.held_out"), _held_out_two_ways),
    (("validation.img_dir", "data.sets"), _held_out_trained),
    *path_checks.CHECKS,
    *training_checks.CHECKS,
)
"""Keys that a check looks at -> the check."""
