"""Rows, verdicts and the record of `bench converge --method full`. No torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.record import to_json
from trainer.files import atomic
from trainer.machine import description
from trainer.telemetry import losses
from trainer.telemetry.measurement import Curves, Table

MOST_APART = 0.01
"""Share by which the mean loss of the last steps may differ from bf16's."""
LEAST_COSINE = 0.99
"""Cosine of a tensor's gradients at which they are taken to point where bf16's do."""
STATES = {"start": "at the start", "trained": "as trained"}
"""States in which gradients are compared, with their words."""
COLUMNS: tuple[str, ...] = (
    *("setting", f"mean loss of the last {losses.LAST} steps", f"first {losses.LAST}, of bf16"),
    *(f"last {losses.LAST}, of bf16", "held-out loss", "of bf16", "single losses apart, mean"),
    *(f"{what} {when}" for when in STATES.values() for what in ("lowest cosine of gradients", "median")),
    "lowest of a layer alone",
    *("within 1 %", "in another seed's band", f"layers' cosines {LEAST_COSINE} or more"),
)
_YES = {True: "yes", False: "no", None: ""}


def rows_of(runs: Mapping[str, Mapping[str, Any]], seeds: Collection[str]) -> list[dict[str, Any]]:
    """Figures of each run, compared with the first one's; `seeds` are runs that differ by chance alone."""
    reference = next(iter(runs.values()))
    rows: list[dict[str, Any]] = []
    for name, one in runs.items():
        row: dict[str, Any] = {"setting": name}
        if "losses" not in one:
            rows.append({**row, "problem": one["problem"]})
            continue
        row |= losses.compare(one["losses"], reference["losses"])
        row |= {key: one[key] for key in ("held_out", "proved", "problem") if one.get(key) is not None}
        if one.get("held_out") and reference.get("held_out"):
            row["held_out_ratio"] = round(one["held_out"] / reference["held_out"], 5)
        cosines = {state: found.get("cosines") for state, found in one.get("gradients", {}).items()}
        row["gradients"] = {state: summed_up(found) for state, found in cosines.items() if found}
        alone = [
            cosine for found in one.get("gradients", {}).values() for cosine in found.get("alone", {}).items()
        ]
        if alone:  # of all states, the lowest of each weight
            row["alone"] = summed_up(dict(sorted(alone, key=lambda pair: -pair[1])))
        rows.append(row)
    band = band_of(rows, seeds)
    compared = rows[1:]
    return [
        rows[0],
        *({**row, **judged(row, band)} if row["setting"] not in seeds else row for row in compared),
    ]


def summed_up(cosines: Mapping[str, float]) -> dict[str, Any]:
    """Lowest cosine and its tensor, median, and how many of how many tensors are below the bound."""
    names = sorted(cosines, key=cosines.__getitem__)
    return {
        "lowest": round(cosines[names[0]], 5),
        "lowest_tensor": names[0],
        "median": round(cosines[names[len(names) // 2]], 5),
        "below": sum(value < LEAST_COSINE for value in cosines.values()),
        "tensors": len(names),
    }


def band_of(rows: Sequence[Mapping[str, Any]], seeds: Collection[str]) -> float | None:
    """The farthest that another seed's last steps are from the reference's, as a share; None without one."""
    return max(
        (abs(row["last_loss_ratio"] - 1) for row in rows if row["setting"] in seeds and "steps" in row),
        default=None,
    )


def judged(row: Mapping[str, Any], band: float | None) -> dict[str, Any]:
    """The verdicts on a row: None where nothing was measured to judge it by."""
    apart = abs(row["last_loss_ratio"] - 1) if "last_loss_ratio" in row else None
    # of whole passes the rounding of all layers adds up over depth: that is told, and judged layer by layer
    lowest = [row["alone"]["lowest"]] if "alone" in row else []
    return {
        "band": None if band is None else round(band, 5),
        "within_1_percent": None if apart is None else apart <= MOST_APART,
        "inside_band": None if apart is None or band is None else apart <= band,
        "cosines_hold": min(lowest) >= LEAST_COSINE if lowest else None,
    }


_VERDICTS = ("within_1_percent", "inside_band", "cosines_hold")


def holds(row: Mapping[str, Any]) -> bool:
    """True where each verdict on a row was measured and holds."""
    return "problem" not in row and all(row[key] is True for key in _VERDICTS)


def sentence(row: Mapping[str, Any]) -> str:
    """The verdicts on a row for people."""
    if "last_loss_ratio" not in row:
        return f"{row['setting']}: not trained: {row['problem']}"
    parts = [
        f"the last {min(losses.LAST, row['steps'])} steps' loss is {row['last_loss_ratio']:.4f} of bf16's, "
        + ("within 1 %" if row["within_1_percent"] else "NOT within 1 %")
    ]
    if row["inside_band"] is not None:
        inside = "inside" if row["inside_band"] else "NOT inside"
        parts.append(f"{inside} another seed's band of {100 * row['band']:.2f} %")
    for state, found in row["gradients"].items():
        below = f"{found['below']} of {found['tensors']} tensors below {LEAST_COSINE}"
        parts.append(
            f"gradients {STATES[state]}: lowest cosine {found['lowest']:.4f} ({found['lowest_tensor']}), "
            f"median {found['median']:.4f}, {below}"
        )
    if "alone" in row:
        alone = row["alone"]
        parts.append(f"layers alone: lowest {alone['lowest']:.4f} ({alone['lowest_tensor']})")
    if "problem" in row:
        parts.append(row["problem"])
    return f"{row['setting']}: {'; '.join(parts)}"


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as the record's table has it."""
    if "last_loss" not in row:
        return (row["setting"], row["problem"], *[""] * (len(COLUMNS) - 2))

    def number(value: float | None, digits: int = 4) -> str:
        return "" if value is None else f"{value:.{digits}f}"

    found = [row["gradients"].get(state, {}) for state in STATES]
    return (
        row["setting"],
        number(row["last_loss"]),
        number(row["first_loss_ratio"]),
        number(row["last_loss_ratio"]),
        number(row.get("held_out")),
        number(row.get("held_out_ratio")),
        number(row["mean_apart"]),
        *(number(one.get(key)) for one in found for key in ("lowest", "median")),
        number(row.get("alone", {}).get("lowest")),
        *(_YES[row.get(key)] for key in _VERDICTS),
    )


def write(
    path: Path, text: str, rows: Sequence[Mapping[str, Any]], curves: Curves, *, title: str, month: str | None
) -> None:
    """Write docs/benchmarks/NAME.json: the table, the losses, and the verdicts' sentences below `text`."""
    said = " ".join(f"{sentence(row)}." for row in rows if "inside_band" in row)
    table = Table(
        title=title,
        text=f"{text}\n\n{said}".strip(),
        machine=description.describe(month),
        command="python -m bench converge --method full --record FILE",
        columns=COLUMNS,
        rows=tuple(map(cells, rows)),
        curves=curves,
    )
    atomic.write_text(path, to_json(table))


def printed(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as JSON, one a line."""
    return "\n".join(json.dumps(row) for row in rows)
