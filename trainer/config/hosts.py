"""Machines (hosts) that train one run together: what the variables say of them, ours and a cluster's.

Each host runs the same command with its own number. Variables of a cluster are those of Kubeflow Trainer's
torch plugin (PET_*), which torchrun reads too: where a launcher started this process they are the launcher's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config import environment
from trainer.errors import ConfigError

DEFAULT_PORT = 29400
"""Port of the meeting, where the address names none; that of Kubeflow Trainer and torchrun."""
NODES, NODE_RANK, MASTER = "TRAINER_NODES", "TRAINER_NODE_RANK", "TRAINER_MASTER"
_NUMBERS = ((NODES, "PET_NNODES"), (NODE_RANK, "PET_NODE_RANK"))
"""Ours, and the cluster's of the same meaning."""
_ADDRESS, _PORT, _EACH = "PET_MASTER_ADDR", "PET_MASTER_PORT", "PET_NPROC_PER_NODE"
_BY_MACHINE = ("auto", "gpu", "cpu")
"""Words for as many processes a host as the machine has devices."""
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_HEXADECIMAL = re.compile(r"[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?")
_EXAMPLE = f"{NODES}=2 {NODE_RANK}=0 {MASTER}=host0:{DEFAULT_PORT} (docs/several-machines.md)"
_MOST = 1024


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of a run, and which of them this one is; without variables the only one."""

    count: int = 1
    number: int = 0
    """Of this host, from 0; host 0 has the first ranks, writes the run's files and is where all meet."""
    address: str = ""
    """Name or address of host 0; empty for one host."""
    port: int = DEFAULT_PORT
    each: int | None = None
    """Processes of each host, where a cluster's variable says so."""
    source: str = ""
    """The variable that gives the number of hosts; empty without one."""
    master_source: str = ""
    """The variable that names host 0; empty for one host."""

    @property
    def several(self) -> bool:
        """True where more than one host trains."""
        return self.count > 1

    @property
    def meeting(self) -> str:
        """The address and port at which the hosts meet, as they may be written."""
        return f"[{self.address}]:{self.port}" if ":" in self.address else f"{self.address}:{self.port}"


ONE = Hosts()
"""The only host of a run."""


def found(environ: Mapping[str, str], *, launched: bool = False) -> Hosts:
    """The hosts that the variables name.

    `launched`: torchrun or accelerate launch started this process, and PET_* are theirs. Raises ConfigError
    where ours and the cluster's differ, where one is missing or is not what it should be, and where a
    launcher and several hosts meet.
    """
    given = _given(environ, launched=launched)
    counts, numbers = (_same(given, names) for names in _NUMBERS)
    if counts is None:
        for name in (NODE_RANK, MASTER, "PET_NODE_RANK"):
            if name in given:
                lacks = NODES if name.startswith("TRAINER") else "PET_NNODES"
                raise _wrong(name, f"{name} is set, and {lacks} is not", f"write all three: {_EXAMPLE}")
        return ONE
    source, text = counts
    count = _number(source, text, least=1, most=_MOST)
    each = _each(given)
    if count == 1:
        if numbers is not None:
            _number(*numbers, least=0, most=0)
        return Hosts(each=each, source=source)
    if launched:
        remedy = f"start `trainer train` itself on each host, which starts its processes: {_EXAMPLE}"
        raise _wrong(source, f"{count} hosts are named, and a launcher started this process", remedy)
    if numbers is None:
        remedy = f"give each host its own number, from 0: {_EXAMPLE}"
        raise _wrong(
            source, f"{count} hosts are named, and {NODE_RANK} does not say which this one is", remedy
        )
    number = _number(*numbers, least=0, most=count - 1)
    address, port, master_source = _master(given, source, count)
    return Hosts(
        count=count,
        number=number,
        address=address,
        port=port,
        each=each,
        source=source,
        master_source=master_source,
    )


