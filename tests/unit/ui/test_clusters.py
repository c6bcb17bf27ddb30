"""Jobs of clusters on the home page: shown by the cluster's words, which no page waits for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer.config import environment
from trainer.queue.clusters import records
from trainer.queue.clusters.records import Submitted
from trainer.queue.launcher import CPU, Request, Seen, State
from trainer.queue.local import Local
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.queueing import clusters
from trainer.ui.views.queueing.jobs import queue_look, queue_view


class Cluster:
    """A cluster that answers once it may, and counts how often it is asked."""

    def __init__(self) -> None:
        self.states: dict[str, Seen] = {}
        self.asked = 0
        self.may_answer = threading.Event()

    def overview(self, queue: Path) -> list[tuple[Submitted, Seen]]:
        self.asked += 1
        assert self.may_answer.wait(60)
        return [(one, self.states[one.job]) for one in records.kept(queue)]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    found = Cluster()
    monkeypatch.setattr(clusters, "overview", found.overview)
    return found


def submitted(run: Path, job: str, *, launcher: str = "slurm", group: str = "") -> Submitted:
    one = Submitted(launcher=launcher, job=job, name=run.name, group=group, run=str(run))
    records.keep(environment.queue_dir(), one)
    return one


def wait_for(look: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not look():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_jobs_of_clusters_are_rows_with_the_clusters_words(
    client: TestClient, studio: Studio, cluster: Cluster
) -> None:
    """No page waits for the cluster; what it has said is there at the next look."""
    run = made.make_run(studio.runs / "cats")
    submitted(run, "12", group="pets")
    submitted(Path("/elsewhere/dogs"), "dogs-3fa92c", launcher="kueue")
    submitted(studio.runs / "owls", "13")
    (studio.runs / "owls/slurm").mkdir(parents=True)  # where its configuration lies: it has not begun
    cluster.states = {
        "12": Seen(state=State.RUNNING),
        "13": Seen(state=State.FINISHED, exit_code=0),
        "dogs-3fa92c": Seen(state=State.WAITING, words="Kueue: no quota <left>"),
    }
    before = queue_look(studio)
    assert before.works, "an answer is on its way"
    rows = queue_view(studio).clusters
    assert [(row.name, row.state.word) for row in rows] == [
        ("cats", "not known yet"), ("dogs", "not known yet"), ("owls", "not known yet"),
    ]  # fmt: skip
    assert "not known yet" in client.get("/").text
    cluster.may_answer.set()
    wait_for(lambda: not queue_look(studio).works)
    assert queue_look(studio) != before
    rows = queue_view(studio).clusters
    assert [(row.word, row.place, row.state.word, row.page) for row in rows] == [
        ("slurm-12", "Slurm, pets", "running", f"/runs/{identifier(studio.runs, run)}"),
        ("kueue-dogs-3fa92c", "Kueue", "waiting", ""),
    ]
    page = client.get("/").text
    assert "Kueue: no quota &lt;left&gt;" in page and "<code>slurm-12</code>" in page and "owls" not in page
    assert client.get(rows[0].page).status_code == 200


def test_a_cluster_is_asked_once_in_a_while_and_only_where_somebody_looks(
    client: TestClient, studio: Studio, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.may_answer.set()
    for _ in range(3):
        queue_look(studio)
        client.get("/")
    assert cluster.asked == 0, "there are no jobs to ask for"
    submitted(studio.runs / "cats", "12")
    cluster.states = {"12": Seen(state=State.WAITING)}
    assert cluster.asked == 0, "nobody has looked"
    queue_look(studio)
    wait_for(lambda: not queue_look(studio).works)
    seen, clock, now = queue_look(studio), time.monotonic, time.monotonic()
    for seconds in (0, 10, 29):
        monkeypatch.setattr(time, "monotonic", lambda seconds=seconds: now + seconds)
        assert queue_look(studio) == seen and "waiting" in client.get("/").text
    assert cluster.asked == 1
    monkeypatch.setattr(time, "monotonic", lambda: now + 31)
    assert queue_look(studio).works
    monkeypatch.setattr(time, "monotonic", clock)
    wait_for(lambda: cluster.asked == 2)


def test_the_same_answer_is_no_change_and_another_one_is(studio: Studio, cluster: Cluster) -> None:
    """A resting tab is not woken by it."""
    cluster.may_answer.set()
    one = submitted(studio.runs / "cats", "12")
    queue = environment.queue_dir()
    asked, seen = clusters.asked_of(queue.absolute()), list[object]()
    for state in (State.WAITING, State.WAITING, State.RUNNING):
        cluster.states = {"12": Seen(state=state)}
        asked._ask()
        seen.append(queue_look(studio).changes)
    assert seen[0] == seen[1] != seen[2]
    folder = queue / "clusters"
    before = folder.stat()
    records.drop(queue, one)
    os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))  # as within one tick of the kernel
    assert queue_look(studio).changes != seen[2] and queue_view(studio).clusters == ()


def test_an_answer_is_awaited_beside_a_job_that_waits_here(studio: Studio, cluster: Cluster) -> None:
    submitted(studio.runs / "cats", "12")
    cluster.states = {"12": Seen(state=State.RUNNING)}
    one = Request(config="{}", name="owls", run=studio.runs / "owls", working_folder=studio.runs, gpus=(CPU,))
    Local(folder=environment.queue_dir()).submit([one])
    assert queue_look(studio).works
    cluster.may_answer.set()
    wait_for(lambda: not queue_look(studio).works)
    assert [row.state.word for row in queue_view(studio).clusters] == ["running"]


def test_a_damaged_record_is_told_and_the_rest_of_the_queue_is_shown(
    client: TestClient, studio: Studio, cluster: Cluster
) -> None:
    cluster.may_answer.set()
    submitted(studio.runs / "cats", "12")
    (environment.queue_dir() / "clusters/slurm-13.json").write_text("{")
    one = Request(config="{}", name="owls", run=studio.runs / "owls", working_folder=studio.runs, gpus=(CPU,))
    Local(folder=environment.queue_dir()).submit([one])
    page = client.get("/").text
    assert "no record of a job: it was damaged" in page and "slurm-13.json" in page and "<b>owls</b>" in page
