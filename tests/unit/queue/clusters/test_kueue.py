"""The launcher of Kueue: Jobs and Workloads as the API's references describe them, and texts that are none.

No cluster has answered here: kubectl is a program of the tests, but where a kustomization is rendered.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.container_files.k8s_files import combined, kubectl, pod_spec
from tests.unit.container_files.k8s_rules import house, restricted
from tests.unit.queue.clusters.fakes import client, request, words
from trainer.errors import ConfigError
from trainer.queue.clusters import records
from trainer.queue.clusters.kueue import LABEL, Kueue, _manifests, _name, _template, judged, states
from trainer.queue.launcher import State

QUEUED = """\
apiVersion: v1
kind: ServiceAccount
metadata: {name: trainer}
---
apiVersion: batch/v1
kind: Job
metadata: {name: trainer, labels: {kueue.x-k8s.io/queue-name: gpus}}
spec:
  suspend: true
  template:
    spec:
      containers: [{name: trainer, image: trainer, args: [train, /config/quickstart.yaml]}]
      volumes: [{name: config, configMap: {name: trainer-config-abc}}]
"""
BODY = """\
case "$1 $2" in
"kustomize "*) cat "{folder}/rendered" ;;
"create "*) cat >>"{folder}/created"; [ ! -e "{folder}/full" ] || {{ echo "exceeded quota" >&2; exit 1; }} ;;
"get jobs") cat "{folder}/jobs" ;;
"get job") echo uid-1 ;;
"get workloads.kueue.x-k8s.io")
    case "$*" in *name) echo workload.kueue.x-k8s.io/w ;; *) cat "{folder}/workloads" ;; esac ;;
esac
"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inside: st.lists(inside) | st.dictionaries(st.text(), inside),
    max_leaves=20,
)
META = st.fixed_dictionaries(
    {"name": JSON, "uid": JSON, "labels": st.fixed_dictionaries({"kueue.x-k8s.io/job-uid": JSON})}
)
CONDITION = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["Failed", "Complete", "QuotaReserved"]) | JSON,
        "status": st.just("True") | JSON,
        "message": JSON,
    }
)
STATUS = st.fixed_dictionaries({"active": JSON, "conditions": st.lists(CONDITION | JSON)})
NEARLY = JSON | st.fixed_dictionaries(
    {
        "metadata": META | JSON,
        "spec": st.dictionaries(st.sampled_from(["suspend", "active"]), JSON) | JSON,
        "status": STATUS | JSON,
    }
)
"""JSON of the shape of a Job or of a Workload, down to some depth."""


def job(
    *, suspend: bool = False, conditions: tuple[dict[str, str], ...] = (), **status: int
) -> dict[str, Any]:
    meta = {"name": "cats-1", "uid": "uid-1"}
    return {
        "metadata": meta,
        "spec": {"suspend": suspend},
        "status": {**status, "conditions": list(conditions)},
    }


def workload(*, active: bool = True, waits: str = "") -> dict[str, Any]:
    reserved = {"type": "QuotaReserved", "status": "False" if waits else "True", "message": waits}
    labels = {"kueue.x-k8s.io/job-uid": "uid-1"}
    return {"metadata": {"labels": labels}, "spec": {"active": active}, "status": {"conditions": [reserved]}}


def condition(kind: str, message: str = "") -> dict[str, str]:
    return {"type": kind, "status": "True", "message": message}


# the message is that of the Job controller: kubernetes.io/docs/tasks/job/pod-failure-policy
FAILED = condition(
    "Failed",
    "Container trainer for pod default/cats-1-x failed with exit code 70 matching FailJob rule at index 1",
)


@pytest.mark.parametrize(
    ("asked", "owned", "state", "told"),
    [
        (job(suspend=True), workload(waits="insufficient quota"), State.WAITING, "Kueue: insufficient"),
        (job(suspend=True), {}, State.WAITING, ""),
        (job(suspend=True), workload(active=False), State.HELD, ""),
        (job(suspend=True, terminating=1), workload(active=False), State.STOPPING, "saves"),
        (job(active=1), workload(active=False), State.STOPPING, "saves"),
        (job(), workload(), State.WAITING, "not started its pods"),
        (job(active=1), workload(), State.RUNNING, "pods start"),
        (job(active=1, ready=1), workload(), State.RUNNING, ""),
        (job(conditions=(condition("Complete"),)), workload(), State.FINISHED, ""),
        (job(conditions=(FAILED,)), workload(), State.FAILED, "exit code 70: the loss"),
        (job(conditions=(condition("Failed", "limit reached"),)), {}, State.FAILED, "limit reached"),
        (
            job(conditions=({**condition("Failed"), "reason": "BackoffLimitExceeded"},)),
            {},
            State.FAILED,
            "Kubernetes: BackoffLimitExceeded",
        ),
        (job(conditions=(condition("Failed"),)), {}, State.FAILED, "Kubernetes: Failed"),
        (job(conditions=({**condition("Failed"), "status": "False"},)), {}, State.WAITING, "not started"),
    ],
)
def test_states_are_those_of_the_job_and_its_workload(
    asked: dict[str, Any], owned: dict[str, Any], state: State, told: str
) -> None:
    seen = judged(asked, owned)
    assert seen.state is state and told in seen.words
    assert seen.exit_code == {State.FINISHED: 0}.get(state, 70 if "70" in told else None)
    found = states(json.dumps({"items": [asked]}), json.dumps({"items": [owned]}))
    assert found == {"cats-1": seen}


