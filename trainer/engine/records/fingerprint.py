"""Values that make a run the same experiment: those that a resume refuses to change, and those it tells.

A checkpoint records both lists. A new option needs a row here; `unrecorded` says what it was in checkpoints
of before there was such a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.schema import LoraSection
from trainer.data.records import Record
from trainer.engine.caching.entries import data_fingerprint
from trainer.engine.context import Context
from trainer.planning.choose.optimizers import second_beta_and_decay
from trainer.planning.plan import Plan

SAMPLE_ORDER = "drawn by the step"
"""The way samples become steps; up to 0.1.0 they waited for others of equal shape, which made up a step."""

Value = Callable[[Context, Sequence[Record]], str | None]
"""The value as text; None where the run has no such value."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value of a run."""

    name: str
    """The row's name in checkpoints."""
    keys: tuple[str, ...]
    """Configuration keys that decide it."""
    value: Value
    unrecorded: str | None = None
    """The value that a checkpoint without this row was trained with; None where it is not known."""


def _config(key: str, *, name: str | None = None, unrecorded: str | None = None) -> Row:
    """A row with the value of a configuration key."""
    return Row(
        name=name or key, keys=(key,), value=lambda run, _: _configured(run, key), unrecorded=unrecorded
    )


def _adapter(key: str) -> Row:
    """A row of `lora`; 0.1.0 recorded those of its options only that were not the usual ones."""
    return _config(f"lora.{key}", unrecorded=_text(vars(LoraSection())[key]))


def _plan(name: str, key: str, value: Callable[[Plan], object]) -> Row:
    """A row that the plan decides; `key` is empty where the configuration has no say in it."""
    return Row(name=name, keys=(key,) if key else (), value=lambda run, _: str(value(run.plan)))


def _configured(context: Context, key: str) -> str | None:
    """The value of a configuration key; None for the adapter of a full fine-tune, and for draws that a family
    does not make, a weighting scheme has not, or a model is not told.
    """
    config, family, (section, _, last) = context.config, context.family, key.rpartition(".")
    if section == "lora" and config.method != "lora":
        return None
    if section == "flow":
        scheme = config.flow.weighting_scheme
        if "latents" not in family.encoder_components or _SCHEME_OF.get(last, scheme) != scheme:
            return None
        base = context.source.component_config(family.trained_component)
        if last == "guidance_scale" and not base.get("guidance_embeds"):
            return None
    return _text(vars(vars(config)[section] if section else config)[last])


def _text(value: object) -> str:
    """A value in one form: tables and names in alphabetical order."""
    if isinstance(value, dict):
        return str(sorted(value.items()))
    return ",".join(sorted(value)) if isinstance(value, tuple) else str(value)


def _init_from(context: Context, _: Sequence[Record]) -> str | None:
    file = context.config.lora.init_from
    if file is None or context.config.method != "lora":
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _weights(context: Context, _: Sequence[Record]) -> str:
    plan = context.plan
    return " ".join(filter(None, (context.source.weights, plan.weights, plan.modulation)))


def _adamw(context: Context) -> tuple[str, ...]:
    """AdamW's second beta and decay, where `auto` is decided by the optimizer."""
    return tuple(map(str, second_beta_and_decay(context.config.train, context.plan.optimizer)))


_SCHEME_OF = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
_BASE = "model.pretrained_model_name_or_path"
_DATA = ("data.sets", "data.resolution", "data.trigger_word", "data.on_bad_file", "validation.held_out")

