"""k8s/components/ui: what the studio of a cluster may do, and that it fits the image and the claims."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from tests.unit.container_files.k8s_files import (
    BASE,
    K8S,
    OF_RUNS,
    OVERLAYS,
    Manifest,
    combined,
    container,
    environment,
    load,
    one,
    pod_spec,
    render,
    rendered,
)
from tests.unit.container_files.k8s_rules import house, restricted, selects, unresolved
from tests.unit.container_files.test_manuals import click_command
from trainer import __version__
from trainer.cli.ui import DEFAULT_PORT
from trainer.config.environment import VARIABLES
from trainer.container.appliance import GROUP, IMAGE_ENVIRONMENT, PREFIX, RUNTIME_DIR, USER, VOLUMES
from trainer.ui.access import Access
from trainer.ui.app import create_app
from trainer.ui.studio import Studio

UI = K8S / "components/ui"
NAME = "trainer-ui"


def written() -> list[Manifest]:
    """The component's manifests as they are written."""
    listed = load(UI / "kustomization.yaml")[0]["resources"]
    assert {path.name for path in UI.iterdir()} == {"kustomization.yaml", *listed}
    return [manifest for name in listed for manifest in load(UI / name)]


@pytest.fixture(params=["plain", pytest.param("kubectl", marks=pytest.mark.container)])
def manifests(request: pytest.FixtureRequest, tmp_path: Path) -> list[Manifest]:
    """The component's manifests, as written and as kubectl renders them over an overlay."""
    if request.param == "plain":
        return written()
    found = combined(tmp_path, "hopper-fp8", ["ui"])
    return [manifest for manifest in found if manifest["metadata"]["name"] == NAME]


@pytest.fixture
def deployment(manifests: list[Manifest]) -> Manifest:
    return one(manifests, "Deployment")


def test_it_has_these_objects_and_no_way_in_from_outside(manifests: list[Manifest]) -> None:
    kinds = ["Deployment", "NetworkPolicy", "Role", "RoleBinding", "Service", "ServiceAccount"]
    assert sorted(manifest["kind"] for manifest in manifests) == kinds, "no Ingress"
    assert {manifest["metadata"]["name"] for manifest in manifests} == {NAME}
    assert not [manifest for manifest in manifests if "namespace" in manifest["metadata"]]
    assert one(manifests, "Service")["spec"]["type"] == "ClusterIP"
    policy = one(manifests, "NetworkPolicy")["spec"]
    # a type without a rule forbids everything
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert "ingress" not in policy and "egress" not in policy


def test_the_pod_is_restricted_and_runs_as_the_image_does(deployment: Manifest) -> None:
    assert not restricted(deployment)
    assert not house(deployment)
    context = pod_spec(deployment)["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (USER, GROUP, GROUP)
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}, "one folder is one studio's"
    assert deployment["spec"]["replicas"] == 1
    assert "nvidia.com/gpu" not in str(container(deployment)["resources"])
    assert environment(deployment) == {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert environment(deployment).keys() <= {variable.name for variable in VARIABLES}


def test_its_account_may_start_suspend_and_read_jobs_and_nothing_else(manifests: list[Manifest]) -> None:
    verbs = ["create", "get", "list", "watch", "patch"]
    assert one(manifests, "Role")["rules"] == [
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": verbs}
    ]
    binding = one(manifests, "RoleBinding")
    assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) == ("Role", NAME)
    (subject,) = binding["subjects"]
    assert (subject["kind"], subject["name"]) == ("ServiceAccount", NAME)
    assert "namespace" not in subject, "the binding's own, whichever it is applied to"
    # nothing in the studio asks the API server yet, and house() holds the pod to it
    assert one(manifests, "ServiceAccount")["automountServiceAccountToken"] is False


