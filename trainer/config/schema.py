"""The keys that a user may write. Frozen models that forbid unknown keys, spelled as in diffusers' scripts.

The string under a field is its help: `trainer config schema` hands it to editors. Error messages are built
from the declared types, so a bound written here needs no second place.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from trainer.config.value_types import (
    ALPHAS,
    RANKS,
    ChatTemplate,
    Compute,
    ModelName,
    Modulation,
    Positive,
    Size,
    Text,
    Toggle,
    UserPath,
    Weights,
    number_first,
)


class Section(BaseModel):
    """Base of every section: frozen, unknown keys forbidden, NaN and infinity refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelSection(Section):
    """The base model."""

    pretrained_model_name_or_path: ModelName
    """A folder in diffusers' layout (a language model's in transformers'), or a repository id on the hub."""
    revision: Text | None = None
    """Branch, tag or commit of the repository. `trainer plan` names the commit that is here, and the run's
    config.resolved.yaml the one that was used: written here it keeps the base from changing."""
    weights: Literal["pretrained", "random"] = "pretrained"
    """`random` trains from zero: what trains is built from its config.json, seeded; the other components are
    loaded where the folder holds their weights, and built too where it holds none."""
    download: Literal["auto", "never"] = "auto"
    """`never` uses only what is on disk already."""
    dtype: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """Compute and storage type of the frozen base; `auto`: what `features.weights` says, else bf16 on a GPU
    that has it and fp32 elsewhere; fp16, for a LoRA, scales the loss and skips steps that overflow."""


class Columns(Section):
    """Names that a record's parts have in a file of conversations."""

    messages: Text | None = None
    """The list of messages, each of role and content or of from and value."""
    prompt: Text | None = None
    """The question."""
    query: Text | None = None
    """The question's second part, put below `prompt`."""
    response: Text | None = None
    """The answer."""
    history: Text | None = None
    """Pairs of question and answer before `prompt`."""
    system: Text | None = None
    """The system prompt."""

    @property
    def named(self) -> dict[str, str]:
        """The parts that have a name."""
        return {part: name for part, name in self if name is not None}


