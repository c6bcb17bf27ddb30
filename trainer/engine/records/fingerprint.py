"""What makes a run the same experiment: values that a resume refuses to change, and those it tells.

A checkpoint records both lists. A new option needs a row here; `unrecorded` says what it was in checkpoints
of before there was such a row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trainer.config.schema import FlowSection, LoraSection, RunConfig
from trainer.data.records import Record
from trainer.engine.caching.entries import data_fingerprint
from trainer.engine.context import Context
from trainer.planning.choose.optimizers import second_beta_and_decay

SAMPLE_ORDER = "drawn by the step"
"""How samples become steps; up to 0.1.0 they waited for others of equal shape, which made up a step."""

Value = Callable[[Context, Sequence[Record]], str | None]
"""The value as text; None where the run has no such thing."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value of a run."""

    name: str
    """As checkpoints record it."""
    keys: tuple[str, ...]
    """Configuration keys that decide it."""
    value: Value
    unrecorded: str | None = None
    """What a checkpoint without this value was trained with; None: nobody knows."""


def _config(key: str, *, name: str | None = None, unrecorded: str | None = None) -> Row:
    """A row whose value is that of a configuration key."""

    def value(context: Context, records: Sequence[Record]) -> str | None:
        return str(_read(context.config, key))

    return Row(name=name or key, keys=(key,), value=value, unrecorded=unrecorded)


def _read(config: RunConfig, key: str) -> object:
    section, _, name = key.rpartition(".")
    found: object = vars(vars(config)[section])[name] if section else vars(config)[name]
    return found


def _plan(
    name: str, keys: Sequence[str], value: Callable[[Context], str], *, unrecorded: str | None = None
) -> Row:
    """A row that the plan, or this version, decides."""
    return Row(
        name=name, keys=tuple(keys), value=lambda context, records: value(context), unrecorded=unrecorded
    )


def _adapter(key: str) -> Row:
    """A row of `lora`; 0.1.0 recorded those of its options only that were not the usual ones."""

    def text(lora: LoraSection) -> str:
        found = vars(lora)[key]
        if isinstance(found, dict):
            return str(sorted(found.items()))
        return ",".join(sorted(found)) if isinstance(found, tuple) else str(found)

    def value(context: Context, records: Sequence[Record]) -> str | None:
        return text(context.config.lora) if context.config.method == "lora" else None

    return Row(name=f"lora.{key}", keys=(f"lora.{key}",), value=value, unrecorded=text(LoraSection()))


def _init_from(context: Context, records: Sequence[Record]) -> str | None:
    file = context.config.lora.init_from
    if file is None or context.config.method != "lora":
        return None
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


def _flow(key: str, applies: Callable[[FlowSection], bool] = lambda flow: True) -> Row:
    """A row of `flow`, for families that draw noise."""

    def value(context: Context, records: Sequence[Record]) -> str | None:
        flow = context.config.flow
        return str(vars(flow)[key]) if _draws_noise(context) and applies(flow) else None

    return Row(name=f"flow.{key}", keys=(f"flow.{key}",), value=value)


def _draws_noise(context: Context) -> bool:
    return "latents" in context.family.encoder_components


def _guidance(context: Context, records: Sequence[Record]) -> str | None:
    """Only a guidance-distilled model is told it."""
    if not _draws_noise(context):
        return None
    config = context.source.component_config(context.family.trained_component)
    return str(context.config.flow.guidance_scale) if config.get("guidance_embeds") else None


def _weights(context: Context) -> str:
    plan = context.plan
    return " ".join(filter(None, (context.source.weights, plan.weights, plan.modulation)))


def _beta_2_and_decay(context: Context) -> tuple[float, float]:
    return second_beta_and_decay(context.config.train, context.plan.optimizer)


_DATA_KEYS = tuple(f"data.{name}" for name in ("sets", "resolution", "trigger_word", "on_bad_file"))

