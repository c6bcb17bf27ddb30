"""Start of the training process: what its commands share, from checks of the folders to the supervisor."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from collections.abc import Mapping
from types import FrameType

from trainer.cli.output import say
from trainer.cli.targets import nearest, require_writable_folder
from trainer.config import environment
from trainer.config.interpreter import python, with_safe_path
from trainer.config.reading.load import Loaded
from trainer.engine.spec import Job, Mode, Spec, write_spec
from trainer.errors import StoppedError
from trainer.files import codec
from trainer.machine.facts import Facts
from trainer.planning.plan import Plan
from trainer.telemetry.supervising import server, supervisor
from trainer.telemetry.supervising.jobfolder import job_folder

_FLASH_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|CCL_WORKER_COUNT|MPI_LOCALRANKID|PMI_(SIZE|RANK)"
    r"|(OMPI|MV2)_COMM_WORLD_\w+|(ACCELERATE|FSDP|DEEPSPEED)_\w+"
)
"""Variables by which accelerate would wait for other processes, or be told what the plan decides.

They are left behind by launchers and allocations of several processes, each of which is a run of its own
here.
"""
_SHARED_MODES: frozenset[Mode] = frozenset({"train", "cache"})
"""Jobs that take the user's runtime folder, of which there is one at a time; the others get their own.

`trainer health` asks about the run of this machine; a picture drawn beside it has no say in that.
"""


def run_job(loaded: Loaded, facts: Facts, plan: Plan, job: Job, *, port: int | None = None) -> int:
    """Hand one job to the training process, watch over it, and return its exit code."""
    shared = environment.make_runtime_dir()
    with job_folder(shared, job.mode) as folder:
        runtime_dir = shared if job.mode in _SHARED_MODES else folder
        spec = Spec(
            **vars(job),
            config=loaded.config.model_dump(),
            plan_text=codec.to_json(plan),
            runtime_dir=str(runtime_dir),
            cache_dir=str(environment.cache_dir(loaded.config)),
            supervisor_pid=os.getpid(),
            meeting_place=str(folder / "meeting"),
        )
        write_spec(spec, folder / "spec.json")
        return supervisor.supervise(
            python("-m", "trainer.engine", str(folder / "spec.json")),
            environments=rank_environments(
                child_environment(plan, facts),
                plan if job.mode in _SHARED_MODES else dataclasses.replace(plan, ranks=1),
            ),
            runtime_dir=runtime_dir,
            port=port,
            address=environment.metrics_address(),
            unified_memory=any(gpu.integrated for gpu in facts.gpus),
        )


def rank_environments(environ: Mapping[str, str], plan: Plan) -> list[dict[str, str]]:
    """The environment of each rank: `environ` with the plan's variables of ranks, and those by which ranks of
    one host know each other.
    """
    count = plan.ranks
    if count == 1:
        return [dict(environ)]
    shared = {**environ, **plan.rank_environment}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    address = {
        "MASTER_ADDR": environment.LOOPBACK,
        "MASTER_PORT": "0",
    }  # accelerate wants some; nobody listens
    # the place of its GPU, as accelerate understands it
    places = plan.devices or range(count)
    return [
        {**shared, **size, **address, "RANK": str(rank), "LOCAL_RANK": str(places[rank])}
        for rank in range(count)
    ]


def child_environment(plan: Plan, facts: Facts) -> dict[str, str]:
    """This process's environment with the plan's variables and folders for compiled kernels, and without the
    variables of launchers of several processes.

    Kernels are kept in the user's cache folder, so that the next start finds them: compilers' own choices are
    temporary folders, which a container loses, and flash-attn 4 keeps nothing at all. A folder that cannot be
    written to is told, and its compiler keeps to its own choice: flash-attn 4 would fail.
    """
    ours = plan.child_environment(environment.snapshot())
    environ = with_safe_path({name: value for name, value in ours.items() if not _LAUNCHED.fullmatch(name)})
    if plan.device == "cpu" and not plan.compile:
        return environ
    folder = environment.user_cache_dir() / "compile"
    folders = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    if facts.gpus:
        # its own keys leave out which GPU a kernel was made for
        major, minor = facts.on(plan.devices).gpu.capability
        folders[_FLASH_CACHE] = folder / f"flash-attn-sm{major}{minor}"
    for name, path in folders.items():
        if name in environ:
            continue
        try:
            path.mkdir(parents=True, exist_ok=True)
            _, trouble = nearest(path)
        except OSError as error:
            trouble = error.strerror or str(error)
        if trouble:
            say(f"{path} cannot be written ({trouble}): every start compiles anew", err=True)
        else:
            environ[name] = str(path)
    if _FLASH_CACHE in environ:
        environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    return environ


def require_startable(loaded: Loaded, *, port: int | None = None, writes_run: bool = False) -> None:
    """Raise ConfigError before kernels are measured, where the start after it could not succeed.

    Another run has the port or the runtime folder, or with `writes_run` the output folder cannot be written.
    """
    supervisor.require_free(environment.make_runtime_dir())
    server.require_free(port, environment.metrics_address())
    if writes_run:
        require_writable_folder(loaded.config.output_dir, loaded.sources["output_dir"])


def stop_before_start() -> None:
    """From now on SIGTERM and Ctrl-C end with 75, as they do later when the supervisor has taken over."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise StoppedError("stopped before anything was started", remedy="start it again")

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
