"""Variables of compose files and Kubernetes manifests, beside the keys as they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from trainer.doctor.entries import Entry


def compose(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, and each variable of a service as `services.NAME.env.VARIABLE`."""
    for entry in entries:
        yield entry
        match entry.path:
            case ("services", service, "environment", name):
                if name.isdecimal():
                    name, _, value = entry.value.partition("=")
                    yield _variable(("services", service), name, value, entry.line)
                else:
                    yield _variable(("services", service), name, entry.value, entry.line)


def kubernetes(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries, and each variable of a container as `...containers.N.env.VARIABLE`."""
    known = list(entries)
    values = {entry.path: entry for entry in known}
    for entry in known:
        yield entry
        if entry.path[-1:] == ("name",) and entry.path[-3:-2] == ("env",):
            value = values.get((*entry.path[:-1], "value"))
            if value is not None:
                yield _variable(entry.path[:-3], entry.value, value.value, value.line)
        elif entry.path[:1] == ("data",) and len(entry.path) == 2 and re.fullmatch("[A-Z_0-9]+", entry.name):
            yield _variable((), entry.name, entry.value, entry.line)  # a ConfigMap of variables


def _variable(path: tuple[str, ...], name: str, value: str, line: int) -> Entry:
    return Entry(path=(*path, "env", name), value=value, line=line)
