"""scripts/slurm/train.sbatch in a real Slurm: which ends are final, which are tried again, which are held."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.slurm.cluster import NODES, Slurm

pytestmark = pytest.mark.slurm
STAND_IN = f"{sys.executable} -m tests.slurm.stand_in"
TWO = ("--nodes=2", "--exclusive")


def shown(cluster: Slurm, job: str) -> list[dict[str, dict[str, str]]]:
    """Variables and words of each start of each node."""
    return [json.loads(line) for line in re.findall(r"^begins (.*)$", cluster.log(job), re.MULTILINE)]


def test_each_node_learns_of_all(cluster: Slurm) -> None:
    words = ("my.yaml", "--set", "a=b c")
    job = cluster.submit(*words, options=TWO, LAUNCH=STAND_IN, CODES="0,0")
    cluster.wait(job, state="COMPLETED")
    first, second = sorted(shown(cluster, job), key=lambda one: one["variables"]["TRAINER_NODE_RANK"])
    assert first["words"] == second["words"] == ["train", *words]
    for rank, one in enumerate((first, second)):
        variables = one["variables"]
        assert (variables["TRAINER_NODES"], variables["TRAINER_NODE_RANK"]) == ("2", str(rank))
        assert re.fullmatch(rf"{NODES[0]}:\d+", variables["TRAINER_MASTER"])
    assert first["variables"]["TRAINER_MASTER"] == second["variables"]["TRAINER_MASTER"]
    # the nodes of this cluster share a machine, as jobs of others do
    assert first["variables"]["TRAINER_RUNTIME_DIR"] != second["variables"]["TRAINER_RUNTIME_DIR"]


@pytest.mark.parametrize("codes", ["70,76", "76,78", "1,1", "71,71"])
def test_a_final_code_ends_the_job_and_is_its_code(cluster: Slurm, codes: str) -> None:
    """The code of the node that has the cause, not 76 of those that lost it."""
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN, CODES=codes)
    cluster.wait(job, state="FAILED")
    (cause,) = set(codes.split(",")) - {"76"}
    assert f"ExitCode={cause}:0" in cluster.ask("scontrol", "show", "job", job)


@pytest.mark.parametrize("code", ["74", "76"])
def test_a_lost_machine_and_a_hang_are_tried_again_but_not_for_ever(cluster: Slurm, code: str) -> None:
    job = cluster.submit("my.yaml", LAUNCH=STAND_IN, MAX_RESTARTS="1", CODES=f"{code};{code}")
    cluster.wait(job, state="PENDING", text=f"exit code {code}: goes on from the newest checkpoint")
    cluster.start_now(job)
    cluster.wait(job, state="FAILED")
    assert f"ExitCode={code}:0" in cluster.ask("scontrol", "show", "job", job)
    assert len(shown(cluster, job)) == 2


@pytest.mark.parametrize("variables", [{}, {"DEAF": "1"}], ids=["saves", "before it heeds signals"])
def test_a_person_stops_it_and_it_is_held(cluster: Slurm, variables: dict[str, str]) -> None:
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN, CODES=";0,0", **variables)
    cluster.wait(job, state="RUNNING", text="begins", times=2)
    cluster.ask("scancel", "--signal=TERM", job)
    cluster.wait(job, state="PENDING", text=f"stopped and held; scontrol release {job} goes on")
    assert re.search(r"Held|held", cluster.state(job))
    cluster.ask("scontrol", "release", job)
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED")


def test_a_cancelled_job_saves_and_is_gone(cluster: Slurm) -> None:
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN)
    cluster.wait(job, state="RUNNING", text="begins", times=2)
    cluster.ask("scancel", job)
    cluster.wait(job, state="CANCELLED", text="saved")
    assert cluster.log(job).count("saved") == 2


def test_what_goes_before_it_has_it_save_and_go_on_later(cluster: Slurm) -> None:
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN, CODES=";0,0")
    cluster.wait(job, state="RUNNING", text="begins")
    urgent = cluster.ask("sbatch", "--parsable", "--partition=urgent", *TWO, "--output=/dev/null", "--wrap=:")
    cluster.wait(job, state="PENDING", text="saved for a job that goes before it")
    cluster.wait(urgent.strip(), state="COMPLETED")
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED")


def test_starts_after_preemptions_are_no_lost_machines(cluster: Slurm) -> None:
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN, MAX_RESTARTS="1", CODES=";76,76;0,0")
    cluster.wait(job, state="RUNNING", text="begins", times=2)
    urgent = cluster.ask("sbatch", "--parsable", "--partition=urgent", *TWO, "--output=/dev/null", "--wrap=:")
    cluster.wait(job, state="PENDING", text="saved for a job that goes before it")
    cluster.wait(urgent.strip(), state="COMPLETED")
    cluster.start_now(job)
    cluster.wait(job, state="PENDING", text="exit code 76: goes on from the newest checkpoint")
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED")
    assert not list(cluster.folder.glob(f"{job}.log.tries"))


def test_a_job_that_was_held_while_it_ran_is_held_when_it_is_queued_again(cluster: Slurm) -> None:
    """By which the queue's stop holds a job that is preempted in the same moment."""
    job = cluster.submit("my.yaml", options=TWO, LAUNCH=STAND_IN, CODES=";0,0")
    cluster.wait(job, state="RUNNING", text="begins", times=2)
    cluster.ask("scontrol", "hold", job)
    urgent = cluster.ask("sbatch", "--parsable", "--partition=urgent", *TWO, "--output=/dev/null", "--wrap=:")
    cluster.wait(job, state="PENDING", text="saved for a job that goes before it")
    cluster.wait(urgent.strip(), state="COMPLETED")
    cluster.wait(job, state="PENDING JobHeld")


def test_a_time_limit_no_longer_than_the_time_to_save_is_no_circle(cluster: Slurm) -> None:
    """Slurm gives the signal soon after the start then: the job would be queued again and again."""
    job = cluster.submit("my.yaml", options=("--time=1",), LAUNCH=STAND_IN)
    cluster.wait(job, state="PENDING", text="held: its time limit is no longer than the time")


@pytest.mark.timeout(600)
def test_before_its_time_limit_it_saves_and_queues_again(cluster: Slurm) -> None:
    """Slurm counts in minutes, and may give the signal a minute early: the slowest test here."""
    options = ("--time=4", "--signal=B:USR1@60")
    job = cluster.submit("my.yaml", options=options, LAUNCH=STAND_IN, CODES=";0")
    cluster.wait(job, state="PENDING", text="saved before the time limit", seconds=280)
    cluster.start_now(job)
    cluster.wait(job, state="COMPLETED")