REFUSED: tuple[Row, ...] = (
    _config("family"),
    _config("method"),
    Row(name="base", keys=(_BASE,), value=lambda context, _: context.source.identity),
    Row(name="revision", keys=("model.revision",), value=lambda context, _: context.source.revision or ""),
    Row(name="weights", keys=("model.weights", "features.weights", "features.modulation"), value=_weights),
    _plan("dtype", "model.dtype", lambda plan: plan.dtype),
    _plan("compute", "features.compute", lambda plan: plan.compute),
    _plan("text_encoders", "", lambda plan: plan.text_encoder_weights),
    Row(name="data", keys=_DATA, value=lambda _, records: data_fingerprint(records)),
    Row(name="sample_order", keys=(), value=lambda *_: SAMPLE_ORDER, unrecorded="collected by shape"),
    _config("data.caption_dropout_rate", name="caption_dropout_rate"),
    _config("data.max_sequence_length", name="max_sequence_length"),
    _config("train.seed", name="seed"),
    _plan("train_batch_size", "train.train_batch_size", lambda plan: plan.micro_batch_size),
    _plan(
        "gradient_accumulation_steps",
        "train.gradient_accumulation_steps",
        lambda plan: plan.accumulation_steps,
    ),
    _plan("optimizer", "train.optimizer", lambda plan: plan.optimizer),
    _config("train.ema_decay", unrecorded="None"),
    *map(_adapter, ("rank", "alpha", "target_modules", "type", "dropout", "rank_pattern", "alpha_pattern")),
    Row(name="lora.init_from", keys=("lora.init_from",), value=_init_from, unrecorded="nothing"),
    *map(_config, (
        "flow.weighting_scheme", "flow.logit_mean", "flow.logit_std", "flow.mode_scale", "flow.shift",
        "flow.guidance_scale",
    )),
)  # fmt: skip
"""Another value is another experiment: exit code 78."""

TOLD: tuple[Row, ...] = (
    *map(_config, (
        "train.max_train_steps", "train.learning_rate", "train.lr_scheduler", "train.lr_warmup_steps",
        "train.lr_num_cycles", "train.lr_power", "train.max_grad_norm", "train.adam_beta1",
        "train.adam_epsilon",
    )),
    Row(name="train.adam_beta2", keys=("train.adam_beta2",), value=lambda run, _: _adamw(run)[0]),
    Row(name="train.weight_decay", keys=("train.weight_decay",), value=lambda run, _: _adamw(run)[1]),
    _plan("device", "", lambda plan: plan.device),
    _plan("attention", "features.attention", lambda plan: plan.attention),
    _plan("compile", "features.compile", lambda plan: plan.compile),
    _plan("text_padding", "features.text_padding", lambda plan: plan.text_padding),
    _plan("tf32", "features.tf32", lambda plan: plan.tf32),
    _plan("vae_tiling", "features.vae_tiling", lambda plan: plan.vae_tiling),
)  # fmt: skip
"""A run may go on with another value, and says so."""

FREE: tuple[str, ...] = (
    "output_dir", "model.download", "data.cache_dir", "data.cache_in_memory", "train.log_every_steps",
    "train.report_to", "train.tracker_project_name", "features.activation_checkpointing",
    "features.activation_budget", "features.block_swap", "features.cuda_graphs", "features.loader",
    "features.memory_budget", "validation.prompts", "validation.every_steps", "validation.seed",
    "validation.num_inference_steps", "validation.guidance_scale", "validation.resolution",
    "validation.max_new_tokens", "validation.control_images", "validation.img_dir", "validation.chat_file",
    "validation.control_dir", "checkpoint.checkpointing_steps", "checkpoint.checkpoints_total_limit",
    "checkpoint.resume_from_checkpoint", "checkpoint.keep_best",
)  # fmt: skip
"""Keys that change no step: nothing is said of them."""


def values(rows: Sequence[Row], context: Context, records: Sequence[Record]) -> dict[str, str]:
    """The values of these rows in a run, by name; rows that do not apply are left out."""
    found = ((row.name, row.value(context, records)) for row in rows)
    return {name: value for name, value in found if value is not None}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that has changed; `nothing` where one side has none."""

    name: str
    old: str
    new: str


def changes(
    rows: Sequence[Row], saved: Mapping[str, str], current: Mapping[str, str]
) -> tuple[list[Change], list[str]]:
    """The differences by name, and names that the trainer that wrote `saved` did not record.

    Names that no row has are compared too: another version of the trainer wrote them.
    """
    before = {row.name: row.unrecorded for row in rows if row.unrecorded is not None} | dict(saved)
    names = sorted({*saved, *current})
    found = [
        Change(name=name, old=before[name], new=current.get(name, "nothing"))
        for name in names
        if name in before and before[name] != current.get(name, "nothing")
    ]
    return found, [name for name in names if name not in before]
