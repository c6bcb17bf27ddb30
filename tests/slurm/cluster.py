"""A real Slurm on this machine: munged, slurmctld and two slurmd, which are two nodes to it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port
from tests.programs import missing

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/slurm/train.sbatch"
NODES = (socket.gethostname(), f"{socket.gethostname()}-2")
"""The first is the master of a run, so its name has to be an address."""
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
KILL_WAIT_SECONDS = 20
PATIENCE_SECONDS = 120.0
SLOW = "slow"
"""File in the cluster's folder for as long as which nodes do not get ready."""
CONFIGURATION = """\
ClusterName=test
SlurmctldHost=localhost
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/spool-%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait={kill_wait}
Prolog={folder}/prolog
MinJobAge=600
GresTypes=gpu
NodeName=DEFAULT CPUs=2 RealMemory=4000 Gres=gpu:2
NodeName={nodes[0]} NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[1]}
NodeName={nodes[1]} NodeHostname={machine} NodeAddr=127.0.0.1 Port={ports[2]}
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=ALL PriorityTier=10
"""
"""Clocks of the scheduler tick faster than usual; the files of its GPUs are none."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """A cluster that runs, and its clients."""

    folder: Path
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """For the clients, with the cluster's configuration."""

    def ask(self, *words: str, **variables: str) -> str:
        """All that a client prints; it has to end well."""
        ended = subprocess.run(
            words, cwd=ROOT, env=self.environment | variables, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 0, (words, ended.stderr)
        return ended.stdout

    def submit(self, *words: str, options: tuple[str, ...] = (), **variables: str) -> str:
        """Number of a job of the script with `words` for `trainer train`."""
        own = (f"--output={self.folder}/%j.log", *options)
        return self.ask("sbatch", "--parsable", *own, str(SCRIPT), *words, **variables).strip()

    def state(self, job: str) -> str:
        """`STATE REASON`, as squeue has them."""
        return self.ask("squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T %r").strip()

    def log(self, job: str) -> str:
        path = self.folder / f"{job}.log"
        return path.read_text() if path.exists() else ""

    def wait(
        self,
        job: str,
        *,
        state: str = "",
        text: str = "",
        times: int = 1,
        seconds: float = PATIENCE_SECONDS,
    ) -> None:
        """Wait until the job's state begins with `state`, and its log has `text` so many times."""
        end = time.monotonic() + seconds
        while not (self.state(job).startswith(state) and self.log(job).count(text) >= times):
            assert time.monotonic() < end, (self.state(job), self.log(job))
            time.sleep(0.2)

    def start_now(self, job: str) -> None:
        """Take off the two minutes that Slurm lets pass before it starts a job anew, but for two seconds: one
        that starts in the second of its end it refuses.
        """
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now+2")


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """A cluster of its own in `folder`, ended with its jobs at the end."""
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent or os.geteuid() != 0:
        missing(f"a Slurm needs root and {', '.join(absent or PROGRAMS)}: `make test-slurm` installs them")
    munge = folder / "munge"
    for made in (munge, folder / "state", *(folder / f"spool-{name}" for name in NODES)):
        made.mkdir(mode=0o700)
    (munge / "key").write_bytes(secrets.token_bytes(128))
    (munge / "key").chmod(0o600)
    ports = [free_port() for _ in range(3)]
    text = CONFIGURATION.format(
        folder=folder, ports=ports, nodes=NODES, kill_wait=KILL_WAIT_SECONDS, machine=NODES[0]
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "prolog").write_text(f"#!/bin/sh\nwhile [ -e {folder}/{SLOW} ]; do sleep 0.2; done\n")
    (folder / "prolog").chmod(0o755)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n")
    cluster = Slurm(folder=folder, environment={**os.environ, "SLURM_CONF": str(folder / "slurm.conf")})
    own = [f"--{name}={munge}/{file}" for name, file in
           (("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"), ("log-file", "log"),
            ("seed-file", "seed"))]  # fmt: skip
    with _daemons(cluster) as (begin, all_run):
        begin("munged", "--foreground", "--force", *own)
        _until((munge / "socket").exists, "munged made no socket")
        begin("slurmctld", "-D")
        for name in NODES:
            begin("slurmd", "-D", "-N", name)
        _until(lambda: all_run() and _idle(cluster) == len(NODES), f"nodes are missing: see {folder}")
        try:
            yield cluster
        finally:
            cluster.ask("scancel", "--user=root")
            _until(lambda: not cluster.ask("squeue", "--noheader"), "jobs do not end")


@contextlib.contextmanager
def _daemons(cluster: Slurm) -> Iterator[tuple[Callable[..., None], Callable[[], bool]]]:
    """A function that starts one, and one that fails where one has ended. The last one is ended first."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*words: str) -> None:
        with (cluster.folder / f"{words[0]}.out").open("ab") as output:
            started.append(subprocess.Popen(words, env=cluster.environment, stdout=output, stderr=output))

    def all_run() -> bool:
        ended = [process.args for process in started if process.poll() is not None]
        assert not ended, f"{ended} ended: see {cluster.folder}"
        return True

    try:
        yield begin, all_run
    finally:
        for process in reversed(started):
            process.terminate()
            process.wait(timeout=30)


def _idle(cluster: Slurm) -> int:
    asked = subprocess.run(
        ["sinfo", "--noheader", "--Node", "--partition=main", "--format=%t"],
        env=cluster.environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return asked.stdout.split().count("idle")


def _until(holds: Callable[[], bool], complaint: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, complaint
        time.sleep(0.2)
