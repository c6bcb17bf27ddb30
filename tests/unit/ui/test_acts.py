"""Buttons of a job and of the queue: what is asked reaches the run, or the queue, and nothing else."""

from __future__ import annotations

import html
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.testclient import TestClient

from tests.unit.queue.fakes import FakeLocal, FakeMachine, wanted
from tests.unit.ui import made
from trainer.config import environment
from trainer.config.schema import RunConfig
from trainer.config.writing.dump import dump
from trainer.errors import Problem
from trainer.machine.occupancy import GpuUse
from trainer.queue import database
from trainer.queue.database import Machine
from trainer.queue.launcher import CPU, Request, State
from trainer.queue.local import Local
from trainer.telemetry import control
from trainer.telemetry.control import Order
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.kept import kept_settings
from trainer.ui.views.queueing.jobs import WORDS, Act, change_job, queue_look, queue_view

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def queue(studio: Studio) -> Local:
    """Three jobs that wait for a CPU; nothing starts them."""
    local = Local(folder=environment.queue_dir())
    for name in ("one", "two", "three"):
        run = studio.runs / name
        local.submit([Request(config="{}", name=name, run=run, working_folder=studio.runs, gpus=(CPU,))])
    return local


def names(local: Local) -> list[str]:
    return [job.name for job, _ in local.jobs()]


@pytest.mark.parametrize("order", list(Order))
def test_a_button_leaves_the_order_for_the_run(
    client: TestClient, studio: Studio, tmp_path: Path, order: Order
) -> None:
    folder, runtime = made.make_run(studio.runs / "cats"), tmp_path / "rt"
    path = f"/runs/{identifier(studio.runs, folder)}"
    with made.running(folder, runtime, step=3, steps=300):
        assert f'name="order" value="{order}"' in client.get(path).text
        answer = client.post(f"{path}/ask", data={"order": order.value})
        assert (answer.status_code, answer.headers["location"]) == (303, path)
        assert control.take(runtime, list(Order)) == (order,)
        assert "it does so after the present step" in client.get(path).text
        control.answer(runtime, order, step=4, done="step-000004")
        assert re.search(r"done at step 4, step-000004", client.get(path).text)


def test_previews_that_a_stop_came_before_are_told(
    client: TestClient, studio: Studio, tmp_path: Path
) -> None:
    """While it saves, and after its end."""
    folder, runtime = made.make_run(studio.runs / "cats"), tmp_path / "rt"
    path = f"/runs/{identifier(studio.runs, folder)}"
    with made.running(folder, runtime, step=3, steps=300):
        control.ask(folder, Order.SAMPLE)
        assert "draw previews: it does so after" in client.get(path).text
        control.ask(folder, Order.STOP)
        assert "draw previews: it does not, since it was asked to stop." in client.get(path).text
        left = control.not_drawn(runtime)
    stopped = Problem(what="stopped on request")
    made.ended(folder, 75, problems=[stopped])
    assert "were not drawn" not in client.get(path).text
    made.ended(folder, 75, problems=[stopped, *left])
    page = client.get(path).text
    assert "were not drawn: it ended before" in page and "resume the run, and ask again" in page
    assert "<li>stopped on request" not in page, "its exit code says so"


@pytest.mark.parametrize("when", ["", " before the hosts had met"])
def test_the_host_that_was_asked_to_stop_is_told(client: TestClient, studio: Studio, when: str) -> None:
    folder = made.make_run(studio.runs / "cats")
    stopped = Problem(what=f"host 1 was asked to stop{when}", remedy="start it again on all hosts")
    made.ended(folder, 75, problems=[stopped])
    page = client.get(f"/runs/{identifier(studio.runs, folder)}").text
    assert f"<li>host 1 was asked to stop{when}" in page and "start it again on all hosts" in page


def test_a_run_of_the_queue_is_stopped_there(client: TestClient, studio: Studio) -> None:
    """Else it would be started again."""
    folder = made.make_run(studio.runs / "cats")
    local = FakeLocal(environment.queue_dir(), FakeMachine((), identity=Machine.here()))
    local.submit([wanted("cats", (CPU,), root=studio.runs)])
    local.start_due()
    path = f"/runs/{identifier(studio.runs, folder)}"
    answer = client.post(f"{path}/ask", data={"order": "stop"})
    assert (answer.status_code, answer.headers["location"]) == (303, path)
    assert local.state("1").state is State.STOPPING
    local.fake.live()[0].end(75)
    assert local.state("1").state is State.HELD


