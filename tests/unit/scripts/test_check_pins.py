"""Pins that have no wheel are named, on the platform that lacks them; a fake pip answers."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from scripts.check_pins import MACHINES, read_pins
from scripts.pip_dry_run import PinError, Place, Wheel, resolve
from tests.unit.container_files.test_dockerfile import STAGES
from tests.unit.house.sources import ROOT
from trainer.container.appliance import TARGETS

SPARK = Place(machine="aarch64", python="3.12.3", glibc=39)

# What a version is, is told by the constraints or by the requirement.
FAKE_PIP = """
import json, pathlib, re, sys
here = pathlib.Path(__file__).parent
words = sys.argv[1:]
if "--version" in words:
    print("pip VERSION from here")
elif "config" in words:
    print("global.find-links='/a/folder'\\nglobal.index-url='the-index'")
elif "index" in words:
    print(json.dumps({"versions": ["1.0"] if "LACKING" in words else re.findall(r"[=]=([^ ]+)", COMPILED)}))
else:
    pins = dict(re.findall(r"^([\\w-]+)==([^ \\n]+)", open(words[words.index("-c") + 1]).read(), re.M))
    wheels = []
    for word in words[words.index("-c") + 2 :]:
        name, version = re.match(r"[\\w-]+", word)[0], re.search("==([^,]+)", word)
        if name in "LACKING" and "linux_aarch64" in words:
            sys.exit(f"ERROR: Could not find it\\nERROR: No matching distribution found for {word}")
        metadata = {"name": name, "version": pins.get(name) or (version[1] if version else "1.0")}
        if name == "torch":
            arm = 'only-arm==2.0; platform_machine == "aarch64"'
            metadata["requires_dist"] = [arm, 'only-windows; sys_platform == "win32"']
        wheels.append({"metadata": metadata, "download_info": {"url": (here / "wheel").as_uri()}})
    print(json.dumps({"install": wheels}))
