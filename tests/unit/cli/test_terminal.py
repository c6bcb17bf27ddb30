"""Names that a data set or a folder brings along give no orders to the terminal, and forge no line."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.data.pictures import scan, write_pair
from trainer.cli import main
from trainer.errors import DataError, Problem, one_line, printable
from trainer.telemetry import log

CLEAR, FORGED = "\x1b[2J\x9b2J", "x\n12:00:00 error: all is lost"
LATIN_1 = os.fsdecode(b"caf\xe9")


@pytest.fixture
def stderr_of_logs(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    log.setup(None)
    yield
    for handler in list(logging.getLogger("trainer").handlers):
        logging.getLogger("trainer").removeHandler(handler)


def test_what_is_spelled_out() -> None:
    assert one_line(f"{CLEAR}\t{FORGED}") == r"\x1b[2J\x9b2J\tx\n12:00:00 error: all is lost"
    assert printable("a\tb\nc\r\x07 \u202eexe.png \u2028") == "a\tb\nc\\r\\x07 \\u202eexe.png \\u2028"
    for text in ("naïve 画像 👩\u200d🎨 \u200f\u05e2\u05d1", "C:\\x"):
        assert printable(text) == one_line(text) == text
    assert printable(LATIN_1) == r"caf\udce9"


def test_a_problem_is_told_on_its_lines() -> None:
    problem = Problem(what=f"no {CLEAR}", where=FORGED, remedy=f"rename {FORGED}")
    assert str(problem).splitlines() == [
        r"x\n12:00:00 error: all is lost: no \x1b[2J\x9b2J",
        r"    -> rename x\n12:00:00 error: all is lost",
    ]


@pytest.mark.usefixtures("stderr_of_logs")
def test_names_of_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, name in enumerate((CLEAR, FORGED)):
        write_pair(tmp_path, f"{name}.png", seed=number)
        write_pair(tmp_path, f"{name}2.png", seed=number)  # copies are told, and that they are small
    scan(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert sum("\\x1b[2J" in line for line in lines) and sum("x\\n12:00" in line for line in lines)
    assert not [
        line for line in lines if "\x1b" in line or "\x9b" in line or line.startswith("12:00:00 error")
    ]
    (tmp_path / f"{FORGED}.png").write_bytes(b"")
    with pytest.raises(DataError) as caught:
        scan(tmp_path)
    assert len(str(caught.value).splitlines()) == 2


@pytest.mark.parametrize("name", [CLEAR, FORGED], ids=["escape", "line break"])
def test_folders_of_the_configuration(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("c.yaml").write_text("family: flux1_dev\ndata: {sets: [{img_dir: x}]}\noutput_dir: out\n")
    assert main(["config", "check", "c.yaml", "--output", name]) == 78
    told = capsys.readouterr().err
    assert "--output: expected a path" in told.replace("`output_dir`: ", "")
    assert "\x1b" not in told and "\n12:00" not in told


def test_names_on_the_command_line_and_of_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = "family: flux1_dev\ndata: {sets: [{img_dir: x}]}\noutput_dir: out\n"
    for name in (CLEAR, FORGED, LATIN_1):
        Path(f"{name}.yaml").write_text(text)
        assert main(["config", "check", f"{name}.yaml"]) == 0
        assert main(["config", "show", f"{name}.yaml"]) == 0
        assert main(["config", "check", "gone.yaml", f"--{name}"]) == 78
        run = tmp_path / "runs" / name
        run.mkdir(parents=True)
        (run / "config.resolved.yaml").write_text(text)
    assert main(["runs", "list", "runs"]) == 0
    captured = capsys.readouterr()
    for told in (captured.out, captured.err):
        assert "\x1b" not in told and "\x9b" not in told and "\n12:00" not in told
        told.encode()
    assert r"\udce9" in captured.out
