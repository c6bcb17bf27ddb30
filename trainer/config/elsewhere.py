"""What other trainers call things: keys, file names and environment variables, and what ours are.

One table for error messages and for docs/coming-from.md (`make docs`). A key of ours is never in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainer.config import environment


@dataclass(frozen=True, kw_only=True)
class Row:
    """Spellings that mean one thing: `ours` is a dotted key or a file, empty where there is none."""

    names: tuple[str, ...]
    ours: str = ""
    note: str = ""
    """What differs, or why there is none."""

    @property
    def remedy(self) -> str:
        """What to do, for an error message."""
        if not self.ours:
            return f"there is none here, leave it out: {self.note}"
        return f"did you mean `{self.ours}`?" + (f" {self.note}" if self.note else "")


def _row(names: str, ours: str = "", note: str = "") -> Row:
    return Row(names=tuple(names.split()), ours=ours, note=note)


KEYS: Mapping[str, tuple[Row, ...]] = {
    "Whole files": (
        _row("job process extension meta config",
             note="this is another trainer's file: start from one in train_configs/ and move the keys over"),
        _row("accelerate_config distributed_type num_processes num_machines machine_rank main_process_port "
             "gpu_ids num_gpus gpus devices",
             note="one process trains on one GPU; CUDA_VISIBLE_DEVICES picks it"),
        _row("network network_config adapter peft peft_config lora_config", "lora.rank",
             "it is a section: `lora:`"),
        _row("training train_config training_args training_arguments optimization trainer",
             "train.max_train_steps", "it is a section: `train:`"),
        _row("sample sampling samples sample_config", "validation.prompts", "it is a section: `validation:`"),
        _row("save saving save_config", "checkpoint.checkpointing_steps", "it is a section: `checkpoint:`"),
    ),
    "Base model": (
        _row("base_model model_name_or_path name_or_path pretrained_model_name pretrained_model "
             "base_model_name model_path model_id base_model_path dit dit_path model_name "
             "pretrained_transformer_path", "model.pretrained_model_name_or_path",
             "A folder in diffusers' layout, or a repository on the hub; not a single file."),
        _row("vae vae_path ae ae_path clip_l t5xxl text_encoder1 text_encoder2 text_encoder_path te_path "
             "text_encoder pretrained_vae_model_name_or_path", "model.pretrained_model_name_or_path",
             "Its folder or repository holds the other components as well."),
        _row("model_type arch model_family model_version", "family",
             "`trainer families` lists them."),
        _row("training_type training_method train_type finetune_mode", "method", "lora or full"),
        _row("mixed_precision train_dtype compute_dtype precision weight_dtype full_bf16 full_fp16 bf16 fp16 "
             "base_model_default_dtype", "model.dtype", "`auto` is bf16 on a GPU"),
        _row("variant", note="files are read in the type that they are in, and stored as the plan says"),
        _row("hub_token hf_token huggingface_token token use_auth_token",
             note="put it into a file that the environment variable HF_TOKEN_PATH names, never into a "
             "configuration"),
        _row("cache_dir_hf hub_cache model_cache_dir", note="set HF_HOME or HF_HUB_CACHE in the environment"),
    ),
    "Data": (
        _row("dataset datasets dataset_config folder_path image_dir image_directory instance_data_dir "
             "train_data_dir data_dir train_dir in_json dataset_path dataset_name data_backend_config "
             "subsets concepts concept_file_name train_dataset", "data.sets",
             "[{img_dir: DIR}], or `--dataset DIR`"),
        _row("video_directory num_frames target_frames frame_extraction",
             note="no family here trains on videos"),
        _row("num_repeats dataset_repeats repeat", "data.sets", "`repeats` of a set"),
        _row("control_path control_directory conditioning_data_dir control_images_dir "
             "conditioning_image_column", "data.sets", "`control_dir` of a set"),
        _row("caption_ext caption_extension caption_column caption_strategy image_column caption_type "
             "caption_filename metadata_file",
             note="captions are .txt files of the images' names, or one metadata.jsonl or .csv with "
             "file_name and text"),
        _row("instance_prompt trigger class_tokens activation_text trigger_phrase instance_token",
             "data.trigger_word", "put before every caption that does not hold it already"),
        _row("caption_dropout caption_dropout_prob", "data.caption_dropout_rate",
             "a share: 0.05 is 5 %"),
        _row("shuffle_caption shuffle_tokens keep_tokens caption_prefix caption_suffix random_caption "
             "tag_shuffle caption_tag_dropout_rate", note="captions are encoded once, as they are written"),
        _row("resolutions image_size img_size width height resolution_type size base_resolution sample_size",
             "data.resolution", "one number, the side of the square whose area every bucket keeps to"),
        _row("enable_bucket bucket_reso_steps min_bucket_reso max_bucket_reso bucket_no_upscale "
             "aspect_ratio_bucketing aspect crop_aspect crop_style crop center_crop bucket_tolerance buckets",
             note="images always go into buckets of one area and every aspect; a set's `random_crop` cuts"),
        _row("flip_aug horizontal_flip random_flip flip_x flip_p", "data.sets", "`flip` of a set"),
        _row("alpha_mask mask_path masked_loss masked_training mask_images_dir masked_loss_weight",
             "data.sets", "`mask_dir` of a set"),
        _row("color_aug face_crop_aug_range augmentations", note="pictures are learned as they are"),
        _row("cache_latents cache_latents_to_disk cache_text_embeddings cache_text_encoder_outputs "
             "cache_text_encoder_outputs_to_disk latent_caching cache_to_disk vae_cache_ondemand "
             "cache_directory vae_cache_dir skip_cache_check", "data.cache_dir",
             "Latents and captions are always encoded once and kept on disk; the key says where."),
        _row("max_token_length t5xxl_max_token_length tokenizer_max_length text_encoder_max_length "
             "max_prompt_length", "data.max_sequence_length"),
        _row("max_data_loader_n_workers persistent_data_loader_workers dataloader_num_workers num_workers "
             "pin_memory prefetch_factor dataloader_prefetch",
             note="batches come from the cache in threads; the plan decides it, and says why (`trainer "
             "plan`)"),
    ),
    "LoRA": (
        _row("network_dim network_rank linear lora_rank lora_r r dim lora_dim", "lora.rank"),
        _row("conv conv_dim conv_alpha conv_rank",
             note="adapters are on linear layers: these models have few others"),
        _row("network_alpha linear_alpha lora_alpha", "lora.alpha",
             "the output is scaled by alpha / rank, as there"),
        _row("network_dropout lora_dropout", "lora.dropout", "of the adapter's inputs"),
        _row("rank_dropout module_dropout",
             note="only the adapter's inputs are dropped, by lora.dropout"),
        _row("target_layers lora_layers lora_target only_if_contains transformer_only network_args "
             "lora_modules layer_filter train_transformer_layers single_blocks double_blocks "
             "lora_target_modules", "lora.target_modules",
             "a preset of the family, or a list of name suffixes"),
        _row("network_module lora_type algo network_type use_dora dora_wd dora use_lokr lycoris_config "
             "factor", "lora.type", "lora, dora or lokr"),
        _row("network_weights resume_lora init_lora lora_weights_path pretrained_lora dim_from_weights",
             "lora.init_from"),
        _row("train_text_encoder network_train_unet_only network_train_text_encoder_only text_encoder_lr "
             "train_text_encoder_1 text_encoder_learning_rate train_clip train_t5",
             note="text encoders are frozen: they run once, before training, and are not in memory "
             "afterwards"),
        _row("loraplus_lr_ratio loraplus_unet_lr_ratio", note="LoRA+ is not built in"),
    ),
    "Training": (
        _row("steps max_steps num_train_steps total_steps max_training_steps num_steps",
             "train.max_train_steps", "optimizer steps, not images"),
        _row("num_train_epochs max_train_epochs epochs num_epochs epoch", "train.max_train_steps",
             "A run is counted in steps: epochs x images x repeats / images in a step."),
        _row("lr unet_lr transformer_lr base_lr learning_rates", "train.learning_rate"),
        _row("batch_size per_device_train_batch_size train_batchsize micro_batch_size",
             "train.train_batch_size", "images in one forward pass"),
        _row("accumulation_steps gradient_accumulation grad_accum_steps gradient_accumulate_every",
             "train.gradient_accumulation_steps"),
        _row("lr_warmup warmup_steps warmup num_warmup_steps lr_warmup_ratio warmup_ratio",
             "train.lr_warmup_steps", "steps, not a share"),
        _row("scheduler lr_scheduler_type learning_rate_scheduler lr_scheduler_name", "train.lr_scheduler"),
        _row("lr_scheduler_num_cycles lr_scheduler_cycles num_cycles", "train.lr_num_cycles"),
        _row("lr_scheduler_power lr_end lr_min_ratio", "train.lr_power", "the end itself is not a setting"),
        _row("optimizer_type optim", "train.optimizer"),
        _row("use_8bit_adam use_8bit use_adam8bit adam8bit", "train.optimizer", "write adamw_8bit"),
        _row("optimizer_args optimizer_params optimizer_config betas", "train.adam_beta1",
             "Each has a key of its own: adam_beta1, adam_beta2, adam_epsilon, weight_decay."),
        _row("decouple d_coef d0 growth_rate use_bias_correction safeguard_warmup",
             note="Prodigy's own settings are what its authors advise for diffusion models"),
        _row("adam_weight_decay", "train.weight_decay"),
        _row("max_norm gradient_clipping clip_grad_norm gradient_clip_val", "train.max_grad_norm"),
        _row("ema use_ema ema_config ema_foreach ema_update_after_step", "train.ema_decay"),
        _row("noise_offset pyramid_noise adaptive_noise_scale multires_noise_iterations "
             "multires_noise_discount ip_noise_gamma zero_terminal_snr",
             note="it is for models that predict noise; these match flows"),
        _row("min_snr_gamma snr_gamma v_parameterization prediction_type beta_schedule "
             "debiased_estimation_loss",
             note="it is for models that predict noise; flow.weighting_scheme weights these"),
        _row("noise_scheduler", note="flow matching is all there is; the family decides it"),
        _row("timestep_sampling timestep_type content_or_style timestep_distribution",
             "flow.weighting_scheme", "`logit_normal` is others' sigmoid"),
        _row("sigmoid_scale", "flow.logit_std", "with `weighting_scheme: logit_normal`"),
        _row("discrete_flow_shift timestep_shift flow_schedule_shift flow_shift flow_schedule_auto_shift",
             "flow.shift", "a number, or `resolution`"),
        _row("model_prediction_type loss_type huber_c scale_weight_norms",
             note="the loss is the squared error of the velocity, as in diffusers' scripts"),
        _row("prior_loss_weight with_prior_preservation class_data_dir class_prompt reg_data_dir "
             "num_class_images", "data.sets", "`is_reg` and `loss_weight` of a set"),
        _row("logging_dir log_dir wandb_dir log_every logging_steps", "train.log_every_steps",
             "Logs lie in `output_dir`."),
        _row("log_with use_wandb wandb tracker", "train.report_to", "tensorboard or wandb"),
        _row("wandb_project tracker_name log_tracker_name project_name", "train.tracker_project_name"),
        _row("tracker_run_name wandb_run_name", "output_dir", "a run is called as its folder"),
        _row("wandb_api_key", note="set WANDB_API_KEY in the environment"),
    ),
    "Memory and speed": (
        _row("unified_memory uma memory_mode",
             note="unified memory is seen by itself; UNIFIED_MEMORY=true in the environment makes it a "
             "condition"),
        _row("memory_pool memory_pool_size cuda_memory_pool memory_fraction gpu_memory_fraction "
             "per_process_memory_fraction max_memory max_memory_gb vram_limit memory_limit",
             "features.memory_budget", "a size such as 20GiB"),
        _row("disable_cpu_offload cpu_offload enable_cpu_offload offload low_vram lowvram "
             "layer_offloading layer_offload_fraction enable_model_cpu_offload offload_during_startup "
             "group_offload split_mode", "features.block_swap",
             "0 keeps the whole base on the device, as DISABLE_CPU_OFFLOAD=true"),
        _row("blocks_to_swap double_blocks_to_swap single_blocks_to_swap block_swapping "
             "musubi_blocks_to_swap", "features.block_swap"),
        _row("cuda_version cuda cuda_arch compute_capability torch_version driver_version",
             note="torch brings its own CUDA; `trainer probe` shows it, and the plan refuses a driver that "
             "is too old"),
        _row("quantize quantization quantize_base qtype fp8_base fp8_scaled base_model_precision "
             "quantize_via load_in_8bit load_in_4bit bnb_config nf4 fp8_base_unet",
             "features.weights", "bf16, int8, nf4 or fp8"),
        _row("quantize_te qtype_te text_encoder_1_precision text_encoder_2_precision fp8_llm fp8_t5",
             note="the plan decides how text encoders are stored: they run once, before training"),
        _row("fp8_training fp8_backend fp8 use_fp8 float8 fp8_recipe te_fp8 transformer_engine fp8_fast",
             "features.compute",
             "fp8, for a frozen base; there is one way to do it, through torch"),
        _row("flash_attention_3 flash_attention flash_attn use_flash_attention flash3 attention_backend "
             "attn_mode attention_mechanism xformers sdpa mem_eff_attn split_attn sage_attn "
             "use_sage_attention enable_xformers_memory_efficient_attention attn_implementation "
             "attention_processor", "features.attention",
             "The plan takes the fastest kernel that this machine passes."),
        _row("gradient_checkpointing gradient_checkpointing_interval use_gradient_checkpointing "
             "checkpointing gradient_checkpointing_cpu_offload cpu_offload_checkpointing "
             "unsloth_gradient_checkpointing", "features.activation_checkpointing",
             "The plan decides it, and says why (`trainer plan`)."),
        _row("torch_compile compile_model dynamo_backend dynamo_mode compile_mode inductor use_torch_compile",
             "features.compile"),
        _row("tf32_compute allow_tf32 tf32_mode use_tf32 enable_tf32 matmul_precision", "features.tf32"),
        _row("deepspeed deepspeed_config zero_stage zero3_init_flag offload_optimizer offload_param fsdp "
             "fsdp_config ddp_timeout ddp ddp_gradient_as_bucket_view context_parallel zero_optimization "
             "data_types communication_data_type fp32_reduce_scatter train_micro_batch_size_per_gpu",
             note="one process trains on one GPU; what does not fit is quantised, recomputed or swapped by "
             "the plan"),
        _row("enable_vae_tiling vae_enable_tiling vae_enable_slicing vae_batch_size vae_chunk_size",
             "features.vae_tiling"),
        _row("cuda_graph use_cuda_graphs", "features.cuda_graphs"),
        _row("highvram fused_backward_pass blockwise_fused_optimizers fused_optimizer_groups",
             note="what memory there is decides the plan, which says why (`trainer plan`)"),
    ),
    "Language models": (
        _row("stage do_train do_eval predict_with_generate",
             note="`trainer train` trains on answers (supervised fine-tuning), and validation.held_out "
             "measures"),
        _row("finetuning_type", "method", "lora or full"),
        _row("template chat_template", note="the base model's tokenizer has its chat template"),
        _row("cutoff_len sequence_len max_seq_length max_length block_size", "data.max_sequence_length",
             "a longer conversation is an error, nothing is cut off"),
        _row("packing neat_packing sample_packing pad_to_sequence_len group_by_length",
             note="conversations are always packed into rows, and none sees another"),
        _row("train_on_prompt train_on_inputs mask_history",
             note="all answers of a conversation are learned, and nothing else of it"),
        _row("val_size val_set_size", "validation.held_out", "conversations, not a share"),
        _row("eval_strategy evaluation_strategy", "validation.every_steps"),
        _row("adapter_name_or_path lora_model_dir", "lora.init_from"),
        _row("quantization_bit quantization_method double_quantization", "features.weights",
             "nf4 or int8"),
        _row("max_samples preprocessing_num_workers overwrite_cache overwrite_output_dir plot_loss "
             "use_unsloth enable_liger_kernel trust_remote_code rope_scaling",
             note="nothing here needs it"),
    ),
    "Previews and validation": (
        _row("sample_prompts validation_prompt validation_prompts sample_prompt prompt_file "
             "user_prompt_library validation_prompt_library", "validation.prompts", "a list in the file"),
        _row("sample_every sample_every_n_steps sample_steps_interval validation_steps validation_epochs "
             "sample_every_n_epochs eval_steps validation_step_interval eval_steps_interval",
             "validation.every_steps"),
        _row("sample_steps validation_num_inference_steps sampling_steps inference_steps",
             "validation.num_inference_steps"),
        _row("validation_guidance cfg_scale sample_guidance_scale validation_guidance_scale",
             "validation.guidance_scale"),
        _row("validation_resolution sample_width sample_height sample_resolution", "validation.resolution"),
        _row("num_validation_images walk_seed sample_at_first skip_first_sample sampler sample_sampler neg "
             "negative_prompt validation_negative_prompt",
             note="one preview a prompt, also before the first step, with a seed that stays"),
        _row("validation_split eval_split validation_seed_count val_split", "validation.held_out",
             "samples, not a share"),
        _row("eval_dataset validation_data_dir eval_data_dir", "validation.img_dir"),
    ),
    "Saving": (
        _row("output training_folder save_dir output_folder workspace_dir", "output_dir"),
        _row("output_name name run_name lora_name save_name", "output_dir",
             "files bear its last part as their name"),
        _row("save_every save_steps save_every_n_steps save_every_n_epochs save_interval "
             "checkpointing_interval checkpoint_every checkpoint_step_interval",
             "checkpoint.checkpointing_steps"),
        _row("keep_last max_step_saves_to_keep save_last_n_steps save_last_n_epochs save_total_limit "
             "max_checkpoints rolling_backup_count", "checkpoint.checkpoints_total_limit"),
        _row("resume resume_from save_state resume_checkpoint continue_last_backup save_state_on_train_end",
             "checkpoint.resume_from_checkpoint", "A run resumes by itself."),
        _row("save_model_as save_precision save_format save_dtype output_model_format save_as_diffusers",
             note="a LoRA is saved as safetensors for diffusers and for ComfyUI, in the type that it trained "
             "in"),
        _row("push_to_hub hub_model_id hf_repo_id push_checkpoints_to_hub huggingface_repo_id",
             note="nothing is uploaded by itself; the files in lora/ are ready for it"),
        _row("metadata_title training_comment metadata_author no_metadata",
             note="files say their base and steps"),
    ),
}  # fmt: skip
"""By topic."""

FILES: tuple[Row, ...] = (
    _row("train_dgx_spark.yaml train_spark.yaml dgx_spark.yaml spark.yaml train_lora_dgx_spark.yaml",
         "train_configs/hardware/dgx-spark.yaml",
         "behind your own file; the machine is seen by itself, so that none is needed"),
    _row("train_lora_4090.yaml train_4090.yaml train_rtx4090.yaml train_rtx_4090.yaml rtx4090.yaml 24gb.yaml",
         "train_configs/hardware/rtx-4090.yaml",
         "behind your own file; the machine is seen by itself, so that none is needed"),
    _row("train_hopper.yaml train_h100.yaml train_h200.yaml train_fp8.yaml train_hopper_fp8.yaml hopper.yaml",
         "train_configs/hardware/hopper-fp8.yaml",
         "behind your own file; the machine is seen by itself, so that none is needed"),
    _row("train_low_vram.yaml low_vram.yaml lowvram.yaml", "train_configs/presets/low-vram.yaml",
         "or --preset low-vram"),
    _row("dataset.toml dataset_config.toml dataset.yaml multidatabackend.json concepts.json "
         "config_dataset.toml", "data.sets", "Data sets are keys of the one configuration."),
    _row("sample_prompts.txt prompts.txt user_prompt_library.json", "validation.prompts",
         "a list in the file"),
    _row("ds_config.json deepspeed.json zero2.json zero3.json accelerate.yaml default_config.yaml fsdp.yaml",
         note="one process trains on one GPU; accelerate and DeepSpeed are not configured"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Foreign:
    """An environment variable that does nothing here, or harm."""

    name: str
    """A regular expression over whole names."""
    says: str
    remedy: str
    value: str = r".*\S.*"
    """A regular expression over whole values."""
    is_error: bool = False
    beside: tuple[str, ...] = ()
    """Variables of which one must be set too; empty where it means the same alone."""


_SEVERAL = r"\s*0*(?:[2-9]|[1-9][0-9]+)\s*"

VARIABLES: tuple[Foreign, ...] = (
    Foreign(name="CUDA_VISIBLE_DEVICES", value=r"\s*all\s*", is_error=True, says="`all` means no GPU at all",
            remedy="unset it for all GPUs, or write their numbers: 0"),
    Foreign(name="OMPI_COMM_WORLD_SIZE|PMI_SIZE|MV2_COMM_WORLD_SIZE|SLURM_STEP_NUM_TASKS", value=_SEVERAL,
            says="several processes were started (mpirun, srun), and each of them is a run of its own, on "
            "one device", remedy="give each its own configuration, output_dir and GPU, or start "
            "`trainer train` itself, once"),
    Foreign(name="WORLD_SIZE", value=_SEVERAL, is_error=True, beside=("LOCAL_RANK", "RANK"),
            says="several processes were started (torchrun, accelerate launch), and this "
            "version trains in one, on one device",
            remedy="start `trainer train` itself, once; where nothing was started so, unset it. Several GPUs "
            "come with a later version"),
    Foreign(name="ACCELERATE_DYNAMO_MODE", is_error=True,
            says="this was started by `accelerate launch`, whose settings and processes mean nothing here",
            remedy="start `trainer train` itself. Several GPUs come with a later version"),
    Foreign(name="TRANSFORMERS_CACHE|PYTORCH_TRANSFORMERS_CACHE|PYTORCH_PRETRAINED_BERT_CACHE",
            says="transformers reads it no more", remedy="set HF_HOME"),
    Foreign(name="CUDA_MANAGED_FORCE_DEVICE_ALLOC", says="does nothing for torch",
            remedy="unset it; unified memory is seen by itself"),
    Foreign(name="PYTORCH_CUDA_ALLOC_CONF|PYTORCH_HIP_ALLOC_CONF",
            says="the old spelling of PYTORCH_ALLOC_CONF, under which its value is handed on",
            remedy="rename it; features.memory_budget limits memory"),
    Foreign(name="PYTORCH_ALLOC_CONF", value=r".*backend\s*:\s*native.*",
            says="backend:native is the default, and does nothing",
            remedy="unset it: it takes the place of what the plan would set"),
    Foreign(name="PYTORCH_NO_CUDA_MEMORY_CACHING", value="(?!0$).+",
            says="every tensor is asked of the driver: many times slower", remedy="unset it"),
    Foreign(name="CUDA_LAUNCH_BLOCKING", value="(?!0$).+",
            says="the host waits for every kernel: much slower",
            remedy="unset it, unless you look for the place of a CUDA error"),
    Foreign(name="NVTE_.*", says="Transformer Engine is not used here",
            remedy="unset it; features.compute decides about FP8"),
    Foreign(name="NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
            says="decides about TF32 behind the plan's back", remedy="unset it, and write features.tf32"),
    Foreign(name="ACCELERATE_.*|FSDP_.*|DEEPSPEED_.*",
            says="accelerate and DeepSpeed are not configured from outside", remedy="unset it"),
    Foreign(name="HF_HUB_ENABLE_HF_TRANSFER", value="(?!0$).+", says="the hub's library uses it no more",
            remedy="unset it"),
    Foreign(name="XFORMERS_.*|FORCE_SDPA|FLASH_ATTENTION_.*|USE_FLASH_ATTENTION",
            says="nothing here reads it",
            remedy="unset it, and write features.attention"),
    Foreign(name="TRAIN_BATCH_SIZE|LEARNING_RATE|MAX_TRAIN_STEPS|MIXED_PRECISION|LORA_RANK|MEMORY_POOL_SIZE|"
            "FP8_TRAINING|TF32_COMPUTE|FP8_BACKEND", says="nothing here reads it",
            remedy="keys are set by names such as TRAINER__LORA__RANK, or by --set"),
)  # fmt: skip


def key(name: str) -> Row | None:
    """What another trainer's key is here; hyphens and capitals do not count."""
    return _BY_NAME.get(name.lower().lstrip("-").replace("-", "_"))


def file(name: str) -> Row | None:
    """What another trainer's file is here, by its name without folders."""
    plain = name.lower().replace("-", "_").removesuffix(".yml").removesuffix(".yaml")
    return next(
        (row for row in FILES for one in row.names if one.removesuffix(".yaml").replace("-", "_") == plain),
        None,
    )


def variables(environ: Mapping[str, str]) -> Iterator[tuple[str, Foreign]]:
    """Name and row of each variable that is set and does nothing, or harm."""
    ours = {variable.name for variable in environment.VARIABLES}
    for name in sorted(environ):
        for row in VARIABLES:
            # one of ours is meant by a row of its own name, never by a pattern that happens to cover it
            covered = row.name == name or (name not in ours and re.fullmatch(row.name, name))
            alone = row.beside and not any(environ.get(one) for one in row.beside)
            if covered and not alone and re.fullmatch(row.value, environ[name], re.DOTALL):
                yield name, row


_BY_NAME: dict[str, Row] = {name: row for rows in KEYS.values() for row in rows for name in row.names}
