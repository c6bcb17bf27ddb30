"""Ways to spoil a good Job, one for each rule in k8s_rules: what the rules are tried on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.unit.container_files.k8s_files import Manifest

Damage = Callable[[Any], object]
"""Changes a pod's spec in place."""


def own(spec: Manifest) -> Any:
    """The security settings of the container."""
    return spec["containers"][0]["securityContext"]


RESTRICTED: dict[str, Damage] = {
    "hostNetwork is on": lambda spec: spec.update(hostNetwork=True),
    "hostPID is on": lambda spec: spec.update(hostPID=True),
    "hostIPC is on": lambda spec: spec.update(hostIPC=True),
    "sysctls is set": lambda spec: spec["securityContext"].update(sysctls=[{"name": "kernel.msgmax"}]),
    "volume data is hostPath": lambda spec: spec["volumes"].append(
        {"name": "data", "hostPath": {"path": "/data"}}
    ),
    "privileged": lambda spec: own(spec).update(privileged=True),
    "allowPrivilegeEscalation is not false": lambda spec: own(spec).pop("allowPrivilegeEscalation"),
    "runAsNonRoot is not true": lambda spec: spec["securityContext"].pop("runAsNonRoot"),
    "runAsUser is root or not a number": lambda spec: own(spec).update(runAsUser=0),
    "no seccomp profile": lambda spec: own(spec).update(seccompProfile={"type": "Unconfined"}),
    "capabilities are not dropped": lambda spec: own(spec)["capabilities"].update(add=["SYS_ADMIN"]),
    "procMount is set": lambda spec: own(spec).update(procMount="Unmasked"),
    "AppArmor is off": lambda spec: own(spec).update(appArmorProfile={"type": "Unconfined"}),
    "hostPort": lambda spec: spec["containers"][0]["ports"][0].update(hostPort=9464),
}
HOUSE: dict[str, Damage] = {
    "a token for the API server is mounted": lambda spec: spec.pop("automountServiceAccountToken"),
    "Services of the namespace become variables": lambda spec: spec.pop("enableServiceLinks"),
    "restartPolicy is not Never": lambda spec: spec.update(restartPolicy="OnFailure"),
    "the root file system can be written": lambda spec: own(spec).update(readOnlyRootFilesystem=False),
    "no memory limit": lambda spec: spec["containers"][0]["resources"]["limits"].pop("memory"),
}
UNRESOLVED: dict[str, Damage] = {
    "ServiceAccount other": lambda spec: spec.update(serviceAccountName="other"),
    "PersistentVolumeClaim other": lambda spec: spec["volumes"].append(
        {"name": "data", "persistentVolumeClaim": {"claimName": "other"}}
    ),
    "ConfigMap other": lambda spec: spec["volumes"].append({"name": "data", "configMap": {"name": "other"}}),
    "Secret other": lambda spec: spec["volumes"].append({"name": "data", "secret": {"secretName": "other"}}),
    "mount other": lambda spec: spec["containers"][0]["volumeMounts"].append({"name": "other"}),
    "volume other is not mounted": lambda spec: spec["volumes"].append({"name": "other", "emptyDir": {}}),
}
