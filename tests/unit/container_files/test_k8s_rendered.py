"""k8s/ through kubectl: every combination renders, and what comes out is valid."""

from __future__ import annotations

import copy
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.container_files.k8s_files import (
    BASE,
    COMPONENTS,
    K8S,
    OF_HOSTS,
    OF_RUNS,
    OVERLAYS,
    Manifest,
    as_job,
    combined,
    container,
    environment,
    load,
    one,
    plain,
    pod_spec,
    render,
    rendered,
)
from tests.unit.container_files.k8s_rules import house, quantity_bytes, restricted, unresolved
from tests.unit.container_files.test_compose import SHARED_MEMORY_BYTES
from tests.unit.house.sources import ROOT
from trainer import __version__
from trainer.config.environment import CONFIG_PREFIX
from trainer.container.appliance import GROUP, USER, VOLUMES

COMBINATIONS = [
    chosen for count in range(len(OF_RUNS) + 1) for chosen in itertools.combinations(OF_RUNS, count)
]
ONE_GPU_A_NODE = ("cpu", "dgx-spark")
"""Overlays whose nodes have one GPU at most."""
SEVERAL_GPUS_A_NODE = tuple(name for name in OVERLAYS if name not in ONE_GPU_A_NODE)
NEWEST_MINORS = 3
OPERATOR, JOBSET, KUBEFLOW = (
    "monitoring.coreos.com/v1",
    "jobset.x-k8s.io/v1alpha2",
    "trainer.kubeflow.org/v1alpha1",
)
MODELLED = {
    (OPERATOR, "PodMonitor"),
    (OPERATOR, "PrometheusRule"),
    (JOBSET, "JobSet"),
    (KUBEFLOW, "TrainingRuntime"),
    (KUBEFLOW, "TrainJob"),
}
"""Custom resources that a package ships models of."""
CORE = re.compile(r"v1|(apps|batch|networking\.k8s\.io|rbac\.authorization\.k8s\.io)/v1")
UNVALIDATED = {("kueue.x-k8s.io/v1beta2", "LocalQueue"): "no package ships a schema or model of it"}
"""Kinds that nothing here validates, each with the reason."""


def everything(tmp_path: Path) -> list[Manifest]:
    """One manifest of each kind that exists, rendered by kubectl."""
    chosen = [name for name in COMPONENTS if name not in ("no-operator", "offline", *OF_HOSTS)]
    of_hosts = [manifest for name in OF_HOSTS for manifest in combined(tmp_path, "hopper-fp8", [name])]
    return combined(tmp_path, "hopper-fp8", chosen) + of_hosts + render(K8S / "files")


def kind(manifest: Manifest) -> tuple[str, str]:
    return manifest["apiVersion"], manifest["kind"]


def test_there_are_the_components() -> None:
    assert {path.name for path in (K8S / "components").iterdir()} == set(COMPONENTS)


@pytest.mark.container
@pytest.mark.parametrize("name", OVERLAYS)
def test_kubectl_merges_as_our_own_merge_does(name: str) -> None:
    """Otherwise the tests without kubectl would check other manifests than a cluster gets."""
    ours, theirs = one(plain(name), "Job"), copy.deepcopy(one(rendered(name), "Job"))
    assert theirs["metadata"].pop("labels") == theirs["spec"]["template"]["metadata"]["labels"]
    assert theirs["spec"]["template"]["metadata"]["labels"].pop("app.kubernetes.io/instance") == name
    configs = pod_spec(theirs)["volumes"]
    (config,) = [volume["configMap"] for volume in configs if "configMap" in volume]
    config["name"] = re.sub("-[a-z0-9]{10}$", "", config["name"])
    for job in (ours, theirs):
        for entries in (pod_spec(job)["volumes"], container(job)["env"]):
            entries.sort(key=lambda entry: entry["name"])
    assert theirs == ours


