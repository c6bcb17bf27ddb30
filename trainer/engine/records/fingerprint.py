"""Values that make a run the same experiment: those that a resume refuses to change, and those it tells.

A checkpoint records both. A new option needs a place in one of these tables; `UNRECORDED` says what it was in
checkpoints of before it had one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trainer.config.schema import LoraSection
from trainer.data.records import Record
from trainer.engine.caching.entries import data_fingerprint, template_key, text_key
from trainer.engine.context import Context
from trainer.planning.choose.optimizers import SPLIT, second_beta_and_decay
from trainer.ways import chat_templates

SAMPLE_ORDER = "drawn by the step"
"""The way samples become steps; up to 0.1.0 they waited for others of equal shape, which made up a step."""

REFUSED: Mapping[str, Sequence[str]] = {
    "base": ("model.pretrained_model_name_or_path",),
    "revision": ("model.revision",),
    "weights": ("model.weights", "features.weights", "features.modulation"),
    "dtype": ("model.dtype",),
    "compute": ("features.compute",),
    "text_encoders": (),
    # samples that are left out, held out or cut are what these keys decide, and part of the fingerprint
    "data": (
        "data.sets", "data.resolution", "data.trigger_word", "data.on_bad_file", "data.on_long",
        "validation.held_out", "validation.seed",
    ),
    "sample_order": (),
    "caption_dropout_rate": ("data.caption_dropout_rate",),
    "max_sequence_length": ("data.max_sequence_length",),
    "seed": ("train.seed",),
    "train_batch_size": ("train.train_batch_size",),
    "gradient_accumulation_steps": ("train.gradient_accumulation_steps",),
    "optimizer": ("train.optimizer",),
    **{key: (key,) for key in (
        "family", "method", "data.learn", "data.chat_template", "train.ema_decay",
        "lora.rank", "lora.alpha", "lora.target_modules", "lora.type", "lora.dropout",
        "lora.rank_pattern", "lora.alpha_pattern", "lora.init_from",
        "flow.weighting_scheme", "flow.logit_mean", "flow.logit_std", "flow.mode_scale", "flow.shift",
        "flow.guidance_scale",
    )},
}  # fmt: skip
"""Values by their names in checkpoints, with the configuration keys that decide each. Another value is
another experiment: exit code 78."""

SUCCEEDED: Mapping[str, Mapping[str, str]] = {"optimizer": {"adamw_kahan_bf16": SPLIT}}
"""Values of `REFUSED` from which a run may go on with one other, which takes the state of the first: AdamW
with compensated (Kahan) sums has become the one with split masters."""

TOLD: Mapping[str, Sequence[str]] = {
    "device": (),
    "weight_gradient": ("features.weight_gradient",),
    "attention": ("features.attention",),
    "compile": ("features.compile",),
    "text_padding": ("features.text_padding",),
    "tf32": ("features.tf32",),
    "vae_tiling": ("features.vae_tiling",),
    **{key: (key,) for key in (
        "train.max_train_steps", "train.num_train_epochs", "train.learning_rate", "train.lr_scheduler",
        "train.lr_warmup_steps",
        "train.lr_num_cycles", "train.lr_power", "train.max_grad_norm", "train.adam_beta1",
        "train.adam_beta2", "train.weight_decay", "train.adam_epsilon",
    )},
}  # fmt: skip
"""The same of values with which a run may go on, and says so."""

FREE: tuple[str, ...] = (
    "output_dir", "model.download", "data.cache_dir", "data.cache_in_memory", "train.log_every_steps",
    "train.report_to", "train.tracker_project_name", "features.activation_checkpointing",
    "features.activation_budget", "features.block_swap", "features.cuda_graphs", "features.loader",
    "features.memory_budget", "parallel.gpus", "parallel.shard",
    "validation.prompts", "validation.every_steps",
    "validation.num_inference_steps", "validation.guidance_scale", "validation.resolution",
    "validation.max_new_tokens", "validation.control_images", "validation.img_dir", "validation.chat_file",
    "validation.columns", "validation.dataset_info", "validation.name",
    "validation.control_dir", "validation.metrics", "validation.clip_model", "validation.dinov2_model",
    "validation.copy_threshold", "validation.early_stop", "checkpoint.checkpointing_steps",
    "checkpoint.checkpoints_total_limit", "checkpoint.resume_from_checkpoint", "checkpoint.keep_best",
    "checkpoint.lora_files",
)  # fmt: skip
"""Keys that change no step: nothing is said of them."""

_SCHEME_OF = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
_PLANNED = (
    "dtype", "compute", "weight_gradient", "optimizer", "device", "attention", "compile", "text_padding",
    "tf32", "vae_tiling",
)  # fmt: skip
"""Values that are the plan's of the same name."""


