"""Comparisons whose runs only write metrics, beside an nvidia-smi that says what a test wants."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import ROOT
from tests.e2e.nursery import Forked, Nursery
from trainer.cli.options import Layers
from trainer.config import interpreter
from trainer.engine.comparing import child
from trainer.engine.comparing.rounds import Extent, Outcome, compare
from trainer.engine.comparing.variants import LETTERS, Variant
from trainer.machine.reading import read_recorded
from trainer.planning.planning import plan_run

FAKE = Path(__file__).with_name("fake_trainer.py")
IDLE = "NVIDIA H200, 580.159.04, 143771, 4, 0\n"
CLEAR = "0x0000000000000000, 1980, 1980, 40960\n"


@dataclass(kw_only=True)
class Bench:
    """A comparison's surroundings: what its runs do, what nvidia-smi says, and what was told."""

    folder: Path
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    @property
    def script(self) -> Path:
        return self.folder / "script.json"

    @property
    def journal(self) -> list[dict[str, Any]]:
        """The runs that were started, in order."""
        path = self.folder / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def names(self) -> list[str]:
        return [one["name"] for one in self.journal if one["command"] == "train"]

    def says(self, **texts: str) -> None:
        """Let nvidia-smi answer: `gpu`, `apps`, `clocks`."""
        for name, text in texts.items():
            (self.folder / f"{name}.csv").write_text(text)
            self.answers(**{name: f"cat {name}.csv"})

    def answers(self, **commands: str) -> None:
        """Let nvidia-smi answer with what shell commands print, run where the journal is."""
        for name, command in commands.items():
            (self.folder / f"{name}.sh").write_text(command)

    def write_script(self) -> None:
        content = {"journal": str(self.folder / "journal.jsonl"), "runs": self.runs, **self.more}
        self.script.write_text(json.dumps(content))

    def compare(self, variants: list[Variant], *, output: Path | None = None, **lengths: int) -> Outcome:
        self.write_script()
        extent = Extent(**{"steps": 4, "warmup": 2, "rounds": 2, "learn": 0, **lengths})
        return compare(variants, extent, output, dict(_environ()), self.told.append)


def _environ() -> Mapping[str, str]:
    from trainer.config import environment

    return environment.snapshot()


def variants_of(*overrides: str, config: str = "quickstart.yaml", machine: str = "cpu.json") -> list[Variant]:
    """A variant for each text of overrides, planned for a recorded machine."""
    facts = read_recorded(ROOT / "tests" / "golden" / "machines" / machine)
    found = []
    for letter, text in zip(LETTERS, overrides, strict=False):
        loaded = Layers((ROOT / "train_configs" / config,), tuple(text.split())).load()
        found.append(Variant(letter=letter, title=text, config=loaded.config, plan=plan_run(loaded, facts)))
    return found


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Nursery) -> Bench:
    """A quiet machine whose runs end well."""
    found = Bench(folder=tmp_path / "bench")
    found.folder.mkdir()
    (tmp_path / "temporary").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(
        f"#!/bin/sh\ncd {found.folder}\ncase $3 in\n"
        "*clocks*) . ./clocks.sh ;;\n*compute-apps*) . ./apps.sh ;;\n*) . ./gpu.sh ;;\nesac\n"
    )
    smi.chmod(0o755)
    found.says(gpu=IDLE, apps="", clocks=CLEAR)
    monkeypatch.setenv("PATH", f"{smi.parent}:/usr/bin:/bin")
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(child, "python", fake_python(found.script))
    monkeypatch.setattr(child, "subprocess", forking(warm))
    monkeypatch.setattr(child, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(child, "_LOOK_SECONDS", 0.0)
    return found


def fake_python(script: Path) -> Callable[..., list[str]]:
    """`interpreter.python`, which starts the fake in place of `trainer`."""

    def python(*words: str) -> list[str]:
        if words[:2] == ("-m", "trainer"):
            return [sys.executable, str(FAKE), str(script), *words[2:]]
        return interpreter.python(*words)

    return python


def forking(warm: Nursery) -> types.SimpleNamespace:
    """The module `subprocess`, which forks the fake: a comparison in a process of its own starts it."""

    def start(command: list[str], **rest: Any) -> Forked:
        words = command[command.index(str(FAKE)) + 1 :]
        module = f"{__package__}.{FAKE.stem}"
        log = Path(rest["stdout"].name)
        forked = warm.start(["-m", module, *words], rest["env"], stdout=log, with_errors=True)
        assert forked.stderr is not None
        forked.stderr.close()
        return forked

    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start})