def test_settings_of_a_refused_run_are_its_newest_jobs(studio: Studio) -> None:
    """Wherever that stands in the queue."""
    folder = studio.runs / "cats"
    folder.mkdir()
    local = FakeLocal(environment.queue_dir(), FakeMachine((), identity=Machine.here()))
    for seed in (1, 2):
        config = f"train:\n  seed: {seed}\n"
        local.submit(
            [Request(config=config, name="cats", run=folder, working_folder=studio.runs, gpus=(CPU,))]
        )
        if seed == 1:
            local.start_due()
            local.fake.live()[0].end(65)
            local.submit([wanted("dogs", (CPU,), root=studio.runs)])
    local.move(["1"], 3)
    assert [job.id for job, _ in local.jobs()] == [2, 3, 1]
    kept = kept_settings(studio, folder)
    assert kept is not None and kept.text == config and kept.of_job


def test_the_home_page_shows_runs_beside_a_queue_that_cannot_be_used(
    client: TestClient, studio: Studio
) -> None:
    made.make_run(studio.runs / "cats")
    environment.queue_dir().mkdir(parents=True)
    (environment.queue_dir() / "queue.sqlite").write_bytes(b"no database, as long as a header" * 100)
    answer = client.get("/")
    assert answer.status_code == 200
    assert "the file is damaged: move it away" in answer.text and ">cats<" in answer.text