class DataSet(Section):
    """One folder of images with captions, or of conversations."""

    img_dir: UserPath | None = None
    """Folder with png, jpg, webp, bmp, tiff or avif files, in sub-folders too, each with a .txt of the same
    stem, or named in a metadata.jsonl or metadata.csv."""
    control_dir: UserPath | Annotated[tuple[UserPath, ...], Field(min_length=1)] | None = None
    """For families that edit: folder of the images before the edit, with the stems of those in `img_dir`; a
    list of folders for several a sample. Without it, metadata names them as `control_file_name`."""
    mask_dir: UserPath | None = None
    """Folder of loss masks with the stems of the images: white counts, black does not, grey in part."""
    chat_file: UserPath | None = None
    """For language models: a file of conversations (.jsonl, .json or .parquet) as `messages`, ShareGPT or
    alpaca, which is found by its content."""
    columns: Columns | None = None
    """Names of keys in the records of `chat_file`, or of columns: `messages`, or `prompt` and `response`, are
    needed. What is not named is not read."""
    dataset_info: UserPath | None = None
    """In place of `chat_file`: a dataset_info.json, as other trainers list files of its folder in."""
    name: Text | None = None
    """Entry of `dataset_info`."""
    repeats: Annotated[int, Field(ge=1, le=10_000)] = 1
    """How often every image counts in one epoch: the weight of a set among several."""
    loss_weight: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Factor on the loss of every sample of the set."""
    is_reg: bool = False
    """Whether this is a regularisation set: no trigger word, never held out; `loss_weight` is its weight."""
    flip: bool = False
    """Train on every image mirrored too, cached as an image of its own."""
    random_crop: Annotated[int, Field(ge=0, le=16)] = 0
    """How many cuts of every image are cached, at random places, in place of the one in the middle."""

    @property
    def has_conversations(self) -> bool:
        """True for a set of conversations, False for one of images."""
        return self.chat_file is not None or self.dataset_info is not None


class DataSection(Section):
    """Images and captions."""

    sets: Annotated[tuple[DataSet, ...], Field(min_length=1)]
    """Data sets to train on; `--dataset PATH` replaces them all by one folder or file."""
    resolution: Annotated[int, Field(ge=32, le=4096)] = 1024
    """Side in pixels of the square whose area every bucket keeps to."""
    caption_dropout_rate: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """Share of samples that are trained with an empty caption."""
    trigger_word: Text | None = None
    """Put before every caption that does not contain it already."""
    max_sequence_length: Annotated[int, Field(ge=8, le=1_048_576)] = 512
    """Tokens that captions are padded or cut to; for conversations the length of a packed row."""
    on_long: Literal["error", "skip", "cut"] = "error"
    """Conversations of more tokens than `max_sequence_length`: `skip` leaves them out, `cut` removes whole
    turns from their ends; both are told."""
    learn: Literal["answers", "last_answer", "all"] = "answers"
    """Tokens of a conversation that the loss is on: the assistant's messages, the last of them, or all."""
    chat_template: ChatTemplate = "auto"
    """How conversations are written: `auto`, the tokenizer's own template; the name of a shipped one, such as
    chatml (docs/data.md lists them); or a FILE.jinja. Saved with the result where it is not `auto`."""
    cache_dir: UserPath | None = None
    """Where encoded samples are kept; TRAINER_CACHE_DIR, else the user's cache folder, when not given."""
    cache_in_memory: Toggle = "auto"
    """Whether entries that were read from the disk stay in memory: `auto` an eighth of what the run leaves of
    it, and none where it is the GPU's too; true all of them, or the run is refused."""
    on_bad_file: Literal["error", "skip"] = "error"
    """`skip` leaves out what cannot be used and lists it, in the log and in `left_out.jsonl` of the run."""


class LoraSection(Section):
    """The adapter that `method: lora` trains."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Width of the adapter: more learns more and weighs more."""
    alpha: Annotated[float, Field(gt=0)] = 16.0
    """The adapter's output is scaled by alpha / rank."""
    target_modules: Text | Annotated[tuple[Text, ...], Field(min_length=1)] = "attention"
    """One preset of the family (`trainer families` lists them), or a list of module name suffixes."""
    type: Literal["lora", "dora", "lokr"] = "lora"
    """`dora` learns the length of every row of a weight by itself, `lokr` is a Kronecker product; both want a
    base that is not quantised, and train slower."""
    dropout: Annotated[float, Field(ge=0.0, lt=1)] = 0.0
    """Share of the adapter's inputs that are set to zero in training."""
    rank_pattern: Annotated[dict[Text, Annotated[int, Field(ge=1, le=1024)]], RANKS] = {}
    """Other ranks for some layers, by the end of their names or a regular expression, as in peft. What is
    written over another file adds to its keys; `{}` removes them."""
    alpha_pattern: Annotated[dict[Text, Annotated[float, Field(gt=0)]], ALPHAS] = {}
    """Other alphas for some layers, as `rank_pattern`."""
    init_from: UserPath | None = None
    """A file that an earlier run saved: its adapter is what training starts from."""


