"""Under WSL the driver spills to host memory in silence: plans and probes say so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.cli import main

MACHINES = Path(__file__).resolve().parents[2] / "golden" / "machines"
SAID = "moves it to host memory silently"


@pytest.mark.parametrize(("wsl", "machine"), [(True, "rtx-4090"), (False, "rtx-4090"), (True, "cpu")])
def test_plan_and_probe(
    wsl: bool,
    machine: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    facts = json.loads((MACHINES / f"{machine}.json").read_text())
    Path("facts.json").write_text(json.dumps({**facts, "wsl": wsl}))
    Path("c.yaml").write_text("family: flux1_dev\ndata: {sets: [{img_dir: x}]}\noutput_dir: out\n")
    monkeypatch.setenv("TRAINER_FACTS", "facts.json")
    told = wsl and machine != "cpu"
    assert main(["plan", "c.yaml"]) == 0
    assert (SAID in " ".join(capsys.readouterr().out.split())) == told
    assert main(["probe"]) == 0
    assert (SAID in " ".join(capsys.readouterr().out.split())) == told
