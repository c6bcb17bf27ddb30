"""Which wheels pip would install elsewhere: another machine, another Python. No wheel is downloaded.

pip judges markers (`; platform_machine == "aarch64"`) by the machine that it runs on, whatever platform it is
asked for. So `resolve` walks through the dependencies itself, and asks pip for one round of them at a time.
"""

from __future__ import annotations

import ast
import json
import os
import re
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from trainer.config import environment

OLDEST_GLIBC = 17
"""Of glibc 2.x: the oldest that wheels for aarch64 are built for; nobody builds current ones for older."""
OLDEST_PIP = 24
"""Older ones download every wheel in a dry run."""
_CONNECTION = ("index-url", "cert", "client-cert", "proxy", "trusted-host", "timeout", "default-timeout")
_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Place:
    """What wheels must fit: Linux on a machine, with a CPython and a glibc."""

    machine: str
    """x86_64 or aarch64."""
    python: str
    """With its patch level."""
    glibc: int
    """The 36 of 2.36."""

    @property
    def python_series(self) -> str:
        """3.11 of 3.11.2."""
        return self.python.rpartition(".")[0]

    def markers(self) -> dict[str, str]:
        """What environment markers ask for."""
        return {
            "implementation_name": "cpython",
            "implementation_version": self.python,
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_release": "",
            "platform_system": "Linux",
            "platform_version": "",
            "python_full_version": self.python,
            "python_version": self.python_series,
            "sys_platform": "linux",
        }

    def options(self) -> list[str]:
        """Of pip, for the same."""
        tags = [f"manylinux_2_{minor}" for minor in range(self.glibc, OLDEST_GLIBC - 1, -1)]
        platforms = [f"{tag}_{self.machine}" for tag in (*tags, "manylinux2014", "linux")]
        wanted = ["--only-binary=:all:", "--implementation", "cp", "--python-version", self.python_series]
        return [*wanted, *(word for platform in platforms for word in ("--platform", platform))]


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """What pip would install."""

    name: str
    version: str
    url: str
    requires: tuple[str, ...]


class PinError(Exception):
    """Requirements that do not resolve; the text names them."""


Find = Callable[[Sequence[Requirement]], Sequence[Wheel]]
"""The wheel for each requirement, without what it requires itself; raises PinError."""


def resolve(roots: Sequence[str], find: Find, markers: Mapping[str, str]) -> dict[str, Wheel]:
    """The wheels of these requirements and of all that they require, by name. Raises PinError."""
    found: dict[str, Wheel] = {}
    asked: list[Requirement] = []
    for _ in range(_ROUNDS):
        wanted = _wanted(roots, found, markers)
        asked = [one for name, one in wanted.items() if name not in found or not _fits(one, found[name])]
        if not asked:
            return {name: found[name] for name in wanted}
        for wheel in find(asked):
            found[canonicalize_name(wheel.name)] = wheel
        lacking = [str(one) for one in asked if canonicalize_name(one.name) not in found]
        if lacking:
            raise PinError(f"pip says nothing of {', '.join(lacking)}")
    raise PinError(f"no end of {', '.join(str(one) for one in asked)}: their versions contradict each other")


def _wanted(
    roots: Sequence[str], found: Mapping[str, Wheel], markers: Mapping[str, str]
) -> dict[str, Requirement]:
    """Every package that is known to be needed, with the versions and extras that all who need it ask for."""
    wanted: dict[str, Requirement] = {}
    queue = [one for text in roots for one in _applying(text, (), markers)]
    while queue:
        one = queue.pop(0)
        name = canonicalize_name(one.name)
        merged = Requirement(name)
        before = wanted.get(name)
        merged.specifier = SpecifierSet() if before is None else before.specifier
        merged.specifier &= one.specifier
        merged.extras = one.extras | (set() if before is None else before.extras)
        wanted[name] = merged
        if name in found and (before is None or before.extras != merged.extras):
            extras = sorted(merged.extras)
            queue += [needed for text in found[name].requires for needed in _applying(text, extras, markers)]
    return wanted