def test_selectors_take_its_pod_and_no_run(manifests: list[Manifest], deployment: Manifest) -> None:
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert selects(deployment["spec"]["selector"], labels)
    policies = {m["metadata"]["name"]: m for m in [*manifests, *load(BASE / "networkpolicy.yaml")]}
    runs = {"app.kubernetes.io/name": "trainer"}
    for name, policy in policies.items():
        if policy["kind"] == "NetworkPolicy":
            selector = policy["spec"]["podSelector"]
            assert (selects(selector, labels), selects(selector, runs)) == (name == NAME, name != NAME)
    service = one(manifests, "Service")["spec"]
    assert service["selector"].items() <= labels.items() and not service["selector"].items() <= runs.items()
    (monitor,) = load(BASE / "podmonitor.yaml")
    assert not selects(monitor["spec"]["selector"], labels)
    (near,) = pod_spec(deployment)["affinity"]["podAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    assert selects(near["podAffinityTerm"]["labelSelector"], runs)


def test_the_command_shows_what_lies_on_the_claims(deployment: Manifest) -> None:
    command, given = click_command(container(deployment)["args"])
    options = command.make_context("ui", list(given)).params
    assert (options["host"], options["port"]) == ("0.0.0.0", DEFAULT_PORT)
    mounts = {mount["mountPath"]: mount for mount in container(deployment)["volumeMounts"]}
    for root, written in (("runs", True), ("data", True), ("models", False)):
        assert mounts[str(options[root])].get("readOnly", False) is not written
    assert options["folder"] is None
    assert options["runs_elsewhere"], "nothing here starts what is added to a queue"
    claims = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod_spec(deployment)["volumes"][:4]}
    folders = {volume.name: volume.path for volume in VOLUMES if volume.name != "config"}
    assert claims == {name: f"trainer-{name}" for name in folders}
    assert {mount["name"]: path for path, mount in mounts.items()} == folders | {
        "run": RUNTIME_DIR,
        "tmp": "/tmp",
    }
    empty = [volume["emptyDir"] for volume in pod_spec(deployment)["volumes"] if "emptyDir" in volume]
    assert all("sizeLimit" in volume for volume in empty)
    writable = [path for path, mount in mounts.items() if not mount.get("readOnly")]
    homes = {value for value in IMAGE_ENVIRONMENT.values() if value.startswith("/")} - {"/models"}
    for folder in [home for home in homes if not Path(home).is_relative_to(PREFIX)]:
        assert any(Path(folder).is_relative_to(mount) for mount in writable), folder


def test_references_resolve(manifests: list[Manifest]) -> None:
    assert not unresolved([*manifests, *load(BASE / "volumes.yaml")])


def test_probes_get_the_answer_that_they_want(
    manifests: list[Manifest], deployment: Manifest, tmp_path: Path
) -> None:
    """The real app is asked as the kubelet asks: by the pod's address, unless the probe names another."""
    (port,) = container(deployment)["ports"]
    assert port["containerPort"] == one(manifests, "Service")["spec"]["ports"][0]["port"] == DEFAULT_PORT
    assert one(manifests, "Service")["spec"]["ports"][0]["targetPort"] == port["name"]
    studio = Studio(folder=tmp_path, runs=tmp_path, data=tmp_path, models=tmp_path, runtime=tmp_path)
    app = create_app(studio, access=Access(tmp_path / "studio"))
    client = TestClient(app, base_url=f"http://10.1.2.3:{DEFAULT_PORT}", follow_redirects=False)
    for kind in ("startup", "readiness", "liveness"):
        asked = container(deployment)[f"{kind}Probe"]["httpGet"]
        headers = {header["name"]: header["value"] for header in asked["httpHeaders"]}
        assert asked["port"] == port["name"]
        assert client.get(asked["path"], headers=headers).status_code == 200
        assert client.get(asked["path"]).status_code == 400, "without that header no pod would be ready"
        assert client.get("/", headers=headers).status_code == 401


def test_it_takes_the_version_of_the_package(deployment: Manifest) -> None:
    assert container(deployment)["image"] == f"trainer:{__version__}-cpu"


@pytest.mark.container
def test_a_run_is_the_same_with_it_and_an_image_named_for_both_is_boths(tmp_path: Path) -> None:
    """The kustomization in the comment of the component."""
    text = (UI / "kustomization.yaml").read_text()
    (example,) = re.findall(r"^#   resources:.*\n(?:#   .*\n)+", text, re.M)
    own = yaml.safe_load(example.replace("#   ", ""))
    for key in ("resources", "components"):
        own[key] = [os.path.relpath(K8S.parent / folder, tmp_path) for folder in own[key]]
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(own))
    found = render(tmp_path)
    image = f"registry.example.com/trainer:{__version__}"
    assert container(one(found, "Deployment"))["image"] == f"{image}-cpu"
    job, alone = one(found, "Job"), one(rendered("hopper-fp8"), "Job")
    assert container(job).pop("image") == f"{image}-hopper-fp8"
    assert job == {**alone, "spec": job["spec"]} and pod_spec(job)["volumes"] == pod_spec(alone)["volumes"]
    assert not unresolved(found)


@pytest.mark.container
@pytest.mark.parametrize("name", OVERLAYS)
def test_it_goes_with_every_other_component(name: str, tmp_path: Path) -> None:
    others = [one for one in OF_RUNS if one != "two-gpus"]
    for chosen in ([], others, *([other] for other in others)):
        found = combined(tmp_path, name, [*chosen, "ui"])
        assert unresolved(found) == (["Secret trainer-wandb"] if "wandb" in chosen else [])
        deployment = one(found, "Deployment")
        assert not restricted(deployment) and not house(deployment)
        # what a component says of runs does not reach it
        assert environment(deployment).keys() == {"NVIDIA_VISIBLE_DEVICES"}
        assert "egress" not in one(found, "NetworkPolicy", NAME)["spec"]
        assert ("egress" in one(found, "NetworkPolicy", "trainer")["spec"]) == ("offline" not in chosen)
