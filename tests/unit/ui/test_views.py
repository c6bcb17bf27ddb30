"""Lists and pages of runs as values: what is shown is what the folder says."""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.ui import made
from trainer.errors import MEANING, ExitCode, Problem
from trainer.telemetry import locks
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.runs import read_run
from trainer.telemetry.status import STATUS_FILE, Phase, read_status
from trainer.ui.studio import Studio, UnknownIdError, found_by_id, identifier
from trainer.ui.views import runs, state
from trainer.ui.views.job import job_view
from trainer.ui.views.runs import runs_view
from trainer.ui.views.state import PHASES, REMEDIES, remedy, row_look, signature, state_view


def names(studio: Studio, **asked: str) -> list[str]:
    return [row.name for row in runs_view(studio, **asked).rows]


def test_running_ones_come_first_then_the_last_changed(studio: Studio, tmp_path: Path) -> None:
    for number, name in enumerate(["old", "new", "works"]):
        folder = made.make_run(studio.runs / name)
        for path in [folder, *folder.rglob("*")]:
            os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))
    assert names(studio) == ["works", "new", "old"]
    with made.running(studio.runs / "old", tmp_path / "rt", step=7, steps=300):
        view = runs_view(studio)
        assert [row.name for row in view.rows] == ["old", "works", "new"]
        row = view.rows[0]
        assert (row.step, row.steps, row.percent, row.seconds_left) == (7, 300, 2, 293 * 0.5)
        assert names(studio, shown="running") == ["old"]
        assert names(studio, shown="ended") == ["works", "new"]
    assert names(studio, words="W") == ["works", "new"]
    assert names(studio, words="tiny lora") == names(studio)
    assert names(studio, words="tiny dog") == [] and runs_view(studio, words="dog").count == 3


def test_the_studios_own_folder_shows_no_runs(studio: Studio) -> None:
    made.make_run(studio.folder / "trash" / "gone")
    made.make_run(studio.runs / "kept")
    assert names(studio) == ["kept"]


def test_a_row_follows_its_folder(studio: Studio) -> None:
    """Rows are kept between two looks: a change must not be missed."""
    folder = made.make_run(studio.runs / "cats", done=20)
    assert (runs_view(studio).rows[0].step, runs_view(studio).rows[0].state.word) == (20, "not begun")
    made.write_metrics(folder, [30])
    assert runs_view(studio).rows[0].step == 30
    made.checkpoint(folder, 30)
    assert runs_view(studio).rows[0].state.word == "stopped"
    made.ended(folder, 71)
    assert runs_view(studio).rows[0].state.word == "failed (71)"


def test_ids_are_of_one_folder_each_and_lead_nowhere(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "a b", "a-b", "ä", "x/a", "..a", "日本", "a" * 200)]
    ids = [identifier(tmp_path, path) for path in paths]
    assert len(set(ids)) == len(paths)
    assert all(
        set(one) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-") for one in ids
    )
    assert [found_by_id(tmp_path, one, paths) for one in ids] == paths
    with pytest.raises(UnknownIdError):
        found_by_id(tmp_path, "a", paths)


def test_every_exit_code_has_a_remedy_in_words() -> None:
    assert set(REMEDIES) == set(MEANING) - {ExitCode.OK}
    assert set(PHASES) == set(Phase)
    assert remedy(0) == "" and "Signal 9" in remedy(137) and remedy(None) and remedy(1)


@pytest.mark.parametrize("code", [code for code in ExitCode if code not in (0, 75, 76)])
def test_a_failed_run_says_why_and_what_to_do(studio: Studio, code: ExitCode) -> None:
    folder = made.make_run(studio.runs / "cats")
    made.log(folder, "error", "the last words")
    made.ended(folder, code)
    view = job_view(studio, identifier(studio.runs, folder))
    assert (view.state.kind, view.state.word, view.state.detail) == (
        "bad",
        f"failed ({code.value})",
        MEANING[code],
    )
    assert view.end is not None
    assert (view.end.code, view.end.meaning, view.end.remedy) == (code, MEANING[code], REMEDIES[code])
    assert view.end.lines[-1].text == "the last words"