@pytest.mark.slow
@given(st.text(), st.text())
def test_any_text_gives_an_error_of_ours_or_states(jobs: str, workloads: str) -> None:
    try:
        states(jobs, workloads)
    except ConfigError as error:
        assert "not a list as JSON" in str(error)


@pytest.mark.slow
@given(NEARLY, NEARLY)
def test_any_json_gives_an_error_of_ours_or_states(jobs: Any, workloads: Any) -> None:
    for one in ({"items": [jobs]}, jobs):
        try:
            states(json.dumps(one), json.dumps({"items": [workloads]}))
        except ConfigError as error:
            assert "not a list as JSON" in str(error)


@pytest.fixture
def cluster(clients: Path) -> Path:
    """The folder with a cluster's answers."""
    (clients / "rendered").write_text(QUEUED)
    client(clients, "kubectl", BODY.format(folder=clients))
    return clients


def test_a_job_is_made_with_its_configuration_and_stopped_by_its_workload(
    cluster: Path, tmp_path: Path
) -> None:
    kueue = Kueue(queue=tmp_path / "queue", options=("my-run",))
    (name,) = kueue.submit([request(tmp_path, "My cats!")])
    whole = json.loads((cluster / "created").read_text())
    assert (whole["apiVersion"], whole["kind"]) == ("v1", "List")
    made = {one["kind"]: one for one in whole["items"]}
    assert made.keys() == {"ConfigMap", "Job"}
    pod, key = made["Job"]["spec"]["template"]["spec"], made["Job"]["metadata"]["name"]
    assert name == f"kueue-{key}" and key.startswith("my-cats-")
    assert made["ConfigMap"] == {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": key, "labels": {LABEL: key}},
        "data": {"config.yaml": "family: flux1_dev\n"},
    }
    assert pod["volumes"] == [{"name": "config", "configMap": {"name": key}}]
    assert made["Job"]["apiVersion"] == "batch/v1" and made["Job"]["spec"]["suspend"] is True
    assert pod["containers"][0]["args"] == ["train", "/config/config.yaml"]
    assert made["Job"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "gpus", LABEL: key}
    kueue.stop(key)
    given = words(cluster, "kubectl")
    assert "--selector=kueue.x-k8s.io/job-uid=uid-1" in given
    assert given[-4:] == [
        "patch", "workload.kueue.x-k8s.io/w", "--type=merge", '--patch={"spec": {"active": false}}',
    ]  # fmt: skip
    (cluster / "jobs").write_text('{"items": []}')
    (cluster / "workloads").write_text('{"items": []}')
    assert kueue.state(key).state is State.LOST


def test_a_job_is_held_released_and_forgotten_by_its_own_name(cluster: Path, tmp_path: Path) -> None:
    kueue = Kueue(queue=tmp_path / "queue", options=("my-run",))
    (name,) = kueue.submit([request(tmp_path)])
    key = name.removeprefix("kueue-")
    ours = json.loads((cluster / "created").read_text())["items"]
    assert all(one["metadata"]["labels"][LABEL] == key for one in ours)
    answer, one = cluster / "jobs", job(suspend=True)
    one["metadata"]["name"] = key
    answer.write_text(json.dumps({"items": [one]}))
    (cluster / "workloads").write_text(json.dumps({"items": [workload(active=False)]}))

    def given(act: Callable[[str], object]) -> list[str]:
        (cluster / "kubectl.words").unlink()
        act(key)
        return words(cluster, "kubectl")

    assert given(kueue.hold)[-1] == '--patch={"spec": {"active": false}}'
    assert given(kueue.release)[-1] == '--patch={"spec": {"active": true}}'
    assert given(kueue.log) == [
        "logs", f"--selector=batch.kubernetes.io/job-name={key}", "--tail=-1", "--prefix",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="it is held") as caught:
        kueue.forget(key)
    assert caught.value.problems[0].remedy == f"kubectl delete job {key}"
    # once it has ended it is not started again, and goes with its configuration
    one["status"]["conditions"] = [condition("Complete")]
    answer.write_text(json.dumps({"items": [one]}))
    with pytest.raises(ConfigError, match="it has ended"):
        kueue.release(key)
    assert given(kueue.state) == [
        "get", "jobs", f"--selector={LABEL}", "--output=json",
        "get", "workloads.kueue.x-k8s.io", "--output=json",
    ]  # fmt: skip
    assert given(kueue.forget)[-5:] == [
        "delete", "job,configmap", f"--selector={LABEL}={key}", "--ignore-not-found", "--wait=false",
    ]  # fmt: skip
    assert kueue.jobs() == []


