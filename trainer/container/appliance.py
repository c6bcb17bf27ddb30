"""The tables that images, compose files, manifests and manuals agree on: volumes, user, ports, time to stop.

`VARIABLES` in `environment` has the variables. Tests hold every file to these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.config.environment import DEFAULT_METRICS_PORT

METRICS_PORT = DEFAULT_METRICS_PORT
USER, GROUP = 10001, 0
"""User and group of images; any other user works too where group 0 or the mounted folder lets it write."""
GRACE_SECONDS = 1800
"""Seconds between asking a run to end and killing it: the heartbeat's budget for saving."""
RUNTIME_DIR = "/run/trainer"
"""A tmpfs: status and metrics of the run."""
PREFIX = "/opt/trainer"
"""Folder of the virtual environment, the shipped configurations and the image's record of itself."""


@dataclass(frozen=True, kw_only=True)
class Volume:
    """A folder that people mount into a container."""

    path: str
    access: Literal["ro", "rw"]
    meaning: str
    name: str
    """Name of the volume in manifests; its claim is trainer-NAME."""


VOLUMES: tuple[Volume, ...] = (
    Volume(path="/data", access="ro", name="data", meaning="images with captions, or conversations"),
    Volume(path="/config", access="ro", name="config", meaning="your configuration files"),
    Volume(path="/models", access="rw", name="models", meaning="downloaded base models (HF_HOME)"),
    Volume(
        path="/cache", access="rw", name="cache", meaning="encoded samples, kernel verdicts, compiled code"
    ),
    Volume(
        path="/output", access="rw", name="output", meaning="runs: checkpoints, LoRA files, previews, logs"
    ),
)

MISPLACED: Mapping[str, str] = {
    wrong: ours
    for ours, others in {
        "/data": "/app/data /app/dataset /dataset /datasets /input /workspace/data /workspace/dataset",
        "/config": "/app/config /app/configs /configs /workspace/config",
        "/models": "/app/models /workspace/models /root/.cache/huggingface /home/user/.cache/huggingface",
        "/cache": "/app/cache /workspace/cache",
        "/output": "/app/output /app/outputs /outputs /workspace/output",
    }.items()
    for wrong in others.split()
}
"""Folders of other images' volumes: a mount there is one of ours in the wrong place."""

IMAGE_ENVIRONMENT: Mapping[str, str] = {
    "HOME": "/cache/home",
    "HF_HOME": "/models",
    "XDG_CACHE_HOME": "/cache",
    "TRAINER_CACHE_DIR": "/cache/trainer",
    "TRAINER_RUNTIME_DIR": RUNTIME_DIR,
    # beside the runs, so that all containers of a machine that have them know who has which GPU
    "TRAINER_QUEUE_DIR": "/output/.queue",
    # a published port and a kubelet's probe come from outside of the container
    "TRAINER_METRICS_ADDRESS": "::",
    "TRAINER_TORCH_FACTS": f"{PREFIX}/torch.json",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
"""Variables of every image besides TRAINER_PROFILE: caches lie on volumes, so the root may be read-only."""

SECRETS = ("HF_TOKEN", "WANDB_API_KEY")
"""Variables that may be given as NAME_FILE, the path of a file that holds the value."""

SECRET_FILES = (*(f"{name}_FILE" for name in SECRETS), "TRAINER_WEBHOOK_FILE")
"""Variables that name the file of a secret, which compose hands in."""

HANDED_IN = (
    "TRAINER_PROFILE", "UNIFIED_MEMORY", "DISABLE_CPU_OFFLOAD", "HF_HUB_OFFLINE", "WANDB_MODE",
    "TRAINER_WEBHOOK_PRIVATE",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "PYTORCH_ALLOC_CONF",
    "OMP_WAIT_POLICY", "OMP_NUM_THREADS", "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "TRAINER_NODES", "TRAINER_NODE_RANK", "TRAINER_MASTER", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR",
    "PET_MASTER_PORT", "PET_NPROC_PER_NODE", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
)  # fmt: skip
"""Variables of ours that compose hands in as they are on the host: none names a folder, none is a secret."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")
OTHERS_HANDED_IN = (
    *PROXIES, *map(str.lower, PROXIES), "HF_ENDPOINT", "WANDB_BASE_URL", "WANDB_ENTITY",
)  # fmt: skip
"""Variables of the libraries beneath, handed in likewise: the way to the hub and to Weights & Biases."""


_BOTH = ("linux/amd64", "linux/arm64")
TARGETS: Mapping[str, tuple[str, ...]] = {
    "dgx-spark": ("linux/arm64",),
    "rtx-4090": ("linux/amd64",),
    "hopper-fp8": _BOTH,
    "generic-cuda": _BOTH,
    "cpu": _BOTH,
}
"""Images and their platforms. An image only sets the default profile: it takes any that suits its machine."""
