"""Other Python processes of this environment, none of which imports from the working directory.

`python -m` and `python -c` put the working directory before the standard library: a `random.py` there, in a
data set's folder for instance, would be executed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from trainer.config import environment

_PACKAGE_FOLDER = Path(__file__).parents[2]


def require_utf8() -> None:
    """Start this process anew in Python's UTF-8 mode where the locale's encoding is another one.

    Names of files are bytes: in Latin-1 or in ASCII `ü.png` would be another picture than the one that its
    row names, and than the one that a run began with. Processes that are started from here inherit the mode.
    """
    if sys.getfilesystemencoding() == "utf-8" or not environment.begin_utf8():
        return
    # its bytes: words that were decoded by a locale may be others when they are encoded
    words = Path("/proc/self/cmdline").read_bytes().split(b"\0")[1:-1]
    interpreter = python()[0]
    os.execv(interpreter, [os.fsencode(interpreter), b"-X", b"utf8", *words])  # noqa: S606


def python(*arguments: str) -> list[str]:
    """The command line of a Python process: `python("-m", "trainer.engine")`."""
    return [sys.executable, "-P", *arguments]


def with_safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, in which Python processes that a library starts keep to the same."""
    return {**environ, "PYTHONSAFEPATH": "1"}


def keep_checkout(folder: str) -> None:
    """Keep a checkout importable that is not installed, and is run by `python -m trainer` from its `folder`.

    It comes after everything else in this process; those that are started from here find it as well. Any
    other folder is left alone.
    """
    if folder and Path(folder).resolve() == _PACKAGE_FOLDER.resolve():
        sys.path.append(folder)
        environment.add_python_path(folder)
