"""Answers of `python -m bench` to a user's mistake: never a traceback, never 0, never an empty record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import __main__ as bench
from bench import arguments, jobs, load, memory, train
from tests.unit.bench.test_bench import MACHINE
from trainer.errors import AccessError, ConfigError, HardwareError
from trainer.machine import description, idle

BASE = "assets/tiny-flux"


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU is here."""
    monkeypatch.setattr(idle, "require_gpu", lambda **_: None)
    monkeypatch.setattr(idle, "require_idle", lambda **_: None)
    monkeypatch.setattr(description, "describe", lambda _=None: MACHINE)
    monkeypatch.setattr(train, "compute_floors", lambda *_: ({}, {}))


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("memory", "FAMILY=BASE"),
        ("memory flux1_dev", "'flux1_dev' is not of the form FAMILY=BASE"),
        ("memory foo=/tmp", "no family 'foo'; there are flux1_dev"),
        (f"memory flux1_dev={BASE} --blocks abc", "'abc' is not of the form FAMILY=COUNTS"),
        (f"memory flux1_dev={BASE} --blocks flux1_dev=abc", "'abc' is not of the form 2,4"),
        (f"memory flux1_dev={BASE} --jobs 0", "'0' is not a whole number from 1"),
        (f"memory flux1_dev={BASE} --record MISSING/x.json", "no file in a folder that exists"),
        (f"sweep flux1_dev={BASE} --budgets 16,x", "'x' is not a number above 0"),
        ("load --gib 0", "'0' is not a number above 0"),
        ("load --gib nan", "'nan' is not a number above 0"),
        ("load --files 0", "'0' is not a whole number from 1"),
        ("load --rings abc", "'abc' is not MIBxPIECESxTHREADS"),
        ("load --rings 4x0x1", "'4x0x1' is not MIBxPIECESxTHREADS"),
        ("load --variants raw", "no variant raw"),
        ("load --folder MISSING", "there is no folder MISSING"),
        ("save --folder MISSING", "there is no folder MISSING"),
        ("save --repeats 0", "'0' is not a whole number from 1"),
        ("plan --repeats 0", "'0' is not a whole number from 1"),
        ("profile x.yaml --blocks 2,,4", "'2,,4' is not of the form 2,4"),
        ("converge --blocks 2,4", "give both"),
        ("converge --jobs x", "'x' is not a whole number from 1"),
        ("overhead --step-ms -1", "'-1' is not a number above 0"),
        (f"train flux1_dev --base {BASE} --rounds 0", "'0' is not a whole number from 1"),
        (f"train flux1_dev --base {BASE} --warmup -1", "'-1' is not a whole number from 0"),
        (f"train flux1_dev --base {BASE} --ceilings bf17=700", "no rate bf17; there are bf16"),
        (f"train flux1_dev --base {BASE} --work MISSING", "there is no folder MISSING"),
    ],
)
def test_a_command_line_that_cannot_be_meant_is_refused(
    command: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> list[Path]:
        raise AssertionError("nothing may be written")

    monkeypatch.setattr(load, "write_files", write)
    with pytest.raises(SystemExit) as ended:
        bench.main(command.split())
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.startswith(f"usage: bench {command.split()[0]} ")


@pytest.mark.parametrize("name", bench.COMMANDS)
def test_help_names_the_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.main([name, "--help"])
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert printed.startswith(f"usage: bench {name} ")
    assert f"python -m bench {name}" in printed


@pytest.mark.parametrize("name", ["memory", "converge"])
def test_settings_are_listed_one_a_line(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bench.main([name, "--help"])
    assert "\n  compiled, budget 0.4\n" in capsys.readouterr().out


# bases


def test_a_base_is_a_folder_with_an_index(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"--base: .*/no does not exist\n.*random_base\.py"):
        arguments.require_base(tmp_path / "no", "--base")
    with pytest.raises(AccessError, match=r"has no model_index\.json or config\.json"):
        arguments.require_base(tmp_path, "--base")
    (tmp_path / "config.json").write_text("{}")
    assert arguments.require_base(tmp_path, "--base") == tmp_path.resolve()


@pytest.mark.parametrize(
    "command",
    [
        "train flux1_dev --base {0}",
        "memory flux1_dev={0}",
        "sweep flux1_dev={0}",
        "count flux1_dev={0}",
        "converge --base {0}",
    ],
)
def test_a_missing_base_is_told_before_anything_starts(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(command.format(tmp_path / "no").split()) == 77
    assert "no does not exist" in capsys.readouterr().err


def test_blocks_that_the_model_does_not_have(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["memory", f"flux1_dev={BASE}", "--blocks", "flux1_dev=1,2,3"]) == 78
    assert "3 counts, but flux1_dev counts num_layers, num_single_layers" in capsys.readouterr().err
    assert bench.main(["memory", f"flux1_dev={BASE}", "--blocks", "llama=1"]) == 78
    assert "llama is not measured" in capsys.readouterr().err


def test_a_base_of_another_kind_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(AccessError, match=r"transformer/config\.json.*\n.*a base of flux1_dev"):
        jobs.block_keys("flux1_dev", tmp_path, ())
    with pytest.raises(ConfigError, match="counts no blocks"):
        jobs.block_keys("llama", tmp_path, (2,))


# the GPU


@pytest.mark.parametrize("command", [f"train flux1_dev --base {BASE}", f"memory flux1_dev={BASE}"])
@pytest.mark.parametrize("hidden", ["", "-1"])
def test_without_a_gpu_nothing_is_measured(
    command: str, hidden: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRAINER_PROFILE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert bench.main(command.split()) == 69
    assert "there is no GPU to measure" in capsys.readouterr().err


def test_a_gpu_that_is_there_is_enough() -> None:
    gpu = idle.parse_gpu("NVIDIA H200, 580.159.04, 143771, 4, 0\n")
    idle.require_gpu(remedy="", read=lambda: (gpu, []))
    with pytest.raises(HardwareError, match="buy one"):
        idle.require_gpu(remedy="buy one", read=lambda: None)


# nothing measured


def answers(problem: str) -> dict[str, Any]:
    return {"problem": problem} if problem else {"times": [1.0, 2.0, 3.0]}


@pytest.mark.parametrize(("problems", "code"), [(("a", "b"), 1), (("", "b"), 0)])
def test_a_record_needs_figures(
    problems: Sequence[str],
    code: int,
    with_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = dict(zip(("ours-bf16", "diffusers"), map(answers, problems), strict=True))
    monkeypatch.setattr(train, "run_variant", lambda job, variant, *_, **__: found[variant])
    path = tmp_path / "a.json"
    command = ["train", "flux1_dev", "--base", BASE, "--variants", ",".join(found), "--record", str(path)]
    assert bench.main(command) == code
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2, "problems are told in both cases"
    assert ("nothing is recorded" in printed.err) is (code == 1)
    assert path.exists() is (code == 0)


@pytest.mark.parametrize("measured", [False, True])
def test_a_memory_record_needs_figures(
    measured: bool,
    with_gpu: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"way": "bf16, eager", "held_gib": 9.0, "driver_gib": 1.0, "planned_gib": 11.0}

    def row(case: memory.Case, environ: Mapping[str, str]) -> dict[str, Any]:
        known = measured and case.setting == "eager"
        return {"setting": case.setting, **(figures if known else {"refused": "no"})}

    monkeypatch.setattr(memory, "measured_row", row)
    path = tmp_path / "a.json"
    command = ["memory", f"flux1_dev={BASE}", "--record", str(path)]
    assert bench.main([*command, "--settings", "eager", "--settings", "compiled"]) == (0 if measured else 1)
    printed = capsys.readouterr()
    if measured:
        assert [one.get("difference") for one in json.loads(path.read_text())] == [0.1, None]
        assert "1 settings, worst +10.0%" in printed.out
    else:
        assert "nothing is recorded" in printed.err and not path.exists()


# records


def test_records_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["page", "--output", str(tmp_path / "page.md"), "--no-plots", "--records"]
    assert bench.main([*command, str(tmp_path / "no")]) == 65
    assert "there is no such folder" in capsys.readouterr().err
    assert bench.main([*command, str(tmp_path)]) == 65
    assert "notes.md: there is no such file" in capsys.readouterr().err
    for foreign in ('{"name": "x"}', "[1, 2]", "{", '{"machine": 3, "rows": []}'):
        (tmp_path / "package.json").write_text(foreign)
        assert bench.main([*command, str(tmp_path)]) == 65
        assert "package.json: it is not a record of measurements" in capsys.readouterr().err
    assert not (tmp_path / "page.md").exists()
