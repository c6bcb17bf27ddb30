"""The plan as a table for people, and as shell exports."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from trainer.planning.plan import MemoryRow, Plan
from trainer.words.sizes import GIB
from trainer.words.tables import aligned

_WIDTH = 118
_MEMORY_NAME_WIDTH = 28


def plan_text(plan: Plan) -> str:
    """Plain text: one row a decision, memory against the budget, warnings; no newline at the end."""
    header = ("feature", "value", "source", "reason")
    rows = [header, *((row.feature, row.value, row.source, row.reason) for row in plan.decisions)]
    lines = aligned(rows, width=_WIDTH)
    lines += ["", *_memory("memory while training", plan.train_memory, plan.budget_bytes)]
    lines += ["", *_memory("memory while encoding captions and images", plan.cache_memory, plan.budget_bytes)]
    if plan.host_memory:
        lines += ["", *_memory("host memory", plan.host_memory, None)]
    for warning in plan.warnings:
        lines += ["", *textwrap.wrap(f"warning: {warning}", _WIDTH, subsequent_indent="  ")]
    return "\n".join(lines)


def environment_exports(plan: Plan) -> str:
    """One `export NAME='value'` a line for a shell, quoted so that no value is ever executed.

    As in `Plan.child_environment`, an `OMP_*` value that the shell has already stays.
    """
    lines = [f"unset {name}\n" for name in plan.unset]
    for name, value in sorted({**plan.environment, **plan.rank_environment}.items()):
        kept = f'[ -n "${{{name}+set}}" ] || ' if name.startswith("OMP_") else ""
        lines.append(f"{kept}export {name}={shlex.quote(value)}\n")
    return "".join(lines)


def _memory(title: str, rows: Sequence[MemoryRow], budget_bytes: int | None) -> list[str]:
    """One block; a budget of 0 is none to spend, of None no question."""
    total, share = sum(row.bytes for row in rows), "" if budget_bytes is None else "no budget"
    if budget_bytes:
        share = f"{total / budget_bytes:.0%} of the budget, {_size(budget_bytes).strip()}"
    table = [*((row.name, row.bytes, row.detail) for row in rows), ("sum", total, share)]
    cells = (f"  {name.ljust(_MEMORY_NAME_WIDTH)}{_size(size)}  {detail}" for name, size, detail in table)
    return [f"{title} (predicted)", *(line.rstrip() for line in cells)]


def _size(count: int) -> str:
    """Fixed width; small sizes in MiB so that tiny models show figures too."""
    return f"{count / GIB:8.2f} GiB" if count >= GIB // 10 else f"{count / 1024**2:8.2f} MiB"
