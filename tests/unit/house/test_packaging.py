"""Pins, make targets and the tables of the documents agree with the code."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.house.sources import ROOT, modules, name
from trainer.errors import MEANING

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DIRECT = [Requirement(text) for text in PROJECT["dependencies"]]
OPTIONAL = [
    Requirement(text)
    for extra in ("dev", "ui", "parquet", "plots", "tiny-base")
    for text in PROJECT["optional-dependencies"][extra]
]
MAKE_TARGETS = [
    "help", "setup", "demo", "test", "test-slow", "test-browser", "test-container", "test-gpu", "test-slurm",
    "lint", "type", "pins", "docs", "golden", "scan", "clean",
]  # fmt: skip


def pins() -> dict[str, tuple[str, str]]:
    """Version and reason by package name."""
    found = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            match = re.fullmatch(r"([a-z0-9.-]+)==([\w.]+)(?: +# (.+))?", line)
            assert match, f"not NAME==VERSION  # reason: {line}"
            found[match[1]] = (match[2], match[3] or "")
    return found


@pytest.mark.parametrize("requirement", DIRECT + OPTIONAL, ids=lambda requirement: requirement.name)
def test_direct_dependencies_are_pinned_with_a_reason(requirement: Requirement) -> None:
    version, reason = pins()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(version), f"{requirement} does not admit the pinned {version}"
    assert reason


def test_make_help_lists_every_target() -> None:
    # `make test` hands its own flags down, which would print folders
    plain = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    printed = subprocess.run(
        ["make", "help"], cwd=ROOT, env=plain, check=True, capture_output=True, text=True
    ).stdout
    assert [line.split()[0] for line in printed.splitlines()] == MAKE_TARGETS


@pytest.mark.parametrize("marker", ["browser", "container", "slurm"])
def test_marked_tests_lie_where_make_looks_for_them(marker: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    folders = re.search(rf"pytest -q -m {marker} (.+) \$\(OR_NONE\)", makefile)
    assert folders
    if variable := re.fullmatch(r"\$\((\w+)\)", folders[1]):
        folders = re.search(rf"^{variable[1]} := (.+)$", makefile, re.MULTILINE)
        assert folders
    marked = [path for path in modules("tests") if f"mark.{marker}" in path.read_text()]
    assert marked and all((ROOT / folder).is_dir() for folder in folders[1].split())
    elsewhere = [
        path for path in marked if not any(path.is_relative_to(ROOT / f) for f in folders[1].split())
    ]
    assert [name(path) for path in elsewhere] == []


def test_readme_lists_every_exit_code() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [(int(code), meaning.strip()) for code, meaning in rows] == [
        (code.value, meaning) for code, meaning in MEANING.items()
    ]


def test_scripts_are_executable_where_they_are_run_directly() -> None:
    assert (ROOT / ".ci/run").stat().st_mode & 0o111 == 0o111