def values(context: Context, records: Sequence[Record]) -> tuple[dict[str, str], dict[str, str]]:
    """The values of a run by name, of `REFUSED` and of `TOLD`. Those that do not apply are left out."""
    source, plan = context.source, context.plan
    beta_2, decay = second_beta_and_decay(context.config.train)
    found = {
        **{name: str(vars(plan)[name]) for name in _PLANNED if vars(plan)[name] != ""},
        "base": source.identity,
        "revision": source.revision or "",
        "weights": " ".join(filter(None, (source.weights, plan.weights, plan.modulation))),
        "text_encoders": plan.text_encoder_weights,
        "data": data_fingerprint(records),
        "sample_order": SAMPLE_ORDER,
        "train_batch_size": str(plan.micro_batch_size),
        "gradient_accumulation_steps": str(plan.accumulation_steps),
        "train.adam_beta2": str(beta_2),
        "train.weight_decay": str(decay),
    }
    for name, keys in {**REFUSED, **TOLD}.items():
        if name in found or name in _PLANNED:
            continue
        if (value := _configured(context, *keys)) is not None:
            found[name] = value
    refused, told = ({name: found[name] for name in rows if name in found} for rows in (REFUSED, TOLD))
    return refused, told


def _configured(context: Context, key: str) -> str | None:
    """The value of a configuration key; None for the adapter of a full fine-tune, for an adapter that starts
    from none, for parts of conversations that a family has not, and for draws that a family does not make, a
    weighting scheme has not, or a model is not told.
    """
    config, family, (section, _, last) = context.config, context.family, key.rpartition(".")
    value = vars(vars(config)[section] if section else config)[last]
    if section == "lora" and config.method != "lora":
        return None
    if key in ("data.learn", "data.chat_template") and family.encode_conversation is None:
        return None
    if key == "data.chat_template":  # a file by its content
        return template_key(context) or "auto"
    if key == "lora.init_from":
        return None if value is None else hashlib.sha256(value.read_bytes()).hexdigest()[:16]
    if section == "flow":
        scheme = config.flow.weighting_scheme
        if "latents" not in family.encoder_components or _SCHEME_OF.get(last, scheme) != scheme:
            return None
        base = context.source.component_config(family.trained_component)
        if last == "guidance_scale" and not base.get("guidance_embeds"):
            return None
    return _text(value)


def _text(value: object) -> str:
    """A value in one form: tables and names in alphabetical order."""
    if isinstance(value, dict):
        return str(sorted(value.items()))
    return ",".join(sorted(value)) if isinstance(value, tuple) else str(value)


UNRECORDED: Mapping[str, str] = {
    "sample_order": "collected by shape",
    "train.ema_decay": "None",
    "data.learn": "answers",
    "data.chat_template": "auto",
    "lora.init_from": "nothing",
    **{f"lora.{key}": _text(value) for key, value in LoraSection() if key != "init_from"},
}
"""Values that a checkpoint without them was trained with. 0.1.0 recorded those options of the adapter only
that were not the usual ones."""


_FILES = {"data.chat_template": "a template of a file", "lora.init_from": "an adapter's file"}
"""Values that are a file by its content, in words."""


def _named(name: str, value: str, kind: str) -> str:
    """A value of `_FILES` for people: a word as it is, a shipped template by its name."""
    if value in (chat_templates.AUTO, "nothing"):
        return value
    shipped = {text_key(str(chat_templates.text_of(one))): one for one in chat_templates.names()}
    return shipped.get(value, kind) if name == chat_templates.KEY else kind


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that has changed; `nothing` where one side has none."""

    name: str
    old: str
    new: str

    @property
    def words(self) -> str:
        """Both values for people: of files, which are compared by hashes, what kind of file it is."""
        kind = _FILES.get(self.name)
        if kind is None:
            return f"it began with {self.old!r}, this start has {self.new!r}"
        old, new = (_named(self.name, value, kind) for value in (self.old, self.new))
        other = f"{kind} with another content" if old == new else new
        return f"it began with {old}, this start has {other}"

    @property
    def succeeds(self) -> bool:
        """Whether the new value goes on with what the old one left."""
        return SUCCEEDED.get(self.name, {}).get(self.old) == self.new


def changes(saved: Mapping[str, str], current: Mapping[str, str]) -> tuple[list[Change], list[str]]:
    """The differences by name, and names that the trainer that wrote `saved` did not record.

    Names that no table has are compared too: another version of the trainer wrote them.
    """
    before, names = {**UNRECORDED, **saved}, sorted({*saved, *current})
    found = [
        Change(name=name, old=before[name], new=current.get(name, "nothing"))
        for name in names
        if name in before and before[name] != current.get(name, "nothing")
    ]
    return found, [name for name in names if name not in before]