@pytest.mark.container
@pytest.mark.parametrize("name", OVERLAYS)
def test_every_combination_of_components_renders(name: str, tmp_path: Path) -> None:
    """Of one overlay every combination; of the others, which differ in few values, pairs and the largest."""
    possible = [one for one in COMBINATIONS if "two-gpus" not in one or name in SEVERAL_GPUS_A_NODE]
    few = [one for one in possible if len(one) <= 2 or one == possible[-1]]
    for chosen in possible if name == SEVERAL_GPUS_A_NODE[0] else few:
        manifests = combined(tmp_path, name, chosen)
        names = [(kind(manifest), manifest["metadata"]["name"]) for manifest in manifests]
        assert len(set(names)) == len(names)
        # its Secret is made by hand
        assert unresolved(manifests) == (["Secret trainer-wandb"] if "wandb" in chosen else [])
        job, kinds = one(manifests, "Job"), {manifest["kind"] for manifest in manifests}
        assert not restricted(job) and not house(job)
        assert ("PodMonitor" in kinds) == ("no-operator" not in chosen)
        assert ("PrometheusRule" in kinds) == ("monitoring" in chosen)
        assert ("LocalQueue" in kinds) == job["spec"].get("suspend", False) == ("kueue" in chosen)
        offline = "egress" not in one(manifests, "NetworkPolicy")["spec"]
        assert offline == (environment(job).get("HF_HUB_OFFLINE") == "1") == ("offline" in chosen)
        gpus = container(job)["resources"]["limits"].get("nvidia.com/gpu", 0)
        assert (gpus == 2) == ("two-gpus" in chosen)


@pytest.mark.container
def test_a_queue_takes_the_job_that_names_it(tmp_path: Path) -> None:
    manifests = combined(tmp_path, "rtx-4090", ["kueue"])
    named = one(manifests, "Job")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    assert named == one(manifests, "LocalQueue")["metadata"]["name"]


@pytest.mark.container
def test_offline_leaves_no_way_out(tmp_path: Path) -> None:
    policy = one(combined(tmp_path, "rtx-4090", ["offline"]), "NetworkPolicy")["spec"]
    assert "Egress" in policy["policyTypes"] and "egress" not in policy
    assert policy["ingress"], "Prometheus may still ask"


@pytest.mark.container
def test_a_key_for_wandb_comes_as_a_file_and_only_where_asked_for(tmp_path: Path) -> None:
    job = one(combined(tmp_path, "rtx-4090", ["wandb"]), "Job")
    folder, key = environment(job)["WANDB_API_KEY_FILE"].rsplit("/", 1)
    (mount,) = [mount for mount in container(job)["volumeMounts"] if mount["mountPath"] == folder]
    (volume,) = [volume for volume in pod_spec(job)["volumes"] if volume["name"] == mount["name"]]
    assert mount["readOnly"] and volume["secret"]["defaultMode"] == 0o440
    # the entrypoint refuses a name of a file that is not there: without the Secret there must be no pod
    assert not volume["secret"].get("optional", False)
    assert "WANDB_API_KEY_FILE" not in environment(one(plain("rtx-4090"), "Job"))
    told = f"create secret generic {volume['secret']['secretName']} --from-file={key}="
    assert told in (K8S / "components/wandb/kustomization.yaml").read_text()


@pytest.mark.container
@pytest.mark.parametrize("name", SEVERAL_GPUS_A_NODE)
def test_two_gpus_take_twice_what_one_takes(name: str, tmp_path: Path) -> None:
    """Each GPU has a process of its own, and these share no memory of the host."""
    one_gpu = container(one(rendered(name), "Job"))["resources"]
    two = container(one(combined(tmp_path, name, ["two-gpus"]), "Job"))["resources"]
    for kind_of, values in one_gpu.items():
        for resource, value in values.items():
            number, unit = re.fullmatch(r"(\d+)(\D*)", str(value)).groups()  # type: ignore[union-attr]
            assert str(two[kind_of][resource]) == f"{2 * int(number)}{unit}", (kind_of, resource)
    assert two.keys() == one_gpu.keys()


