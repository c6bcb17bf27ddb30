"""Plans of every shipped configuration on every recorded machine, as text."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

from trainer import families
from trainer.cli.errors import error_text
from trainer.config.reading.load import Loaded, load
from trainer.config.schema import RunConfig
from trainer.errors import TrainerError
from trainer.machine.reading import read_recorded
from trainer.planning.plan import Plan
from trainer.planning.planning import plan_run
from trainer.planning.render import plan_text

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINES = Path(__file__).parent / "machines"
PLANS = Path(__file__).parent / "plans"
SEVERAL = "several"
"""Folder of the machines with several GPUs, and of their plans: of one configuration each."""
_SHARED = Path("train_configs/flux1_dev_lora.yaml")
_VARIABLES = (
    "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_P2P_DISABLE",
    "NCCL_IB_DISABLE",
)  # fmt: skip
_RULE = "=" * 118


def machines() -> list[str]:
    """Names of the recorded machines."""
    return sorted(path.stem for path in MACHINES.glob("*.json"))


def machine_text(machine: str) -> str:
    """One block for each configuration: its plan, or the refusal as the command line prints it.

    Repositories of the hub count as not downloaded, so that the text does not depend on the disk. The current
    directory must be the repository's root.
    """
    facts = read_recorded(MACHINES / f"{machine}.json")

    def find_model(config: RunConfig) -> Path | None:
        return Path(config.model.pretrained_model_name_or_path) if config.model.download == "never" else None

    blocks = []
    for path in sorted((ROOT / "train_configs").glob("*.yaml")):
        relative = path.relative_to(ROOT)
        try:
            text = plan_text(plan_run(load_shipped(relative), facts, find_model=find_model))
        except TrainerError as error:
            text = error_text(error)
        blocks.append(f"{_RULE}\n{relative}\n{_RULE}\n{text}\n")
    return "\n".join(blocks)


def machines_of_several() -> list[str]:
    """Names of the machines with several GPUs, made of recorded ones."""
    return sorted(f"{SEVERAL}/{path.stem}" for path in (MACHINES / SEVERAL).glob("*.json"))


def shared_plan(machine: str) -> Plan:
    """The plan of FLUX.1-dev's LoRA, four images a step, on a machine with several GPUs, whatever variables
    are set here. The current directory must be the repository's root.
    """
    facts = read_recorded(MACHINES / f"{machine}.json")
    environ = {name: value for name, value in os.environ.items() if name not in _VARIABLES}
    with mock.patch.dict(os.environ, environ, clear=True):
        return plan_run(load_shipped(_SHARED), facts, find_model=lambda _: None)


def load_shipped(path: Path) -> Loaded:
    """A shipped configuration without anything from the environment."""
    defaults = {name: families.get(name).defaults for name in families.names()}
    return load([path], family_defaults=defaults, environ={})