def test_a_run_that_does_not_run_is_not_asked(client: TestClient, studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats")
    path = f"/runs/{identifier(studio.runs, folder)}"
    assert 'name="order"' not in client.get(path).text
    answer = client.post(f"{path}/ask", data={"order": "save"})
    assert answer.status_code == 422 and "no run trains in this folder now" in answer.text


@pytest.mark.parametrize("order", ["", "delete", "../save", "save.json"])
def test_another_word_is_no_order(client: TestClient, studio: Studio, tmp_path: Path, order: str) -> None:
    folder, runtime = made.make_run(studio.runs / "cats"), tmp_path / "rt"
    with made.running(folder, runtime, step=3, steps=300):
        path = f"/runs/{identifier(studio.runs, folder)}/ask"
        assert client.post(path, data={"order": order}).status_code == 400
        assert not control.requests(runtime)


def test_jobs_are_moved_held_and_taken_off(client: TestClient, queue: Local) -> None:
    ids = {job.name: job.id for job, _ in queue.jobs()}
    steps = (("three", Act.UP, ["one", "three", "two"]), ("three", Act.UP, ["three", "one", "two"]),
             ("three", Act.UP, ["three", "one", "two"]), ("three", Act.DOWN, ["one", "three", "two"]),
             ("two", Act.DOWN, ["one", "three", "two"]), ("one", Act.FORGET, ["three", "two"]))  # fmt: skip
    for name, act, order in steps:
        assert client.post(f"/queue/{ids[name]}", data={"act": act.value}).status_code == 303
        assert names(queue) == order, (name, act)
    assert client.post(f"/queue/{ids['two']}", data={"act": "hold"}).status_code == 303
    assert queue.state(str(ids["two"])).state is State.HELD
    assert client.post(f"/queue/{ids['two']}", data={"act": "release"}).status_code == 303
    assert queue.state(str(ids["two"])).state is State.WAITING
    assert client.post(f"/queue/{ids['two']}", data={"act": "explode"}).status_code == 400
    assert client.post("/queue/999", data={"act": "up"}).status_code == 404


def test_every_act_has_a_word_and_each_row_only_those_that_work(studio: Studio, queue: Local) -> None:
    assert set(WORDS) == set(Act)
    first, middle, last = queue_view(studio).rows
    assert (Act.UP in first.acts, Act.UP in middle.acts, Act.DOWN in middle.acts, Act.DOWN in last.acts) == (
        False, True, True, False,
    )  # fmt: skip
    for row in queue_view(studio).rows:
        for act in row.acts:
            if act is not Act.FORGET:
                change_job(row.id, act)  # raises where it does not work


def test_a_job_that_waits_is_not_moved_before_one_that_runs(client: TestClient, studio: Studio) -> None:
    local = FakeLocal(environment.queue_dir(), FakeMachine((), identity=Machine.here()))
    local.submit([wanted(name, (CPU,), root=studio.runs) for name in ("one", "two", "three")])
    local.start_due()
    running, first, second = queue_view(studio).rows
    assert [Act.UP in row.acts for row in (running, first, second)] == [False, False, True]
    assert [Act.DOWN in row.acts for row in (running, first, second)] == [False, True, False]
    for job, act, order in ((3, Act.UP, ["one", "three", "two"]), (3, Act.UP, ["one", "three", "two"]),
                            (3, Act.DOWN, ["one", "two", "three"])):  # fmt: skip
        assert client.post(f"/queue/{job}", data={"act": act.value}).status_code == 303
        assert names(local) == order


def test_a_signature_changes_with_the_queue_and_asks_for_nothing_while_that_rests(
    studio: Studio, queue: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeLocal(queue.folder, FakeMachine(uuids=(), identity=Machine.here()))
    one, two, three = (str(job.id) for job, _ in queue.jobs())
    changes = [lambda: queue.hold(one), lambda: queue.hold(two), lambda: queue.hold(three),
               lambda: queue.move([three], 1), lambda: queue.forget(two), lambda: queue.release(one),
               fake.start_due, lambda: fake.fake.started[0].end(0), lambda: queue.release(three),
               lambda: queue.hold(three)]  # fmt: skip
    seen = [queue_look(studio)]
    for change in changes:
        change()
        seen.append(queue_look(studio))
        assert seen[-1] != seen[-2]
        assert seen[-1].works is any(found.state is State.RUNNING for _, found in queue.jobs())
    assert [one.works for one in seen].count(True) == 1, "what waits does nothing"
    with monkeypatch.context() as patched:
        patched.setattr(Local, "jobs", None)
        assert queue_look(studio) == seen[-1]
        patched.setattr("trainer.ui.views.queueing.jobs.is_scheduled", lambda folder: True)
        assert queue_look(studio) != seen[-1]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    """The queue's machine has two GPUs, and a third one on which another program computes."""
    machine = FakeMachine(uuids=("GPU-a", "GPU-b", "GPU-c"), foreign={"GPU-c": 4711}, identity=Machine.here())
    monkeypatch.setattr("trainer.queue.local.usable_gpus", machine.gpus)
    return machine


def test_lanes_are_what_has_each_gpu_and_what_comes_next(studio: Studio, two_gpus: FakeMachine) -> None:
    local = FakeLocal(environment.queue_dir(), two_gpus)
    jobs = {"cats": (("GPU-a",), 600.0), "dogs": (("GPU-a", "GPU-b"), 1200.0), "owls": (("GPU-b",), 60.0),
            "bats": (("GPU-c",), 60.0)}  # fmt: skip
    local.submit([wanted(name, gpus, seconds=seconds) for name, (gpus, seconds) in jobs.items()])
    local.start_due()
    lanes = queue_view(studio).lanes
    assert [(lane.name, lane.words) for lane in lanes] == [
        ("GPU 0", "cats, now, preparing, then about 10 min of training; "
                  "dogs, in about 10 min at the earliest; free in about 30 min"),
        ("GPU 1", "dogs, in about 10 min at the earliest; "
                  "owls, in about 30 min at the earliest; free in about 31 min"),
        ("GPU 2", "in use by PID 4711; nobody knows when it is free"),
    ]  # fmt: skip
    # three quarters of a line are the 1,860 s until all known ends
    places = [[(one.start, one.width) for one in lane.stays] for lane in lanes]
    assert places == [[(0, 24), (24, 48)], [(24, 48), (73, 2)], [(0, 100)]]
    for run in two_gpus.live():
        run.end(0)


def test_a_row_has_buttons_in_place_of_commands(studio: Studio, two_gpus: FakeMachine) -> None:
    local = FakeLocal(environment.queue_dir(), two_gpus)
    local.submit([wanted("cats"), wanted("dogs")])
    local.start_due()
    local.stop("1")
    one, two = two_gpus.live()
    one.end(75)
    two.end(None)
    told = ["stopped, resumable", "ended without an exit code: it was killed, or the machine was"]
    rows = queue_view(studio).rows
    assert [row.state.detail for row in rows] == told
    assert all(WORDS[Act.RELEASE] == "Go on" and Act.RELEASE in row.acts for row in rows)


def test_a_waiting_job_is_given_other_gpus(client: TestClient, studio: Studio, two_gpus: FakeMachine) -> None:
    local = FakeLocal(environment.queue_dir(), two_gpus)
    local.submit(
        [wanted("cats", ("GPU-c",)), wanted("dogs", count=2), wanted("owls", (CPU,)), wanted("all", count=3)]
    )
    rows = queue_view(studio).rows
    assert [[one.name for one in row.choices if one.chosen] for row in rows] == [["GPU 2"], [], [], []]
    assert [len(row.choices) for row in rows] == [3, 3, 0, 0], "the CPU, and all there are, are no choice"

    def asked(job: int, *gpus: str) -> int:
        return client.post(f"/queue/{job}/gpus", data={"gpu": list(gpus)}).status_code

    assert asked(1, "GPU-a") == asked(2, "GPU-a", "GPU-b") == 303
    assert [job.gpus for job, _ in local.jobs()] == [("GPU-a",), ("GPU-a", "GPU-b"), (CPU,), ()]
    assert asked(2) == 303 and local.job("2").gpus == ()
    for job, gpus in ((1, ["GPU-a", "GPU-b"]), (2, ["GPU-a"]), (1, ["GPU-z"]), (3, ["GPU-a"])):
        assert asked(job, *gpus) == 422
    assert asked(9, "GPU-a") == 404
    local.start_due()
    assert asked(1, "GPU-b") == 422, "it runs"
    assert local.job("1").gpus == ("GPU-a",)
    for run in two_gpus.live():
        run.end(0)


def test_the_driver_is_asked_once_for_one_page(
    client: TestClient, studio: Studio, two_gpus: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through NVML, which takes milliseconds a GPU."""
    FakeLocal(environment.queue_dir(), two_gpus).submit([wanted("cats", ("GPU-c",))])
    asked = list[int]()

    def gpus() -> tuple[GpuUse, ...]:
        asked.append(1)
        return two_gpus.gpus()

    monkeypatch.setattr("trainer.queue.local.usable_gpus", gpus)
    assert "GPU 2" in client.get("/").text and len(asked) == 1


def test_jobs_of_a_group_are_one_row_that_leads_to_their_comparison(
    client: TestClient, studio: Studio
) -> None:
    local, runs = (
        Local(folder=environment.queue_dir()),
        [made.make_run(studio.runs / f"cats-{k}") for k in (1, 2)],
    )
    rest = {"config": "{}", "working_folder": studio.runs, "gpus": (CPU,)}
    local.submit([Request(name=run.name, run=run, group="cats", **rest) for run in runs])  # type: ignore[arg-type]
    local.submit([Request(name="one", run=studio.runs / "one", **rest)])  # type: ignore[arg-type]
    local.submit([Request(name="two", run=studio.runs / "two", group="pair", **rest)])  # type: ignore[arg-type]
    local.hold("2")
    sections = queue_view(studio).sections
    assert [(one.group, [row.name for row in one.rows]) for one in sections] == [
        ("cats", ["cats-1", "cats-2"]), ("", ["one"]), ("", ["two"]),
    ]  # fmt: skip
    assert sections[0].words == "2 jobs: 1 waiting, 1 held"
    assert client.get(sections[0].compare).status_code == 200 and not sections[1].compare
    fake = FakeLocal(local.folder, FakeMachine(uuids=(), identity=Machine.here()))
    fake.start_due()
    fake.fake.started[0].end(0)
    after = queue_view(studio).sections[0]
    assert [row.name for row in after.rows] == ["cats-2"], "what finished is no row"
    assert (after.words, after.first) == ("2 jobs: 1 finished, 1 held", sections[0].first)
    assert after.compare == sections[0].compare
    shutil.rmtree(runs[0])
    assert not queue_view(studio).sections[0].compare


def test_a_run_that_loads_its_base_has_no_page_yet(client: TestClient, studio: Studio) -> None:
    """Its folder is there before its record: the link led to 'Nothing is here', and the comparison too."""
    local, names = Local(folder=environment.queue_dir()), ("cats-1", "cats-2")
    rest = {"config": "{}", "working_folder": studio.runs, "gpus": (CPU,), "group": "cats"}
    local.submit([Request(name=name, run=studio.runs / name, **rest) for name in names])  # type: ignore[arg-type]
    made.make_run(studio.runs / "cats-1")
    (studio.runs / "cats-2").mkdir()
    (section,) = queue_view(studio).sections
    assert not section.compare and not section.rows[1].page
    assert client.get(section.rows[0].page).status_code == 200
    (studio.runs / "cats-2").rmdir()
    made.make_run(studio.runs / "cats-2")
    (section,) = queue_view(studio).sections
    assert client.get(section.compare).status_code == client.get(section.rows[1].page).status_code == 200


def test_the_page_says_that_nothing_starts_what_waits(client: TestClient, queue: Local) -> None:
    page = client.get("/").text
    assert "Nothing starts what waits here" in page and page.index("one") < page.index("two")


def quickstart(studio: Studio) -> Path:
    folder = made.make_run(studio.runs / "style")
    text = (ROOT / "train_configs/quickstart.yaml").read_text()
    for name in ("assets/tiny-flux", "examples/style-held-out", "examples/style"):
        text = re.sub(rf"(: ){name}(\s)", rf"\1{ROOT / name}\2", text)
    (folder / "config.resolved.yaml").write_text(text)
    made.checkpoint(folder, 80)
    made.ended(folder, 75)
    return folder


def test_resume_adds_a_job_in_the_same_folder_and_then_releases_it(
    client: TestClient, studio: Studio
) -> None:
    folder = quickstart(studio)
    path = f"/runs/{identifier(studio.runs, folder)}"
    assert "Resume" in client.get(path).text
    assert client.post(f"{path}/resume").status_code == 303
    local = Local(folder=environment.queue_dir())
    ((job, seen),) = local.jobs()
    assert (job.run, seen.state, job.gpus) == (folder, State.WAITING, (CPU,))
    local.hold(str(job.id))
    assert client.post(f"{path}/resume").status_code == 303
    ((again, seen),) = local.jobs()
    assert (again.id, seen.state) == (job.id, State.WAITING)


def test_resume_goes_on_by_the_settings_that_the_run_keeps(client: TestClient, studio: Studio) -> None:
    """It was continued by hand with other settings than its held job has; a second start writes the same."""
    folder = quickstart(studio)
    path = f"/runs/{identifier(studio.runs, folder)}"
    client.post(f"{path}/resume")
    queue = Local(folder=environment.queue_dir())
    queue.hold("1")
    config = folder / "config.resolved.yaml"
    accepted = yaml.safe_load((queue.folder / "jobs/1/config.yaml").read_text())
    config.write_text(dump(RunConfig.model_validate(accepted)))
    later = time.time() + 5
    os.utime(config, (later, later))
    client.post(f"{path}/resume")
    ((job, seen),) = queue.jobs()
    assert (job.id, seen.state) == (1, State.WAITING)
    queue.hold("1")
    config.write_text(config.read_text().replace("max_train_steps: 240", "max_train_steps: 500"))
    os.utime(config, (later, later))
    assert client.post(f"{path}/resume").status_code == 303
    ((job, seen),), (kept,) = queue.jobs(), configs(queue)
    assert (job.id, seen.state, kept["train"]["max_train_steps"]) == (2, State.WAITING, 500)
    assert not (queue.folder / "jobs/1").exists()


def test_what_a_run_keeps_is_read_where_it_was_started_and_alone(
    client: TestClient, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume, and a new run like it: the studio lies elsewhere, and has a variable of another run."""
    folder = made.make_run(studio.runs / "style")
    (folder / "config.resolved.yaml").write_text((ROOT / "train_configs/quickstart.yaml").read_text())
    made.checkpoint(folder, 80)
    monkeypatch.chdir(ROOT)
    made.ended(folder, 75)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRAINER__TRAIN__SEED", "999")
    run = identifier(studio.runs, folder)
    resumed = client.post(f"/runs/{run}/resume")
    assert resumed.status_code == 303, resumed.text
    like = client.post("/new/start", data={"start": f"run:{run}"})
    assert like.status_code == 303, like.text
    queue = Local(folder=environment.queue_dir())
    assert [job.run for job, _ in queue.jobs()] == [folder, studio.runs / "style-2"]
    for number in (1, 2):
        config = yaml.safe_load((queue.folder / f"jobs/{number}/config.yaml").read_text())
        assert Path(config["data"]["sets"][0]["img_dir"]) == ROOT / "examples/style"
        assert Path(config["model"]["pretrained_model_name_or_path"]) == ROOT / "assets/tiny-flux"
        assert config["train"]["seed"] == 0


def test_a_run_that_keeps_no_folder_of_relative_paths_is_told_from_where_they_were_taken(
    client: TestClient, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a version before process.json, in a studio that was started elsewhere."""
    folder = made.make_run(studio.runs / "style")
    (folder / "config.resolved.yaml").write_text((ROOT / "train_configs/quickstart.yaml").read_text())
    made.checkpoint(folder, 80)
    monkeypatch.chdir(tmp_path)
    answer = client.post(f"/runs/{identifier(studio.runs, folder)}/resume")
    said = html.unescape(answer.text)
    assert answer.status_code == 422
    assert f"does not record where its relative paths begin: they were taken from {tmp_path}" in said
    assert "start the studio in the folder that the run was started in" in said


def test_a_run_that_has_a_result_goes_on_where_it_did_not_end_well(
    client: TestClient, studio: Studio
) -> None:
    """Its proof failed, or it was continued with more steps and stopped."""
    folder = quickstart(studio)
    made.result(folder)
    path = f"/runs/{identifier(studio.runs, folder)}"
    for code, offered in ((75, True), (71, True), (0, False)):
        made.ended(folder, code)
        assert (f'action="{path}/resume"' in client.get(path).text) is offered, code
    made.ended(folder, 71)
    assert client.post(f"{path}/resume").status_code == 303


def finished(studio: Studio, **train: object) -> tuple[Path, str]:
    """A run of the quickstart that did its 80 steps, and its page; `train` lies over its settings."""
    folder = quickstart(studio)
    path = folder / "config.resolved.yaml"
    content = yaml.safe_load(path.read_text())
    content["train"] |= {"max_train_steps": 80} | train
    path.write_text(yaml.safe_dump(content))
    made.result(folder)
    made.ended(folder, 0)
    return folder, f"/runs/{identifier(studio.runs, folder)}"


def configs(queue: Local) -> list[dict[str, Any]]:
    return [
        yaml.safe_load((queue.folder / f"jobs/{job.id}/config.yaml").read_text()) for job, _ in queue.jobs()
    ]


def test_more_steps_are_a_job_in_the_same_folder(client: TestClient, studio: Studio) -> None:
    folder, path = finished(studio, lr_scheduler="cosine")
    page = client.get(path).text
    assert f'action="{path}/more"' in page and "Steps beyond 80" in page
    assert "Its learning rate (cosine) follows the course of the longer run" in html.unescape(page)
    answer = client.post(f"{path}/more", data={"steps": " 40 "})
    assert (answer.status_code, answer.headers["location"]) == (303, "/"), answer.text
    queue = Local(folder=environment.queue_dir())
    ((job, seen),), (config,) = queue.jobs(), configs(queue)
    assert (job.run, job.name, seen.state) == (folder, "style", State.WAITING)
    assert config["train"]["max_train_steps"] == 120 and config["output_dir"] == str(folder)
    assert config["checkpoint"]["resume_from_checkpoint"] == "auto"
    again = client.post(f"{path}/more", data={"steps": "40"})
    assert again.status_code == 422 and "style (job 1) writes there" in html.unescape(again.text)


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "ten", "\u0663", "9" * 8, "9" * 5000, "1; touch x"])
def test_what_is_no_number_of_steps_is_no_job(client: TestClient, studio: Studio, text: str) -> None:
    _, path = finished(studio)
    answer = client.post(f"{path}/more", data={"steps": text})
    assert answer.status_code == 422 and "a whole number from 1 to 9999999" in answer.text
    assert not Local(folder=environment.queue_dir()).jobs()


def test_more_steps_take_the_place_of_a_held_job(client: TestClient, studio: Studio) -> None:
    """That of a run that was stopped here has fewer steps, and writes in the same folder."""
    folder = quickstart(studio)
    path = f"/runs/{identifier(studio.runs, folder)}"
    assert client.post(f"{path}/resume").status_code == 303
    queue = Local(folder=environment.queue_dir())
    queue.hold("1")
    assert client.post(f"{path}/more", data={"steps": "5"}).status_code == 303
    ((job, seen),), (config,) = queue.jobs(), configs(queue)
    assert (job.id, seen.state, config["train"]["max_train_steps"]) == (2, State.WAITING, 245)


def test_a_held_job_stays_where_more_steps_are_refused(client: TestClient, studio: Studio) -> None:
    """Another job of the run waits: it was released after a second one was held."""
    folder = quickstart(studio)
    path = f"/runs/{identifier(studio.runs, folder)}"
    client.post(f"{path}/resume")
    queue = Local(folder=environment.queue_dir())
    with database.transaction(queue.folder, None) as connection:
        connection.execute(
            "INSERT INTO jobs (place, name, group_name, run, working_folder, gpus, gpu_count, held)"
            " SELECT 2, name, group_name, run, working_folder, gpus, gpu_count, 1 FROM jobs"
        )
    answer = client.post(f"{path}/more", data={"steps": "5"})
    assert answer.status_code == 422 and "writes there" in answer.text
    assert [seen.state for _, seen in queue.jobs()] == [State.WAITING, State.HELD]


def test_a_length_in_epochs_becomes_steps_once_they_are_trained(client: TestClient, studio: Studio) -> None:
    folder, path = finished(studio, max_train_steps=None, num_train_epochs=3)
    assert "Its length was written in epochs" in client.get(path).text
    assert client.post(f"{path}/more", data={"steps": "7"}).status_code == 303
    (config,) = configs(Local(folder=environment.queue_dir()))
    assert (config["train"]["max_train_steps"], config["train"]["num_train_epochs"]) == (87, None)
    shutil.rmtree(folder / "lora")
    made.ended(folder, 75)
    for answer in (client.get(path), client.post(f"{path}/more", data={"steps": "7"})):
        assert "its length is written in epochs, which are not trained yet" in answer.text
    assert answer.status_code == 422


def test_a_run_that_cannot_train_on_says_why(client: TestClient, studio: Studio, tmp_path: Path) -> None:
    folder, path = finished(studio)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 120, "early_stop": "validation_loss is not better since step 60"}\n')
    for answer in (client.get(path), client.post(f"{path}/more", data={"steps": "7"})):
        assert "it would end at once, as before: validation_loss is not better" in answer.text
        assert f'action="{path}/more"' not in answer.text
    shutil.rmtree(folder / "checkpoints")
    assert "it has no checkpoint to go on from" in client.get(path).text
    with made.running(folder, tmp_path / "rt", step=3, steps=80):
        assert "Train more steps" not in client.get(path).text
        answer = client.post(f"{path}/more", data={"steps": "7"})
        assert answer.status_code == 422 and "once it has finished or was stopped" in answer.text
    shutil.rmtree(folder / "lora")
    made.ended(folder, 70)
    assert "Train more steps" not in client.get(path).text
    assert not Local(folder=environment.queue_dir()).jobs()


def test_a_start_that_was_refused_has_nothing_to_go_on_with(client: TestClient, studio: Studio) -> None:
    folder = studio.runs / "refused"
    folder.mkdir()
    made.process.end(folder, supervisor=1, exit_code=78, cause="", problems=())
    page = client.get(f"/runs/{identifier(studio.runs, folder)}").text
    assert "78" in page and "/resume" not in page and "/new?run=" not in page


def test_a_runs_page_leads_to_a_new_run_like_it(client: TestClient, studio: Studio) -> None:
    run = identifier(studio.runs, quickstart(studio))
    assert f'href="/new?run={run}"' in client.get(f"/runs/{run}").text
    page = client.get(f"/new?run={run}")
    assert page.status_code == 200 and f'value="run:{run}" selected' in page.text


def test_a_run_that_is_not_seen_from_here_says_where_it_is_asked(
    client: TestClient, studio: Studio, tmp_path: Path
) -> None:
    """Its lock is seen, its runtime folder is in another container; and before it has a record."""
    folder, runtime = made.make_run(studio.runs / "cats"), tmp_path / "rt"
    path = f"/runs/{identifier(studio.runs, folder)}"
    with made.running(folder, runtime, step=3, steps=300):
        assert 'name="order"' in client.get(path).text
        runtime.rename(tmp_path / "away")
        page = client.get(path).text
        assert (
            'name="order"' not in page
            and "docker compose -f FILE exec trainer trainer runs control RUN save" in page
        )
        (folder / "process.json").unlink()
        page = client.get(path).text
        assert 'name="order"' not in page and "has not begun" in page
        answer = client.post(f"{path}/ask", data={"order": "stop"})
        assert answer.status_code == 422 and "has not begun" in answer.text


def test_a_resume_that_cannot_be_is_told(client: TestClient, studio: Studio) -> None:
    folder = quickstart(studio)
    (folder / "config.resolved.yaml").write_text("family: nobody\n")
    answer = client.post(f"/runs/{identifier(studio.runs, folder)}/resume")
    assert answer.status_code == 422 and "nobody" in answer.text
    assert not Local(folder=environment.queue_dir()).jobs()