REFUSED: tuple[Row, ...] = (
    _config("family"),
    _config("method"),
    _plan("base", ("model.pretrained_model_name_or_path",), lambda context: context.source.identity),
    _plan("revision", ("model.revision",), lambda context: context.source.revision or ""),
    _plan("weights", ("model.weights", "features.weights", "features.modulation"), _weights),
    _plan("dtype", ("model.dtype",), lambda context: context.plan.dtype),
    _plan("compute", ("features.compute",), lambda context: context.plan.compute),
    _plan("text_encoders", (), lambda context: context.plan.text_encoder_weights),
    Row(
        name="data",
        keys=(*_DATA_KEYS, "validation.held_out"),
        value=lambda context, records: data_fingerprint(records),
    ),
    _plan("sample_order", (), lambda context: SAMPLE_ORDER, unrecorded="collected by shape"),
    _config("data.caption_dropout_rate", name="caption_dropout_rate"),
    _config("data.max_sequence_length", name="max_sequence_length"),
    _config("train.seed", name="seed"),
    _plan(
        "train_batch_size", ("train.train_batch_size",), lambda context: str(context.plan.micro_batch_size)
    ),
    _plan(
        "gradient_accumulation_steps",
        ("train.gradient_accumulation_steps",),
        lambda context: str(context.plan.accumulation_steps),
    ),
    _plan("optimizer", ("train.optimizer",), lambda context: context.plan.optimizer),
    _config("train.ema_decay", unrecorded="None"),
    *(_adapter(key) for key in ("rank", "alpha", "target_modules", "type", "dropout")),
    *(_adapter(key) for key in ("rank_pattern", "alpha_pattern")),
    Row(name="lora.init_from", keys=("lora.init_from",), value=_init_from, unrecorded="nothing"),
    _flow("weighting_scheme"),
    *(
        _flow(key, lambda flow: flow.weighting_scheme == "logit_normal")
        for key in ("logit_mean", "logit_std")
    ),
    _flow("mode_scale", lambda flow: flow.weighting_scheme == "mode"),
    _flow("shift"),
    Row(name="flow.guidance_scale", keys=("flow.guidance_scale",), value=_guidance),
)
"""Another value is another experiment: exit code 78."""

TOLD: tuple[Row, ...] = (
    _config("train.max_train_steps"),
    _config("train.learning_rate"),
    *(
        _config(f"train.{key}")
        for key in ("lr_scheduler", "lr_warmup_steps", "lr_num_cycles", "lr_power", "max_grad_norm")
    ),
    *(_config(f"train.{key}") for key in ("adam_beta1", "adam_epsilon")),
    # `auto` is decided by the optimizer
    _plan("train.adam_beta2", ("train.adam_beta2",), lambda context: str(_beta_2_and_decay(context)[0])),
    _plan("train.weight_decay", ("train.weight_decay",), lambda context: str(_beta_2_and_decay(context)[1])),
    _plan("device", (), lambda context: context.plan.device),
    _plan("attention", ("features.attention",), lambda context: context.plan.attention),
    _plan("compile", ("features.compile",), lambda context: str(context.plan.compile)),
    _plan("text_padding", ("features.text_padding",), lambda context: str(context.plan.text_padding)),
    _plan("tf32", ("features.tf32",), lambda context: str(context.plan.tf32)),
    _plan("vae_tiling", ("features.vae_tiling",), lambda context: str(context.plan.vae_tiling)),
)
"""A run may go on with another value, and says so."""

FREE: tuple[str, ...] = (
    "output_dir",
    "model.download",
    "data.cache_dir",
    "data.cache_in_memory",
    *(f"train.{key}" for key in ("log_every_steps", "report_to", "tracker_project_name")),
    *(
        f"features.{key}"
        for key in (
            "activation_checkpointing",
            "activation_budget",
            "block_swap",
            "cuda_graphs",
            "loader",
            "memory_budget",
        )
    ),
    *(
        f"validation.{key}"
        for key in ("prompts", "every_steps", "seed", "num_inference_steps", "guidance_scale")
    ),
    *(f"validation.{key}" for key in ("resolution", "max_new_tokens", "control_images")),
    *(f"validation.{key}" for key in ("img_dir", "chat_file", "control_dir")),
    *(
        f"checkpoint.{key}"
        for key in ("checkpointing_steps", "checkpoints_total_limit", "resume_from_checkpoint", "keep_best")
    ),
)
"""Keys that change no step: nothing is said of them."""


def refused(context: Context, records: Sequence[Record]) -> dict[str, str]:
    """Values that a checkpoint and the run that continues it must have in common, by name."""
    return _values(REFUSED, context, records)


def told(context: Context, records: Sequence[Record]) -> dict[str, str]:
    """Values of which a resume says the changes, by name."""
    return _values(TOLD, context, records)


def _values(rows: Sequence[Row], context: Context, records: Sequence[Record]) -> dict[str, str]:
    found = ((row.name, row.value(context, records)) for row in rows)
    return {name: value for name, value in found if value is not None}


@dataclass(frozen=True, kw_only=True)
class Change:
    """A value that is not what it was; `nothing` where one side has none."""

    name: str
    old: str
    new: str


def changes(
    rows: Sequence[Row], saved: Mapping[str, str], current: Mapping[str, str]
) -> tuple[list[Change], list[str]]:
    """What differs by name, and names that the trainer that wrote `saved` did not record.

    Names that no row has are compared too: another version of the trainer wrote them.
    """
    known = {row.name: row for row in rows}
    found, unrecorded = [], []
    for name in sorted({*saved, *current}):
        old, new = saved.get(name), current.get(name, "nothing")
        if old is None and name in known:
            old = known[name].unrecorded
        if old is None:
            unrecorded.append(name)
        elif old != new:
            found.append(Change(name=name, old=old, new=new))
    return found, unrecorded