"""


def asked(folder: Path, *, version: str = "26.3", lacking: str = "") -> subprocess.CompletedProcess[str]:
    """`check_pins` with a pip that finds everything but one wheel for aarch64."""
    module = folder / "pip"
    module.mkdir()
    (module / "__init__.py").touch()
    (module / "wheel").write_bytes(b"0" * 1000)
    text = FAKE_PIP.replace("VERSION", version).replace("LACKING", lacking or "-")
    (module / "__main__.py").write_text(text.replace("COMPILED", repr(" ".join(read_pins(ROOT).compiled))))
    command = [sys.executable, "-m", "scripts.check_pins"]
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)


def test_every_target_has_its_platforms_and_what_they_take(tmp_path: Path) -> None:
    answer = asked(tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    _, *rows, compiled = answer.stdout.splitlines()
    found = [(target, platform) for target, platform, *_ in map(str.split, rows)]
    wanted = [
        (profile, platform) for profile, some in TARGETS.items() if profile != "cpu" for platform in some
    ]
    assert found == [pair for pair in wanted for _ in range(2)], "with two Pythons each"
    packages = {(row.split()[1], int(row.split()[4])) for row in rows}
    roots = len({Requirement(text).name for text in read_pins(ROOT).wheels})
    assert packages == {("linux/amd64", roots), ("linux/arm64", roots + 1)}, (
        "a marker is that of the platform"
    )
    assert "flash-attn==" in compiled


def test_a_pin_without_a_wheel_is_named_with_its_platform(tmp_path: Path) -> None:
    answer = asked(tmp_path, lacking="bitsandbytes")
    assert answer.returncode == 1
    errors = answer.stderr.splitlines()
    assert len(errors) == 2
    for line, base in zip(errors, ("bookworm", "noble"), strict=True):
        assert line.startswith(f"error: linux/arm64, {base}: No matching distribution found for bitsandbytes")
    rows = {row.split()[0]: row for row in answer.stdout.splitlines()}
    assert rows["dgx-spark"].endswith(" no") and rows["rtx-4090"].endswith(" 0.00")


def test_a_version_that_does_not_exist_is_named(tmp_path: Path) -> None:
    answer = asked(tmp_path, lacking="flash-attn")
    assert answer.returncode == 1
    assert "error: flash-attn==" in answer.stderr and ": no such version" in answer.stderr


def test_a_pip_that_would_download_everything_is_refused(tmp_path: Path) -> None:
    answer = asked(tmp_path, version="23.9")
    assert answer.returncode == 1
    assert answer.stderr.startswith("error: pip 23.9 downloads whole wheels") and "make pins" in answer.stderr


def test_what_is_checked_is_what_the_dockerfile_installs(tmp_path: Path) -> None:
    """Its own script, run here."""
    _, instructions = STAGES["requirements"]
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    defaults = dict(one.words.replace('"', "").split("=", 1) for one in instructions if one.name == "ARG")
    (script,) = [one.words for one in instructions if one.name == "RUN"]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    subprocess.run(["/bin/sh", "-euc", script], cwd=tmp_path, env={**defaults, "PATH": path}, check=True)
    installed = [
        *(tmp_path / "torch.txt").read_text().split("\n"),
        *(tmp_path / "cuda.txt").read_text().split("\n"),
    ]
    assert sorted(filter(None, installed)) == sorted(read_pins(ROOT).wheels)


def test_every_platform_of_a_target_has_a_machine() -> None:
    assert {platform for platforms in TARGETS.values() for platform in platforms} == set(MACHINES)


def index(**requires: Sequence[str]) -> tuple[list[list[str]], object]:
    """A finder with two versions of everything, and what it was asked for."""
    rounds: list[list[str]] = []

    def wheels(requirements: Sequence[Requirement]) -> Iterator[Wheel]:
        for one in requirements:
            (newest, *_) = [version for version in ("2.0", "1.0") if version in one.specifier] or [""]
            if not newest:
                raise PinError(f"no {one}")
            needed = tuple(requires.get(one.name, ()))
            yield Wheel(name=one.name, version=newest, url="", requires=needed)

    def find(requirements: Sequence[Requirement]) -> list[Wheel]:
        rounds.append([str(one) for one in requirements])
        return list(wheels(requirements))

    return rounds, find


def test_extras_and_markers_are_those_of_the_place() -> None:
    rounds, find = index(
        a=('b[fast]; platform_machine == "aarch64"', 'c; python_version < "3.12"', 'd; extra == "dev"'),
        b=('e; extra == "fast"', 'f; extra == "slow"'),
    )
    found = resolve(["a"], find, SPARK.markers())
    assert sorted(found) == ["a", "b", "e"]
    assert rounds == [["a"], ["b[fast]"], ["e"]], "nothing is asked for twice"


def test_a_version_that_a_later_package_excludes_is_asked_for_again() -> None:
    rounds, find = index(a=("c",), b=("c<2",))
    found = resolve(["a", "b"], find, SPARK.markers())
    assert found["c"].version == "1.0"
    rounds, find = index(a=("c", "b"), b=("c<2",))
    found = resolve(["a"], find, SPARK.markers())
    assert found["c"].version == "1.0"
    assert rounds == [["a"], ["c", "b"], ["c<2"]]


def test_versions_that_contradict_each_other_are_refused() -> None:
    _, find = index(a=("c==1.0",), b=("c==2.0",))
    with pytest.raises(PinError, match=r"no c==1.0,==2.0"):
        resolve(["a", "b"], find, SPARK.markers())


def test_wheels_fit_machine_python_and_glibc() -> None:
    words = SPARK.options()
    platforms = [after for word, after in itertools.pairwise(words) if word == "--platform"]
    assert platforms[0] == "manylinux_2_39_aarch64" and {"linux_aarch64", "manylinux2014_aarch64"} <= set(
        platforms
    )
    assert words[words.index("--python-version") + 1] == "3.12"
    assert "--only-binary=:all:" in words
