"""What a user may ask for: frozen models that forbid unknown keys. Field names are those of diffusers' training scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Toggle = Literal["auto"] | bool


class Section(BaseModel):
    """Base of every section: frozen, unknown keys forbidden, no silent coercion of strings to numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), use_attribute_docstrings=True)


class ModelSection(Section):
    """The base model."""

    pretrained_model_name_or_path: str
    """A folder in diffusers' layout, or a repository id on the hub."""
    revision: str | None = None
    """Branch, tag or commit of the repository; the commit that was used is recorded in the run."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` builds every component from its config.json, seeded: for benchmarks and training from scratch."""
    download: Literal["auto", "never"] = "auto"
    """`never` uses only what is on disk already."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Compute and storage type of the frozen base; `auto` is bf16 on a GPU and fp32 on a CPU."""


class ImageSet(Section):
    """One folder of images with captions."""

    img_dir: Path
    """Folder with png, jpg or webp files, each with a .txt of the same stem, or one metadata.jsonl."""
    repeats: Positive = 1
    """How often every image counts in one epoch."""


class DataSection(Section):
    """Images and captions."""

    sets: Annotated[tuple[ImageSet, ...], Field(min_length=1)]
    resolution: Annotated[int, Field(ge=32, le=4096)] = 1024
    """Side in pixels of the square whose area every bucket keeps to."""
    caption_dropout_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Share of samples that are trained with an empty caption."""
    trigger_word: str | None = None
    """Put before every caption that does not contain it already."""
    max_sequence_length: Annotated[int, Field(ge=8, le=512)] = 512
    """Tokens that captions are padded or cut to."""
    cache_dir: Path | None = None
    """Where encoded samples are kept; TRAINER_CACHE_DIR, else the user's cache folder, when not given."""


class LoraSection(Section):
    """The adapter that `method: lora` trains."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: str | tuple[str, ...] = "attention"
    """A preset of the family (`trainer families` lists them), or module name suffixes."""


class TrainSection(Section):
    """The optimisation."""

    max_train_steps: Positive = 1500
    train_batch_size: Positive = 1
    gradient_accumulation_steps: Positive = 1
    learning_rate: Annotated[float, Field(gt=0, le=1.0)] = 1.0e-4
    optimizer: Literal["adamw"] = "adamw"
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    adam_epsilon: Annotated[float, Field(gt=0)] = 1.0e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    lr_scheduler: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    log_every_steps: Positive = 10
    """Steps between two lines of the log; the device is synchronised only then."""


class FlowSection(Section):
    """Flow matching: how noise levels are drawn and weighted."""

    weighting_scheme: Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"] = "none"
    logit_mean: float = 0.0
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    mode_scale: float = 1.29
    guidance_scale: Annotated[float, Field(ge=0)] = 1.0
    """Guidance value that a guidance-distilled model is told while it trains."""


class FeaturesSection(Section):
    """What the hardware plan decides. Everything is `auto` unless written; what is written is honoured or refused."""

    attention: Literal["auto", "flash", "cudnn", "efficient", "math", "native"] = "auto"
    weights: Literal["auto", "bf16", "fp32", "int8"] = "auto"
    """Storage of the base model's weights; int8 is for `method: lora` only."""
    activation_checkpointing: Toggle = "auto"
    vae_tiling: Toggle = "auto"
    tf32: Toggle = "auto"


class ValidationSection(Section):
    """Previews and held-out loss."""

    prompts: tuple[str, ...] = ()
    every_steps: Positive = 250
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    num_inference_steps: Positive = 20
    guidance_scale: Annotated[float, Field(ge=0)] = 3.5
    resolution: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Side of the square previews in pixels; `data.resolution` when not given."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Images kept out of training and used for the validation loss."""


class CheckpointSection(Section):
    """Checkpoints and resume."""

    checkpointing_steps: Positive = 250
    checkpoints_total_limit: Positive = 3
    resume_from_checkpoint: Literal["auto", "never"] | Path = "auto"
    """`auto` continues the newest valid checkpoint in `output_dir`; `never` refuses a folder that holds one."""


class RunConfig(Section):
    """One training run."""

    family: str
    method: Literal["lora", "full"] = "lora"
    model: ModelSection
    data: DataSection
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    flow: FlowSection = FlowSection()
    features: FeaturesSection = FeaturesSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output_dir: Path
