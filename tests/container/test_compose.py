"""`docker compose up` as the manual has it: it trains, is stopped, and the next one goes on."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.boxes import Box
from tests.container.conftest import SOMEBODY, somebodys
from tests.container.engine import Engine
from tests.container.images import ROOT
from tests.container.quickstart import require_proved, steps_saved, words
from tests.unit.container_files.compose_files import compose_command
from trainer.container.appliance import METRICS_PORT
from trainer.errors import ExitCode

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

STEPS = 160
VOLUMES = ("data", "config", "models", "cache", "output")


@dataclass(frozen=True, kw_only=True)
class Project:
    """compose/cpu.yaml with folders of its own."""

    engine: Engine
    command: tuple[str, ...]
    name: str
    folder: Path
    variables: dict[str, str]

    def run(self, *arguments: str, command: str = "") -> subprocess.CompletedProcess[str]:
        """Compose's answer; `command` is what the container is to do."""
        # neither the variables of whoever runs the tests nor their compose/.env
        ours = ("TRAINER_", "COMPOSE_", "HF_", "METRICS_PORT")
        kept = {name: text for name, text in self.engine.environment().items() if not name.startswith(ours)}
        return subprocess.run(
            [*self.command, "-p", self.name, "--env-file", os.devnull, "-f", "compose/cpu.yaml", *arguments],
            cwd=ROOT,
            env={**kept, **self.variables, "TRAINER_COMMAND": command},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=600,
        )

    def up(self, *options: str, command: str) -> int:
        """Exit code of `up`, once nothing runs any more, or with -d at once."""
        answer = self.run("up", *options, command=command)
        assert "warn" not in answer.stdout.lower(), answer.stdout
        return answer.returncode

    def box(self) -> Box:
        """The container that trains."""
        return Box(engine=self.engine, name=self.run("ps", "-aq", "trainer").stdout.strip())

    def owner(self, volume: str) -> int:
        return (self.folder / volume).stat().st_uid


@pytest.fixture
def project(engine: Engine, cpu_image: str, tmp_path: Path) -> Iterator[Project]:
    """A project whose output belongs to `SOMEBODY`, who runs it; its other folders are missing."""
    command = compose_command()
    (tmp_path / "output").mkdir()
    somebodys(tmp_path / "output")
    variables = {
        **{f"TRAINER_{volume.upper()}": str(tmp_path / volume) for volume in VOLUMES},
        "TRAINER_IMAGE": cpu_image,
        "UID": str(SOMEBODY),
        # any that is free
        "METRICS_PORT": "0",
    }
    found = Project(
        engine=engine,
        command=tuple(command),
        name=f"trainer-test-{os.getpid()}",
        folder=tmp_path,
        variables=variables,
    )
    yield found
    found.run("down", "-v", "--timeout", "0")


def text_of(steps: int, *overrides: str) -> str:
    return shlex.join([*words(steps, *overrides), "--output", "/output/quickstart"])


def test_up_trains_a_proved_lora_that_belongs_to_the_caller(project: Project) -> None:
    assert project.up(command=text_of(4)) == 0
    require_proved(project.box(), project.folder / "output", owner=SOMEBODY)
    # those that were missing are the caller's, too
    assert {volume: project.owner(volume) for volume in VOLUMES} == dict.fromkeys(VOLUMES, SOMEBODY)


def test_the_next_up_goes_on_after_a_stop_and_after_a_kill(project: Project) -> None:
    # as many steps as a busy machine does not get through while compose stops and kills
    output, command = project.folder / "output", text_of(STEPS, "checkpoint.checkpointing_steps=1000")
    assert project.up("-d", command=command) == 0
    box = project.box()
    box.wait_for(lambda: box.step() >= 2)
    with urllib.request.urlopen(f"http://{box.address(METRICS_PORT)}/healthz", timeout=60) as answer:
        assert answer.status == 200
    stopped = project.run("stop", command=command)
    assert stopped.returncode == 0, stopped.stdout
    assert box.exit_code() == ExitCode.STOPPED, box.log()
    (saved,) = steps_saved(output)
    assert 2 <= int(saved.removeprefix("step-")) < STEPS
    assert project.up("-d", command=command) == 0
    box.wait_for(lambda: f"resumed from {saved}" in box.log())
    killed = project.run("kill", command=command)
    assert killed.returncode == 0, killed.stdout
    assert box.exit_code() == 128 + signal.SIGKILL
    # waits for the end, and is not ended by that of the service that prepares the folders
    assert project.up("--exit-code-from", "trainer", command=command) == 0
    assert project.box() == box, "the same container"
    require_proved(box, output, owner=SOMEBODY)
    assert box.log().count(f"resumed from {saved}") == 2
    assert f"step-{STEPS:06d}" in steps_saved(output)