def test_a_problem_brings_its_own_remedy(studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats")
    made.ended(folder, 65, problems=[Problem(what="a picture is damaged", where="a.png", remedy="remove it")])
    end = job_view(studio, identifier(studio.runs, folder)).end
    assert end is not None and end.problems[0].remedy == "remove it" and end.remedy == ""


def test_a_stop_is_no_failure_and_a_lost_run_says_that_it_can_go_on(studio: Studio) -> None:
    stopped, lost = made.make_run(studio.runs / "stopped"), made.make_run(studio.runs / "lost")
    made.ended(stopped, 75)
    made.process.begin(lost, supervisor=2**22, runtime_dir=lost)
    assert [state_view(read_run(one)).kind for one in (stopped, lost)] == ["paused", "bad"]
    assert state_view(read_run(lost)).word == "lost"
    assert "resumed" in job_view(studio, identifier(studio.runs, lost)).end.meaning  # type: ignore[union-attr]


def test_a_finished_run_is_good_and_all_its_phases_are_done(studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats", done=300)
    made.result(folder)
    made.ended(folder, 0)
    view = job_view(studio, identifier(studio.runs, folder))
    assert (view.state.kind, view.state.word, view.end, view.percent) == ("good", "finished", None, 100)
    assert {phase.when for phase in view.phases} == {"done"}


@pytest.mark.parametrize(
    ("phase", "whens"),
    [
        (Phase.LOAD, "now next next next next"),
        (Phase.CACHE, "done now next next next"),
        (Phase.PREVIEW, "done done done now next"),
        (Phase.SAVE, "done done done done now"),
        (Phase.DONE, "done done done done done"),
    ],
)
def test_the_bar_of_phases_is_where_the_heartbeat_is(
    studio: Studio, tmp_path: Path, phase: Phase, whens: str
) -> None:
    folder = made.make_run(studio.runs / "cats")
    with made.running(folder, tmp_path / "rt", phase, step=3, steps=300):
        view = job_view(studio, identifier(studio.runs, folder))
    assert " ".join(one.when for one in view.phases) == whens
    assert view.state.kind == "running" and view.state.word == PHASES[phase]


def test_a_silent_run_is_told_and_then_a_hung_one(studio: Studio, tmp_path: Path) -> None:
    folder, runtime = made.make_run(studio.runs / "cats"), tmp_path / "rt"
    with made.running(folder, runtime, step=3, steps=300):
        found = []
        for seconds in (0, 400, 900):  # the budget of training is 300 s
            status = read_status(runtime)
            assert status is not None
            old = dataclasses.replace(status, beat=time.monotonic() - seconds)
            (runtime / STATUS_FILE).write_text(made.json.dumps(dataclasses.asdict(old)))
            found.append(state_view(read_run(folder)).word)
    assert found == ["training", "silent", "hung"]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_list_and_an_open_page_see_a_heartbeat_that_stops(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """No file changes then. Rank 0 may wait for the one that is silent, and is not judged itself."""
    folder, runtime, clock = made.make_run(studio.runs / "cats"), tmp_path / "rt", time.monotonic
    with made.running(folder, runtime, step=3, steps=300):
        beat = read_status(runtime)
        assert beat is not None
        if rank:
            (runtime / "rank-1").mkdir()
            for place, waits in ((runtime, True), (runtime / "rank-1", False)):
                status = dataclasses.replace(beat, ranks=2, waits=waits)
                (place / STATUS_FILE).write_text(made.json.dumps(dataclasses.asdict(status)))
        words, seen = [], set()
        for seconds in (0, 1, 400, 401, 900):  # the budget of training is 300 s
            monkeypatch.setattr(time, "monotonic", lambda late=seconds: clock() + late)
            words.append(runs_view(studio, shown="running").rows[0].state.word)
            seen.add(signature(folder))
        assert words == ["training", "training", "silent", "silent", "hung"] and len(seen) == 3


def test_a_start_in_the_folder_of_runs_hides_none_of_them(studio: Studio) -> None:
    made.make_run(studio.runs / "cats")
    made.make_run(studio.runs / "ranks/rank-8")
    for refused in (studio.runs, studio.runs / "ranks"):
        made.process.end(refused, supervisor=1, exit_code=65, cause="", problems=())
        assert sorted(names(studio)) == ["cats", "ranks/rank-8"]
    # one that was accepted is a run beside the others
    (studio.runs / "config.resolved.yaml").write_text("family: tiny\n")
    assert sorted(names(studio)) == ["cats", "ranks/rank-8", "runs"]


def test_prediction_and_measurement_are_of_one_optimizer_step(studio: Studio) -> None:
    """250 ms a micro-batch, two a step; 16 GiB of components; medians and peaks by hand."""
    folder = made.make_run(studio.runs / "cats", done=110)
    step, memory = job_view(studio, identifier(studio.runs, folder)).compared
    seconds = sorted(made.step_record(number).seconds_per_step for number in range(20, 111, 10))
    assert (step.predicted, step.measured) == (0.5, seconds[len(seconds) // 2])
    assert (memory.predicted, memory.measured) == (16 * 2**30, int(15.6 * 2**30))
    assert memory.ratio == pytest.approx(15.6 / 16)
    bare = made.make_run(studio.runs / "bare", done=0, plan=False)
    assert {one.ratio for one in job_view(studio, identifier(studio.runs, bare)).compared} == {None}


def test_previews_are_by_prompt_and_step(studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats")
    for step in (0, 10):
        made.samples(folder, step, [Image.new("RGB", (8, 8))] * 2, ["a cat", "a dog <b>"])
    view = job_view(studio, identifier(studio.runs, folder))
    assert view.preview_steps == (0, 10)
    assert [(prompt, [one.step for one in found]) for prompt, found in view.previews] == [
        ("a cat", [0, 10]),
        ("a dog <b>", [0, 10]),
    ]


def test_the_log_is_filtered_by_level(studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats")
    for level in ("warning", "error", "critical"):
        made.log(folder, level, f"this is a {level}")
    with (folder / "log.jsonl").open("a") as file:
        file.write("torn {\n[]\n")
    run = identifier(studio.runs, folder)
    assert [line.level for line in job_view(studio, run, level="warning").log] == [
        "warning",
        "error",
        "critical",
    ]
    assert [line.level for line in job_view(studio, run, level="error").log] == ["error", "critical"]
    assert len(job_view(studio, run, level="nonsense").log) == 5


def test_a_log_tells_the_time_of_this_machine(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.make_run(studio.runs / "cats")
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"time": "0001-01-01T00:00:00+00:00"}\n{"time": 5}\n')
    with monkeypatch.context() as patched:
        patched.setenv("TZ", "Asia/Tokyo")
        time.tzset()
        log = job_view(studio, identifier(studio.runs, folder)).log
    time.tzset()
    assert [line.time for line in log][1:] == ["01:05:12", log[2].time, ""]


def test_a_run_that_vanishes_breaks_no_list(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = made.make_run(studio.runs / "cats")
    found = runs.run_folders(studio)
    shutil.rmtree(folder)
    monkeypatch.setattr(runs, "run_folders", lambda *_: found)
    assert names(studio) == ["cats"]


def test_a_signature_changes_with_everything_that_a_page_shows(studio: Studio, tmp_path: Path) -> None:
    folder = made.make_run(studio.runs / "cats")
    seen = [signature(folder)]
    acts = [
        lambda: made.write_metrics(folder, [130]),
        lambda: made.log(folder, "info", "more"),
        lambda: made.checkpoint(folder, 100),
        lambda: made.samples(folder, 100, [Image.new("RGB", (8, 8))], ["a"]),
        lambda: made.result(folder),
        lambda: made.ended(folder, 70),
    ]
    for act in acts:
        act()
        assert signature(folder) not in seen
        seen.append(signature(folder))
    assert signature(folder) == seen[-1]
    with made.running(folder, tmp_path / "rt", step=1, steps=2) as status:
        assert signature(folder) not in seen
        seen.append(signature(folder))
        status.beat(Phase.SAVE, step=1, total=2)
        assert signature(folder) not in seen


def test_a_look_at_the_list_changes_with_what_happens_to_a_run(studio: Studio, tmp_path: Path) -> None:
    """Of one that has ended little is looked at: its first start after that is seen all the same."""
    folder = made.make_run(studio.runs / "cats")
    seen = [row_look(folder)]
    acts = [
        lambda: made.write_metrics(folder, [130]),
        lambda: made.checkpoint(folder, 100),
        lambda: made.ended(folder, 75),
        lambda: made.write_metrics(folder, [140]),
        lambda: made.log(folder, "info", "more"),
        lambda: made.result(folder),
        lambda: made.ended(folder, 0),
    ]
    for act in acts:
        act()
        assert row_look(folder) not in seen
        seen.append(row_look(folder))
    assert row_look(folder) == seen[-1] and not any(one.works for one in seen)
    with made.running(folder, tmp_path / "rt", step=1, steps=2) as status:
        begun = row_look(folder)
        assert begun.works and begun not in seen
        status.beat(Phase.SAVE, step=1, total=2)
        assert row_look(folder) not in (begun, *seen)


def test_a_resume_that_is_refused_before_it_begins_is_seen_to_end(studio: Studio) -> None:
    """It holds the folder while process.json still tells the end before."""
    folder = made.make_run(studio.runs / "cats")
    made.ended(folder, 75)
    before, taken = row_look(folder), Problem(what="taken")
    held = locks.holding(folder / LOCK_FILE, supervisor=os.getpid(), taken=taken, on_wait=lambda text: None)
    with held:
        begun = row_look(folder)
        assert begun.works and begun != before
    assert row_look(folder) not in (before, begun) and not row_look(folder).works


def test_no_lock_is_tried_of_a_run_that_has_ended(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """The home page looks at all runs each second."""
    folder = made.make_run(studio.runs / "cats")
    (folder / LOCK_FILE).touch()
    made.ended(folder, 0)
    os.utime(folder / LOCK_FILE, (1, 1))
    monkeypatch.setattr(state, "is_running", None)
    assert not row_look(folder).works
