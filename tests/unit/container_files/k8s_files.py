"""The manifests as data: put together by a small merge of our own, and as kubectl renders them."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.house.sources import ROOT
from trainer.container.appliance import TARGETS

K8S = ROOT / "k8s"
BASE = K8S / "base"
OVERLAYS = tuple(TARGETS)
OF_RUNS = ("kueue", "monitoring", "no-operator", "offline", "two-gpus", "wandb")
"""Components that change a run, or add to it."""
OF_HOSTS = ("indexed-job", "jobset", "trainjob")
"""Components that have a run on several nodes, of which it takes one, before kueue."""
COMPONENTS = (*OF_RUNS, *OF_HOSTS, "ui")
RENDER_TIMEOUT_SECONDS = 60

Manifest = dict[str, Any]


def load(path: Path) -> list[Manifest]:
    """The documents of one file, of one's own: tests change them."""
    return copy.deepcopy(_parsed(path.read_text()))


@functools.cache
def _parsed(text: str) -> list[Manifest]:
    return [document for document in yaml.safe_load_all(text) if document]


def one(manifests: Iterable[Manifest], kind: str, name: str | None = None) -> Manifest:
    """The only manifest of its kind, or of its kind and name."""
    (found,) = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind and name in (None, manifest["metadata"]["name"])
    ]
    return found


def pod_spec(manifest: Manifest) -> Manifest:
    """The pod spec of a Job's or Deployment's template, or of a Pod."""
    return manifest["spec"] if manifest["kind"] == "Pod" else manifest["spec"]["template"]["spec"]


def container(manifest: Manifest) -> Manifest:
    (only,) = pod_spec(manifest)["containers"]
    return only


def environment(manifest: Manifest) -> dict[str, str]:
    """Variables whose values are written there."""
    return {entry["name"]: entry["value"] for entry in container(manifest)["env"] if "value" in entry}


def as_job(manifest: Manifest) -> Manifest:
    """The Job that its operator makes of a JobSet or of a TrainingRuntime, as far as that is written."""
    spec = manifest["spec"] if manifest["kind"] == "JobSet" else manifest["spec"]["template"]["spec"]
    (replicated,) = spec["replicatedJobs"]
    name = {"name": f"{manifest['metadata']['name']}-{replicated['name']}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": name, "spec": replicated["template"]["spec"]}


def plain(overlay: str) -> list[Manifest]:
    """Manifests of an overlay, put together without kubectl and without kustomize's labels and hashes."""
    listed, on_top = load(BASE / "kustomization.yaml")[0], K8S / "overlays" / overlay
    manifests = [manifest for name in listed["resources"] for manifest in load(BASE / name)]
    for generator in listed["configMapGenerator"]:
        data = {Path(name).name: (BASE / name).read_text() for name in generator["files"]}
        manifests.append({"kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})
    (patch,) = load(on_top / "job.yaml")
    manifests[manifests.index(one(manifests, "Job"))] = merged(one(manifests, "Job"), patch)
    (image,) = load(on_top / "kustomization.yaml")[0]["images"]
    assert container(one(manifests, "Job"))["image"] == image["name"]
    container(one(manifests, "Job"))["image"] = f"{image['name']}:{image['newTag']}"
    return manifests


def merged(under: Any, over: Any) -> Any:
    """A strategic merge, as far as the patches here need it: lists of named entries are merged by name."""
    if isinstance(under, dict) and isinstance(over, dict):
        both = {key: merged(under[key], over[key]) for key in under.keys() & over.keys()}
        return {**under, **over, **both}
    if isinstance(under, list) and isinstance(over, list) and _named(under) and _named(over):
        entries = {entry["name"]: entry for entry in copy.deepcopy(over)}
        for entry in under:
            entries[entry["name"]] = merged(entry, entries.get(entry["name"], {}))
        return list(entries.values())
    return over


def _named(entries: list[Any]) -> bool:
    return all(isinstance(entry, dict) and "name" in entry for entry in entries)


def kubectl() -> str:
    """The program: the one named, the virtual environment's, the machine's; else skips, on CI fails."""
    beside_python = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    found = os.environ.get("TRAINER_KUBECTL") or shutil.which("kubectl", path=beside_python)
    if found is None:
        message = "no kubectl: install one, or name it in TRAINER_KUBECTL"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return found


def render(folder: Path) -> list[Manifest]:
    """Manifests that `kubectl kustomize` renders from a folder."""
    result = subprocess.run(
        [kubectl(), "kustomize", str(folder)],
        capture_output=True,
        text=True,
        timeout=RENDER_TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr, "kustomize warns"
    return [document for document in yaml.load_all(result.stdout, Loader=_Loader) if document]


# the C one is ten times as fast, and is there wherever PyYAML comes as a wheel
_Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


@functools.cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """`render` of an overlay, once a session. Read only: copy it to change it."""
    return tuple(render(K8S / "overlays" / overlay))


def combined(folder: Path, overlay: str, components: Sequence[str]) -> list[Manifest]:
    """`render` of an overlay with components, from a kustomization of a user's own in `folder`."""
    own = {
        "resources": [os.path.relpath(K8S / "overlays" / overlay, folder)],
        "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(own))
    return render(folder)
