"""The only reader of the process environment, and the table of the variables that matter to us.

Keys of the configuration come as `TRAINER__SECTION__KEY` and are read by `layers`; the rest is listed here.
Cheap to import: `trainer health` runs it every few seconds.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError, NoSpaceError, Problem
from trainer.words.near import closest

if TYPE_CHECKING:
    from trainer.config.schema import RunConfig

CONFIG_PREFIX = "TRAINER__"
DEFAULT_METRICS_PORT = 9464
LOOPBACK = "127.0.0.1"
DEVICE_ORDER, BY_SLOT = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
"""The variable that says how CUDA numbers GPUs, and its value for nvidia-smi's numbers."""


@dataclass(frozen=True)
class Variable:
    """One environment variable: `default` is what an unset one amounts to, in words or as a value."""

    name: str
    default: str
    meaning: str


VARIABLES: tuple[Variable, ...] = (
    Variable("TRAINER_PROFILE", "auto",
             "hardware profile: auto, dgx-spark, rtx-4090, hopper-fp8, generic-cuda or cpu"),
    Variable("UNIFIED_MEMORY", "as the GPU says",
             "true: only train where CPU and GPU share one memory; false: only where they do not"),
    Variable("DISABLE_CPU_OFFLOAD", "false",
             "true: no weights of the base wait in host memory, whatever fits (features.block_swap: 0)"),
    Variable("TRAINER_FACTS", "", "JSON file that replaces the facts read from this machine"),
    Variable("TRAINER_TORCH_FACTS", "",
             "JSON file with the installed torch's version and architectures, written at image build"),
    Variable("TRAINER_RUNTIME_DIR", "a folder per user under the system's temporary one",
             "where the training process leaves its status and metrics; a tmpfs in containers"),
    Variable("TRAINER_CACHE_DIR", "$XDG_CACHE_HOME/trainer",
             "encoded samples and kernel verdicts; `data.cache_dir` goes before it for samples"),
    Variable("TRAINER_QUEUE_DIR", "~/.local/state/trainer/queue",
             "jobs of `trainer queue`, with their configurations and outputs; on a disk of this machine"),
    Variable("TRAINER_QUEUE_JOB", "", "set by the queue for its own runs: the number of the job"),
    Variable("TRAINER_METRICS_PORT", str(DEFAULT_METRICS_PORT),
             "port of /metrics, /healthz and /readyz; 0 opens none"),
    Variable("TRAINER_METRICS_ADDRESS", LOOPBACK,
             "address that the port listens on: 127.0.0.1 is this machine alone, `::` all its addresses"),
    Variable("TRAINER_WEBHOOK_FILE", "",
             "file that holds one https address, to which the end of a run is posted (docs/runs.md)"),
    Variable("TRAINER_WEBHOOK_PRIVATE", "false",
             "true: the webhook may be at an address of a private network"),
    Variable("HF_HOME", "$XDG_CACHE_HOME/huggingface", "downloaded base models"),
    Variable("HF_HUB_CACHE", "$HF_HOME/hub", "downloaded repositories"),
    Variable("HF_HUB_OFFLINE", "0", "1: never ask the hub"),
    Variable("HF_TOKEN", "", "access token; a file (HF_TOKEN_PATH) leaks less easily"),
    Variable("HF_TOKEN_FILE", "", "containers: file whose text becomes HF_TOKEN"),
    Variable("HF_TOKEN_PATH", "$HF_HOME/token", "file that holds the access token"),
    Variable("WANDB_API_KEY", "", "for train.report_to: wandb; a file leaks less easily"),
    Variable("WANDB_API_KEY_FILE", "", "file whose text is used as WANDB_API_KEY"),
    Variable("WANDB_MODE", "online", "offline: only write what `wandb sync` sends later"),
    Variable("XDG_CACHE_HOME", "~/.cache", "the user's cache folder"),
    Variable("HOME", "the user's", "where libraries write what has no other place"),
    Variable("TORCHINDUCTOR_CACHE_DIR", "$TRAINER_CACHE_DIR/compile/inductor", "compiled blocks"),
    Variable("TRITON_CACHE_DIR", "$TRAINER_CACHE_DIR/compile/triton", "compiled kernels"),
    Variable("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "$TRAINER_CACHE_DIR/compile/flash-attn-sm90",
             "compiled kernels of flash-attn 4; sm90 as the GPU is"),
    Variable("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1",
             "0: flash-attn 4 compiles its kernels anew at every start"),
    Variable("CUDA_VISIBLE_DEVICES", "all GPUs", "GPUs that a run may use, as 0,1"),
    Variable("CUDA_DEVICE_ORDER", "as nvidia-smi numbers them", "how CUDA numbers GPUs; yours stays"),
    Variable("NVIDIA_VISIBLE_DEVICES", "", "GPUs that the container toolkit hands in"),
    Variable("NVIDIA_DRIVER_CAPABILITIES", "", "parts of the driver that the toolkit hands in"),
    Variable("CUDA_HOME", "/usr/local/cuda",
             "CUDA toolkit, which `trainer probe` in a container reports; training needs none"),
    Variable("LD_LIBRARY_PATH", "", "looked through: a foreign cuDNN here breaks torch"),
    Variable("PYTORCH_ALLOC_CONF", "set by the plan",
             "torch's allocator; yours stays, within the cap of a machine whose memory is the host's"),
    Variable("OMP_WAIT_POLICY", "set by the plan", "how threads wait on a CPU; yours stays"),
    Variable("OMP_NUM_THREADS", "the cores, or a container's limit; of several processes each has a share",
             "threads of each training process; yours stays"),
    Variable("GLOO_SOCKET_IFNAME",
             "lo for several processes; of several machines, the route's to TRAINER_MASTER",
             "network interface by which processes of a run meet; yours stays"),
    Variable("NCCL_SOCKET_IFNAME",
             "lo for several GPUs; of several machines, the route's to TRAINER_MASTER",
             "network interface by which GPUs of a run meet; yours stays"),
    Variable("NCCL_P2P_DISABLE", "1 on RTX 40 with drivers before 550.40.07",
             "1: GPUs send to each other through host memory; yours stays"),
    Variable("NCCL_IB_DISABLE", "1 on RTX 40 with drivers before 550.40.07",
             "1: no InfiniBand between GPUs; yours stays"),
    Variable("TRAINER_NODES", "1", "machines that train the run together (docs/several-machines.md)"),
    Variable("TRAINER_NODE_RANK", "", "number of this machine among them, from 0"),
    Variable("TRAINER_MASTER", "", "address of machine 0, where all meet: host0 or host0:29400"),
    Variable("PET_NNODES", "1", "of Kubeflow Trainer: as TRAINER_NODES"),
    Variable("PET_NODE_RANK", "", "of it: as TRAINER_NODE_RANK"),
    Variable("PET_MASTER_ADDR", "", "of it: the address of TRAINER_MASTER"),
    Variable("PET_MASTER_PORT", "29400", "of it: the port of TRAINER_MASTER"),
    Variable("PET_NPROC_PER_NODE", "auto", "of it: processes of each machine"),
    Variable("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "7200 on several machines",
             "when NCCL ends a process by itself: after the supervisor would; yours stays"),
    Variable("TORCH_NCCL_DUMP_ON_TIMEOUT", "0 on several machines",
             "1: NCCL writes what it did when it ends a process; yours stays"),
    Variable("RANK", "no launcher", "of torchrun and accelerate launch: this process's place in its run"),
    Variable("LOCAL_RANK", "no launcher", "of them: its place on this machine; proves a launcher"),
    Variable("WORLD_SIZE", "no launcher", "of them: processes of the run"),
    Variable("LOCAL_WORLD_SIZE", "no launcher", "of them: those on this machine, which are all"),
    Variable("MASTER_ADDR", "no launcher", "of them: part of the launch's name; nothing connects to it"),
    Variable("MASTER_PORT", "no launcher", "of them: part of the launch's name; nothing connects to it"),
    Variable("TORCHELASTIC_RUN_ID", "no launcher", "of torchrun: part of the launch's name; proves torchrun"),
    Variable("TORCHELASTIC_RESTART_COUNT", "no launcher", "of torchrun: part of the launch's name"),
    Variable("ACCELERATE_DYNAMO_MODE", "no launcher", "proves accelerate launch; not used otherwise"),
)  # fmt: skip

