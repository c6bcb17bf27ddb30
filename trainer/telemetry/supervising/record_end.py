"""The end of a run as its supervisor records and tells it: in the run's folder, and by the webhook."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.config.secrets import redacted
from trainer.errors import Problem, StorageError, meaning
from trainer.telemetry import status
from trainer.telemetry.run_folder import process
from trainer.telemetry.supervising import webhook
from trainer.telemetry.supervising.runtime_folder import say
from trainer.telemetry.supervising.webhook import Webhook, WebhookError


def problems_of(runtime_dir: Path, exit_code: int, cause: str) -> tuple[Problem, ...]:
    """Errors that the ranks of a run ended with, or the cause where none could say; none of a good end."""
    if not exit_code:
        return ()
    errors = (process.read_error(folder) for folder in status.rank_folders(runtime_dir))
    return next(filter(None, errors), (Problem(what=cause),) if cause else ())


def record_and_tell(
    run_dir: Path, runtime_dir: Path, receiver: Webhook | None, exit_code: int, cause: str
) -> None:
    """Record the end in the run's folder, then tell the receiver. What fails is said, and changes nothing."""
    problems = problems_of(runtime_dir, exit_code, cause)
    try:
        process.end(run_dir, supervisor=os.getpid(), exit_code=exit_code, cause=cause, problems=problems)
    except (OSError, StorageError) as error:  # the exit code is worth more than its note
        say(f"warning: the end is not recorded: {error}")
    if receiver is not None:
        last = status.read_status(runtime_dir)
        try:
            answer = webhook.send(receiver, body(run_dir, exit_code, cause, problems, last))
            say(f"webhook: {receiver.host} answered {answer}")
        except WebhookError as error:
            say(f"warning: the webhook was not told: {error}")


def body(
    run_dir: Path, exit_code: int, cause: str, problems: tuple[Problem, ...], last: status.Status | None
) -> Mapping[str, object]:
    """The webhook's JSON, without secrets: the run's name, how it ended, how far it came.

    `text` and `content` are one line for people, which chat services show by one of these names.
    """
    why = cause or (problems[0].what if problems else "")
    steps = {} if last is None else {"step": last.optimizer_step, "steps": last.optimizer_steps}
    line = f"{run_dir.name}: {meaning(exit_code)} (exit code {exit_code})" + (f": {why}" if why else "")
    seconds = 0.0 if last is None else time.time() - last.started_unix_seconds
    values = {
        "text": line,
        "content": line,
        "run": run_dir.name,
        "exit_code": exit_code,
        "meaning": meaning(exit_code),
        "cause": why,
        **steps,
        # not known where the clock was set back meanwhile
        "seconds": None if last is None or seconds < 0 else round(seconds, 1),
    }
    found = json.loads(redacted(json.dumps(values)))
    assert isinstance(found, dict)
    return found
