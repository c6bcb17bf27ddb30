"""Programs that tests run and a machine may lack."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

LOCAL = Path(__file__).resolve().parents[1] / "build" / "ci" / "bin"
"""Folder in which .ci/run unpacks its tools."""


def program(name: str, *, package: str, folder: Path) -> str:
    """Path of a program: from PATH or `LOCAL`, else out of Debian's package, which is unpacked into `folder`.

    Nothing is installed: packages of servers start them.
    """
    unpacked = folder / package / "usr" / "bin" / name
    found = shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), str(LOCAL))))
    if found is not None:
        return found
    if not unpacked.exists():
        _unpack(name, package, folder)
    return str(unpacked)


def missing(reason: str) -> NoReturn:
    """Skip a test that lacks a program; in CI, where everything is there, it fails."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def _unpack(name: str, package: str, folder: Path) -> None:
    if shutil.which("apt-get") is None:
        missing(f"no {name}, and no apt-get to take it from (package: {package})")
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, capture_output=True)
    archives = sorted(folder.glob(f"{package}_*.deb"))
    if not archives:
        missing(f"no {name}, and apt-get cannot download the package {package}")
    subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(folder / package)], check=True)
