"""Rules for manifests: functions that return the violations. A test breaks each rule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tests.unit.container_files.k8s_files import Manifest, pod_spec

# https://kubernetes.io/docs/concepts/security/pod-security-standards/, level "restricted"
RESTRICTED_VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected",
    "secret",
}  # fmt: skip
SECCOMP = {"RuntimeDefault", "Localhost"}
REFERENCES = (("persistentVolumeClaim", "claimName"), ("configMap", "name"), ("secret", "secretName"))
KIND_OF = {"persistentVolumeClaim": "PersistentVolumeClaim", "configMap": "ConfigMap", "secret": "Secret"}


def restricted(manifest: Manifest) -> list[str]:
    """Violations of the restricted pod security standard in a Job, Deployment or Pod."""
    spec = pod_spec(manifest)
    pod = spec.get("securityContext", {})
    wrong = [f"{key} is on" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    wrong += [f"{key} is set" for key in ("sysctls", "seLinuxOptions", "windowsOptions") if pod.get(key)]
    for volume in spec.get("volumes", ()):
        sources = volume.keys() - {"name"}
        if len(sources) != 1 or not sources <= RESTRICTED_VOLUMES:
            wrong.append(f"volume {volume['name']} is {', '.join(sorted(sources))}")
    for container in [*spec["containers"], *spec.get("initContainers", ())]:
        wrong += [f"{container['name']}: {what}" for what in _container(container, pod)]
    return wrong


def _container(container: Manifest, pod: Manifest) -> Iterator[str]:
    own = container.get("securityContext", {})
    both = {**pod, **own}
    if own.get("privileged"):
        yield "privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    if both.get("runAsNonRoot") is not True:
        yield "runAsNonRoot is not true"
    if not both.get("runAsUser"):
        # the standard would take a missing one, but runAsNonRoot then needs a number in the image
        yield "runAsUser is root or not a number"
    if both.get("seccompProfile", {}).get("type") not in SECCOMP:
        yield "no seccomp profile"
    capabilities = own.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
        yield "capabilities are not dropped"
    if own.get("procMount", "Default") != "Default":
        yield "procMount is set"
    if own.get("appArmorProfile", {}).get("type", "RuntimeDefault") not in SECCOMP:
        yield "AppArmor is off"
    if any("hostPort" in port for port in container.get("ports", ())):
        yield "hostPort"


def house(manifest: Manifest) -> list[str]:
    """Violations of our own rules for every pod, beyond the standard."""
    spec = pod_spec(manifest)
    wrong = []
    if spec.get("automountServiceAccountToken") is not False:
        wrong.append("a token for the API server is mounted")
    if spec.get("enableServiceLinks") is not False:
        wrong.append("Services of the namespace become variables")
    # a Deployment takes no other than its default
    if spec.get("restartPolicy") != (None if manifest["kind"] == "Deployment" else "Never"):
        wrong.append("restartPolicy is not Never")
    for container in spec["containers"]:
        if container.get("securityContext", {}).get("readOnlyRootFilesystem") is not True:
            wrong.append(f"{container['name']}: the root file system can be written")
        if "memory" not in container.get("resources", {}).get("limits", {}):
            wrong.append(f"{container['name']}: no memory limit")
    return wrong


def unresolved(manifests: Iterable[Manifest]) -> list[str]:
    """References to what is neither there nor optional, and mounts of volumes that are not there."""
    manifests = list(manifests)
    there = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    wrong = []
    for manifest in manifests:
        if manifest["kind"] == "RoleBinding":
            wanted = [manifest["roleRef"], *manifest["subjects"]]
            wrong += [
                f"{one['kind']} {one['name']}" for one in wanted if (one["kind"], one["name"]) not in there
            ]
        if manifest["kind"] not in ("Job", "Deployment", "Pod"):
            continue
        spec = pod_spec(manifest)
        account = spec.get("serviceAccountName")
        if account is not None and ("ServiceAccount", account) not in there:
            wrong.append(f"ServiceAccount {account}")
        for volume in spec["volumes"]:
            for source, key in REFERENCES:
                if source in volume and not volume[source].get("optional"):
                    wanted = (KIND_OF[source], volume[source][key])
                    wrong += [] if wanted in there else [" ".join(wanted)]
        volumes = {volume["name"] for volume in spec["volumes"]}
        mounted = [mount["name"] for c in spec["containers"] for mount in c.get("volumeMounts", ())]
        wrong += [f"mount {name}" for name in mounted if name not in volumes]
        wrong += [f"volume {name} is not mounted" for name in sorted(volumes - set(mounted))]
    return wrong


def admits(manifest: Manifest, labels: Mapping[str, str]) -> bool:
    """True if the pod's required node affinity admits a node with these labels."""
    required = pod_spec(manifest)["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    return any(
        all(_matches(expression, labels) for expression in term["matchExpressions"])
        for term in required["nodeSelectorTerms"]
    )


def _matches(expression: Manifest, labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values", [])
    assert all(isinstance(text, str) for text in values), "label values are text"
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            (bound,) = values
            return value is not None and (
                int(value) > int(bound) if operator == "Gt" else int(value) < int(bound)
            )
    raise AssertionError(f"unknown operator in {expression}")


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """True if a label selector, which may use matchLabels alone, takes these labels."""
    assert selector.keys() == {"matchLabels"}
    return selector["matchLabels"].items() <= labels.items()


def quantity_bytes(text: str) -> int:
    """Kubernetes' Mi and Gi."""
    return int(text[:-2]) * {"Mi": 1024**2, "Gi": 1024**3}[text[-2:]]
