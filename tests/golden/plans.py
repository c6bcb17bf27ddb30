"""Plans of every shipped configuration on every recorded machine, as text."""

from __future__ import annotations

from pathlib import Path

from trainer import families
from trainer.cli.errors import error_text
from trainer.config.reading.load import Loaded, load
from trainer.config.schema import RunConfig
from trainer.errors import TrainerError
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run
from trainer.planning.render import plan_text

ROOT = Path(__file__).resolve().parent.parent.parent
MACHINES = Path(__file__).parent / "machines"
PLANS = Path(__file__).parent / "plans"
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


def load_shipped(path: Path) -> Loaded:
    """A shipped configuration without anything from the environment."""
    defaults = {name: families.get(name).defaults for name in families.names()}
    return load([path], family_defaults=defaults, environ={})
