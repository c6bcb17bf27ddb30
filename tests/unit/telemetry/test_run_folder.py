"""Numbers of a run's folder: what runs there, how it ended, and what it left."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from trainer.errors import MEANING, DataError, ExitCode, Problem
from trainer.telemetry import locks
from trainer.telemetry.run_folder import process
from trainer.telemetry.run_folder.plan import read_plan
from trainer.telemetry.runs import State, find_runs, read_run
from trainer.telemetry.status import LOCK_FILE, Phase, StatusWriter

CONFIG = "family: tiny\nmethod: lora\ntrain:\n  max_train_steps: 40\n  num_train_epochs: null\n"
ROWS = (
    {"step": 0, "validation_loss": 2.0, "validation_data": "x"},
    {"step": 10, "loss": 1.5, "seconds_per_step": 0.5, "learning_rate": 1e-4},
    {"step": 20, "loss": 1.25, "seconds_per_step": 0.25, "validation_loss": 1.0, "validation_data": "x"},
)
PROBLEM = Problem(what="a file is damaged", where="a.png", remedy="remove it")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.resolved.yaml").write_text(CONFIG)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    folder = tmp_path / "runtime"
    folder.mkdir()
    return folder


@contextlib.contextmanager
def held(path: Path, supervisor: int) -> Iterator[None]:
    taken = Problem(what="taken")
    with locks.holding(path, supervisor=supervisor, taken=taken, on_wait=lambda text: None):
        yield


def test_numbers_are_those_of_the_files(run_dir: Path) -> None:
    run = read_run(run_dir)
    assert run.config["train.max_train_steps"] == "40" and run.steps == 40
    assert list(run.rows) == list(ROWS)
    assert (run.step, run.losses) == (20, [(10, 1.5), (20, 1.25)])
    assert run.series("seconds_per_step") == [(10, 0.5), (20, 0.25)]
    assert run.held_out == [(0, 2.0), (20, 1.0)]
    assert (run.state, run.phase, run.end, run.plan) == (State.BEGUN, None, None, None)


def test_a_running_one_has_the_phase_and_step_of_its_heartbeat(run_dir: Path, runtime: Path) -> None:
    own = os.getpid()
    with held(run_dir / ".lock", own), held(runtime / LOCK_FILE, own):
        process.begin(run_dir, supervisor=own, runtime_dir=runtime)
        assert (read_run(run_dir).phase, read_run(run_dir).step) == (None, 20), "no heartbeat yet"
        StatusWriter(runtime).beat(Phase.TRAIN, step=23, total=40)
        run = read_run(run_dir)
        assert (run.state, run.phase, run.step, run.end) == (State.RUNNING, Phase.TRAIN, 23, None)
        assert run.health is not None and run.health.healthy
        StatusWriter(runtime).beat(Phase.CACHE, step=3, total=500)
        assert read_run(run_dir).step == 20, "samples that are encoded are no steps"
    assert read_run(run_dir).state is State.BEGUN


def test_a_run_may_begin_in_a_folder_that_was_removed(
    run_dir: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    process.begin(run_dir, supervisor=os.getpid(), runtime_dir=runtime)
    found = process.read_process(run_dir)
    assert found is not None and found.working_folder == ""
    assert process.working_folder(run_dir) is None


def test_it_runs_until_its_supervisor_has_recorded_the_end(run_dir: Path, runtime: Path) -> None:
    own = os.getpid()
    process.begin(run_dir, supervisor=own, runtime_dir=runtime)
    with held(runtime / LOCK_FILE, own):
        assert read_run(run_dir).state is State.RUNNING
        process.end(run_dir, supervisor=own, exit_code=0, cause="", problems=())
        assert read_run(run_dir).state is State.FINISHED
    process.begin(run_dir, supervisor=own, runtime_dir=runtime)
    with held(runtime / LOCK_FILE, own + 1):  # by now another run has the runtime folder
        assert read_run(run_dir).state is State.BEGUN


@pytest.mark.parametrize("code", [*ExitCode, 137])
def test_an_end_says_its_exit_code_and_what_it_means(run_dir: Path, runtime: Path, code: int) -> None:
    process.begin(run_dir, supervisor=os.getpid(), runtime_dir=runtime)
    problems = (PROBLEM, PROBLEM, PROBLEM) if code == ExitCode.BAD_DATA else ()
    cause = "SIGKILL: killed from outside" if code == 137 else ""
    process.end(run_dir, supervisor=os.getpid(), exit_code=code, cause=cause, problems=problems)
    end = read_run(run_dir).end
    assert end is not None and end.exit_code == code and end.problems == problems
    assert end.meaning == dict(MEANING).get(code, "unexpected")  # type: ignore[call-overload]
    assert end.cause == (cause or ("a.png: a file is damaged (and 2 more)" if problems else ""))


@pytest.mark.parametrize("name", ["step-000010", ".step-000010.old"])
@pytest.mark.parametrize("boot", ["this", "another"])
def test_an_end_that_nobody_recorded_is_told(
    run_dir: Path, runtime: Path, boot: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed save may have left its older checkpoint aside."""
    process.begin(run_dir, supervisor=os.getpid(), runtime_dir=runtime)
    (run_dir / "checkpoints" / name).mkdir(parents=True)
    if boot == "another":
        (tmp_path / "boot").write_text("another\n")
        monkeypatch.setattr(locks, "_BOOT_ID", tmp_path / "boot")
    run = read_run(run_dir)
    assert run.state is State.RESUMABLE and run.end is not None
    assert run.end.exit_code is None and "killed, or the machine went down" in run.end.meaning


