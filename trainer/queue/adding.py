"""Requests made of configurations: judged and planned before they wait for a night."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer import families
from trainer.config.launchers import KEY
from trainer.config.reading.load import Loaded
from trainer.config.writing.dump import dump
from trainer.data.caption_text import encodable
from trainer.errors import ConfigError, HardwareError, Problem
from trainer.machine.driver import visible_uuids
from trainer.machine.facts import Facts
from trainer.machine.occupancy import GpuUse, is_named
from trainer.planning.data_rows import require_data, require_template
from trainer.planning.epochs import with_epochs
from trainer.planning.kept_decisions import continued
from trainer.planning.planning import plan_run, requested_profile
from trainer.queue.launcher import CPU, Request
from trainer.telemetry.run_folder.tries import Try, with_try


def request(
    loaded: Loaded,
    facts: Facts,
    known: Sequence[GpuUse],
    *,
    name: str = "",
    group: str = "",
    on: Sequence[str] = (),
    held: bool = False,
) -> Request:
    """The job of a configuration, its values written out: later edits of files change nothing.

    facts, known: this machine and its GPUs. name: without one the run folder's. on: GPUs that it must have,
    by nvidia-smi's numbers or UUIDs, or `cpu`; without it any, as many as `parallel.gpus` says, one for
    `auto`. Plans the run as if nothing else ran, and raises as `plan_run` where it cannot be done;
    ConfigError for GPUs that are not there, DataError for samples.
    """
    asked = loaded.config.parallel.gpus
    gpus = tuple(uuid_of(word, known) for word in on) or _any(facts, known)
    gpus = gpus or _of_one_kind(loaded, facts, 1 if asked == "auto" else asked)
    count = len(gpus) or (1 if asked == "auto" else asked)
    if CPU in gpus[1:] or len(set(gpus)) < len(gpus):
        raise ConfigError("name different GPUs, or `cpu` alone", where="--on", remedy="--on 0,1")
    if gpus != (CPU,) and asked not in ("auto", count):
        what = f"{KEY} is {asked}, and {count} are named"
        raise ConfigError(what, where=loaded.sources[KEY], remedy=f"name {asked}, or write {KEY}: auto")
    require_data(loaded)
    require_template(loaded)
    run = Path(os.path.realpath(loaded.config.output_dir))
    _require_text({"--name": name, "output_dir": str(run), "the working folder": str(Path.cwd())})
    return Request(
        config=dump(loaded.config, loaded.sources),
        name=name or loaded.config.output_dir.absolute().name,
        group=group,
        run=run,
        working_folder=Path.cwd(),
        gpus=gpus,
        count=count,
        seconds=_seconds(loaded, facts, gpus, count),
        held=held,
    )


def cluster_request(
    loaded: Loaded, *, name: str, group: str = "", held: bool = False, shared: bool = True
) -> Request:
    """The job of a configuration for a cluster, its values written out. Nothing is planned: this machine is
    not the one that trains.

    shared: whether the cluster's machines have the folders of this one, so that samples must be there, else
    DataError is raised.
    """
    if shared:
        require_data(loaded)
    asked, run = loaded.config.parallel.gpus, loaded.config.output_dir
    return Request(
        config=dump(loaded.config, loaded.sources),
        name=name,
        group=group,
        run=Path(os.path.realpath(run)) if shared else run,
        working_folder=Path.cwd(),
        gpus=(CPU,) if requested_profile() == CPU else (),
        count=1 if asked == "auto" else asked,
        held=held,
    )


def try_request(
    loaded: Loaded, one: Try, folder: Path, facts: Facts, known: Sequence[GpuUse], *, name: str
) -> Request:
    """The job that draws a try into `folder` by a run's configuration; on any GPU, or the CPU.

    Plans the drawing as if nothing else ran, and raises as `request` does; ConfigError where the run cannot
    be drawn so.
    """
    family, drawn = families.get(loaded.config.family), with_try(loaded, one)
    if family.control_counts[0] and not drawn.config.validation.control_images:
        what = f"{family.title} edits pictures, and the run names none"
        remedy = "`trainer sample` draws with validation.control_images, one for each prompt"
        raise ConfigError(what, where="validation.control_images", remedy=remedy)
    gpus = _any(facts, known)
    plan_run(drawn, _alone(facts, gpus, 1), requested_profile())
    return Request(
        config=dump(loaded.config, loaded.sources),
        name=name,
        run=folder,
        working_folder=Path.cwd(),
        gpus=gpus,
        pictures=one.pictures,
    )


def _require_text(given: Mapping[str, str]) -> None:
    """Raise ConfigError for names that the queue's database cannot keep."""
    problems = [
        Problem(what=f"{text!a} is not UTF-8", where=where, remedy="name it otherwise")
        for where, text in given.items()
        if not encodable(text)
    ]
    if problems:
        raise ConfigError(problems)


