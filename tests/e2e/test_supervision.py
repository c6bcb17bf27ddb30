"""A real run seen from outside: metrics, health, low memory. Hangs are in tests/unit/telemetry and, with
Docker's own health, in tests/container.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.contract.runs import CASES, LORA_CASES, STEPS, Case, different, edits, products, steps_saved
from tests.e2e.conftest import Process, Start
from tests.e2e.test_interruptions import FIRST_CASES
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase

ENDLESS = ("train.max_train_steps=100000", "checkpoint.checkpointing_steps=100000", "validation.prompts=[]")


def samples(text: str) -> dict[str, float]:
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for family in families for sample in family.samples}


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_metrics_answer_throughout_and_can_be_read(
    case: Case, uninterrupted: Callable[[Case], Process], request: pytest.FixtureRequest
) -> None:
    answers = uninterrupted(case).answers
    assert len(answers) > 20
    read = [samples(text) for text in answers]
    assert all(values["trainer_child_up"] in (0.0, 1.0) for values in read)
    assert all(values["trainer_healthy"] == 1.0 for values in read)
    steps = [values["trainer_step"] for values in read if "trainer_step" in values]
    assert steps == sorted(steps)
    phases = {
        word for text in answers for word in re.findall(r'^trainer_phase{phase="(\w+)"} 1.0$', text, re.M)
    }
    assert {Phase.LOAD, Phase.TRAIN, Phase.PREVIEW, Phase.SAVE} <= phases
    promtool = request.getfixturevalue("promtool")  # last: where there is none the test ends as skipped
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=answers[-1], text=True, capture_output=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("case", CASES[:1], ids=str)
def test_two_processes_give_equal_bytes(
    case: Case, uninterrupted: Callable[[Case], Process], finished_here: Callable[[Case], Path]
) -> None:
    assert not different(products(uninterrupted(case).run_dir), products(finished_here(case)))


OURS = re.compile(
    r"\d\d:\d\d:\d\d |(/\S+|validation\.prompts, prompt \d+): \d+ tokens$"
    r"|(checking|caching|loading|measuring|training) "
)
"""Beginnings of a run's lines that are not its plan: a log's time, a cut caption, a bar's word."""


@pytest.mark.parametrize(
    "case",
    [
        *FIRST_CASES,
        *(pytest.param(case, marks=pytest.mark.slow) for case in LORA_CASES[1:] if not edits(case.family)),
    ],
    ids=str,
)
def test_only_our_lines_reach_the_terminal(case: Case, uninterrupted: Callable[[Case], Process]) -> None:
    """Families that edit would take minutes, and have their code from those that draw."""
    (printed,) = uninterrupted(case).printed
    plan, found, rest = printed.partition("\nchecking ")
    assert plan.startswith("feature ") and "arning" not in plan
    lines = [line for line in (found + rest).splitlines() if line.strip()]
    assert lines and not [line for line in lines if not OURS.match(line)]


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_low_host_memory_gives_a_checkpoint_and_71(case: Case, fork: Start, tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {64 * 1024**2} kB\n")
    limits = {"interval_seconds": 0.1, "soft_samples": 3}
    process = fork(case, tmp_path, *ENDLESS, knobs={"meminfo": str(meminfo), "limits": limits})
    process.wait_for_phase(Phase.TRAIN)
    assert process.popen.poll() is None
    low = meminfo.with_suffix(".new")
    low.write_text(f"MemAvailable: {8 * 1024**2} kB\n")  # between the two floors
    low.replace(meminfo)
    code, errors = process.end()
    assert code == ExitCode.OUT_OF_MEMORY, errors
    assert "8.0 GiB of host memory are left, the soft floor is 10.0 GiB" in errors
    assert len(steps_saved(process.run_dir)) == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_the_run_said_where_its_result_is(case: Case, uninterrupted: Callable[[Case], Process]) -> None:
    process = uninterrupted(case)
    log = (process.run_dir / "log.jsonl").read_text()
    assert str(process.run_dir / "lora" / "run.safetensors") in log
    assert "Proved: " in log
    assert process.status() is not None
    assert f"step-{STEPS:06d}" in steps_saved(process.run_dir)
