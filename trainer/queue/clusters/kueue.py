"""The launcher of a Kubernetes cluster with Kueue: kubectl, and a kustomization of one Job that is queued.

The Job's claims and accounts are there already, and its configuration names the container's folders.
"""

from __future__ import annotations

import contextlib
import copy
import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer.errors import ConfigError, ExitCode
from trainer.queue.clusters import records
from trainer.queue.clusters.client import asked
from trainer.queue.clusters.records import Submitted, require_own_folders
from trainer.queue.launcher import ENDED, Request, Seen, State, meaning

LABEL = "trainer-queue"
"""Label of what was submitted here: its value is the Job's name."""
_QUEUE_NAME = "kueue.x-k8s.io/queue-name"
_OWNER = "kueue.x-k8s.io/job-uid"
_MOUNT = "config"
"""Name of the volume that has the configuration."""
_FILE = "/config/config.yaml"
_CODE = re.compile(r"failed with exit code (\d+) ")
"""The Job's message where a rule of its podFailurePolicy ends it."""
_MOST_NAME = 40

Manifest = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Kueue:
    """A `Launcher` for the cluster and the namespace of kubectl's context."""

    queue: Path
    """Folder of the queue, for what was submitted."""
    options: Sequence[str] = ()
    """The folder with the kustomization, alone."""

    def submit(self, requests: Sequence[Request]) -> list[str]:
        """Take in all of these jobs or none; their names. Raises ConfigError, StorageError."""
        if len(self.options) != 1:
            remedy = "name one folder with a kustomization.yaml (docs/clusters.md)"
            raise ConfigError("which Job is to be started is not said", where="--kueue", remedy=remedy)
        if any(request.held for request in requests):
            remedy = "add it without --held, then `trainer queue hold`"
            raise ConfigError("Kueue takes no job that is held", where="--held", remedy=remedy)
        require_own_folders(self.jobs(), requests)
        template = _template(asked(("kubectl", "kustomize", self.options[0])), self.options[0])
        taken: list[Submitted] = []
        with contextlib.ExitStack() as undo:
            for request in requests:
                name = _name(request.name)
                taken.append(
                    Submitted(
                        launcher="kueue",
                        job=name,
                        name=request.name,
                        group=request.group,
                        run=str(request.run),
                    )
                )
                undo.callback(_delete, name)
                _create(_manifests(template, name, request))
                records.keep(self.queue, taken[-1])
                undo.callback(records.drop, self.queue, taken[-1])
            undo.pop_all()
        return [one.word for one in taken]

    def jobs(self) -> list[tuple[Submitted, Seen]]:
        """All jobs that were submitted here, each with its state now."""
        known = records.kept(self.queue, "kueue")
        if not known:
            return []
        found = states(
            asked(("kubectl", "get", "jobs", f"--selector={LABEL}", "--output=json")),
            asked(("kubectl", "get", "workloads.kueue.x-k8s.io", "--output=json")),
        )
        gone = Seen(state=State.LOST, words="the cluster no longer has it")
        return [(one, found.get(one.job, gone)) for one in known]

    def state(self, job: str) -> Seen:
        """The state of a job now."""
        return next(seen for one, seen in self.jobs() if one.job == job)

    def stop(self, job: str) -> None:
        """Ask a run to save and end; it is held then. One that has not begun is held."""
        self._activate(job, False)

    def hold(self, job: str) -> None:
        """The same as `stop`: Kueue has no other way to keep a job from going on."""
        self._activate(job, False)

    def release(self, job: str) -> None:
        """Let a held job start, or go on."""
        if self.state(job).state in ENDED:
            raise ConfigError("it has ended", where=f"kueue-{job}", remedy="add its configuration again")
        self._activate(job, True)

    def _activate(self, job: str, active: bool) -> None:
        """Not by the Job's own `suspend`: Kueue starts a Job again whose Workload it has admitted."""
        uid = asked(("kubectl", "get", "job", job, "--output=jsonpath={.metadata.uid}")).strip()
        owned = f"--selector={_OWNER}={uid}"
        names = asked(("kubectl", "get", "workloads.kueue.x-k8s.io", owned, "--output=name")).split()
        if not names:
            remedy = "see whether Kueue runs; kubectl delete job ends the job"
            raise ConfigError("Kueue has made no Workload of it yet", where=f"kueue-{job}", remedy=remedy)
        patch = json.dumps({"spec": {"active": active}})
        for name in names:
            asked(("kubectl", "patch", name, "--type=merge", f"--patch={patch}"))

    def log(self, job: str) -> str:
        """Output of the pods that are still there."""
        return asked(
            ("kubectl", "logs", f"--selector=batch.kubernetes.io/job-name={job}", "--tail=-1", "--prefix")
        )

    def forget(self, job: str) -> None:
        """Delete a Job that has ended, with its configuration, and take it off the list."""
        for one, seen in self.jobs():
            if one.job == job:
                if seen.state not in ENDED:
                    raise ConfigError(
                        f"it is {seen.state}", where=one.word, remedy=f"kubectl delete job {job}"
                    )
                _delete(job)
                records.drop(self.queue, one)