def _of_one_kind(loaded: Loaded, facts: Facts, count: int) -> tuple[str, ...]:
    """The GPUs that a run by hand takes, where GPUs of several kinds are here and not any `count` of them do;
    none for any.
    """
    order, kinds = visible_uuids(), facts.kinds
    if len(kinds) < 2 or len(order) < len(facts.gpus):
        return ()
    if count == 1 and all(_fits(loaded, _alone(facts, [order[kind[0]]], 1)) for kind in kinds):
        return ()
    enough = next((kind for kind in kinds if len(kind) >= count), ())  # none: the plan says so
    return tuple(order[place] for place in enough[:count])


def _fits(loaded: Loaded, facts: Facts) -> bool:
    try:
        plan_run(with_epochs(continued(loaded)), facts, requested_profile())
    except (HardwareError, ConfigError):  # of the best kind it is raised where the time is asked for
        return False
    return True


def _any(facts: Facts, known: Sequence[GpuUse]) -> tuple[str, ...]:
    """The CPU where nothing else computes here; none for any GPU. Raises HardwareError without NVML."""
    if requested_profile() == CPU or not (known or facts.gpus):
        return (CPU,)
    if not known:
        what = "the driver shows GPUs, and NVML, which tells who uses them, does not answer"
        remedy = "containers have it with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        raise HardwareError(what, where="GPUs", remedy=remedy)
    return ()


def uuid_of(word: str, known: Sequence[GpuUse]) -> str:
    """The UUID of a GPU by nvidia-smi's number or by UUID; `cpu` is itself. Raises ConfigError for others."""
    if word == CPU:
        return CPU
    found = [gpu.uuid for gpu in known if is_named(gpu, word)]
    if len(found) != 1:
        there = ", ".join(f"{gpu.index} ({gpu.name}, {gpu.uuid})" for gpu in known) or "none, only cpu"
        what = f'"{word}" names {len(found)} GPUs' if found else f'no GPU is called "{word}"'
        raise ConfigError(what, where="--on", remedy=f"GPUs here: {there}")
    return found[0]


def _seconds(loaded: Loaded, facts: Facts, gpus: Sequence[str], count: int) -> float | None:
    """Time that the run's plan predicts on its GPUs, as if it had the machine for itself."""
    counted = with_epochs(continued(loaded))
    plan = plan_run(counted, _alone(facts, gpus, count), requested_profile())
    known_length = counted.config.train.num_train_epochs is None or counted.config != loaded.config
    step = plan.step_seconds if known_length else None
    return None if step is None else counted.config.train.max_train_steps * step


def _alone(facts: Facts, gpus: Sequence[str], count: int) -> Facts:
    """The machine with its memory free, and with these GPUs, or any so many, alone."""
    alone = dataclasses.replace(facts.idle(), memory=facts.memory.idle())
    if gpus == (CPU,):
        alone = dataclasses.replace(alone, gpus=())
    elif alone.gpus:
        order = visible_uuids() if gpus else ()
        alone = alone.on([order.index(uuid) for uuid in gpus if uuid in order] or alone.kinds[0][:count])
    return alone