class TrainSection(Section):
    """The optimisation."""

    max_train_steps: Positive = 1500
    """Optimizer steps of the whole run."""
    num_train_epochs: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Length of the run in epochs, in place of `max_train_steps`: an epoch holds every sample `repeats`
    times. The plan and the run tell how many steps these are."""
    train_batch_size: Annotated[int, Field(ge=1, le=4096)] = 1
    """The most images in one forward pass; those of a step that differ in shape take turns."""
    gradient_accumulation_steps: Positive = 1
    """An optimizer step learns from this many times train_batch_size images, drawn before they are parted."""
    learning_rate: Annotated[float, Field(gt=0, le=1.0)] = 1.0e-4
    """Peak learning rate."""
    optimizer: Literal["adamw", "adamw_stochastic_bf16", "adamw_8bit", "prodigy"] = "adamw"
    """AdamW, whose fp32 masters a full fine-tune in bf16 keeps in two halves; `adamw_stochastic_bf16` has no
    masters, for less memory in one; `adamw_8bit` (bitsandbytes) keeps its state in 8 bits; `prodigy`
    (prodigyopt) finds the rate itself: write learning_rate: 1."""
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of AdamW's running mean of gradients."""
    adam_beta2: Literal["auto"] | Annotated[float, Field(ge=0, lt=1)] = "auto"
    """Decay of AdamW's running mean of squared gradients; `auto`: 0.999."""
    adam_epsilon: Annotated[float, Field(gt=0)] = 1.0e-8
    """Added to AdamW's denominator."""
    weight_decay: Literal["auto"] | Annotated[float, Field(ge=0)] = "auto"
    """Decoupled weight decay; `auto`: 0.01."""
    lr_scheduler: Literal[
        "constant", "constant_with_warmup", "linear", "cosine", "cosine_with_restarts", "polynomial"
    ] = "constant"
    """Course of the learning rate after warm-up, by diffusers' names; all but the constant ones fall to
    zero (polynomial: to 1e-7) after the last step."""
    lr_num_cycles: Positive = 1
    """How often `cosine_with_restarts` falls."""
    lr_power: Annotated[float, Field(gt=0)] = 1.0
    """Exponent of `polynomial`."""
    lr_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps over which the learning rate rises from zero."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients are scaled down to this norm."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of a running mean of the weights, such as 0.999; files, previews and the validation loss are
    then the mean's, checkpoints hold both."""
    report_to: Literal["tensorboard", "wandb"] = "tensorboard"
    """`wandb` sends losses and previews to Weights & Biases as well; WANDB_API_KEY, or WANDB_MODE=offline."""
    tracker_project_name: Text = "trainer"
    """Project at Weights & Biases."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Decides initialisation, sample order, noise and dropout."""
    log_every_steps: Positive = 10
    """Steps between two lines of the log; the device is synchronised only then."""


class FlowSection(Section):
    """Flow matching: how noise levels are drawn and weighted."""

    weighting_scheme: Literal["none", "sigma_sqrt", "logit_normal", "mode", "cosmap"] = "none"
    """Distribution and loss weight of noise levels, by diffusers' names; `none` is uniform."""
    logit_mean: float = 0.0
    """Mean of the normal draw; only with `logit_normal`."""
    logit_std: Annotated[float, Field(gt=0)] = 1.0
    """Standard deviation of the normal draw; only with `logit_normal`."""
    mode_scale: float = 1.29
    """Strength of the mode, from -1 to 1.75; only with `mode`. Beyond, noise levels would leave 0 to 1."""
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] = 1.0
    """Guidance value that a guidance-distilled model is told while it trains."""
    shift: Literal["auto", "resolution"] | Annotated[float, Field(gt=0)] = "auto"
    """Moves noise levels up: `auto` keeps the base model's training levels, `resolution` shifts them as its
    pipeline does at the image's size, a number s gives s sigma / (1 + (s - 1) sigma) of those levels: a
    shift that these have already is multiplied with it."""