def _given(environ: Mapping[str, str], *, launched: bool) -> dict[str, str]:
    names = [ours for ours, _ in _NUMBERS] + [MASTER]
    if not launched:
        names += [theirs for _, theirs in _NUMBERS] + [_ADDRESS, _PORT, _EACH]
    read = {name: environment.read(name, environ) for name in names}
    return {name: value.strip() for name, value in read.items() if value is not None and value.strip()}


def _same(given: Mapping[str, str], names: tuple[str, str]) -> tuple[str, str] | None:
    """The variable that is set with its text; raises ConfigError where both are and differ."""
    there = [(name, given[name]) for name in names if name in given]
    if len(there) == 2 and there[0][1] != there[1][1]:
        raise _differ(*there)
    return there[0] if there else None


def _differ(one: tuple[str, str], other: tuple[str, str]) -> ConfigError:
    what = f"{one[0]} is {one[1]}, and {other[0]} is {other[1]}"
    return _wrong(one[0], what, f"unset {one[0]} where the cluster's variables are right, else {other[0]}")


def _number(name: str, text: str, *, least: int, most: int) -> int:
    if text.isascii() and text.isdecimal() and least <= int(text) <= most:
        return int(text)
    what, remedy = f'"{text}" is not a number from {least} to {most}', f"write one: {_EXAMPLE}"
    if name in _NUMBERS[1]:
        what += ", as many as there are hosts"
    if re.fullmatch(r"\d+:\d+", text):
        remedy = "a run has one number of hosts: write that"
    raise _wrong(name, what, remedy)


def _each(given: Mapping[str, str]) -> int | None:
    text = given.get(_EACH)
    return None if text is None or text in _BY_MACHINE else _number(_EACH, text, least=1, most=_MOST)


def _master(given: Mapping[str, str], source: str, count: int) -> tuple[str, int, str]:
    """Address and port of host 0, and the variable that names it."""
    theirs = _port(_PORT, given[_PORT]) if _PORT in given else None
    if MASTER not in given:
        if _ADDRESS not in given:
            what = f"{count} hosts are named, and {MASTER} does not say where they meet"
            raise _wrong(source, what, f"write the address of host 0 on each: {_EXAMPLE}")
        address, port = _parsed(_ADDRESS, given[_ADDRESS])
        if port is not None:
            raise _wrong(_ADDRESS, f'"{given[_ADDRESS]}" has a port', f"write it as {_PORT}")
        return address, theirs or DEFAULT_PORT, _ADDRESS
    address, port = _parsed(MASTER, given[MASTER])
    if _ADDRESS in given and given[_ADDRESS] != address:
        raise _differ((MASTER, given[MASTER]), (_ADDRESS, given[_ADDRESS]))
    if None not in (port, theirs) and port != theirs:
        raise _differ((MASTER, given[MASTER]), (_PORT, given[_PORT]))
    return address, port or theirs or DEFAULT_PORT, MASTER


def _parsed(name: str, text: str) -> tuple[str, int | None]:
    """Host and port of `host`, `host:port`, `[IPv6]:port`, or an IPv6 address alone."""
    inside = re.fullmatch(r"\[([^\]]+)\](?::(.*))?", text)
    if inside is not None:
        address, port = inside[1], inside[2]
    elif _HEXADECIMAL.fullmatch(text) and text.count(":") > 1:
        address, port = text, None
    else:
        address, colon, rest = text.partition(":")
        port = rest if colon else None
    if not (_HEXADECIMAL if ":" in address else _HOST).fullmatch(address):
        raise _wrong(name, f'"{text}" is not the address of a host', f"write host0 or host0:{DEFAULT_PORT}")
    return address, None if port is None else _port(name, port)


def _port(name: str, text: str) -> int:
    return _number(name, text, least=1, most=65535)


def _wrong(name: str, what: str, remedy: str) -> ConfigError:
    return ConfigError(what, where=name, remedy=remedy)
