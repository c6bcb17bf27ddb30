"""k8s/components of several nodes: a Job, a JobSet and a TrainJob of the same pods, through kubectl."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.unit.container_files.k8s_files import (
    BASE,
    OF_HOSTS,
    Manifest,
    as_job,
    combined,
    container,
    environment,
    load,
    one,
    pod_spec,
)
from tests.unit.container_files.k8s_rules import house, restricted, selects, unresolved
from trainer.telemetry.status import BUDGET_SECONDS, Phase

pytestmark = pytest.mark.container
OTHERS = ("monitoring", "two-gpus", "wandb")
QUEUE = "kueue.x-k8s.io/queue-name"


def of_run(manifests: list[Manifest], name: str) -> Manifest:
    """The maker of the pods, as a Job."""
    kind = {"jobset": "JobSet", "trainjob": "TrainingRuntime"}.get(name)
    return one(manifests, "Job") if kind is None else as_job(one(manifests, kind))


def started(manifests: list[Manifest], name: str) -> Manifest:
    """The object that a cluster's queue starts."""
    return one(manifests, {"jobset": "JobSet", "trainjob": "TrainJob"}.get(name, "Job"))


@pytest.mark.parametrize("name", OF_HOSTS)
@pytest.mark.parametrize(
    ("overlay", "others"), [("hopper-fp8", OTHERS), ("cpu", ()), ("dgx-spark", ("offline",))]
)
def test_pods_are_those_of_the_overlay(
    name: str, overlay: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    """But for their place among the others."""
    manifests = combined(tmp_path, overlay, [*others, name])
    job, alone = of_run(manifests, name), one(combined(tmp_path, overlay, others), "Job")
    assert not restricted(job) and not house(job)
    resolved = [manifest for manifest in manifests if manifest["kind"] != "Job"] + [job]
    assert unresolved(resolved) == (["Secret trainer-wandb"] if "wandb" in others else [])
    expected = copy.deepcopy(alone["spec"]["template"])
    affinity = pod_spec(job)["affinity"].pop("podAntiAffinity")
    (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert preferred["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    if "two-gpus" in others:
        (gpus,) = [one for one in expected["spec"]["containers"][0]["env"] if one["name"].endswith("__GPUS")]
        assert gpus["value"] == "2"
        gpus["value"] = "4"  # of both pods
    # the base's ten minutes, after the half hour in which the first pod may get its name
    probe = expected["spec"]["containers"][0]["startupProbe"]
    probe["failureThreshold"] += BUDGET_SECONDS[Phase.LOAD] // probe["periodSeconds"]
    for template in (expected, job["spec"]["template"]):
        template["spec"]["containers"][0]["env"].sort(key=lambda entry: entry["name"])
    pod = job["spec"]["template"]
    if name == "trainjob":
        assert container(job)["name"] == "node", "the torch plugin looks for it"
        container(job)["name"] = "trainer"
        # the plugin sets PET_*, and both may not be there
        assert not any(entry["name"].startswith("TRAINER_NODE") for entry in container(job)["env"])
    else:
        assert pod_spec(job).pop("subdomain") == "trainer"
        own = ("TRAINER_NODES", "TRAINER_NODE_RANK", "JOB_NAME", "TRAINER_MASTER")
        container(job)["env"] = [entry for entry in container(job)["env"] if entry["name"] not in own]
    assert pod == expected


@pytest.mark.parametrize("name", OF_HOSTS)
def test_final_codes_end_it_and_others_start_all_anew(name: str, tmp_path: Path) -> None:
    manifests = combined(tmp_path, "cpu", [name])
    job, base = of_run(manifests, name)["spec"], load(BASE / "job.yaml")[0]["spec"]
    named = container(of_run(manifests, name))["name"]
    rules = copy.deepcopy(base["podFailurePolicy"]["rules"])
    for rule in rules[1:]:
        rule["onExitCodes"]["containerName"] = named
    assert job["podFailurePolicy"]["rules"] == rules
    if name == "indexed-job":
        # a loss ends the pods of all nodes
        assert job["backoffLimit"] == job["completions"] * base["backoffLimit"]
        return
    assert job["backoffLimit"] == 0, "the first failure is the JobSet's"
    kind = "JobSet" if name == "jobset" else "TrainingRuntime"
    spec: Any = one(manifests, kind)["spec"]
    policy = (spec if name == "jobset" else spec["template"]["spec"])["failurePolicy"]
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] == base["backoffLimit"]


@pytest.mark.parametrize("name", ["indexed-job", "jobset"])
def test_each_pod_learns_its_place(name: str, tmp_path: Path) -> None:
    manifests = combined(tmp_path, "cpu", [name])
    job = of_run(manifests, name)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert environment(job)["TRAINER_NODES"] == str(spec["completions"])
    fields = {entry["name"]: entry["valueFrom"]["fieldRef"]["fieldPath"]
              for entry in container(job)["env"] if "valueFrom" in entry}  # fmt: skip
    assert fields == {
        "TRAINER_NODE_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']",
        "JOB_NAME": "metadata.labels['batch.kubernetes.io/job-name']",
    }
    # variables are put in where they stand before
    names = [entry["name"] for entry in container(job)["env"]]
    assert names.index("JOB_NAME") < names.index("TRAINER_MASTER")
    assert environment(job)["TRAINER_MASTER"] == f"$(JOB_NAME)-0.{pod_spec(job)['subdomain']}:29400"
    services = [manifest for manifest in manifests if manifest["kind"] == "Service"]
    if name == "jobset":
        # it makes one, by its own name
        assert not services and one(manifests, "JobSet")["metadata"]["name"] == pod_spec(job)["subdomain"]
        return
    (service,) = services
    assert service["metadata"]["name"] == pod_spec(job)["subdomain"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert selects({"matchLabels": service["spec"]["selector"]}, spec["template"]["metadata"]["labels"])


def test_a_train_job_has_two_nodes_of_its_runtime(tmp_path: Path) -> None:
    manifests = combined(tmp_path, "cpu", ["trainjob"])
    job, runtime = one(manifests, "TrainJob"), one(manifests, "TrainingRuntime")
    group, _, _ = runtime["apiVersion"].partition("/")
    name = runtime["metadata"]["name"]
    assert job["spec"]["runtimeRef"] == {"apiGroup": group, "kind": "TrainingRuntime", "name": name}
    assert job["spec"]["trainer"] == {"numNodes": 2}, "numProcPerNode is the supervisor's"
    assert runtime["spec"]["mlPolicy"]["torch"] == {}
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node"
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["metadata"]["labels"] == label
    assert not {"completions", "parallelism"} & replicated["template"]["spec"].keys()


@pytest.mark.parametrize("name", OF_HOSTS)
def test_kueue_takes_it(name: str, tmp_path: Path) -> None:
    manifests = combined(tmp_path, "cpu", [name, "kueue"])
    queued = started(manifests, name)
    assert queued["metadata"]["labels"][QUEUE] == one(manifests, "LocalQueue")["metadata"]["name"]
    assert queued["spec"]["suspend"] is True
    assert "Job" not in {manifest["kind"] for manifest in manifests} or name == "indexed-job"


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_kueue_before_it_is_refused(name: str, tmp_path: Path) -> None:
    """It would suspend the Jobs inside, which its operator starts, and not what is queued."""
    with pytest.raises(AssertionError, match="spec/suspend failed: test failed"):
        combined(tmp_path, "cpu", ["kueue", name])


@pytest.mark.parametrize("name", OF_HOSTS)
def test_pods_reach_each_other_and_their_folders(name: str, tmp_path: Path) -> None:
    manifests = combined(tmp_path, "cpu", [name, "offline"] if name == "indexed-job" else ["offline", name])
    policy, job = one(manifests, "NetworkPolicy", "trainer-peers")["spec"], of_run(manifests, name)
    labels = job["spec"]["template"]["metadata"]["labels"]
    for direction, way in (("ingress", "from"), ("egress", "to")):
        rule = policy[direction][0]
        (peers,) = rule[way]
        assert selects(peers["podSelector"], labels) and "ports" not in rule
        # of the same namespace alone
        assert peers.keys() == {"podSelector"}
    assert selects(policy["podSelector"], labels)
    names = {(port["protocol"], port["port"]) for port in policy["egress"][1]["ports"]}
    assert names == {("UDP", 53), ("TCP", 53)}
    claims = [manifest["spec"] for manifest in manifests if manifest["kind"] == "PersistentVolumeClaim"]
    assert claims and all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims)


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_the_job_inside_is_valid(name: str, tmp_path: Path) -> None:
    import kubernetes_validate

    job = of_run(combined(tmp_path, "hopper-fp8", [name]), name)
    kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)