class FeaturesSection(Section):
    """Choices of the hardware plan: `auto` unless written; a written one is honoured or refused."""

    attention: Literal[
        "auto", "flash", "cudnn", "cudnn_strided", "flash_attn_2", "flash_attn_3", "flash_attn_4",
        "efficient", "math", "native",
    ] = "auto"  # fmt: skip
    """Attention kernel, forward and backward; flash_attn_2 to 4 are packages that are installed apart."""
    weights: Weights = "auto"
    """Storage of the base model's weights; int8, nf4 (4 bits) and fp8 are for `method: lora` only."""
    compute: Compute = "auto"
    """Type of the base's matrix products; fp8 needs compute capability 8.9, and of a frozen base fp8 weights.
    A full fine-tune multiplies bf16 weights in fp8 where it is written."""
    weight_gradient: Literal["auto", "fp8", "bf16"] = "auto"
    """Type that the gradients of trained weights are multiplied in, where `compute` is fp8; `auto`: fp8."""
    modulation: Modulation = "auto"
    """How an fp8 base stores its modulation, which FP8 leaves out: `kept` in the run's type, or in int8."""
    compile: Toggle = "auto"
    """Compile the repeated blocks with torch.compile: a faster step after a minute of compiling."""
    cuda_graphs: Toggle = "auto"
    """Replay a micro-batch as one CUDA graph: the host's speed does not matter; needs compiled blocks."""
    text_padding: Toggle = "auto"
    """Pad captions to a few lengths, and a language model's rows to one, which attention leaves out exactly:
    compiled blocks and CUDA graphs are made for each length. `false` trains each at its own."""
    activation_checkpointing: Annotated[Toggle | Positive, BeforeValidator(number_first)] = "auto"
    """Recompute blocks in the backward pass: less memory, a slower step; a number: the first so many."""
    activation_budget: Literal["auto"] | Annotated[float, Field(gt=0, le=1)] = "auto"
    """Share of the activations that compiled blocks keep, the cheapest ones being recomputed; 1 keeps all."""
    block_swap: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Repeated blocks whose frozen weights wait in host memory; `auto`: only where nothing else fits."""
    memory_budget: Literal["auto"] | Size = "auto"
    """Device memory that the run may fill, such as 20GiB; `auto` is the profile's share of it."""
    loader: Literal["auto", "safetensors", "fastsafetensors"] = "auto"
    """Reader of the base model's files; `auto` goes by where their bytes are, page cache or disk, and takes
    fastsafetensors where the probe measured it to be clearly faster and one process reads."""
    vae_tiling: Toggle = "auto"
    """Encode and decode images in tiles: less memory at high resolution."""
    tf32: Toggle = "auto"
    """TF32 for the matrix products that stay in float32."""


class ParallelSection(Section):
    """Processes that train one run together."""

    gpus: Literal["auto"] | Annotated[int, Field(ge=1, le=64)] = "auto"
    """How many GPUs share the micro-batches of a step, each with a process; on a CPU how many processes.
    Batch, accumulation and learning rate are those of the whole run, whatever it is. `auto` takes the most
    GPUs of one kind that share a step evenly (of a full fine-tune the fewest that hold it), on a CPU one."""
    shard: Literal["auto", "none", "full"] = "auto"
    """Where the frozen base lies: `none`: whole on every GPU; `full`: its blocks lie with the GPUs in turn,
    which read each other's; `auto`: the fewest blocks, where a whole base would not fit as well. Of a full
    fine-tune every GPU holds its rows of all weights and moments, with `auto` as with `full`."""


class EarlyStopSection(Section):
    """The end of training before its last step, where a metric gets no better."""

    monitor: Literal["validation_loss", "clip_t", "dinov2", "kid"] = "validation_loss"
    """Metric by its name in metrics.jsonl: the held-out loss, or one of `validation.metrics`."""
    patience: Positive = 3
    """Rounds of validation in a row without a better value after which training ends."""
    min_delta: Annotated[float, Field(ge=0)] = 0.0
    """A value is better where it is by more than this."""


