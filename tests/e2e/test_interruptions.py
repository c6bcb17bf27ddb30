"""Runs that are stopped or killed and started again end as if nothing had happened."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.runs import (
    CASES,
    LORA_CASES,
    Case,
    different,
    draws,
    files,
    numbers,
    products,
    steps_saved,
)
from tests.e2e.conftest import PATIENCE_SECONDS, Process, Start
from trainer.errors import ExitCode
from trainer.telemetry.status import Phase

KILLED = 128 + signal.SIGKILL
FIRST_CASES = CASES[:1]
"""Enough for what does not depend on family and method."""
WRITING_CASES = tuple(case for case in LORA_CASES if not draws(case.family))[:1]
"""A family that writes: its runs have other phases than those of families that draw."""


def kill_child(process: Process) -> str:
    """Kill the process that trains, at once; gives what the supervisor says."""
    os.kill(process.child(), signal.SIGKILL)
    code, errors = process.end()
    assert code == KILLED, errors
    assert "SIGKILL: killed from outside" in errors
    assert "Traceback" not in errors
    return errors


def require_equal(run_dir: Path, straight: Path) -> None:
    """Losses, checkpoints, final files and pictures, byte for byte."""
    assert {"before_after.png", "samples/step-000006/01.png"} <= products(straight).keys()
    assert numbers(run_dir) == numbers(straight)
    assert not different(products(run_dir), products(straight))
    assert not different(files(run_dir, "checkpoints/*/*"), files(straight, "checkpoints/*/*"))
    assert not list(run_dir.glob("**/*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("case", (*FIRST_CASES, *WRITING_CASES), ids=str)
def test_a_stop_a_kill_and_two_resumes_equal_one_run(
    case: Case, start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    straight = uninterrupted(case)
    process = start(case, tmp_path)
    process.wait_for_phase(Phase.TRAIN)  # status.json is written at the change of phase: step 1
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert "stopped on request" in errors
    (saved,) = steps_saved(process.run_dir)
    assert saved < "step-000005"
    assert not (process.run_dir / "lora").exists()

    process = start(case, tmp_path)
    process.wait_until((process.run_dir / "checkpoints" / "step-000005").is_dir)
    errors = kill_child(process)
    assert f"resumed from {saved}" in errors
    assert not (process.run_dir / "lora").exists()

    process = start(case, tmp_path)
    code, errors = process.end()
    assert code == 0, errors
    assert "resumed from step-000005" in errors
    require_equal(process.run_dir, straight.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_a_reader_of_its_lines_that_goes_away_changes_nothing(
    case: Case, start: Start, uninterrupted: Callable[[Case], Process], tmp_path: Path
) -> None:
    straight = uninterrupted(case)
    process = start(case, tmp_path)
    assert process.popen.stderr is not None
    process.popen.stderr.close()  # as `2>&1 | head -1`
    process.popen.stderr = None
    assert process.popen.wait(PATIENCE_SECONDS) == 0
    require_equal(process.run_dir, straight.run_dir)
    assert "Proved: " in (process.run_dir / "log.jsonl").read_text()


def test_an_error_of_the_training_process_says_where_its_key_was_written(fork: Start, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% if messages %}")  # judged by the libraries, which the start does not load
    process = fork(WRITING_CASES[0], tmp_path, f"data.chat_template={template}")
    code, errors = process.end()
    assert code == ExitCode.BAD_CONFIG, errors
    assert "error: --set data.chat_template: the chat template does not write a conversation: " in errors


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_a_stop_while_caching_saves_nothing_but_the_cache(case: Case, fork: Start, tmp_path: Path) -> None:
    process = fork(case, tmp_path, knobs={"patch": "cache"}, cache=tmp_path / "cache")
    process.wait_until(lambda: any(process.cache.rglob("*.safetensors")))
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert "stopped on request" in errors
    assert "Traceback" not in errors
    assert not steps_saved(process.run_dir)
    assert not (process.run_dir / "metrics.jsonl").exists()
    assert len(list(process.cache.rglob("*.safetensors"))) < 10
    assert not list(process.cache.rglob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST_CASES, ids=str)
def test_a_stop_before_the_first_step_saves_nothing(case: Case, fork: Start, tmp_path: Path) -> None:
    process = fork(case, tmp_path, "validation.num_inference_steps=500")
    process.wait_for_phase(Phase.PREVIEW)
    process.popen.send_signal(signal.SIGTERM)
    code, errors = process.end()
    assert code == ExitCode.STOPPED, errors
    assert "stopped on request" in errors
    assert "Traceback" not in errors
    assert not steps_saved(process.run_dir)
    assert not (process.run_dir / "lora").exists()


def save_has_begun(process: Process) -> bool:
    return any((process.run_dir / "checkpoints").glob("*.tmp/*"))


def second_save_has_begun(process: Process) -> bool:
    return any((process.run_dir / "checkpoints").glob("step-000010.tmp/*"))


def entries_were_cached(process: Process) -> bool:
    return len(list(process.cache.rglob("*.safetensors"))) >= 3


def export_has_begun(process: Process) -> bool:
    """A file of the result is being written, and nothing of the result is in its place."""
    return any(any(process.run_dir.glob(f"{name}.tmp/**/.*.tmp")) for name in ("lora", "model"))


def twin_has_begun(process: Process) -> bool:
    """The LoRA is in its place, and its file for ComfyUI is being written."""
    return any(process.run_dir.glob("lora.tmp/.*.comfyui.*.tmp"))


def images_are_written(process: Process) -> bool:
    """A later round of previews has an image, and not yet the row that says that all are there."""
    return any((process.run_dir / "samples" / "step-000006").glob("*.png"))


MOMENTS: dict[str, tuple[str, Callable[[Process], bool]]] = {
    "first-save": ("save", save_has_begun),
    "second-save": ("second save", second_save_has_begun),
    "export": ("export", export_has_begun),
    "twin": ("twin", twin_has_begun),
    "caching": ("cache", entries_were_cached),
    "preview": ("images", images_are_written),
}
"""By moment: the knob of what is slowed down, and the condition for the kill."""
TWINLESS = tuple(moment for moment in MOMENTS if moment != "twin")
"""Moments of a run whose result has no file for ComfyUI."""


def is_killed_there(process: Process, moment: str) -> bool:
    """True if the kill left no more than the moment has: none later came before it."""
    run_dir = process.run_dir
    results = [path for name in ("lora", "model") for path in run_dir.glob(f"{name}/**/*.safetensors")]
    return {
        "twin": len(results) == 1,
        "preview": not (run_dir / "samples" / "step-000006.png").exists(),
    }.get(moment, not results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "moment"),
    [
        *itertools.product(FIRST_CASES, MOMENTS),
        *itertools.product(WRITING_CASES, TWINLESS),
        # caches and previews do not depend on the method
        *itertools.product(CASES[1:2], ("first-save", "second-save", "export")),
    ],
    ids=str,
)
def test_a_kill_anywhere_and_a_resume_equal_one_run(
    case: Case,
    moment: str,
    start: Start,
    uninterrupted: Callable[[Case], Process],
    tmp_path: Path,
) -> None:
    straight = uninterrupted(case)
    slow, reached = MOMENTS[moment]
    cache = tmp_path / "cache" if slow == "cache" else None
    process = start(case, tmp_path, knobs={"patch": slow}, cache=cache)
    process.wait_until(lambda: reached(process))
    kill_child(process)
    assert is_killed_there(process, moment)
    process = start(case, tmp_path, cache=cache)
    code, errors = process.end()
    assert code == 0, errors
    require_equal(process.run_dir, straight.run_dir)
