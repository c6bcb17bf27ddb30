"""Start of the training process: what its commands share, from checks of the folders to the supervisor."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.cli.other_hosts import tell_end
from trainer.cli.output import print_error, say, wants_json
from trainer.cli.targets import nearest, require_writable_folder
from trainer.config import environment, launchers
from trainer.config.hosts import ONE, Hosts
from trainer.config.interpreter import python, with_safe_path
from trainer.config.launchers import Launch
from trainer.config.reading.load import Loaded
from trainer.engine.spec import SPEC_FILE, Job, Mode, Spec, read_spec, write_spec
from trainer.errors import ConfigError, ExitCode, HardwareError, Problem, meaning
from trainer.files import codec
from trainer.machine.facts import Facts
from trainer.planning import planning
from trainer.planning.plan import Plan
from trainer.telemetry.locks import is_held
from trainer.telemetry.sinks import tracker
from trainer.telemetry.status import BUDGET_SECONDS, Phase
from trainer.telemetry.supervising import record_end, runtime_folder, server, supervisor, webhook
from trainer.telemetry.supervising.jobfolder import job_folder, named_folder

_FLASH_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
_LAUNCHED = re.compile(
    r"(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|CCL_WORKER_COUNT|MPI_LOCALRANKID|PMI_(SIZE|RANK)"
    r"|(OMPI|MV2)_COMM_WORLD_\w+|(ACCELERATE|FSDP|DEEPSPEED|TORCHELASTIC)_\w+|GROUP_WORLD_SIZE"
)
"""Variables by which accelerate would wait for other processes, or be told what the plan decides.

They are left behind by launchers and allocations of several processes. Ranks are told of each other by
`rank_environments`, whoever started them.
"""
_SHARED_MODES: frozenset[Mode] = frozenset({"train", "cache"})
"""Jobs that take the user's runtime folder, of which there is one at a time; the others get their own.

`trainer health` asks about the run of this machine; a picture drawn beside it has no say in that.
"""
_READY_FILE = "ready"
"""File in the folder of a launcher's job: rank 0 is watched, and the other ranks may start."""
LOOK_SECONDS = 0.1
FREED_SECONDS = 20.0
"""Time in which a program that ended gives its memory back."""


def run_job(loaded: Loaded, facts: Facts, plan: Plan, job: Job, *, port: int | None = None) -> int:
    """Hand one job to the training process, watch over it, and return its exit code."""
    shared, launch = environment.make_runtime_dir(), launchers.found(environment.snapshot())
    shares, hosts = job.mode in _SHARED_MODES, loaded.hosts
    writes = job.mode == "train" and hosts.number == 0  # the run's folder is that of host 0
    receiver = webhook.configured() if writes else None

    problems: list[Problem] = []

    def on_end(exit_code: int, cause: str) -> None:
        problems.extend(record_end.problems_of(runtime_dir, exit_code, cause))
        if writes:
            record_end.record_and_tell(loaded.config.output_dir, runtime_dir, receiver, exit_code, cause)
        if exit_code and wants_json():
            print_error(exit_code, problems)

    if not shares:
        launch.require_one(job.mode)
        plan, hosts = plan.of_one_process, ONE
    with job_folder(shared, job.mode, launch.name) as folder:
        runtime_dir = shared if shares else folder
        spec = _spec(loaded, plan, job, hosts, runtime_dir=runtime_dir, folder=folder)
        write_spec(spec, folder / SPEC_FILE)
        environments = rank_environments(child_environment(plan, facts), plan, spec.first_rank)
        code = supervisor.supervise(
            python("-m", "trainer.engine", str(folder / SPEC_FILE)),
            environments=environments[:1] if launch.name else environments,
            ranks=len(environments),
            runtime_dir=runtime_dir,
            port=port,
            address=environment.metrics_address(),
            unified_memory=any(gpu.integrated for gpu in facts.gpus),
            on_ready=(folder / _READY_FILE).touch,
            on_end=on_end,
            among=supervisor.Among(first_rank=spec.first_rank, elsewhere=hosts.several),
        )
        if code and _is_untold(spec, code):
            tell_end(hosts, code, problems[0].what if problems else meaning(code))
        return code


def _is_untold(spec: Spec, exit_code: int) -> bool:
    """Whether other hosts, which may wait where all meet, do not know of the end of this one's ranks: none
    has come there, or what ended it there, as a kill, was no error of its own.
    """
    if not spec.came_file.exists():
        return True
    return not spec.met_file.exists() and exit_code not in tuple(ExitCode)


def _spec(loaded: Loaded, plan: Plan, job: Job, hosts: Hosts, *, runtime_dir: Path, folder: Path) -> Spec:
    """The job as the training process gets it, whose own files are in `folder`."""
    return Spec(
        **vars(job),
        config=loaded.config.model_dump(),
        sources=loaded.sources,
        plan_text=codec.to_json(plan),
        runtime_dir=str(runtime_dir),
        cache_dir=str(environment.cache_dir(loaded.config)),
        supervisor_pid=os.getpid(),
        meeting_place=str(folder / "meeting"),
        hosts=hosts.count,
        host=hosts.number,
        first_rank=hosts.number * plan.ranks_here,
        master=hosts.address,
        port=hosts.port,
    )


