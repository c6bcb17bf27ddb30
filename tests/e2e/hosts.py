"""Runs of several hosts on one machine: a start for each, with its own folders, that meet over loopback."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contract.runs import Case
from tests.e2e.conftest import Process, Start
from tests.ports import free_port


def start_hosts(
    start: Start,
    case: Case,
    folder: Path,
    *overrides: str,
    count: int = 2,
    only: Sequence[int] | None = None,
    port: int | None = None,
    apart: bool = False,
    own: Mapping[int, Sequence[str]] | None = None,
    variables: Mapping[int, Mapping[str, str]] | None = None,
    knobs: Mapping[int, dict[str, Any]] | None = None,
    cache: Path | None = None,
) -> list[Process]:
    """A start for each host, or for those in `only`; more overrides, variables and knobs by host.

    Each has a runtime folder and a port of its own; `apart` also an output folder and a cache.
    """
    port, started = port or free_port(), []
    for host in range(count) if only is None else only:
        place = {
            "TRAINER_NODES": str(count),
            "TRAINER_NODE_RANK": str(host),
            "TRAINER_MASTER": f"127.0.0.1:{port}",
        }
        own_folder, words = folder / f"host-{host}", [*overrides]
        if not apart:
            words.append(f"output_dir={folder / 'host-0' / 'run'}")
        started.append(
            start(
                case,
                own_folder,
                *words,
                *(own or {}).get(host, ()),
                knobs=(knobs or {}).get(host),
                cache=own_folder / "cache" if apart else cache,
                variables={**place, **(variables or {}).get(host, {})},
            )
        )
    return started