_PATHS = (
    "TRAINER_FACTS", "TRAINER_TORCH_FACTS", "TRAINER_RUNTIME_DIR", "TRAINER_CACHE_DIR", "TRAINER_QUEUE_DIR",
    "TRAINER_WEBHOOK_FILE", "HF_HOME", "HF_HUB_CACHE", "HF_TOKEN_FILE", "HF_TOKEN_PATH", "WANDB_API_KEY_FILE",
    "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR",
    "CUDA_HOME",
)  # fmt: skip
"""Variables of the table that name one file or folder."""
_SWITCH = {"true": True, "1": True, "false": False, "0": False}
_NAMES = tuple(variable.name for variable in VARIABLES)
# what Kubernetes injects for a Service named trainer or trainer-something
_SERVICE = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def snapshot() -> dict[str, str]:
    """A copy of the whole environment, for child processes and for `load`."""
    return dict(os.environ)


def without_settings(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment, this process's if not given, without what would lie over a configuration's files."""
    every = snapshot() if environ is None else environ
    return {name: value for name, value in every.items() if not name.startswith(CONFIG_PREFIX)}


def with_absolute_paths(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for a process in another folder: files and folders of the table's variables are those
    of this process's.
    """
    named = {name: environ.get(name, "") for name in _PATHS}
    relative = {name: path for name, path in named.items() if path and not path.startswith(("/", "~"))}
    return {**environ, **{name: str(Path(path).absolute()) for name, path in relative.items()}}


def without_plugins() -> None:
    """Keep pydantic from looking for plugins, here and in processes that are started from now on.

    It would read all installed packages' metadata, which takes longer than to read a configuration.
    """
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")


def number_gpus_by_slot() -> None:
    """Have CUDA number GPUs as nvidia-smi does, here and in processes that are started from now on.

    The driver library reads the variable when it is initialised. The user's own value stays.
    """
    if not os.environ.get(DEVICE_ORDER, "").strip():
        os.environ[DEVICE_ORDER] = BY_SLOT


def begin_utf8() -> bool:
    """Have the Python processes that are started from now on take all text for UTF-8, whatever the locale;
    False where that was asked for already.
    """
    if os.environ.get("PYTHONUTF8") == "1":
        return False
    os.environ["PYTHONUTF8"] = "1"
    return True


def add_python_path(folder: str) -> None:
    """Have the Python processes that are started from now on import from `folder` as well."""
    others = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{others}{os.pathsep}{folder}" if others else folder


def read(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Value of a listed variable; None when it is unset, empty, or a Service address from Kubernetes."""
    assert name in _NAMES, f"{name} is not in the table of variables"
    value = (os.environ if environ is None else environ).get(name, "")
    return None if not value or _SERVICE_URL.match(value) else value


def switch(name: str, environ: Mapping[str, str] | None = None) -> bool | None:
    """A listed variable as a switch; None when it is unset. Raises ConfigError for other words."""
    value = read(name, environ)
    if value is None:
        return None
    found = _SWITCH.get(value.strip().lower())
    if found is None:
        raise ConfigError(f'"{value}" is neither true nor false', where=name, remedy="write true or false")
    return found


def at_home(path: str, name: str) -> Path:
    """The value or default of the variable `name`, with the home folder in place of `~` at its start.

    Raises ConfigError where that is not known: a user by a number alone, as containers have, without HOME.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        user = f"user {os.getuid()} has no home folder, and HOME is not set"
        what = user if path.startswith("~/") else "there is no such user"
        remedy = f"set HOME to a folder that this user can write, or {name} to a path from /"
        raise ConfigError(f"{path}: {what}", where=name, remedy=remedy) from error


def runtime_dir() -> Path:
    """Folder of status.json and metrics.prom, one for each user; it need not exist yet."""
    value = read("TRAINER_RUNTIME_DIR")
    if value:
        return at_home(value, "TRAINER_RUNTIME_DIR")
    return Path(tempfile.gettempdir()) / f"trainer-{os.getuid()}"


def make_runtime_dir() -> Path:
    """`runtime_dir()`, created where it is missing and known to take files.

    Raises ConfigError when it cannot be used, or is the default one and somebody else's: the folder for
    temporary files is open to all users. Raises NoSpaceError when its disk is full.
    """
    folder = runtime_dir()
    remedy = "set TRAINER_RUNTIME_DIR to a folder that this user can write"
    try:
        if read("TRAINER_RUNTIME_DIR"):
            folder.mkdir(parents=True, exist_ok=True)
        else:
            folder.mkdir(mode=0o700, exist_ok=True)
            found = folder.lstat()
            # a link, or a folder that another user made in our place
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                what = f"{folder} belongs to another user"
                raise ConfigError(what, where="TRAINER_RUNTIME_DIR", remedy=remedy)
        # permission bits do not tell of read-only mounts or of what root may do: ask by writing
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        what = f"{folder} cannot be used: {error.strerror}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(what, where="TRAINER_RUNTIME_DIR", remedy="free space on that disk") from error
        raise ConfigError(what, where="TRAINER_RUNTIME_DIR", remedy=remedy) from error
    return folder


def user_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Folder for what can be computed again, outside any data set; it need not exist yet."""
    value = read("TRAINER_CACHE_DIR", environ)
    if value:
        return at_home(value, "TRAINER_CACHE_DIR")
    return at_home(read("XDG_CACHE_HOME", environ) or "~/.cache", "TRAINER_CACHE_DIR") / "trainer"


def hub_cache_dir() -> Path:
    """Folder of repositories that were downloaded from the hub; it need not exist yet."""
    cache, home, base = read("HF_HUB_CACHE"), read("HF_HOME"), read("XDG_CACHE_HOME")
    if cache:
        return at_home(cache, "HF_HUB_CACHE")
    folder = home or str(Path(base or "~/.cache", "huggingface"))
    return at_home(folder, "HF_HOME") / "hub"


def queue_dir() -> Path:
    """Folder of the queue's jobs; it need not exist yet."""
    return at_home(read("TRAINER_QUEUE_DIR") or "~/.local/state/trainer/queue", "TRAINER_QUEUE_DIR")


def cache_dir(config: RunConfig, environ: Mapping[str, str] | None = None) -> Path:
    """Folder of the run's encoded samples; it need not exist yet."""
    return config.data.cache_dir or user_cache_dir(environ)


def rank_and_ranks() -> tuple[int, int]:
    """The rank of this process and the number of ranks of its run, by the variables that launchers use."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def metrics_port() -> int | None:
    """Port of the parent's server, or None for 0. Raises ConfigError for what is not a port."""
    value = read("TRAINER_METRICS_PORT")
    if value is None:
        return DEFAULT_METRICS_PORT
    if not re.fullmatch(r"[0-9]{1,5}", value) or int(value) > 65535:
        remedy = f"write a port such as {DEFAULT_METRICS_PORT}, or 0 for none"
        raise ConfigError(f'"{value}" is not a port', where="TRAINER_METRICS_PORT", remedy=remedy)
    return int(value) or None


def metrics_address() -> str:
    """Address that the parent's server listens on. Raises ConfigError for what is not one."""
    import ipaddress  # only runs that serve need it

    value = read("TRAINER_METRICS_ADDRESS") or LOOPBACK
    try:
        return str(ipaddress.ip_address(value.strip()))
    except ValueError as error:
        remedy = f"write {LOOPBACK} for this machine alone, or :: for all its addresses"
        what = f'"{value}" is not an address'
        raise ConfigError(what, where="TRAINER_METRICS_ADDRESS", remedy=remedy) from error


def misspelt(environ: Mapping[str, str], keys: Iterable[str]) -> list[Problem]:
    """TRAINER_* names that look like a listed variable or like a key of the configuration, but are neither.

    `keys` are the configuration's dotted keys. Names that resemble nothing are somebody else's: left alone.
    """
    known = [name for name in _NAMES if name.startswith("TRAINER_")]
    known += [CONFIG_PREFIX + key.upper().replace(".", "__") for key in keys]
    problems = []
    for name in sorted(environ):
        if not name.upper().startswith("TRAINER_") or name.startswith(CONFIG_PREFIX) or name in _NAMES:
            continue
        if _SERVICE.search(name) or _SERVICE_URL.match(environ[name]):
            continue
        near = closest(name, known, cutoff=0.9)
        if near:
            remedy = f"did you mean {near}? Unset it if it is not for the trainer"
            problems.append(Problem(what="unknown variable", where=name, remedy=remedy))
    return problems
