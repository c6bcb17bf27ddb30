"""A run at Weights & Biases (`train.report_to: wandb`); wandb sends, no port is opened here.

Only losses, rates, memory and previews are given to it: no machine statistics, no code, no console output.
Once it runs, nothing that becomes of wandb or of its own process ends the run.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.config import environment
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.sinks.records import Record, written_values

_ID_FILE, _KEY_FILE = "wandb.id", "WANDB_API_KEY_FILE"
# the most that the end of a run waits for an upload; what is left lies in the run's folder, for `wandb sync`
_FINISH_SECONDS = 60.0
_MODES = ("online", "offline", "disabled", "shared", "dryrun", "run")


def require_settings() -> None:
    """Raise ConfigError for a WANDB_MODE that wandb has not, and a key's file that cannot be read."""
    _mode()
    _api_key()


class Tracker:
    """One run, found again by the id that its folder holds."""

    def __init__(
        self, run_dir: Path, project: str, settings: Mapping[str, str], say: Callable[[str], None]
    ) -> None:
        """`settings` are shown as the run's configuration; `say` is told where wandb is lost on the way.

        Raises ConfigError where wandb does not start.
        """
        wandb: Any = importlib.import_module("wandb")
        mailbox: Any = importlib.import_module("wandb.sdk.mailbox")
        self._wandb, self._say, self._lost = wandb, say, False
        # wandb's process was killed or refuses, the connection to it broke, a disk is full
        self._errors = (wandb.errors.Error, OSError, mailbox.MailboxClosedError, mailbox.HandleAbandonedError)
        identity = run_dir / _ID_FILE
        if not identity.is_file():
            atomic.write_text(identity, secrets.token_hex(4))
        quiet = wandb.Settings(
            api_key=_api_key(),
            console="off",
            disable_code=True,
            disable_git=True,
            finish_timeout=_FINISH_SECONDS,
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
                mode=_mode(),
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
        step = values.pop("step")
        self._do(lambda: self._run.log(values, step=step))

    def image(self, tag: str, path: Path, *, step: int) -> None:
        """Send a picture."""
        self._do(lambda: self._run.log({tag: self._wandb.Image(str(path))}, step=step))

    def close(self, *, finished: bool) -> None:
        """Send what is left, and whether the run came to its end."""
        self._do(lambda: self._run.finish(exit_code=0 if finished else 1))

    def _do(self, send: Callable[[], None]) -> None:
        """Call wandb, unless it was lost before: a loss is told once."""
        if self._lost:
            return
        try:
            send()
        except self._errors as error:
            self._lost = True
            why = f"{type(error).__name__}: {error}"
            self._say(
                f"warning: Weights & Biases is sent nothing more ({why}): the run goes on, and"
                " metrics.jsonl and TensorBoard have everything; a start that resumes it sends again"
            )
            # else its own hook tries once more when the process ends, with a traceback
            with contextlib.suppress(*self._errors):
                self._wandb.teardown()


def _mode() -> str:
    """WANDB_MODE, `online` where it is not set."""
    mode = environment.read("WANDB_MODE") or "online"
    if mode not in _MODES:
        remedy = "write online, offline (`wandb sync` sends it later) or disabled"
        raise ConfigError(f"{mode!r} is no mode of wandb", where="WANDB_MODE", remedy=remedy)
    return mode


def _api_key() -> str | None:
    """WANDB_API_KEY, or the text of the file that WANDB_API_KEY_FILE names."""
    file = environment.read(_KEY_FILE)
    if environment.read("WANDB_API_KEY") or file is None:
        return environment.read("WANDB_API_KEY")
    try:
        path = Path(file).expanduser()
        # compose's file for no key, which this user may not read where the umask was 027
        return path.read_text().strip() if not path.is_file() or path.stat().st_size else ""
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        remedy = "name a file that this user may read, and that holds the key alone"
        raise ConfigError(f"{file} cannot be read: {reason}", where=_KEY_FILE, remedy=remedy) from error