def _name(title: str) -> str:
    """A name of Kubernetes that nothing else has: `cats-3fa92c`."""
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower())[:_MOST_NAME].strip("-")
    return f"{plain or 'run'}-{secrets.token_hex(3)}"


def _template(text: str, folder: str) -> Manifest:
    """The only Job that a kustomization renders, which waits in a queue. Raises ConfigError."""
    try:
        found = [
            one for one in yaml.safe_load_all(text) if isinstance(one, dict) and one.get("kind") == "Job"
        ]
    except yaml.YAMLError as error:
        raise ConfigError("kubectl rendered no YAML", where=folder, remedy="see kubectl kustomize") from error
    if len(found) != 1:
        remedy = "an overlay of k8s with the component kueue has one; JobSets and TrainJobs are not taken"
        raise ConfigError(f"it has {len(found)} Jobs, and one is started", where=folder, remedy=remedy)
    (job,) = found
    if _QUEUE_NAME not in job["metadata"].get("labels", {}) or job["spec"].get("suspend") is not True:
        raise ConfigError("its Job is not queued", where=folder, remedy="add components/kueue to it")
    return dict(job)


def _manifests(template: Manifest, name: str, request: Request) -> list[Manifest]:
    """The configuration, and the Job that trains by it."""
    job = copy.deepcopy(template)
    meta, pod = job["metadata"], job["spec"]["template"]["spec"]
    meta["name"] = name
    meta["labels"] = {**meta["labels"], LABEL: name}
    pod["containers"][0]["args"] = ["train", _FILE]
    mounted = [volume for volume in pod.get("volumes", ()) if volume["name"] == _MOUNT]
    if not mounted:
        remedy = "k8s/base has one, a ConfigMap"
        raise ConfigError(
            f"its Job has no volume {_MOUNT}", where=template["metadata"]["name"], remedy=remedy
        )
    mounted[0]["configMap"] = {"name": name}
    labels = {LABEL: name}
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "labels": labels},
        "data": {Path(_FILE).name: request.config},
    }
    return [config, job]


def _create(manifests: Sequence[Manifest]) -> None:
    whole = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
    asked(("kubectl", "create", "--filename=-"), given=json.dumps(whole))


def _delete(job: str) -> None:
    asked(
        (
            "kubectl",
            "delete",
            "job,configmap",
            f"--selector={LABEL}={job}",
            "--ignore-not-found",
            "--wait=false",
        )
    )


def states(jobs: str, workloads: str) -> dict[str, Seen]:
    """The states of Jobs by their names, from two lists of kubectl as JSON. Raises ConfigError for others."""
    owned = {str(_labels(one).get(_OWNER)): one for one in _items(workloads)}
    found: dict[str, Seen] = {}
    for job in _items(jobs):
        meta = _part(job, "metadata")
        found[str(meta.get("name", ""))] = judged(job, owned.get(str(meta.get("uid")), {}))
    return found


def judged(job: Mapping[str, Any], workload: Mapping[str, Any]) -> Seen:
    """The state of a Job by its conditions, its pods and Kueue's Workload, as the cluster tells them."""
    status, conditions = _part(job, "status"), _conditions(job)
    if conditions.get("Complete"):
        return Seen(state=State.FINISHED, exit_code=ExitCode.OK)
    if failed := conditions.get("Failed"):
        code = _CODE.search(failed)
        if code is None or len(code[1]) > 3:
            return Seen(state=State.FAILED, words=f"Kubernetes: {failed}")
        return Seen(state=State.FAILED, words=meaning(int(code[1])), exit_code=int(code[1]))
    held = _part(workload, "spec").get("active") is False
    active = status.get("active") or status.get("terminating")
    if _part(job, "spec").get("suspend") is True:
        if active:
            return Seen(state=State.STOPPING, words="saves, and ends")
        waits = _conditions(workload, status="False").get("QuotaReserved", "")
        why = f"Kueue: {waits}" if waits else ""
        return Seen(state=State.HELD) if held else Seen(state=State.WAITING, words=why)
    if held:
        return Seen(state=State.STOPPING, words="saves, and ends")
    if not active:
        return Seen(state=State.WAITING, words="Kubernetes has not started its pods yet")
    if not status.get("ready"):
        return Seen(state=State.RUNNING, words="its pods start, load or encode")
    return Seen(state=State.RUNNING)


def _items(text: str) -> Iterator[Mapping[str, Any]]:
    try:
        items = json.loads(text)["items"]
        yield from (one for one in items if isinstance(one, dict))
    except (ValueError, KeyError, TypeError) as error:
        what = f"it said {text.strip()[:80]!r}, and not a list as JSON"
        raise ConfigError(what, where="kubectl get", remedy="see what it says by itself") from error


def _part(whole: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = whole.get(key)
    return found if isinstance(found, dict) else {}


def _labels(one: Mapping[str, Any]) -> Mapping[str, Any]:
    return _part(_part(one, "metadata"), "labels")


def _conditions(one: Mapping[str, Any], *, status: str = "True") -> dict[str, str]:
    """The conditions that have this status: type -> message, or the reason, or the type again."""
    found = _part(one, "status").get("conditions")
    rows = [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []
    return {
        str(row.get("type")): str(row.get("message") or row.get("reason") or row.get("type"))
        for row in rows
        if row.get("status") == status
    }
