"""Work in a child process that is killed at a moment of its changes to the disk."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_CHANGES = ("fsync", "mkdir", "rename", "replace", "rmdir", "unlink")
"""Functions of `os` through which files and folders come, go and change their names."""


def at_each_change(
    work: Callable[[Path], None], prepare: Callable[[Path], None], root: Path
) -> Iterator[Path]:
    """Folders below `root`, each prepared and then worked in until SIGKILL came, before one more change than
    in the folder before; the last one is that of work which nothing ended.
    """
    for moment in range(1000):
        folder = root / str(moment)
        folder.mkdir()
        prepare(folder)
        child = multiprocessing.get_context("fork").Process(target=_until, args=(work, folder, moment))
        child.start()
        child.join()
        assert child.exitcode in (0, -signal.SIGKILL)
        yield folder
        if child.exitcode == 0:
            assert moment > 0, "the work changes nothing"
            return
    raise AssertionError("the work never ends")


def _until(work: Callable[[Path], None], folder: Path, moment: int) -> None:
    left = [moment]

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1
            return change(*arguments, **options)

        return call

    for name in _CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    work(folder)
