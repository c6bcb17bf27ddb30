"""The place of a start among those of its run: of processes that a launcher started, and of machines."""

from __future__ import annotations

import dataclasses
import signal
import sys
import time
from dataclasses import dataclass
from types import FrameType

from trainer.cli.output import say
from trainer.config import environment, hosts, launchers
from trainer.config.hosts import Hosts
from trainer.config.launchers import KEY, Launch
from trainer.config.reading.load import Loaded
from trainer.config.schema import changed
from trainer.errors import ConfigError, ExitCode, LostError, StoppedError
from trainer.machine import network
from trainer.telemetry.status import BUDGET_SECONDS, Phase
from trainer.telemetry.stop import die_with_parent, heeded

_LOOK_SECONDS = 1.0
_TELL_AGAIN_SECONDS = 60.0
_INTERFACE = "GLOO_SOCKET_IFNAME"
_OF_THIS_MACHINE = ("127.0.0.1", "::1")
"""Addresses that programs of a machine use, as hosts of a trial do; Debian gives its own name 127.0.1.1."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The launcher's place of this process, and the machine's number."""

    launch: Launch
    hosts: Hosts

    def reconciled(self, loaded: Loaded) -> Loaded:
        """`loaded` with the machines, and with the numbers of processes that the launcher or a cluster's
        variable gives.

        Raises ConfigError where another number is written.
        """
        loaded = dataclasses.replace(self.launch.reconciled(loaded), hosts=self.hosts)
        if self.hosts.each is None:
            return loaded
        written, count = loaded.config.parallel.gpus, self.hosts.each * self.hosts.count
        each = f"PET_NPROC_PER_NODE is {self.hosts.each}"
        if written not in ("auto", count):
            raise ConfigError(
                f"{KEY} is {written}, and {each} on {self.hosts.count} hosts, which is {count}",
                where=loaded.sources[KEY],
                remedy=f"{KEY} counts over all hosts: write {count} or auto, or leave PET_NPROC_PER_NODE out",
            )
        sources = {**loaded.sources, KEY: "PET_NPROC_PER_NODE"}
        return dataclasses.replace(loaded, config=changed(loaded.config, {KEY: count}), sources=sources)


def place_of_start() -> Place:
    """The place of this process, which from now on ends with 75 when it is asked to.

    Of several hosts it waits until the name of host 0 is known here, which of a cluster may take a while.
    Raises LostError where it stays unknown, and ConfigError where variables contradict each other, or name
    another machine as host 0 than this one.
    """
    environ = environment.snapshot()
    launch = launchers.found(environ)
    found = hosts.found(environ, launched=bool(launch.source))
    stop_before_start(launch)
    if found.several:
        _require_own(found, _known(found))
    return Place(launch=launch, hosts=found)


def _known(found: Hosts) -> str:
    """The address of host 0, as numbers. Raises LostError where its name stays unknown: in a cluster that
    host may still wait for a node; on that host itself ConfigError.
    """
    patience, began, told = BUDGET_SECONDS[Phase.LOAD], time.monotonic(), -_TELL_AGAIN_SECONDS
    while True:
        try:
            return network.address_of(found.address, found.port)
        except OSError as error:
            what = f'"{found.address}" is not known here: {error.strerror}'
        waited = time.monotonic() - began
        if waited > patience:
            if found.number == 0:
                remedy = "write the name or address of this machine, as it knows itself"
                raise ConfigError(what, where=found.master_source, remedy=remedy)
            remedy = (
                "start host 0, whose name a cluster knows from then on, and all others again; or write its"
                " name or address as this machine knows it"
            )
            raise LostError(what, where=found.master_source, remedy=remedy)
        if waited - told >= _TELL_AGAIN_SECONDS:
            say(f"{found.master_source}: {what}; waiting for it up to {patience / 60:.0f} minutes", err=True)
            told = waited
        time.sleep(_LOOK_SECONDS)


def _require_own(found: Hosts, address: str) -> None:
    """Raise ConfigError where this is host 0 and the others would look for it elsewhere, or by its own name
    it would go by an address that they cannot reach.
    """
    if found.number == 0 and not network.is_own(address):
        also = "" if address == found.address else f", which is {address}"
        raise ConfigError(
            f"this is host 0, and {found.address}{also} is no address of this machine",
            where=found.master_source,
            remedy="name one of its own addresses that the others reach (`ip address` shows them); behind a"
            " bridge with forwarded ports they do not: give the container the host's network",
        )
    if found.number or not network.is_loopback(address) or address == found.address:
        return
    if environment.read(_INTERFACE):  # it does not follow from the name then
        return
    what = f"this is host 0, and {found.address} is {address} here, which only programs on this machine reach"
    if address not in _OF_THIS_MACHINE:
        remedy = (
            "write its address on the network of the hosts, take that line out of its /etc/hosts, or name the"
            f" interface of that network in {_INTERFACE} and NCCL_SOCKET_IFNAME"
        )
        raise ConfigError(what, where=found.master_source, remedy=remedy)
    if found.address != "localhost":
        say(f"warning: {found.master_source}: {what}", err=True)


def stop_before_start(launch: Launch) -> None:
    """Have SIGTERM, Ctrl-C and SIGHUP end with 75, as they do later when the supervisor has taken over.

    So does the end of a launcher, which would leave this process behind. Of several processes rank 0 says so.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        if launch.rank:
            sys.exit(ExitCode.STOPPED)
        raise StoppedError("stopped before anything was started", remedy="start it again")

    for signum in heeded((signal.SIGTERM, signal.SIGINT, signal.SIGHUP)):
        signal.signal(signum, stop)
    if launch.source:
        die_with_parent()