def test_a_refused_attempt_leaves_the_record_of_the_one_before(run_dir: Path, runtime: Path) -> None:
    process.begin(run_dir, supervisor=7, runtime_dir=runtime)
    before = (run_dir / "process.json").read_bytes()
    refused: dict[str, Any] = {"exit_code": 78, "cause": "", "problems": (PROBLEM,)}
    process.end(run_dir, supervisor=8, **refused)  # another supervisor's
    assert (run_dir / "process.json").read_bytes() == before
    process.end(run_dir, supervisor=7, exit_code=0, cause="", problems=())
    before = (run_dir / "process.json").read_bytes()
    process.end(run_dir, supervisor=7, **refused)  # after a restart process ids come again
    assert (run_dir / "process.json").read_bytes() == before


def test_a_first_attempt_that_was_refused_is_a_run_with_an_end(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process.end(folder, supervisor=7, exit_code=65, cause="", problems=(PROBLEM,))
    assert not folder.exists()
    folder.mkdir()
    with held(folder / ".lock", 6):  # of a run that has not written its record yet
        process.end(folder, supervisor=7, exit_code=78, cause="", problems=())
    assert not (folder / "process.json").exists()
    process.end(folder, supervisor=7, exit_code=65, cause="", problems=(PROBLEM,))
    assert find_runs(tmp_path, tell=lambda text: None) == [folder]
    run = read_run(folder)
    assert (run.state, run.config, run.step) == (State.BEGUN, {}, 0)
    assert run.end is not None and (run.end.exit_code, run.end.problems) == (65, (PROBLEM,))
    process.end(folder, supervisor=8, exit_code=78, cause="", problems=())
    end = read_run(folder).end
    assert end is not None and end.exit_code == 78, "the last refusal is the one to tell"


def test_a_refused_start_is_a_run_only_where_none_is_below_it(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    process.end(folder, supervisor=7, exit_code=65, cause="", problems=(PROBLEM,))
    assert find_runs(folder, tell=print) == [folder]
    (folder / "a/b").mkdir(parents=True)
    (folder / "a/b/config.resolved.yaml").write_text(CONFIG)
    assert find_runs(folder, tell=print) == find_runs(tmp_path, tell=print) == [folder / "a/b"]
    (folder / "config.resolved.yaml").write_text(CONFIG)
    assert find_runs(folder, tell=print) == find_runs(tmp_path, tell=print) == [folder]
    assert find_runs(folder, tell=print, nested=True) == [folder, folder / "a/b"]


def test_the_working_folder_is_recorded_where_it_has_a_plain_name(
    run_dir: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert process.working_folder(run_dir) is None
    for name, known in (("plain", True), ("two\nlines", False)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        process.begin(run_dir, supervisor=7, runtime_dir=runtime)
        assert process.read_process(run_dir) is not None
        assert process.working_folder(run_dir) == (tmp_path / name if known else None)


def test_a_run_of_an_older_version_is_not_what_a_refused_attempt_says(run_dir: Path) -> None:
    process.end(run_dir, supervisor=7, exit_code=78, cause="", problems=(PROBLEM,))
    assert read_run(run_dir).end is None


def test_secrets_are_not_recorded(run_dir: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-hub")
    process.begin(run_dir, supervisor=1, runtime_dir=runtime)
    told = (Problem(what="401 for secret-of-the-hub"),)
    process.end(run_dir, supervisor=1, exit_code=77, cause="secret-of-the-hub", problems=told)
    assert "secret-of-the-hub" not in (run_dir / "process.json").read_text()
    assert read_run(run_dir).end is not None


@pytest.mark.parametrize(
    "damage",
    [
        {"supervisor": "7"},
        {"exit_code": "0"},
        {"runtime_dir": 3},
        {"more": 1},
        {"exit_code": float("nan")},
        {"started_unix_seconds": float("inf")},
        {"started_unix_seconds": 10**400},
        {"runtime_dir": "a\0b"},
        {"working_folder": 3},
        {"working_folder": "a\0b"},
        {"runtime_dir": "\ud800"},
        {"problems": [3, {"what": 4}, {"where": "x"}]},
        {"problems": 3},
    ],
)
def test_a_damaged_record_is_no_record(run_dir: Path, runtime: Path, damage: dict[str, Any]) -> None:
    process.begin(run_dir, supervisor=7, runtime_dir=runtime)
    path = run_dir / "process.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
    found = process.read_process(run_dir)
    assert found is None or ("problems" in damage and found.problems == ())
    for text in ("", "[]", "{", "null"):
        path.write_text(text)
        assert process.read_process(run_dir) is None
        assert read_run(run_dir).end is None


def a_preview(run_dir: Path, step: int, number: int, **text: str) -> None:
    folder = run_dir / f"samples/step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    for name, value in text.items():
        info.add_itxt(name, value)
    Image.new("RGB", (8, 8)).save(folder / f"{number:02d}.png", pnginfo=info)


def test_samples_have_their_prompts_and_seeds(run_dir: Path) -> None:
    a_preview(run_dir, 10, 1, prompt="ein Fuß", seed="8", guidance_scale="3.5")
    a_preview(run_dir, 10, 0, prompt="a cat", seed="7")
    (run_dir / "samples/step-000010/00.txt").write_text("an answer\n")
    a_preview(run_dir, 20, 0, prompt="half drawn", seed="7")
    Image.new("RGB", (16, 8)).save(run_dir / "samples/step-000010.png")
    found = read_run(run_dir).samples
    assert [(one.step, one.number, one.prompt, one.seed) for one in found] == [
        (10, 0, "a cat", 7),
        (10, 1, "ein Fuß", 8),
    ]
    assert [one.answer is not None for one in found] == [True, False]
    assert found[1].drawn_as["guidance_scale"] == "3.5"
    (run_dir / "samples/step-000010/00.png").write_bytes(b"\x89PNG\r\n\x1a\nnot really")
    damaged = read_run(run_dir).samples[0]
    assert (damaged.prompt, damaged.seed, dict(damaged.drawn_as)) == ("", None, {})


def test_checkpoints_and_files_are_listed_with_their_sizes(run_dir: Path, tmp_path: Path) -> None:
    for step in (20, 5):
        folder = run_dir / f"checkpoints/step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "weights-00001-of-00001.safetensors").write_bytes(b"x" * step)
    (folder / "lora").mkdir()
    (folder / "lora/run.safetensors").write_bytes(b"yy")
    # of two the older one waits aside: a save was killed between two renames, or before it was removed
    for other in ("step-000010.tmp", "step-000030.damaged", "step-7", ".step-000005.old", ".step-000030.old"):
        (run_dir / "checkpoints" / other).mkdir()
    (run_dir / "checkpoints/.step-000030.old/lora").mkdir()
    (run_dir / "checkpoints/.step-000030.old/lora/run.safetensors").write_bytes(b"aside")
    (run_dir / "lora").mkdir()
    (run_dir / "lora/run.safetensors").write_bytes(b"zzz")
    (tmp_path / "elsewhere").write_text("no")
    (run_dir / "lora/link").symlink_to(tmp_path / "elsewhere")
    run = read_run(run_dir)
    assert [(one.step, one.bytes, [file.bytes for file in one.lora]) for one in run.checkpoints] == [
        (5, 7, [2]),
        (20, 20, []),
        (30, 5, []),
    ]
    names = {str(file.path.relative_to(run_dir)): file.bytes for file in run.files}
    assert names == {
        "lora/run.safetensors": 3,
        "config.resolved.yaml": len(CONFIG),
        "metrics.jsonl": (run_dir / "metrics.jsonl").stat().st_size,
    }
    assert run.state is State.FINISHED


def goes_when_it_is_asked(monkeypatch: pytest.MonkeyPatch, folder: Path, away: Path) -> None:
    """A folder that another process removes between the listing of its parent and its own."""
    for name in ("scandir", "listdir"):
        plain = getattr(os, name)

        def asked(path: Any = ".", *, plain: Any = plain) -> Any:
            if not isinstance(path, int) and Path(path) == folder and folder.exists():
                folder.rename(away)
            return plain(path)

        monkeypatch.setattr(os, name, asked)


def test_a_checkpoint_that_is_pruned_meanwhile_is_left_out(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        folder = run_dir / f"checkpoints/step-{step:06d}"
        folder.mkdir(parents=True)
        (folder / "weights.safetensors").write_bytes(b"x" * step)
    goes_when_it_is_asked(monkeypatch, run_dir / "checkpoints/step-000002", tmp_path / "away")
    assert [(one.step, one.bytes) for one in read_run(run_dir).checkpoints] == [(4, 4)]


@pytest.mark.parametrize("name", ["lora", "model", "model/unet", "checkpoints/step-000002/lora", "samples"])
def test_a_folder_that_is_removed_meanwhile_is_an_empty_one(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (run_dir / name).mkdir(parents=True)
    (run_dir / name / "x.safetensors").write_bytes(b"x")
    goes_when_it_is_asked(monkeypatch, run_dir / name, tmp_path / "away")
    run = read_run(run_dir)
    assert [file.path.name for file in run.files] == ["config.resolved.yaml", "metrics.jsonl"]
    assert not (run_dir / name).exists() and not any(one.lora for one in run.checkpoints)


def test_a_run_that_is_removed_during_the_search_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = tmp_path / "runs"
    for name in "ab":
        (runs / name).mkdir(parents=True)
        (runs / name / "config.resolved.yaml").write_text(CONFIG)
    (runs / "a/config.resolved.yaml").unlink()  # the first that `rm -r` has taken
    goes_when_it_is_asked(monkeypatch, runs / "a", tmp_path / "away")
    assert find_runs(runs, tell=print) == [runs / "b"]


def test_the_plan_is_read_as_it_was_written(run_dir: Path) -> None:
    row = {"feature": "weights", "value": "int8", "source": "auto", "reason": "fits"}
    memory = {"name": "base", "bytes": 5, "detail": "int8"}
    written = {
        "decisions": [row],
        "train_memory": [memory],
        "budget_bytes": 7,
        "step_milliseconds": 1.5,
        "of a later version": {},
    }
    (run_dir / "plan.json").write_text(json.dumps(written))
    plan = read_plan(run_dir)
    assert plan is not None
    assert [vars(one) for one in plan.decisions] == [row] and plan.decision("weights") is plan.decisions[0]
    assert {kind: [vars(one) for one in rows] for kind, rows in plan.memory.items()} == {
        "train": [memory],
        "cache": [],
        "host": [],
    }
    assert (plan.budget_bytes, plan.step_milliseconds, plan.disk_bytes) == (7, 1.5, 0)
    for damaged in ("", "[]", '{"decisions": 3}', '{"decisions": [3]}', '{"budget_bytes": "x"}'):
        (run_dir / "plan.json").write_text(damaged)
        assert read_plan(run_dir) is None


def test_damaged_settings_are_told(run_dir: Path) -> None:
    (run_dir / "config.resolved.yaml").write_text("family: [\n")
    with pytest.raises(DataError):
        read_run(run_dir)


def test_a_lock_says_who_holds_it(tmp_path: Path) -> None:
    path, own = tmp_path / "lock", {**locks.place(), "supervisor": os.getpid()}
    assert not locks.is_held_by(path, own)
    with held(path, os.getpid()):
        assert locks.is_held_by(path, own)
        assert not locks.is_held_by(path, {**own, "supervisor": os.getpid() + 1})
        assert not locks.is_held_by(path, {**own, "processes": "pid:[1]"})
    assert not locks.is_held_by(path, own), "the words stay, the lock does not"


def test_without_locks_the_supervisor_has_to_be_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(37, "No locks available")

    path, own = tmp_path / "lock", {**locks.place(), "supervisor": os.getpid()}
    with held(path, os.getpid()):
        pass
    monkeypatch.setattr(fcntl, "flock", flock)
    assert locks.is_held_by(path, own)
    gone = {**own, "supervisor": 2**22 + 1}  # above the largest process id
    path.write_text(json.dumps(gone))
    assert not locks.is_held_by(path, gone)


def test_a_length_in_epochs_is_one_in_steps_by_the_plan_s_row(run_dir: Path) -> None:
    config = run_dir / "config.resolved.yaml"
    config.write_text(CONFIG.replace("  max_train_steps: 40\n", "").replace("null", "2.0"))
    # of a version that did not record them
    assert (read_run(run_dir).steps, read_run(run_dir).figures["step"]) == (None, "20/2.0 epochs")
    row = {"feature": "steps", "value": "30", "source": "counted", "reason": "2 epochs of 15 images"}
    (run_dir / "plan.json").write_text(json.dumps({"decisions": [row]}))
    assert (read_run(run_dir).steps, read_run(run_dir).figures["step"]) == (30, "20/30")
    config.write_text(CONFIG)
    assert read_run(run_dir).figures["step"] == "20/40", "written in steps since"