def _applying(text: str, extras: Sequence[str], markers: Mapping[str, str]) -> Iterator[Requirement]:
    """The requirement, where its marker holds for one of the extras, or without any."""
    one = Requirement(text)
    if one.marker is None or any(one.marker.evaluate({**markers, "extra": extra}) for extra in ("", *extras)):
        yield one


def _fits(requirement: Requirement, wheel: Wheel) -> bool:
    return requirement.specifier.contains(wheel.version, prereleases=True)


class Pip:
    """The pip of this interpreter, with the configured index alone.

    Further indexes and folders of wheels are left out: they may hold builds for this machine.
    """

    def __init__(self) -> None:
        """Raises PinError for a pip that is too old."""
        version = self._asked("--version", environ=environment.snapshot()).split()[1]
        if int(version.partition(".")[0]) < OLDEST_PIP:
            raise PinError(
                f"pip {version} downloads whole wheels in a dry run: call `make pins`, which has a newer one"
            )
        self._environ = self._of_one_index()

    def find(self, requirements: Sequence[Requirement], place: Place, constraints: str) -> list[Wheel]:
        """As `Find`. Where pip has no answer, each requirement is asked for alone, to name those at fault."""
        try:
            return self._wheels(requirements, place, constraints)
        except PinError:
            if len(requirements) == 1:
                raise
        failed = []
        for one in requirements:
            try:
                self._wheels([one], place, constraints)
            except PinError as error:
                failed.append(str(error))
        raise PinError("\n".join(failed) or f"not together: {', '.join(str(one) for one in requirements)}")

    def versions(self, name: str) -> list[str]:
        """Every version of a package, in any form."""
        listed = json.loads(self._asked("index", "versions", name, "--json", environ=self._environ))[
            "versions"
        ]
        return [str(version) for version in listed]

    def size(self, wheel: Wheel) -> int:
        """Bytes to download. Raises PinError for a file that is not there."""
        context = ssl.create_default_context(cafile=self._environ.get("PIP_CERT"))
        asked = urllib.request.Request(wheel.url, method="HEAD")
        try:
            with urllib.request.urlopen(asked, timeout=60, context=context) as answer:
                return int(answer.headers["Content-Length"] or 0)
        except OSError as error:
            raise PinError(f"{wheel.name}=={wheel.version}: {error}") from error

    def _wheels(self, requirements: Sequence[Requirement], place: Place, constraints: str) -> list[Wheel]:
        # fast-deps: of wheels whose metadata the index does not serve, pip reads the last part
        options = ["--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--report", "-"]
        words = [*options, *place.options(), "-c", constraints, *(str(one) for one in requirements)]
        report = json.loads(self._asked("install", "--quiet", *words, environ=self._environ))
        return [
            Wheel(
                name=item["metadata"]["name"],
                version=item["metadata"]["version"],
                url=item["download_info"]["url"],
                requires=tuple(item["metadata"].get("requires_dist", ())),
            )
            for item in report["install"]
        ]

    def _of_one_index(self) -> dict[str, str]:
        """The environment with what configuration files say of the connection, and without their places."""
        environ = environment.snapshot()
        listed = self._asked("config", "list", environ=environ)
        for key, value in re.findall(r"^(?:global|install)\.([\w-]+)=(.*)$", listed, re.MULTILINE):
            if key in _CONNECTION:
                environ.setdefault(f"PIP_{key.replace('-', '_').upper()}", ast.literal_eval(value))
        for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_CONSTRAINT", "PIP_NO_INDEX"):
            environ.pop(name, None)
        return {**environ, "PIP_CONFIG_FILE": os.devnull}

    def _asked(self, *words: str, environ: Mapping[str, str]) -> str:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
        answer = subprocess.run(command, env=environ, capture_output=True, text=True)
        if answer.returncode != 0:
            said = [line for line in answer.stderr.splitlines() if line.startswith("ERROR: ")]
            raise PinError((said or [answer.stderr.strip()])[-1].removeprefix("ERROR: "))
        return answer.stdout
