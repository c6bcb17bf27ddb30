"""Kinds of files, told by their content first and by their name where that is not enough."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import PurePath

from trainer.doctor.entries import Entry


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SIGNS: tuple[tuple[str, frozenset[str], int], ...] = (
    ("kubernetes", frozenset(("apiVersion", "kind")), 2),
    ("compose", frozenset(("services",)), 1),
    (
        "accelerate",
        _words(
            "compute_environment distributed_type mixed_precision num_processes num_machines machine_rank"
            " fp8_config fsdp_config deepspeed_config dynamo_config downcast_bf16 main_training_function"
            " use_cpu rdzv_backend same_network"
        ),
        2,
    ),
    (
        "deepspeed",
        _words(
            "zero_optimization train_micro_batch_size_per_gpu zero_allow_untested_optimizer data_types"
            " communication_data_type"
        ),
        1,
    ),
    (
        "llamafactory",
        _words("finetuning_type cutoff_len neat_packing stage pure_bf16 fp8_backend flash_attn"),
        1,
    ),
    (
        "axolotl",
        _words(
            "base_model sequence_len micro_batch_size datasets sample_packing val_set_size adapter"
            " num_epochs flash_attention"
        ),
        3,
    ),
    (
        "arguments",
        _words(
            "per_device_train_batch_size per_device_eval_batch_size gradient_accumulation_steps learning_rate"
            " num_train_epochs max_steps output_dir bf16 fp16 lr_scheduler_type warmup_steps deepspeed"
            " torch_compile optim logging_steps save_steps max_grad_norm"
        ),
        2,
    ),
)
"""Kind, keys at its root, and how many of them it needs."""
_MOST_LETTERS = 20_000
"""Letters of a text that cannot be read in which keys are looked for."""
RECORD_KEYS = _words("messages conversations instruction")
"""Keys of which a conversation's record has one."""
_SOURCES = _words("file_name hf_hub_url ms_hub_url om_hub_url script_url cloud_file_name")
"""Keys of which an entry of LLaMA-Factory's dataset_info.json has one."""
_PACKAGE = re.compile(
    r"[A-Za-z0-9][\w.-]*(?:\[[\w,. -]*\])?\s*(?:==\s*[^\s\\]+|@\s*\S+)(?:\s*[;#].*)?(?:\s*\\)?"
)
_OF_PACKAGES = re.compile(r"\s*(?:#.*|-[er]\s.*|--?[\w-]+.*|)")
_VARIABLE = re.compile(r"(?:export )?[A-Za-z_][A-Za-z0-9_]*=(?!=).*")
_DOCKERFILE = re.compile(r"(?:dockerfile|containerfile)(?:[._-].*)?|.*\.dockerfile", re.IGNORECASE)
_LAUNCHES = re.compile(
    r"^(?:export [A-Z_]+=|.*\b(?:accelerate launch|torchrun|llamafactory-cli|deepspeed)\b)", re.M
)
_STARTED = re.compile(
    r"^(?:export )?\w+=\S* .*\b(?:accelerate launch|torchrun|llamafactory-cli|deepspeed"
    r"|python[\d.]* (?:-\S+ )*\S+\.py)\b",
    re.M,
)
"""A command behind a variable for it alone."""
_SHEBANG = re.compile(r"#!.*\b(?:ba|da|z|k)?sh\b")


def of_tree(entries: Sequence[Entry]) -> str:
    """The kind of a YAML or JSON document; `unknown` for others."""
    roots = {entry.path[0] for entry in entries if entry.path}
    if "family" in roots and roots & {"data", "train", "model", "lora", "output_dir", "method"}:
        return "ours"
    # training arguments have switches of these names, DeepSpeed has sections
    if {("bf16", "enabled"), ("fp16", "enabled")} & {entry.path[:2] for entry in entries}:
        return "deepspeed"
    if roots and roots == {
        entry.path[0] for entry in entries if len(entry.path) == 2 and entry.name in _SOURCES
    }:
        return "datasets"
    return next((kind for kind, keys, least in _SIGNS if len(keys & roots) >= least), "unknown")


def is_trainers(names: Collection[str]) -> bool:
    """True for names of arguments of which enough are those of HF's Trainer."""
    return any(kind == "arguments" and len(keys & set(names)) >= least for kind, keys, least in _SIGNS)


def has_signs(text: str) -> bool:
    """True where a text that cannot be read has keys by which a kind is told, and is no template of one."""
    if "{{" in text:
        return False
    keys = frozenset(re.findall(r"[\"']?([A-Za-z_]\w*)[\"']?\s*:", text[:_MOST_LETTERS]))
    if "family" in keys or keys & _SOURCES or ("enabled" in keys and keys & {"bf16", "fp16"}):
        return True
    return any(len(signs & keys) >= least for _, signs, least in _SIGNS)


def is_facts(entries: Sequence[Entry]) -> bool:
    """True for a machine that `trainer probe --json` recorded."""
    return {"architecture", "memory", "gpus", "torch"} <= {entry.path[0] for entry in entries if entry.path}


def of_text(path: PurePath, text: str) -> str:
    """The kind of a text that is neither YAML nor JSON; `unknown` for others, and for YAML."""
    name, lines = path.name, [line for line in text.splitlines() if line.strip()]
    if _DOCKERFILE.fullmatch(name):
        return "dockerfile"
    if path.suffix in (".sh", ".bash", ".slurm", ".sbatch") or _SHEBANG.match(text):
        return "script"
    if path.suffix in (".yaml", ".yml", ".json"):
        return "unknown"
    said = [line for line in lines if not line.lstrip().startswith("#")]
    if next((line for line in said if not line.startswith("ARG ")), "").startswith("FROM "):
        return "dockerfile"
    if said and all(_VARIABLE.fullmatch(line.strip()) for line in said):
        return "script" if _STARTED.search(text) else "environment"
    named = [line for line in lines if _PACKAGE.fullmatch(line.strip())]
    others = [line for line in lines if not _PACKAGE.fullmatch(line.strip())]
    if named and all(_OF_PACKAGES.fullmatch(line) or len(line.split()) == 1 for line in others):
        return "packages"
    return "script" if _LAUNCHES.search(text) and path.suffix in ("", ".txt") else "unknown"
