"""bench stops: the parts with real runs of a tiny base, and what counts as an end that must not be."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import stops
from bench.record import from_json
from tests.e2e.launching import accelerate, torchrun
from trainer.errors import ExitCode

TINY = ("--set", "data.resolution=64", "--set", "data.max_sequence_length=32")


def rows_of(path: Path) -> list[dict[str, str]]:
    table: Any = from_json(path.read_text(), "record")
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


@pytest.fixture
def forked(forking: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stops, "subprocess", forking)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked")
def test_runs_of_two_processes_are_stopped_killed_and_launched(given: list[str], tmp_path: Path) -> None:
    starts = ("one", "torchrun")
    words = ["--steps", "24", "--short", "2", "--starts", ",".join(starts)]
    assert stops.main([*given, *words, "--parts", "stopped,killed,launched", *TINY]) == 0
    rows = rows_of(tmp_path / "record.json")
    assert [row["what"] for row in rows] == [
        *("SIGTERM at step 12", "SIGTERM at step 18", "gone on with to the end"),
        *("SIGKILL of the last rank", "gone on with to the end"),
        *starts,
    ]
    assert {row["as it must"] for row in rows} == {"yes"}
    assert [row["exit code"] for row in rows[:5]] == ["75", "75", "0", "137", "0"]
    assert [row["GPUs"] for row in rows[:3]] == ["2", "1", "2"]
    assert rows[3]["said"].startswith("rank 1: SIGKILL: killed from outside")
    for row in rows[6:]:  # on a CPU all are equal to the bit
        assert (row["losses differ by"], row["LoRA differs by"]) == ("0.0e+00", "0.0e+00"), row["what"]
    assert str(tmp_path) not in (tmp_path / "record.json").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("forked")
def test_a_full_fine_tune_in_rows_is_stopped_and_ended_by_all(given: list[str], tmp_path: Path) -> None:
    assert stops.main([*given, "--method", "full", "--steps", "6", *TINY]) == 0
    rows = rows_of(tmp_path / "record.json")
    assert [(row["family"], row["what"], row["GPUs"], row["as it must"]) for row in rows] == [
        ("flux1_dev, full", "SIGTERM at step 3", "2", "yes"),
        ("flux1_dev, full", "gone on with to the end", "2", "yes"),
    ]
    folder = tmp_path / "stops-flux1_dev" / "stopped"
    assert (folder / "model" / "transformer" / "config.json").is_file()


def test_kills_of_a_full_fine_tune_are_not_offered(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        stops.main([*given, "--method", "full", "--parts", "killed"])
    assert "--method full has the part `stopped` alone" in capsys.readouterr().err


class Fake(stops.Runs):
    """Runs that end as a test says."""

    def __init__(self, **ended: Any) -> None:
        self.ended = {"code": 0, "seconds": 0.0, "said": "", "left": 0} | ended
        self.started: dict[str, stops.Start] = {}

    def folder(self, name: str) -> Path:
        return Path(name)

    def fresh(self, name: str, host: int = 0) -> None:
        pass

    def run(self, name: str, start: stops.Start, **_: Any) -> stops.Ended:
        self.started[name] = start
        return stops.Ended(**self.ended)

    def rows(self, name: str) -> list[dict[str, Any]]:
        return [{"step": 7, "seconds_per_step": 0.25, "loss": 1.0}]


def test_a_killed_run_goes_on_by_the_number_that_is_asked_for(given: list[str]) -> None:
    said = "resumed from step-000003\nProved: 22 layers"
    for words, numbers in (([], [4, 4]), (["--resumed-by", "2"], [4, 2])):
        options = stops.parser().parse_args([*given, "--gpus", "4", *words])
        assert [row["GPUs"] for row in stops.killed(Fake(said=said), options)] == numbers


@pytest.mark.parametrize(("gpus", "more"), [("2", ["--multi_gpu"]), ("1", [])])
def test_launchers_start_as_many_as_are_asked_for(
    gpus: str, more: list[str], given: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the words whose runs give the bits of one process (tests/e2e/test_launchers.py)."""
    monkeypatch.setattr(stops, "_losses_differ", lambda *_: 0.25)
    monkeypatch.setattr(stops, "_adapters_differ", lambda *_: 0.5)
    options = stops.parser().parse_args([*given, "--gpus", gpus])
    runs = Fake(said="Proved: 22 layers")
    rows = list(stops.launched(runs, options))
    assert [row["what"] for row in rows] == list(runs.started) == list(stops.STARTS)
    assert {row["as it must"] for row in rows} == {"yes"}
    assert [row.get("losses differ by") for row in rows] == [None, *["2.5e-01"] * 4]
    assert [row.get("LoRA differs by") for row in rows] == [None, *["5.0e-01"] * 4]
    assert [one.gpus for one in runs.started.values()] == [1, 1, *[int(gpus)] * 3]
    assert [one.launched for one in runs.started.values()] == [False] * 3 + [True] * 2
    words = ["-m", "trainer"]
    assert runs.started["torchrun"].launcher(words) == torchrun(int(gpus))(words)
    expected = accelerate(int(gpus), "--main_process_port=0", *more)(words)
    assert runs.started["accelerate launch"].launcher(words) == expected


@pytest.mark.parametrize(
    ("ended", "fine"),
    [
        ({"code": 137, "seconds": 9.0}, "yes"),
        ({"code": 137, "seconds": 11.0}, "no"),
        ({"code": 137, "seconds": 1.0, "left": 1}, "no"),
        ({"code": 1, "seconds": 1.0}, "no"),
    ],
)
def test_a_killed_rank_must_end_all_soon_with_its_code(given: list[str], ended: Any, fine: str) -> None:
    options = stops.parser().parse_args(given)
    row = next(iter(stops.killed(Fake(**ended), options)))
    assert (row["as it must"], row["steps"], row["ms a step"]) == (fine, 7, "250")


@pytest.mark.parametrize(
    ("said", "fine"),
    [
        ("resumed from step-000003\nProved: 22 layers", "yes"),
        ("Proved: 22 layers", "no"),
        ("resumed from", "no"),
    ],
)
def test_a_run_that_is_gone_on_with_must_be_proved(given: list[str], said: str, fine: str) -> None:
    options = stops.parser().parse_args(given)
    stopped = list(stops.stopped(Fake(said=said), options))
    assert stopped[-1]["as it must"] == fine
    assert stopped[0]["as it must"] == "no"  # it ended with 0, not with 75


def test_the_command_fails_where_a_run_ends_otherwise(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stops, "Runs", lambda _: Fake(code=ExitCode.STOPPED, seconds=2.0))
    assert stops.main([*given, "--parts", "stopped"]) == 1
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["as it must"] for row in rows] == ["yes", "yes", "no"]
    assert rows[0]["from signal to end"] == "2.0 s"
    other = ["llama", *given[1:]]
    assert stops.main([*other, "--parts", "stopped"]) == 1
    assert [row["family"] for row in rows_of(tmp_path / "record.json")] == ["flux1_dev"] * 3 + ["llama"] * 3
