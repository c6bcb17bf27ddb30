"""Launchers that start a run in several processes, torchrun and accelerate launch: what their variables say.

Variables are left behind in shells and injected by clusters. A launcher is proven by TORCHELASTIC_RUN_ID or
LOCAL_RANK, `accelerate launch` of one process by ACCELERATE_DYNAMO_MODE; all others prove nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from trainer.config import environment
from trainer.config.reading.load import Loaded
from trainer.config.schema import changed
from trainer.errors import ConfigError

KEY = "parallel.gpus"
_PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_START = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT")
"""Variables that together differ between two starts, and between two tries of one."""
_ACCELERATE = "ACCELERATE_DYNAMO_MODE"
VARIABLES = (*_PLACE, *_START, _ACCELERATE)
"""Variables that launchers set for the processes that they start."""
_OTHERWISE = "where no launcher started this, unset it"


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The place of this process among those that a launcher started; without one, the only place of a run."""

    rank: int = 0
    size: int = 1
    source: str = ""
    """The variable that says so; empty without a launcher."""
    name: str = ""
    """Eight letters that are the same in all processes of one start; empty for one process."""

    def reconciled(self, loaded: Loaded) -> Loaded:
        """`loaded` with the launcher's number of processes where none is written.

        Raises ConfigError where another one is.
        """
        written = loaded.config.parallel.gpus
        if not self.source or written == self.size:
            return loaded
        if written != "auto":
            raise ConfigError(
                f"{KEY} is {written}, and the launcher started {self.size} (by {self.source})",
                where=loaded.sources[KEY],
                remedy=f"have the launcher start {written}, or write {KEY}: auto",
            )
        sources = {**loaded.sources, KEY: self.source}
        return replace(loaded, config=changed(loaded.config, {KEY: self.size}), sources=sources)

    def require_one(self, command: str) -> None:
        """Raise ConfigError where a command that one process runs was started in several."""
        if self.size > 1:
            raise ConfigError(
                f"the launcher started {self.size} processes, and one runs `trainer {command}`",
                where=self.source,
                remedy=f"start `trainer {command}` without the launcher",
            )


def found(environ: Mapping[str, str]) -> Launch:
    """The place that the variables give this process.

    Raises ConfigError with their names where they contradict each other, are incomplete, or are those of
    several machines.
    """
    given = {name: value for name in _PLACE if (value := environment.read(name, environ)) is not None}
    proof = environment.read("TORCHELASTIC_RUN_ID", environ)
    if proof is None and "LOCAL_RANK" not in given:
        if "RANK" in given:
            if "WORLD_SIZE" not in given:
                raise _incomplete("RANK", "WORLD_SIZE")
            if _number(given, "WORLD_SIZE") > 1:
                raise _several_machines("WORLD_SIZE without LOCAL_RANK")
        return _of_accelerate(environ)
    for name in _PLACE:
        if name not in given:
            raise _incomplete("LOCAL_RANK" if proof is None else "TORCHELASTIC_RUN_ID", name)
    rank, local_rank, size, local_size = (_number(given, name) for name in _PLACE)
    if local_size < size:
        raise _several_machines("LOCAL_WORLD_SIZE below WORLD_SIZE")
    if not rank == local_rank < size == local_size:
        text = ", ".join(f"{name}={given[name]}" for name in _PLACE)
        what = f"{text}: these are not the places of a run's processes on one machine"
        remedy = f"start them by `torchrun --nproc_per_node N`; {_OTHERWISE}"
        raise ConfigError(what, where="RANK", remedy=remedy)
    words = "\n".join(environment.read(name, environ) or "" for name in _START)
    name = hashlib.sha256(words.encode()).hexdigest()[:8] if size > 1 else ""
    return Launch(rank=rank, size=size, source="WORLD_SIZE", name=name)


def _of_accelerate(environ: Mapping[str, str]) -> Launch:
    """The one process that `accelerate launch` starts without a place, or the only one of a plain start."""
    if environment.read(_ACCELERATE, environ) is None:
        return Launch()
    if environment.read("MASTER_ADDR", environ) is not None:
        raise ConfigError(
            "accelerate launch was told to start several processes, and started one",
            where=f"{_ACCELERATE} with MASTER_ADDR and without RANK",
            remedy="without GPUs it starts several with --multi_gpu alone, never with --cpu; or write"
            " `torchrun --nproc_per_node N`, or `trainer train --gpus N`",
        )
    return Launch(source=f"accelerate launch, {_ACCELERATE}")


def _number(given: Mapping[str, str], name: str) -> int:
    if not given[name].strip().isdecimal():
        raise ConfigError(f'"{given[name]}" is not a number of processes', where=name, remedy=_OTHERWISE)
    return int(given[name])


def _incomplete(has: str, lacks: str) -> ConfigError:
    remedy = f"a launcher sets both: start it by `torchrun --nproc_per_node N`; {_OTHERWISE}"
    return ConfigError(f"{has} is set, and {lacks} is not", where=has, remedy=remedy)


def _several_machines(name: str) -> ConfigError:
    what = "processes on several machines were started, and a launcher starts those of one"
    remedy = (
        "start `trainer train` itself on each machine, with TRAINER_NODES, TRAINER_NODE_RANK and"
        f" TRAINER_MASTER (docs/several-machines.md), or all on one (torchrun --nnodes 1); {_OTHERWISE}"
    )
    return ConfigError(what, where=name, remedy=remedy)
