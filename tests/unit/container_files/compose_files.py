"""The compose files as data, with what they extend, and as compose v2 understands them."""

from __future__ import annotations

import copy
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from tests.programs import missing
from tests.unit.house.sources import ROOT

COMPOSE = ROOT / "compose"

Node = dict[str, Any]


class _Loader(yaml.SafeLoader):
    """YAML with compose's `!reset`, which takes away a value of the files below."""


_Loader.add_constructor("!reset", lambda loader, node: None)


def load(name: str) -> Node:
    """The content of a file, of one's own: tests change it."""
    return copy.deepcopy(_parsed((COMPOSE / name).read_text()))


@functools.cache
def _parsed(text: str) -> Node:
    content = yaml.load(text, Loader=_Loader)
    assert isinstance(content, dict)
    return content


def merged(below: Any, above: Any) -> Any:
    """Two nodes merged like compose's `extends`: mappings by key, sequences joined, scalars from `above`."""
    if isinstance(below, dict) and isinstance(above, dict):
        return {key: merged(below.get(key), above.get(key, below.get(key))) for key in {**below, **above}}
    if isinstance(below, list) and isinstance(above, list):
        return below if below == above else [*below, *above]
    return above


def services(profile: str) -> dict[str, Node]:
    """The services of one hardware profile with what they extend."""
    found = {}
    for name, service in load(f"{profile}.yaml")["services"].items():
        service = copy.deepcopy(service)
        extended = service.pop("extends")
        found[name] = merged(load(extended["file"])["services"][extended["service"]], service)
    return found


def interpolated(text: str, variables: dict[str, str]) -> str:
    """`${NAME:-default}` as compose replaces it."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match["name"]) or match["default"]

    return re.sub(r"\$\{(?P<name>\w+):-(?P<default>[^}]*)\}", value, text)


def compose_command() -> list[str]:
    """Compose v2: what TRAINER_COMPOSE names, else docker's plugin, else the program of its own."""
    named = os.environ.get("TRAINER_COMPOSE")
    local = ROOT / "build" / "ci" / "bin" / "docker-compose"
    for command in ([named] if named else [], ["docker", "compose"], ["docker-compose"], [str(local)]):
        if command and shutil.which(command[0]):
            asked = subprocess.run([*command, "version", "--short"], capture_output=True, text=True)
            if asked.returncode == 0 and int(asked.stdout.lstrip("v").partition(".")[0]) >= 2:
                return command
    missing("no compose v2: install docker's compose plugin, or name docker-compose in TRAINER_COMPOSE")


def config(arguments: list[str], folder: Path, **variables: str) -> Node:
    """The configuration that compose resolves, from any folder and with no environment but `variables`."""
    run = subprocess.run(
        # without a developer's own compose/.env
        [*compose_command(), "--env-file", os.devnull, *arguments, "config"],
        cwd=folder,
        env={"PATH": os.environ["PATH"], "HOME": str(folder), **variables},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == "", "compose warns"
    understood = yaml.safe_load(run.stdout)
    assert isinstance(understood, dict)
    return understood
