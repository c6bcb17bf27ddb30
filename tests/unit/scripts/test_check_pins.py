"""Pins that do not resolve, are missing or not needed are named; a fake uv and a fake pip answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from scripts.check_pins import BASES, COMPILED, MACHINES
from tests.unit.container_files.test_dockerfile import STAGES
from tests.unit.house.sources import ROOT
from trainer.container.appliance import TARGETS

CONSTRAINTS = (ROOT / "constraints.txt").read_text()
# what a project needs is told by the pins and by $NEEDED and $NEEDLESS; its calls and settings are kept
FAKE_UV = """
import os, pathlib, re, sys
words = sys.argv[1:]
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    index, proxy = os.environ.get("UV_DEFAULT_INDEX"), os.environ.get("ALL_PROXY")
    print(*words, f"index={index} proxy={proxy} links={os.environ.get('UV_FIND_LINKS')}", file=calls)
lacking = os.environ.get("LACKING", "no such package")
place = next((word for word in words if word.startswith("--python-platform=")), "")
if "-" in words:
    names = [sys.stdin.read()]
    if lacking in names[0]:
        sys.exit("error: No solution found: there is no version of " + names[0])
elif lacking in open("constraints.txt").read() and "aarch64" in place:
    sys.exit(f"error: No solution found: {lacking} has no usable wheels")
else:
    pinned = re.findall(r"^[\\w.-]+==[^ \\n]+", open("constraints.txt").read(), re.M)
    needless = os.environ.get("NEEDLESS", "-")
    names = [one for one in pinned if not one.startswith(needless + "==")]
    names += ["nvidia-cublas==13.0", "triton==3.5", *os.environ.get("NEEDED", "").split()]
print(*names, sep="\\n")
"""
FAKE_PIP = """
print(":env:.cert='/a/file'")
print("global.find-links='/a/folder'\\nglobal.index-url='of-all'")
print("install.index-url='the-index'\\nglobal.proxy='the-proxy'")
"""


def asked(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`check_pins` with both."""
    for name, text in (("uv", FAKE_UV), ("pip", FAKE_PIP)):
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        (folder / name / "__main__.py").write_text(text)
    own = {name: value for name, value in os.environ.items() if name not in ("UV_DEFAULT_INDEX", "ALL_PROXY")}
    return subprocess.run(
        [sys.executable, "-m", "scripts.check_pins"],
        cwd=ROOT,
        env={**own, "PYTHONPATH": str(folder), **variables},
        capture_output=True,
        text=True,
    )


def calls(folder: Path) -> list[str]:
    return (folder / "uv" / "calls").read_text().splitlines()


def test_every_platform_is_asked_for_with_each_python_and_all_extras(tmp_path: Path) -> None:
    answer = asked(tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    *rows, compiled = answer.stdout.splitlines()
    count = len(re.findall(r"^[\w.-]+==", CONSTRAINTS, re.MULTILINE)) + 2
    wanted = [(platform, base, python) for platform in MACHINES for base, (python, _) in BASES.items()]
    assert rows == [f"{platform}, {base}, Python {python}: {count}" for platform, base, python in wanted]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    *resolved, of_compiled = calls(tmp_path)
    for call, (platform, base, python) in zip(resolved, wanted, strict=True):
        assert f"--python-platform={MACHINES[platform]}-manylinux_2_{BASES[base][1]} " in call
        assert f"--python-version={python} " in call and "--only-binary :all: " in call
        assert set(re.findall(r"--extra=([\w-]+)", call)) == set(extras) - {COMPILED}
    assert "--no-deps" in of_compiled and f"{COMPILED}==" in compiled


def test_uv_takes_the_index_that_pip_is_told_and_no_folder_of_wheels(tmp_path: Path) -> None:
    asked(tmp_path)
    assert all(call.endswith("index=the-index proxy=the-proxy links=None") for call in calls(tmp_path))


def test_the_users_own_settings_of_uv_stay(tmp_path: Path) -> None:
    asked(tmp_path, UV_DEFAULT_INDEX="mine")
    assert all("index=mine " in call for call in calls(tmp_path))


def test_a_pin_without_a_wheel_is_named_with_its_platform(tmp_path: Path) -> None:
    answer = asked(tmp_path, LACKING="bitsandbytes")
    assert answer.returncode == 1
    assert answer.stderr.splitlines() == [
        f"error: linux/arm64, {base}: No solution found: bitsandbytes has no usable wheels" for base in BASES
    ]
    found = [row.endswith("not resolved") for row in answer.stdout.splitlines()[:4]]
    assert found == [False, False, True, True]


def test_a_package_that_is_needed_and_not_pinned_is_named(tmp_path: Path) -> None:
    answer = asked(tmp_path, NEEDED="newcomer==1.0")
    assert answer.returncode == 1
    assert answer.stderr == "error: newcomer is needed, and constraints.txt does not pin it\n"


def test_a_pin_that_nothing_needs_is_named(tmp_path: Path) -> None:
    answer = asked(tmp_path, NEEDLESS="tzdata")
    assert answer.returncode == 1
    assert answer.stderr == "error: tzdata is pinned, and nothing needs it\n"


def test_a_version_that_does_not_exist_is_named(tmp_path: Path) -> None:
    answer = asked(tmp_path, LACKING="flash-attn==")
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: No solution found: there is no version of flash-attn==")


@pytest.mark.parametrize("file", ["cpu.txt", "cuda.txt"])
def test_what_is_checked_has_all_that_the_dockerfile_installs(file: str, tmp_path: Path) -> None:
    """Runs the image's own script here."""
    _, instructions = STAGES["requirements"]
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    defaults = dict(one.words.replace('"', "").split("=", 1) for one in instructions if one.name == "ARG")
    (script,) = [one.words for one in instructions if one.name == "RUN"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-euc", script], cwd=tmp_path, env={**defaults, "PATH": path}, check=True)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {name: words for name, words in project["optional-dependencies"].items() if name != COMPILED}
    checked = {*project["dependencies"], *(word for words in extras.values() for word in words)}
    installed = set((tmp_path / file).read_text().splitlines())
    assert {*project["dependencies"], *extras["plots"]} <= installed <= checked
    for pin in (tmp_path / "torch.txt").read_text().splitlines():
        assert re.search(rf"^{re.escape(pin)} ", CONSTRAINTS, re.MULTILINE), pin


def test_every_platform_of_a_target_has_a_machine() -> None:
    assert {platform for platforms in TARGETS.values() for platform in platforms} == set(MACHINES)


def test_the_default_base_image_is_among_the_bases() -> None:
    (image,) = re.findall(r"^ARG BASE_IMAGE=(.+)$", (ROOT / "docker/Dockerfile").read_text(), re.MULTILINE)
    assert image.partition(":")[2].removesuffix("-slim") in BASES
