"""A cluster's own client, asked by a list of words."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.errors import ConfigError, one_line

_PATIENCE_SECONDS = 60.0
_MOST_TOLD = 400


def asked(
    words: Sequence[str],
    *,
    given: str = "",
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> str:
    """All that a client prints. given: its input. environment, folder: this process's where there are none.

    Raises ConfigError where it is not installed, does not answer or refuses, with what it says.
    """
    program = words[0]
    try:
        ended = subprocess.run(
            words,
            input=given,
            env=environment,
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_PATIENCE_SECONDS,
        )
    except FileNotFoundError as error:
        missing = (
            f"there is no folder {folder}" if folder and not folder.is_dir() else "it is not installed here"
        )
        remedy = "start this on a machine from which jobs of the cluster are submitted"
        raise ConfigError(missing, where=program, remedy=remedy) from error
    except subprocess.TimeoutExpired as error:
        what = f"it does not answer within {_PATIENCE_SECONDS:.0f} s"
        raise ConfigError(what, where=program, remedy="see whether the cluster answers at all") from error
    except OSError as error:
        what = f"it cannot be started: {error.strerror}"
        raise ConfigError(what, where=program, remedy="see whether it works by itself") from error
    if ended.returncode != 0:
        said = one_line(" ".join(ended.stderr.split()))[:_MOST_TOLD] or f"exit code {ended.returncode}"
        remedy = "the words are the cluster's; its manual or its administrator knows them"
        raise ConfigError(said, where=" ".join(words[:2]), remedy=remedy)
    return ended.stdout