def test_a_job_that_has_no_workload_yet_is_not_held(cluster: Path, tmp_path: Path) -> None:
    client(cluster, "kubectl", BODY.format(folder=cluster).replace("echo workload.kueue.x-k8s.io/w", ":"))
    with pytest.raises(ConfigError, match="Kueue has made no Workload of it yet"):
        Kueue(queue=tmp_path / "queue").hold("cats-1")


def test_names_are_those_that_kubernetes_takes_and_differ() -> None:
    """RFC 1123, and room for what a Job controller adds to its pods' names."""
    titles = ["My cats!", "-", "", "ÄÖÜ", "a" * 300, f"{'a' * 39}-b", "x.y_z"]
    names = [_name(title) for title in titles for _ in range(2)]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) and len(name) <= 55 for name in names)
    assert names[2].startswith("run-") and names[-1].startswith("x-y-z-")


def test_two_jobs_do_not_write_to_one_folder(cluster: Path, tmp_path: Path) -> None:
    kueue = Kueue(queue=tmp_path / "queue", options=("my-run",))
    with pytest.raises(ConfigError, match="two of these jobs write there"):
        kueue.submit([request(tmp_path), request(tmp_path)])
    assert not (cluster / "created").exists()
    (name,) = kueue.submit([request(tmp_path)])
    made = job()
    made["metadata"]["name"] = name.removeprefix("kueue-")
    (cluster / "jobs").write_text(json.dumps({"items": [made]}))
    (cluster / "workloads").write_text(json.dumps({"items": [workload()]}))
    with pytest.raises(ConfigError, match=rf"cats \({name}\) writes there"):
        kueue.submit([request(tmp_path)])
    (cluster / "jobs").write_text('{"items": []}')  # it was deleted in the cluster
    (again,) = kueue.submit([request(tmp_path)])
    assert again != name


def test_what_a_quota_refuses_leaves_nothing(cluster: Path, tmp_path: Path) -> None:
    (cluster / "full").touch()
    with pytest.raises(ConfigError, match="kubectl create: exceeded quota"):
        Kueue(queue=tmp_path / "queue", options=("my-run",)).submit([request(tmp_path)])
    assert "delete" in words(cluster, "kubectl")
    assert not records.kept(tmp_path / "queue")


def test_a_job_that_is_held_is_refused(cluster: Path, tmp_path: Path) -> None:
    """Its Workload, by which it is held, is made some time after it."""
    with pytest.raises(ConfigError, match="no job that is held"):
        Kueue(queue=tmp_path / "queue", options=("my-run",)).submit([request(tmp_path, held=True)])
    assert not (cluster / "created").exists()


@pytest.mark.parametrize(
    ("rendered", "what"),
    [
        ("kind: JobSet", "it has 0 Jobs"),
        (f"{QUEUED}---\n{QUEUED}", "it has 2 Jobs"),
        (QUEUED.replace("suspend: true", "suspend: false"), "its Job is not queued"),
        (QUEUED.replace("queue-name", "other"), "its Job is not queued"),
        (QUEUED.replace("name: config,", "name: other,"), "no volume config"),
        ("a: [", "no YAML"),
    ],
)
def test_a_kustomization_that_does_not_fit_is_refused(
    cluster: Path, tmp_path: Path, rendered: str, what: str
) -> None:
    (cluster / "rendered").write_text(rendered)
    with pytest.raises(ConfigError, match=what):
        Kueue(queue=tmp_path / "queue", options=("my-run",)).submit([request(tmp_path)])
    assert not (cluster / "created").exists()


@pytest.mark.container
@pytest.mark.parametrize("chosen", [["kueue"], ["indexed-job", "kueue"]])
def test_the_overlays_job_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: list[str]
) -> None:
    import kubernetes_validate

    monkeypatch.setenv("PATH", f"{Path(kubectl()).parent}{os.pathsep}{os.environ['PATH']}")
    combined(tmp_path, "hopper-fp8", chosen)
    from trainer.queue.clusters.client import asked

    template = _template(asked(("kubectl", "kustomize", str(tmp_path))), str(tmp_path))
    config, made = _manifests(template, "cats-1a2b3c", request(tmp_path))
    for one in (config, made):
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    assert not restricted(made) and not house(made)
    # where its pods meet goes by the Job's name, which is another one now
    if "indexed-job" in chosen:
        names = [entry["name"] for entry in pod_spec(made)["containers"][0]["env"]]
        assert "JOB_NAME" in names