@pytest.mark.container
def test_two_gpus_where_one_would_be_asked_for_after_all_are_refused(tmp_path: Path) -> None:
    """Over an overlay without a GPU, and in the list of an overlay whose own patch comes later."""
    with pytest.raises(AssertionError, match="~1gpu failed: test failed"):
        combined(tmp_path, "cpu", ["two-gpus"])
    shutil.copytree(K8S, tmp_path / "k8s")
    overlay = tmp_path / "k8s/overlays/hopper-fp8"
    with (overlay / "kustomization.yaml").open("a") as file:
        file.write("components: [../../components/two-gpus]\n")
    with pytest.raises(AssertionError, match="test operation does not apply"):
        render(overlay)


def test_two_gpus_are_written_down_so_that_none_is_held_for_nothing() -> None:
    (patch,) = load(K8S / "components/two-gpus/job.yaml")
    assert environment(patch) == {CONFIG_PREFIX + "PARALLEL__GPUS": "2"}
    (volume,) = pod_spec(patch)["volumes"]
    assert container(patch)["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
    # the kernel counts it as the container's memory, so it must end somewhere
    assert volume["emptyDir"]["medium"] == "Memory"
    assert quantity_bytes(volume["emptyDir"]["sizeLimit"]) == SHARED_MEMORY_BYTES


@pytest.mark.container
def test_the_dashboard_is_where_grafana_looks(tmp_path: Path) -> None:
    manifests = combined(tmp_path, "rtx-4090", ["monitoring"])
    (dashboard,) = [m for m in manifests if m["metadata"]["name"] == "trainer-dashboard"]
    assert dashboard["metadata"]["labels"]["grafana_dashboard"] == "1"
    source = (ROOT / "compose/monitoring/grafana/dashboards/trainer.json").read_text()
    assert dashboard["data"] == {"trainer.json": source}


@pytest.mark.container
def test_the_example_of_an_own_run_renders(tmp_path: Path) -> None:
    """The one in the comment at the top of the base."""
    text = (BASE / "kustomization.yaml").read_text()
    (example,) = re.findall(r"^#   resources:.*\n(?:#   .*\n)+", text, re.M)
    own = yaml.safe_load(example.replace("#   ", ""))
    assert own.keys() == {"resources", "components", "images", "configMapGenerator", "patches"}
    for key in ("resources", "components"):
        own[key] = [os.path.relpath(ROOT / folder, tmp_path) for folder in own[key]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "my-cats.yaml").write_text("family: flux1_dev\n")
    manifests = render(tmp_path)
    job = one(manifests, "Job")
    assert not unresolved(manifests)
    assert container(job)["image"] == f"registry.example.com/trainer:{__version__}-rtx-4090"
    assert container(job)["args"] == ["train", "/config/my-cats.yaml"]
    (config,) = [m for m in manifests if m["metadata"]["name"].startswith("trainer-config")]
    assert config["data"].keys() > {"my-cats.yaml", "quickstart.yaml"}


@pytest.mark.container
def test_a_changed_configuration_is_another_config_map(tmp_path: Path) -> None:
    names = set()
    for text in ("family: flux1_dev\n", "family: llama\n"):
        (tmp_path / "my.yaml").write_text(text)
        own = {
            "resources": [os.path.relpath(K8S / "overlays/cpu", tmp_path)],
            "configMapGenerator": [{"name": "trainer-config", "behavior": "merge", "files": ["my.yaml"]}],
        }
        (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
        (volume,) = [v for v in pod_spec(one(render(tmp_path), "Job"))["volumes"] if v["name"] == "config"]
        names.add(volume["configMap"]["name"])
    assert len(names) == 2


def test_the_pod_for_files_has_the_claims_of_the_job() -> None:
    (pod,) = load(K8S / "files/pod.yaml")
    (image,) = load(K8S / "files/kustomization.yaml")[0]["images"]
    assert (image["name"], image["newTag"]) == (container(pod)["image"], f"{__version__}-cpu")
    assert not restricted(pod) and not house(pod)
    assert not unresolved([pod, *load(BASE / "volumes.yaml")])
    context = pod_spec(pod)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, GROUP, GROUP)
    places = {mount["name"]: mount["mountPath"] for mount in container(pod)["volumeMounts"]}
    held = [volume for volume in pod_spec(pod)["volumes"] if volume["name"] != "tmp"]
    claims = {volume["name"]: volume["persistentVolumeClaim"]["claimName"] for volume in held}
    folders = {volume.name: volume.path for volume in VOLUMES if volume.name != "config"}
    assert places == folders | {"tmp": "/tmp"}
    assert claims == {name: f"trainer-{name}" for name in folders}
    # else the Job's policy and monitor would take it for a run
    assert pod["metadata"]["labels"] == {"app.kubernetes.io/name": "trainer-files"}


@pytest.mark.container
def test_core_objects_are_valid_in_three_kubernetes_versions(tmp_path: Path) -> None:
    import kubernetes_validate
    from kubernetes_validate.utils import all_versions

    minors = {tuple(map(int, version.split(".")[:2])) for version in all_versions()}
    manifests = [manifest for name in OVERLAYS for manifest in rendered(name)] + everything(tmp_path)
    core = [manifest for manifest in manifests if kind(manifest) not in MODELLED | UNVALIDATED.keys()]
    kinds = {manifest["kind"] for manifest in core}
    assert {"Job", "Pod", "Deployment", "Role", "NetworkPolicy", "PersistentVolumeClaim"} < kinds
    for major, minor in sorted(minors)[-NEWEST_MINORS:]:
        for manifest in core:
            used = kubernetes_validate.validate(manifest, f"{major}.{minor}", strict=True)
            assert used == f"{major}.{minor}"


@pytest.mark.container
@pytest.mark.parametrize(
    "damage",
    [
        lambda spec: spec.update(restartPolicy=True),
        lambda spec: spec.update(terminationGracePeriod=1800),
        lambda spec: spec["volumes"][0].update(emptydir={}),
        lambda spec: spec["containers"][0]["livenessProbe"].update(httpget={}),
    ],
)
def test_the_schemas_find_mistakes(damage: Callable[[Any], None]) -> None:
    import kubernetes_validate

    job = copy.deepcopy(one(rendered("cpu"), "Job"))
    damage(pod_spec(job))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, kubernetes_validate.latest_version(), strict=True)


