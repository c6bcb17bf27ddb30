"""A process that ends with the one that started it: `python -m trainer.engine.comparing.tied PID COMMAND...`.

The kernel keeps a parent's death signal over `exec`, so that the command is asked to end as by SIGTERM.
Source: prctl(2), PR_SET_PDEATHSIG.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trainer.telemetry.stop import die_with_parent


def main(arguments: Sequence[str]) -> None:
    """Become the command, tied to the process PID."""
    parent, *command = arguments
    die_with_parent(int(parent))
    os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
