"""Variables of the training processes: the profile's, how CUDA numbers GPUs, how ranks of one host meet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.environment import BY_SLOT, DEVICE_ORDER
from trainer.machine.facts import driver_text
from trainer.planning.choose import allocator
from trainer.planning.choose.situation import Situation
from trainer.planning.plan import Decision
from trainer.telemetry.status import BUDGET_SECONDS, HUNG_FACTOR

_NO_PEER_ACCESS = "RTX 40"
"""Part of the names of GPUs that cannot read each other's memory. accelerate looks for it too, among all GPUs
that nvidia-smi shows, and with an older driver than this one refuses to start without both variables.
"""
_SAYS_SO_ITSELF = (550, 40, 7)
"""First driver that tells NCCL so."""
_LOOPBACK = "lo"


@dataclass(frozen=True, kw_only=True)
class Variables:
    """The variables of a run's processes, with their rows."""

    of_all: dict[str, str]
    of_ranks: dict[str, str]
    """Variables of each of several processes that train together, besides those `of_all`."""
    unset: tuple[str, ...]
    rows: tuple[Decision, ...]


_Ours = tuple[str, str, str]
"""Name, value, and what it is for."""


def variables(situation: Situation) -> Variables:
    """Every variable that is set for the training processes; a value that the user gave it stays.

    Raises ConfigError as `allocator.variables`.
    """
    of_all, unset, rows = allocator.variables(situation.profile, situation.environ)
    of_ranks = dict[str, str]()
    for found, ours in ((of_all, _of_all(situation)), (of_ranks, _of_ranks(situation))):
        for name, value, why in ours:
            written = situation.environ.get(name, "").strip()
            found[name] = written or value
            source, reason = "auto", f"{value}: {why}"
            if written not in ("", value):
                source, reason = name, f"{written}, yours, in place of {value}: {why}"
            rows.append(Decision("environment", name, source, reason))
    return Variables(of_all=of_all, of_ranks=of_ranks, unset=unset, rows=tuple(rows))


def _of_all(situation: Situation) -> Iterator[_Ours]:
    facts = situation.facts
    if situation.ranks == 1 and facts.cores < facts.cpu_count:
        # libraries would start a thread for each processor that they see
        yield "OMP_NUM_THREADS", str(facts.cores), facts.processors
    if not situation.on_gpu:
        return
    yield DEVICE_ORDER, BY_SLOT, "GPUs have the numbers that nvidia-smi gives them"
    older = facts.driver is None or facts.driver < _SAYS_SO_ITSELF
    # of all that are visible: accelerate looks at each
    gpus = (*facts.gpus, *situation.others, *(gpu for _, gpu in situation.in_use))
    names = [gpu.name for gpu in gpus]
    if older and any(_NO_PEER_ACCESS in name for name in names):
        wanted = f"accelerate wants it for RTX 40 with a driver before {driver_text(_SAYS_SO_ITSELF)}"
        yield "NCCL_P2P_DISABLE", "1", f"GPUs send through host memory; {wanted}"
        yield "NCCL_IB_DISABLE", "1", f"no InfiniBand; {wanted}"


def _of_ranks(situation: Situation) -> Iterator[_Ours]:
    facts, ranks = situation.facts, situation.ranks_here
    if situation.ranks == 1:
        return
    shared = f", shared by {ranks} processes" if ranks > 1 else " for the process on this host"
    of = f" of {facts.processors}" if facts.cores < facts.cpu_count else ""
    yield "OMP_NUM_THREADS", str(max(1, facts.cores // ranks)), f"{facts.cores} cores{of}{shared}"
    if situation.hosts.several:
        yield from _between_hosts(situation)
        return
    # a host without a network, or one that does not know its own name, has this interface too
    yield "GLOO_SOCKET_IFNAME", _LOOPBACK, "the processes meet on this host, without a network"
    if situation.on_gpu:
        yield "NCCL_SOCKET_IFNAME", _LOOPBACK, "the GPUs meet on this host, without a network"


def _between_hosts(situation: Situation) -> Iterator[_Ours]:
    interface, why = situation.interface, f"the route to {situation.hosts.meeting}, where the hosts meet"
    if interface:
        yield "GLOO_SOCKET_IFNAME", interface, f"{why}, goes by it"
    if not situation.on_gpu:
        return
    if interface:
        yield "NCCL_SOCKET_IFNAME", interface, f"{why}, goes by it"
    # the lifeline and the supervisors judge who is lost; NCCL knows neither phases nor budgets
    seconds = int(2 * HUNG_FACTOR * max(BUDGET_SECONDS.values()))
    yield "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(seconds), "longer than what ends a lost or hung rank"
    yield "TORCH_NCCL_DUMP_ON_TIMEOUT", "0", "the supervisor says what was hung, and ends it"