def unknown_to_the_operator(manifest: Manifest) -> list[str]:
    """Fields that the published model of a custom resource does not know. Raises for wrong types."""
    from cloudcoil.models.prometheus_operator import v1
    from kubeflow_trainer_api import models

    model: Any = {
        "PodMonitor": v1.PodMonitor,
        "PrometheusRule": v1.PrometheusRule,
        "JobSet": models.JobsetV1alpha2JobSet,
        "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
        "TrainJob": models.TrainerV1alpha1TrainJob,
    }[manifest["kind"]]
    if manifest["kind"] in ("JobSet", "TrainingRuntime"):
        # pods are the core's, whose schema judges the Job inside: these models take neither "8Gi" nor a name
        manifest = copy.deepcopy(manifest)
        as_job(manifest)["spec"]["template"] = {}
    kept = model.model_validate(manifest).model_dump(mode="json", by_alias=True, exclude_unset=True)
    return list(_missing(manifest, kept, manifest["kind"]))


def _missing(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict):
        for key, value in given.items():
            if key in kept:
                yield from _missing(value, kept[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"
    if isinstance(given, list):
        for value, counterpart in zip(given, kept, strict=True):
            yield from _missing(value, counterpart, where)


@pytest.mark.container
def test_custom_resources_fit_their_published_models(tmp_path: Path) -> None:
    custom = [manifest for manifest in everything(tmp_path) if kind(manifest) in MODELLED]
    assert {kind(manifest) for manifest in custom} == MODELLED
    for manifest in custom:
        assert not unknown_to_the_operator(manifest)


@pytest.mark.container
def test_the_models_find_mistakes() -> None:
    monitor = copy.deepcopy(one(rendered("cpu"), "PodMonitor"))
    monitor["spec"]["podMetricsEndpoints"][0]["intervall"] = "15s"
    assert unknown_to_the_operator(monitor) == ["PodMonitor.spec.podMetricsEndpoints.intervall"]
    monitor["spec"]["podMetricsEndpoints"] = "metrics"
    with pytest.raises(ValueError, match="podMetricsEndpoints"):
        unknown_to_the_operator(monitor)


@pytest.mark.container
def test_the_models_of_several_hosts_find_mistakes(tmp_path: Path) -> None:
    train_job = one(combined(tmp_path, "cpu", ["trainjob"]), "TrainJob")
    # of versions before 2.2
    runtime = one(combined(tmp_path, "cpu", ["trainjob"]), "TrainingRuntime")
    train_job["spec"]["podTemplateOverrides"] = []
    assert unknown_to_the_operator(train_job) == ["TrainJob.spec.podTemplateOverrides"]
    runtime["spec"]["template"]["spec"]["failurePolicy"]["rules"][0]["onExitCodes"] = [70]
    assert unknown_to_the_operator(runtime) == [
        "TrainingRuntime.spec.template.spec.failurePolicy.rules.onExitCodes"
    ]
    job_set = one(combined(tmp_path, "cpu", ["jobset"]), "JobSet")
    del job_set["spec"]["failurePolicy"]["rules"][0]["action"]
    with pytest.raises(ValueError, match="action"):
        unknown_to_the_operator(job_set)


@pytest.mark.container
def test_every_kind_is_validated_or_listed(tmp_path: Path) -> None:
    """A kind that is not Kubernetes' own is checked against a model or listed as unvalidated."""
    kinds = {kind(manifest) for manifest in everything(tmp_path)}
    custom = {(version, name) for version, name in kinds if not CORE.fullmatch(version)}
    assert custom == MODELLED | UNVALIDATED.keys()


@pytest.mark.parametrize("unvalidated", UNVALIDATED, ids=" ".join)
def test_the_manual_names_what_is_unvalidated(unvalidated: tuple[str, str]) -> None:
    version, name = unvalidated
    said = f"`{name}` (`{version}`) is unvalidated: {UNVALIDATED[unvalidated]}"
    assert said in " ".join((ROOT / "DOCKER.md").read_text().split())


@pytest.mark.container
@pytest.mark.parametrize("unvalidated", UNVALIDATED, ids=" ".join)
def test_unvalidated(unvalidated: tuple[str, str]) -> None:
    """Stands in the summary of every run, until a package knows it."""
    import kubernetes_validate

    version, name = unvalidated
    newest = kubernetes_validate.latest_version()
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        kubernetes_validate.validate({"apiVersion": version, "kind": name}, newest, strict=True)
    pytest.skip(f"UNVALIDATED {' '.join(unvalidated)}: {UNVALIDATED[unvalidated]}")


@pytest.mark.container
def test_the_manuals_lines_bring_the_registry_and_leave_the_operators_object_out(tmp_path: Path) -> None:
    """DOCKER.md's own lines, run on a copy."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", (ROOT / "DOCKER.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [one for one in blocks if "newName" in one]
    script = "\n".join(line for line in block.splitlines() if not re.match(r"for |done|  ", line))
    shutil.copytree(K8S, tmp_path / "k8s")
    subprocess.run(["bash", "-euc", script], cwd=tmp_path, check=True)
    manifests = render(tmp_path / "k8s/overlays/hopper-fp8")
    version = f"registry.example/team/trainer:{__version__}"
    assert container(one(manifests, "Job"))["image"] == f"{version}-hopper-fp8"
    (files,) = render(tmp_path / "k8s/files")
    assert container(files)["image"] == f"{version}-cpu"
    assert "PodMonitor" not in {manifest["kind"] for manifest in manifests}
    pushed = re.findall(r"^for target in (.+); do$", block, re.MULTILINE)
    assert pushed == ["hopper-fp8 cpu"]
