"""The rate between the hosts of a run, measured once with a small exchange, as a row of the run's plan."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import torch

from trainer.config.secrets import redacted
from trainer.engine.context import Context
from trainer.engine.ranks import Ranks
from trainer.files import atomic, codec
from trainer.planning.plan import Decision

BYTES = 32 * 2**20
"""Bytes that all ranks send in one exchange, of which there are two: the first one connects."""
SLOW = 2e9
"""Rate in bytes a second below which something is mostly wrong: another interface, a cable, a small MTU."""
_ROW = "link"


def tell_link(context: Context, plan_file: Path | None) -> None:
    """Measure the rate between hosts, say it, and add its row to the plan in `plan_file`, where one is given.

    All ranks call it, once their devices are connected; it does nothing for one host.
    """
    if context.ranks.hosts == 1:
        return
    row = _row(context, measured(context.ranks, context.device))
    context.say(f"link: {row.value}; {row.reason}")
    if plan_file is not None:
        told = dataclasses.replace(context.plan, decisions=(*context.plan.decisions, row))
        atomic.write_text(plan_file, redacted(codec.to_json(told)))


def measured(ranks: Ranks, device: str) -> float:
    """Bytes a second that each host sends to others, and receives, while all of them do."""
    each = BYTES // (ranks.size * ranks.size)
    sent = torch.zeros(ranks.size, each, dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)
    seconds = 0.0
    for _ in range(2):
        ranks.meet()
        began = time.monotonic()
        ranks.all_to_all(received, sent)
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds = time.monotonic() - began
    slowest = max(ranks.gathered(seconds))
    return ranks.ranks_here * each * (ranks.size - ranks.ranks_here) / slowest


def _row(context: Context, rate: float) -> Decision:
    names = context.plan.rank_environment
    interface = names.get("NCCL_SOCKET_IFNAME" if context.plan.device == "cuda" else "GLOO_SOCKET_IFNAME")
    by = f"by {interface}" if interface else "by an interface that is not known here"
    what = f"{BYTES / 2**20:.0f} MiB between {context.ranks.hosts} hosts, {by}"
    value = f"{rate / 1e9:.2g} GB/s"
    if rate < SLOW:
        what += (
            f"; below {SLOW / 1e9:.0f} GB/s: name the fast interface in NCCL_SOCKET_IFNAME and"
            " GLOO_SOCKET_IFNAME on each host, look at its cable and MTU (docs/several-machines.md)"
        )
    return Decision(_ROW, value, "measured", what)