def follow_job(launch: Launch, mode: Mode) -> int:
    """Watch over a rank but the first of a job that rank 0's process planned; return its exit code.

    Says nothing of what that process says. Raises ConfigError where it says nothing to this one for long.
    """
    shared = environment.make_runtime_dir()
    planned = _planned_elsewhere(named_folder(shared, mode, launch.name))
    if planned is None:
        return ExitCode.STOPPED
    plan, facts = codec.from_json(Plan, planned.plan_text, "plan.json"), planning.machine_facts()
    with job_folder(shared, mode) as folder:
        write_spec(dataclasses.replace(planned, supervisor_pid=os.getpid()), folder / SPEC_FILE)
        environments = rank_environments(child_environment(plan, facts), plan)
        return supervisor.supervise_one(
            python("-m", "trainer.engine", str(folder / SPEC_FILE)),
            environment=environments[launch.rank],
            rank=launch.rank,
            ranks=launch.size,
            runtime_dir=Path(planned.runtime_dir),
        )


def _planned_elsewhere(folder: Path) -> Spec | None:
    """The job that rank 0's process plans, once its rank is watched; None where that process ends before."""
    patience, began, seen = BUDGET_SECONDS[Phase.LOAD], time.monotonic(), False
    while time.monotonic() - began < patience:
        held = is_held(folder)
        if held is not False and (folder / _READY_FILE).exists():
            with contextlib.suppress(FileNotFoundError):
                return read_spec(folder / SPEC_FILE)
        if seen and not held:
            return None
        seen = seen or held is True
        time.sleep(LOOK_SECONDS)
    raise ConfigError(
        f"rank 0 of this launch has not said within {patience:.0f} s what to do",
        where=str(folder),
        remedy="see what it says; all processes of a launch need one TRAINER_RUNTIME_DIR",
    )


def rank_environments(environ: Mapping[str, str], plan: Plan, first_rank: int = 0) -> list[dict[str, str]]:
    """The environment of each rank on this host: `environ` with the plan's variables of ranks, and those by
    which ranks know each other.
    """
    count, here = plan.ranks, plan.ranks_here
    if count == 1:
        return [dict(environ)]
    shared = {**environ, **plan.rank_environment}
    size = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(here)}
    address = {
        "MASTER_ADDR": environment.LOOPBACK,
        "MASTER_PORT": "0",
    }  # accelerate wants some; nobody listens
    # the place of its GPU, as accelerate understands it
    places = plan.devices or range(here)
    return [
        {**shared, **size, **address, "RANK": str(first_rank + number), "LOCAL_RANK": str(places[number])}
        for number in range(here)
    ]


def plain_environment() -> dict[str, str]:
    """This process's environment without the variables of launchers of several processes."""
    return _without_launcher(environment.snapshot())


def _without_launcher(environ: Mapping[str, str]) -> dict[str, str]:
    return with_safe_path({name: value for name, value in environ.items() if not _LAUNCHED.fullmatch(name)})


def child_environment(plan: Plan, facts: Facts) -> dict[str, str]:
    """This process's environment with the plan's variables and folders for compiled kernels, and without the
    variables of launchers of several processes.

    Kernels are kept in the user's cache folder, so that the next start finds them: compilers' own choices are
    temporary folders, which a container loses, and flash-attn 4 keeps nothing at all. A folder that cannot be
    written to is told, and its compiler keeps to its own choice: flash-attn 4 would fail.
    """
    environ = _without_launcher(plan.child_environment(environment.snapshot()))
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

    Another run has the port or the runtime folder, or with `writes_run` the output folder cannot be written
    or the file of the webhook or of wandb's key is not one.
    """
    runtime_folder.require_free(environment.make_runtime_dir())
    server.require_free(port, environment.metrics_address())
    if writes_run:
        webhook.configured()
        if loaded.config.train.report_to == "wandb":
            tracker.require_settings()
        require_writable_folder(loaded.config.output_dir, loaded.sources["output_dir"])


def require_free_memory(plan: Plan, facts: Facts) -> None:
    """Raise HardwareError where another program has the memory of a GPU that the plan needs.

    Waits a moment for what has just ended.
    """
    end, told = time.monotonic() + FREED_SECONDS, False
    while short := planning.short_of_memory(plan, facts, share=planning.NEEDED):
        if time.monotonic() >= end:
            visible = environment.snapshot().get("CUDA_VISIBLE_DEVICES")
            where = f", where GPU 0 is the first of CUDA_VISIBLE_DEVICES={visible}" if visible else ""
            remedy = (
                f"nvidia-smi shows which{where}; end it, take other GPUs by CUDA_VISIBLE_DEVICES, or write"
                " less as features.memory_budget"
            )
            raise HardwareError([Problem(what=one, where="GPU memory", remedy=remedy) for one in short])
        if not told:
            say(f"{short[0]}; waiting {FREED_SECONDS:.0f} s for it", err=True)
            told = True
        time.sleep(LOOK_SECONDS)
        facts = planning.machine_facts()
        if max(plan.devices, default=0) >= len(facts.gpus):
            what = f"GPU {max(plan.devices)} of the plan is gone: {len(facts.gpus)} are visible now"
            raise HardwareError(what, where="GPUs", remedy="look at nvidia-smi, and start again")
