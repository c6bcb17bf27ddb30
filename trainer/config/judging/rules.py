"""Contradictions between keys, and settings without effect."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from trainer.config import fields
from trainer.config.judging import path_rules, set_rules, validation_rules
from trainer.config.judging.rule import Clash, Context, Rule
from trainer.config.judging.validation_rules import validates
from trainer.config.schema import RunConfig
from trainer.ways.storages import frozen, multiplied_in
from trainer.words.near import did_you_mean

_SINGLE_FILES = (".safetensors", ".ckpt", ".gguf", ".pt", ".bin")
_LEAST_PRODIGY_RATE = 0.1
_MODE_SCALES = (-1.0, 1.75)
"""Least and greatest `flow.mode_scale` by which noise levels stay within 0 to 1."""
_BUDGET, _SWAP, _SHARD = "features.activation_budget", "features.block_swap", "parallel.shard"
_RECOMPUTE, _MODEL = "features.activation_checkpointing", "model.pretrained_model_name_or_path"

OF_IMAGES = frozenset(
    {key for key in fields.dotted_keys() if key.startswith("flow.")}
    | {"data.resolution", "data.caption_dropout_rate", "data.trigger_word", "features.vae_tiling"}
    | {
        f"validation.{key}"
        for key in ("num_inference_steps", "guidance_scale", "resolution", "control_images")
    }
)
OF_CONVERSATIONS = frozenset({"data.on_long", "data.learn", "validation.max_new_tokens"})
"""Keys that say nothing to families of the other kind."""


def keeps_best(config: RunConfig) -> bool:
    """True if the run keeps the LoRA of its lowest held-out loss."""
    return config.method == "lora" and config.checkpoint.keep_best and validates(config)


_UNUSED: tuple[tuple[tuple[str, ...], Callable[[RunConfig], bool], str, str], ...] = (
    (tuple(key for key in fields.dotted_keys() if key.startswith("lora.")),
     lambda run: run.method == "full",
     "with `method: full`", "remove it, or write `method: lora`"),
    (("flow.logit_mean", "flow.logit_std"),
     lambda run: run.flow.weighting_scheme != "logit_normal",
     "without `flow.weighting_scheme: logit_normal`", "remove it, or write that scheme"),
    (("flow.mode_scale",),
     lambda run: run.flow.weighting_scheme != "mode",
     "without `flow.weighting_scheme: mode`", "remove it, or write that scheme"),
    (("train.max_train_steps",),
     lambda run: run.train.num_train_epochs is not None,
     "with `train.num_train_epochs`: both say how long the run is", "remove one of them"),
    (("validation.control_dir",),
     lambda run: run.validation.img_dir is None,
     "without `validation.img_dir`", "remove it, or write img_dir"),
    (("train.lr_num_cycles",),
     lambda run: run.train.lr_scheduler != "cosine_with_restarts",
     "without `train.lr_scheduler: cosine_with_restarts`", "remove it"),
    (("train.lr_power",),
     lambda run: run.train.lr_scheduler != "polynomial",
     "without `train.lr_scheduler: polynomial`", "remove it"),
    (("train.tracker_project_name",),
     lambda run: run.train.report_to != "wandb",
     "without `train.report_to: wandb`", "remove it"),
    (("features.modulation",),
     lambda run: run.method == "full" or "fp8" not in (run.features.weights, run.features.compute),
     "without `features.weights: fp8`", "remove it"),
    (("features.weight_gradient",),
     lambda run: run.method == "lora" or run.features.compute != "fp8",
     "without `method: full` and `features.compute: fp8`", "remove it"),
    (("checkpoint.lora_files",),
     lambda run: run.method == "full",
     "with `method: full`", "remove it, or write `method: lora`"),
    (("checkpoint.keep_best",),
     lambda run: run.method == "full" or not validates(run),
     "without held-out samples and `method: lora`", "remove it"),
    (("validation.clip_model",),
     lambda run: "clip_t" not in run.validation.metrics,
     "without clip_t in `validation.metrics`", "remove it"),
    (("validation.dinov2_model",),
     lambda run: not set(run.validation.metrics) - {"clip_t"},
     "without one of `validation.metrics` that needs it", "remove it"),
    (("validation.copy_threshold",),
     lambda run: "nearest_train" not in run.validation.metrics,
     "without nearest_train in `validation.metrics`", "remove it"),
)  # fmt: skip
"""Keys, when they have no effect, why, and what to do where one is written."""


def unused_keys(config: RunConfig) -> frozenset[str]:
    """Keys without effect in this configuration; `dump` leaves them out so that its text loads again."""
    return frozenset(key for keys, applies, _, _ in _UNUSED if applies(config) for key in keys)


def _without_effect(context: Context) -> Iterator[Clash]:
    told_by_plan = OF_IMAGES if _talks(context.config) else frozenset[str]()
    for keys, applies, why, remedy in _UNUSED:
        if applies(context.config):
            for key in filter(context.written, keys):
                # `auto` over another layer's value leaves the key out
                if key not in told_by_plan and _value(context.config, key) != "auto":
                    yield {"key": key, "why": why, "remedy": remedy}


def _value(config: RunConfig, key: str) -> object:
    return functools.reduce(lambda found, name: vars(found)[name], key.split("."), config)


def _talks(config: RunConfig) -> bool:
    """True for sets of conversations alone: a language model has no noise levels, whatever their scheme, and
    the plan tells of keys about images.
    """
    return all(one.has_conversations for one in config.data.sets)


def _budgeted(context: Context) -> bool:
    return context.config.features.activation_budget not in ("auto", 1.0)


def _swaps(context: Context) -> bool:
    return context.config.features.block_swap not in ("auto", 0)


def _fp8_weights(context: Context) -> bool:
    """True if weights that FP8 products take are left possible: trained ones are bf16 themselves."""
    stored = "bf16" if context.config.method == "full" else "fp8"
    return context.config.features.weights in ("auto", stored)


def _in_fp8(context: Context) -> bool:
    return context.config.features.compute == "fp8"


def _recompute(context: Context) -> bool | int | str:
    return context.config.features.activation_checkpointing


def _address(context: Context) -> Iterator[Clash]:
    name = context.config.model.pretrained_model_name_or_path
    if "://" in name:
        repository = "/".join(name.partition("://")[2].split("/")[1:3])
        yield {"repository": f"the repository id `{repository}`" if repository else "a repository id"}


def _single_file(context: Context) -> bool:
    name = context.config.model.pretrained_model_name_or_path
    return "://" not in name and Path(name).suffix.lower() in _SINGLE_FILES


def _revision_of_folder(context: Context) -> bool:
    model = context.config.model
    asked = bool(model.revision) and context.written("model.revision")
    folder = Path(model.pretrained_model_name_or_path)
    return asked and not _single_file(context) and path_rules.known(folder.is_dir)


def _unknown_preset(context: Context) -> Iterator[Clash]:
    presets, target = context.lora_presets.get(context.config.family), context.config.lora.target_modules
    if presets is None or not isinstance(target, str) or context.config.method == "full":
        return
    if target not in presets:
        yield {"hint": did_you_mean(target, presets) or f"presets: {', '.join(presets)}. "}


def _other_adapter(context: Context) -> bool:
    return context.config.method == "lora" and context.config.lora.type != "lora"


def _bad_patterns(context: Context) -> Iterator[Clash]:
    lora = context.config.lora
    for name, keys in (("lora.rank_pattern", lora.rank_pattern), ("lora.alpha_pattern", lora.alpha_pattern)):
        for key in keys if context.config.method == "lora" else ():
            try:
                re.compile(f"(.*)({key})")  # as peft puts it into a larger one
            except re.error as error:
                yield {"key": name, "pattern": f"'{key}'", "error": error.msg}


def _beside_the_plain_path(context: Context) -> Iterator[Clash]:
    config, features = context.config, context.config.features
    options = {
        f"lora.type: {config.lora.type}": _other_adapter(context),
        f"lora.dropout: {config.lora.dropout}": config.method == "lora" and config.lora.dropout > 0,
        "model.dtype: fp16": config.model.dtype == "fp16",
    }
    asked = {
        "features.compile": features.compile is True,
        "features.cuda_graphs": features.cuda_graphs is True,
        _BUDGET: _budgeted(context),
        _SWAP: _swaps(context),
    }
    for option in (option for option, taken in options.items() if taken):
        for feature in (feature for feature, written in asked.items() if written):
            where = context.blame(option.partition(":")[0], feature)
            yield {"option": option, "feature": feature, "source": context.source(feature), "where": where}


def _low_rate(context: Context) -> Iterator[Clash]:
    train = context.config.train
    if train.optimizer == "prodigy" and train.learning_rate < _LEAST_PRODIGY_RATE:
        yield {"rate": f"{train.learning_rate:g}"}


def _outside_noise_levels(context: Context) -> bool:
    flow, (least, greatest) = context.config.flow, _MODE_SCALES
    outside = not least <= flow.mode_scale <= greatest
    return flow.weighting_scheme == "mode" and outside and not _talks(context.config)


def _no_file(context: Context) -> bool:
    path = context.config.lora.init_from
    return context.config.method == "lora" and path is not None and not path_rules.known(path.is_file)


RULES: tuple[Rule[Context], ...] = (
    Rule(("method", "flow.weighting_scheme", "validation", "features.weights"), _without_effect,
         "`{key}` has no effect {why}", "{remedy}"),
    Rule(("features.weights", "method"),
         lambda at: at.config.method == "full" and at.config.features.weights in frozen(),
         "`features.weights: {features.weights}` cannot be trained by `method: full`: {features.weights}"
         " weights are frozen", "write `method: lora`, or leave features.weights out"),
    Rule(("features.compute", "features.weights", "method"),
         lambda at: at.config.method == "lora" and _in_fp8(at) and not _fp8_weights(at),
         "`features.compute: fp8` multiplies FP8 weights, but {=features.weights}",
         "leave features.weights out, or write fp8 there too"),
    Rule(("features.compute", "features.weights", "method"),
         lambda at: at.config.features.weights == "fp32" and _in_fp8(at) and at.config.method == "full",
         "`features.compute: fp8` multiplies what bf16 weights are rounded to, but {=features.weights}",
         "leave features.weights out"),
    Rule((_BUDGET, "features.compile", _RECOMPUTE),
         lambda at: _budgeted(at) and at.config.features.compile is False,
         "`features.activation_budget` contradicts {=features.compile}: only compiled blocks keep a share of"
         " their activations", "remove one of them", at=(_BUDGET,)),
    Rule((_BUDGET, "features.compile", _RECOMPUTE),
         lambda at: _budgeted(at) and _recompute(at) != "auto" and _recompute(at) is not False,
         "`features.activation_budget` contradicts {=features.activation_checkpointing}: checkpointing"
         " recomputes blocks whole", "remove one of them", at=(_BUDGET,)),
    Rule((_SWAP, "method"),
         lambda at: _swaps(at) and at.config.method == "full",
         "`features.block_swap` is for a frozen base, and `method: full` trains it",
         "write `method: lora`, or leave features.block_swap out", at=(_SWAP, "method")),
    Rule((_SHARD, _SWAP),
         lambda at: at.config.parallel.shard == "full" and _swaps(at),
         "`parallel.shard` contradicts {=features.block_swap}: a block lies in one place",
         "remove one of them", at=(_SHARD,)),
    Rule(("features.weights", "model.dtype"),
         lambda at: at.config.features.weights in ("bf16", "fp32")
         and at.config.model.dtype not in ("auto", at.config.features.weights),
         "`features.weights: {features.weights}` contradicts {=model.dtype}",
         "write the same in both, or leave features.weights out"),
    Rule(("features.compute", "features.weights", "model.dtype"),
         lambda at: at.config.features.compute == "bf16" and at.config.model.dtype in ("fp16", "fp32"),
         "features.compute is bf16, but model.dtype is {model.dtype}", "leave one of them out",
         at=("features.compute",)),
    Rule(("features.compute", "features.weights", "model.dtype"),
         lambda at: at.config.features.compute == "bf16" and at.config.features.weights == "fp32"
         and at.config.model.dtype not in ("fp16", "fp32"),
         "features.compute is bf16, but features.weights is fp32", "leave one of them out",
         at=("features.compute",)),
    Rule(("train.lr_warmup_steps", "train.max_train_steps", "train.num_train_epochs"),
         lambda at: at.config.train.num_train_epochs is None
         and at.config.train.lr_warmup_steps >= at.config.train.max_train_steps,
         "`train.lr_warmup_steps` is {train.lr_warmup_steps}, but `train.max_train_steps` is"
         " {train.max_train_steps} ({@train.max_train_steps})",
         "a run must be longer than its warm-up: a tenth of the steps is plenty"),
    Rule(("data.trigger_word", "data.caption_dropout_rate"),
         lambda at: at.config.data.trigger_word is not None and at.config.data.caption_dropout_rate == 1.0,
         "`data.trigger_word` is never seen: `data.caption_dropout_rate` is 1 ({@data.caption_dropout_rate}),"
         " which drops every caption",
         "remove it, or lower `data.caption_dropout_rate`: it is a share, 0.01 means 1 %",
         at=("data.trigger_word",)),
    Rule((_MODEL, "model.revision"), _address,
         "`model.pretrained_model_name_or_path` is an address", "write {repository}", at=(_MODEL,)),
    Rule((_MODEL, "model.revision"), _single_file,
         "`model.pretrained_model_name_or_path` is a single file",
         "name a folder (with model_index.json, or a language model's config.json), or a repository id",
         at=(_MODEL,)),
    Rule((_MODEL, "model.revision"), _revision_of_folder,
         "`model.revision` has no effect on a folder ({model.pretrained_model_name_or_path})",
         "remove it, or name a repository", at=("model.revision",)),
    Rule(("family", "method", "lora.target_modules"), _unknown_preset,
         '`lora.target_modules`: "{lora.target_modules}" is no preset of {family}',
         "{hint}Module name suffixes are written as a list: [to_q, to_v]", at=("lora.target_modules",)),
    *set_rules.RULES,
    *path_rules.RULES,
    *validation_rules.RULES,
    Rule(("model.dtype", "method"),
         lambda at: at.config.model.dtype == "fp16" and at.config.method == "full",
         "`model.dtype: fp16` is for `method: lora`: a full fine-tune in it would lose small updates",
         "write bf16 or fp32, or `method: lora`"),
    Rule(("lora.type", "features.weights", "method", "lora.dropout", "features.compute"),
         lambda at: _other_adapter(at) and at.config.features.weights in frozen(),
         "`lora.type: {lora.type}` contradicts {=features.weights}: its file could not be proved",
         "remove one of them", at=("lora.type", "features.weights")),
    Rule(("lora.type", "features.weights", "method", "lora.dropout", "features.compute"),
         lambda at: _other_adapter(at) and multiplied_in(at.config.features.compute) is not None,
         "`lora.type: {lora.type}` contradicts {=features.compute}: its file could not be proved",
         "remove one of them", at=("lora.type", "features.compute")),
    Rule(("lora.dropout", "lora.type", "method", "features.weights", "features.compute"),
         lambda at: _other_adapter(at) and at.config.lora.type == "lokr" and at.config.lora.dropout > 0,
         "`lora.dropout` has no effect with `lora.type: lokr`", "remove it, or write dora or lora",
         at=("lora.dropout", "lora.type")),
    Rule(("method", "lora.rank_pattern", "lora.alpha_pattern"), _bad_patterns,
         "`{key}`: {pattern} is no regular expression ({error})",
         "write the end of a layer's name, or escape what is meant literally by a backslash"),
    Rule(("method", "model.dtype", "lora.type", "lora.dropout", "features"), _beside_the_plain_path,
         "`{option}` keeps to the plain path, without `{feature}` ({source})", "remove one of them"),
    Rule(("train.optimizer", "train.learning_rate"), _low_rate,
         "`train.learning_rate` is {rate} ({@train.learning_rate}): prodigy finds the rate itself and"
         " multiplies it by this", "write `train.learning_rate: 1`"),
    Rule(("flow.mode_scale", "flow.weighting_scheme"), _outside_noise_levels,
         "`flow.mode_scale` is {flow.mode_scale}: noise levels would leave 0 to 1",
         f"a number of at least {_MODE_SCALES[0]:g} and at most {_MODE_SCALES[1]:g}, such as 1.29",
         at=("flow.mode_scale",)),
    Rule(("lora.init_from", "method"), _no_file, "`lora.init_from`: {lora.init_from} is no file",
         "name a .safetensors file of an earlier run; a run that goes on needs the one it began from,"
         " under any name", at=("lora.init_from",)),
)  # fmt: skip