class ValidationSection(Section):
    """Previews and held-out loss."""

    prompts: tuple[Text, ...] = ()
    """Captions that previews are drawn from; no prompts, no previews."""
    every_steps: Positive = 250
    """Optimizer steps between two validations; there is one before the first step and one at the end too."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Start noise of previews and fixed draws of the held-out loss."""
    num_inference_steps: Positive = 20
    """Denoising steps of a preview."""
    guidance_scale: Annotated[float, Field(ge=0, le=1000)] = 3.5
    """Guidance of a preview."""
    resolution: Annotated[int, Field(ge=32, le=4096)] | None = None
    """Side of the square previews in pixels, rounded down to what the model takes; `data.resolution` when not
    given. With control images a preview has the first one's aspect and about the area of that square."""
    max_new_tokens: Positive = 128
    """Longest answer of a language model's preview, in tokens."""
    held_out: Annotated[int, Field(ge=0)] = 0
    """Samples kept out of training and used for the validation loss."""
    img_dir: UserPath | None = None
    """Folder of images with captions for the validation loss, in place of `held_out`; never trained on."""
    chat_file: UserPath | None = None
    """File of conversations for the validation loss, in place of `held_out`; never trained on."""
    columns: Columns | None = None
    """Names of keys in the records of `chat_file`, as `data.sets.columns`."""
    dataset_info: UserPath | None = None
    """In place of `chat_file`, as `data.sets.dataset_info`."""
    name: Text | None = None
    """Entry of `dataset_info`."""
    control_dir: UserPath | Annotated[tuple[UserPath, ...], Field(min_length=1)] | None = None
    """Control images, like `data.sets.control_dir`, for the images in `validation.img_dir`."""
    control_images: tuple[UserPath | tuple[UserPath, ...], ...] = ()
    """Of families that edit, the image or images that each of `prompts` edits; else the first samples'."""
    metrics: tuple[Literal["clip_t", "dinov2", "nearest_train", "diversity", "kid", "fid"], ...] = ()
    """Figures of each round of previews: `clip_t` cosine of picture and prompt, `dinov2` likeness to the
    training pictures, `nearest_train` copies of one, `diversity` over seeds, `kid` (from 50 pictures on)."""
    clip_model: ModelName = "openai/clip-vit-large-patch14"
    """Folder or repository of the CLIP model of `clip_t`."""
    dinov2_model: ModelName = "facebook/dinov2-base"
    """Folder or repository of the DINOv2 model of all other metrics."""
    copy_threshold: Annotated[float, Field(gt=0, le=1)] = 0.95
    """A preview whose cosine to a training picture is above it is told as a copy by `nearest_train`."""
    early_stop: EarlyStopSection | None = None
    """End the run, as a finished one, after `patience` rounds of validation in a row in which `monitor`
    (validation_loss, or clip_t, dinov2 or kid of `metrics`) got better by no more than `min_delta`."""

    @property
    def names_samples(self) -> bool:
        """True where a folder or file of samples is named, in place of `held_out`."""
        return any(path is not None for path in (self.img_dir, self.chat_file, self.dataset_info))


class CheckpointSection(Section):
    """Checkpoints and resume."""

    checkpointing_steps: Positive = 250
    """Optimizer steps between two checkpoints."""
    checkpoints_total_limit: Positive = 3
    """Checkpoints that are kept; older ones are removed after a newer one is complete."""
    resume_from_checkpoint: Literal["auto", "never"] | UserPath = "auto"
    """`auto` continues the newest valid checkpoint in `output_dir`, `never` refuses a folder that holds one;
    a path names one checkpoint."""
    lora_files: bool = False
    """Write the LoRA of every checkpoint into its folder as well, in `lora/`, to try it and compare steps."""
    keep_best: bool = True
    """With held-out samples: keep the LoRA of the lowest validation loss in `best/` of the run's folder."""


class RunConfig(Section):
    """One training run."""

    family: Text
    """Name of the model family; `trainer families` lists them."""
    method: Literal["lora", "full"] = "lora"
    """`lora` trains an adapter, `full` every weight of the transformer."""
    model: ModelSection
    data: DataSection
    lora: LoraSection = LoraSection()
    train: TrainSection = TrainSection()
    flow: FlowSection = FlowSection()
    features: FeaturesSection = FeaturesSection()
    parallel: ParallelSection = ParallelSection()
    validation: ValidationSection = ValidationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    output_dir: UserPath
    """Folder of the run: checkpoints, the LoRA, previews, logs."""


def changed(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """`config` with other values, by dotted key and not checked again."""
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        if section:
            name, value = section, vars(config)[section].model_copy(update={name: value})
        config = config.model_copy(update={name: value})
    return config
