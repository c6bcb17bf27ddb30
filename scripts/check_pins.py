"""Does every pin of the images for GPUs have a wheel for its platform? Asks pip, and downloads no wheel.

make pins

What the images install is read from the Dockerfile and pyproject.toml; sizes are those of the wheels.
Exit code 1 with the names of what is missing.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from scripts.pip_dry_run import PinError, Pip, Place, resolve
from trainer.container.appliance import TARGETS
from trainer.machine.profiles import PROFILES

ROOT = Path(__file__).resolve().parent.parent
MACHINES: Mapping[str, str] = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
BASES: Mapping[str, tuple[str, int]] = {
    "bookworm": ("3.11.2", 36),
    # Ubuntu 24.04: what a DGX Spark runs, and NGC images start from
    "noble": ("3.12.3", 39),
}
"""Distributions that images start from: Python, and the second number of glibc."""
_PINNED = re.compile(r'"([\w-]+)==\$(\w+)"')


@dataclass(frozen=True, kw_only=True)
class Pins:
    """What images for GPUs consist of."""

    wheels: tuple[str, ...]
    """Requirements that are installed as wheels."""
    compiled: tuple[str, ...]
    """Requirements that the build compiles, where it is asked to."""
    base: str
    """The default base image's name in `BASES`."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one platform and Python."""

    packages: int = 0
    size_bytes: int = 0
    problem: str = ""


def main() -> int:
    """Parse arguments and print the table; 1 where something does not resolve."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    try:
        return check(Pip(), read_pins(ROOT))
    except PinError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def read_pins(root: Path) -> Pins:
    """From Dockerfile and pyproject.toml. Raises PinError for a base image that `BASES` does not have."""
    text = (root / "docker" / "Dockerfile").read_text()
    arguments = dict(re.findall(r'^ARG (\w+)="?([^"\n]*)"?$', text, re.MULTILINE))
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [project["optional-dependencies"][name] for name in arguments["EXTRAS"].split()]
    installed, _, compiled = text.partition(" AS kernels-build")
    base = arguments["BASE_IMAGE"].partition(":")[2].removesuffix("-slim")
    if base not in BASES:
        raise PinError(f"BASES does not say which Python and glibc {arguments['BASE_IMAGE']} has")
    pinned = [f"{name}=={arguments[argument]}" for name, argument in _PINNED.findall(installed)]
    return Pins(
        wheels=tuple(sum(extras, [*pinned, *project["dependencies"]])),
        compiled=tuple(f"{name}=={arguments[argument]}" for name, argument in _PINNED.findall(compiled)),
        base=base,
    )


def check(pip: Pip, pins: Pins) -> int:
    """Print a row for every target, platform and Python; 1 where one of them does not resolve."""
    targets = [profile for profile in TARGETS if PROFILES[profile].device == "cuda"]
    names = sorted(BASES, key=lambda name: name != pins.base)
    keys = [(platform, name) for platform in MACHINES for name in names]
    # two at a time: as much as a small machine runs
    with ThreadPoolExecutor(max_workers=2) as pool:
        answers = dict(zip(keys, pool.map(functools.partial(_answer, pip, pins), keys), strict=True))
    print(f"{'target':<14}{'platform':<14}{'python':<9}{'base':<11}{'packages':>8}{'GB':>7}")
    for target in targets:
        for (platform, name), answer in answers.items():
            if platform in TARGETS[target]:
                python, _ = BASES[name]
                told = "no" if answer.problem else f"{answer.packages:>8}{answer.size_bytes / 1e9:>7.2f}"
                print(f"{target:<14}{platform:<14}{python:<9}{name:<11}{told}")
    print(f"compiled where the build is asked to (KERNELS=build): {', '.join(pins.compiled)}")
    problems = [
        f"{platform}, {name}: {one.problem}" for (platform, name), one in answers.items() if one.problem
    ]
    problems += _unknown(pip, pins.compiled)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _answer(pip: Pip, pins: Pins, key: tuple[str, str]) -> Answer:
    platform, name = key
    python, glibc = BASES[name]
    place = Place(machine=MACHINES[platform], python=python, glibc=glibc)
    find = functools.partial(pip.find, place=place, constraints=str(ROOT / "constraints.txt"))
    try:
        wheels = list(resolve(pins.wheels, find, place.markers()).values())
        with ThreadPoolExecutor(max_workers=4) as pool:
            return Answer(packages=len(wheels), size_bytes=sum(pool.map(pip.size, wheels)))
    except PinError as error:
        return Answer(problem=str(error))


def _unknown(pip: Pip, requirements: Sequence[str]) -> list[str]:
    """Those of which there is no such version, in no form."""
    wanted = [Requirement(text) for text in requirements]
    return [
        f"{one}: no such version" for one in wanted if not list(one.specifier.filter(pip.versions(one.name)))
    ]


if __name__ == "__main__":
    sys.exit(main())
