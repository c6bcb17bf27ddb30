"""A run at Weights & Biases (`train.report_to: wandb`); wandb sends, no port is opened here.

Only losses, rates, memory and previews are given to it: no machine statistics, no code, no console output.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import environment
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.sinks.records import Record, written_values

_ID_FILE = "wandb.id"


class Tracker:
    """One run, found again by the id that its folder holds."""

    def __init__(self, run_dir: Path, project: str, settings: Mapping[str, str]) -> None:
        """`settings` are shown as the run's configuration. Raises ConfigError where wandb does not start."""
        import wandb

        self._wandb: Any = wandb
        identity = run_dir / _ID_FILE
        if not identity.is_file():
            atomic.write_text(identity, secrets.token_hex(4))
        quiet = wandb.Settings(
            api_key=_api_key(),
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            silent=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        try:
            self._run: Any = wandb.init(
                project=project,
                name=run_dir.resolve().name,
                id=identity.read_text().strip(),
                dir=str(run_dir),
                resume="allow",
                mode=environment.read("WANDB_MODE") or "online",
                config=dict(settings),
                settings=quiet,
            )
        except (wandb.errors.Error, ValueError) as error:
            what = f"wandb cannot start ({error})"
            remedy = "set WANDB_API_KEY or WANDB_API_KEY_FILE, or WANDB_MODE=offline, or leave the key out"
            raise ConfigError(what, where="train.report_to", remedy=remedy) from error

    def record(self, record: Record) -> None:
        """Send the values; those of a step that was sent before a resume are left out by wandb."""
        values = written_values(record)
        for name in ("validation_data", "score_data"):
            values.pop(name, None)
        self._run.log(values, step=values.pop("step"))

    def image(self, tag: str, path: Path, *, step: int) -> None:
        """Send a picture."""
        self._run.log({tag: self._wandb.Image(str(path))}, step=step)

    def close(self, *, finished: bool) -> None:
        """Send what is left, and whether the run came to its end."""
        self._run.finish(exit_code=0 if finished else 1)


def _api_key() -> str | None:
    """WANDB_API_KEY, or the text of the file that WANDB_API_KEY_FILE names."""
    file = environment.read("WANDB_API_KEY_FILE")
    if environment.read("WANDB_API_KEY") or file is None:
        return environment.read("WANDB_API_KEY")
    try:
        return Path(file).expanduser().read_text().strip()
    except OSError as error:
        what, remedy = f"{file} cannot be read: {error.strerror}", "name a file that this user may read"
        raise ConfigError(what, where="WANDB_API_KEY_FILE", remedy=remedy) from error
