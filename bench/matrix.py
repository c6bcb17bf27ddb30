"""`bench matrix`: every family in the plans that people run, on sets of real shape, by the command line.

    python -m bench matrix --work DIR --record docs/benchmarks/matrix-h200.json
    python -m bench matrix --work DIR --record FILE --only qwen_image --gpus 0,1

Each cell is one `trainer train` of a shipped configuration at full size with random weights, on
tests/data/real_shaped, to a proved LoRA. Rows that a record holds already stay where a cell is not run
again. Cells that have not begun after `--minutes` are left out. One line of JSON a cell goes to stdout; the
exit code is 1 where a cell neither ended with a proved LoRA nor was refused before anything was loaded.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from bench import arguments as types
from bench import jobs, ours
from bench.processes import GIB, REPOSITORY
from bench.record import update_table
from tests.random_bases import build
from trainer import families
from trainer.config import environment
from trainer.errors import ExitCode
from trainer.machine import description, idle
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

SET = REPOSITORY / "tests" / "data" / "real_shaped"
MICRO_BATCHES = {"flux2_dev": 40}
"""Micro-batches of a run whose batches are of one sample, for families where they are not 120."""
_MICRO_BATCHES, _BATCHED = 120, 30
# their cells are compared with those of one caption length: a step each micro-batch gives medians of 60 steps
_COMPARED = ("qwen_image", "kandinsky5")
ONE_LENGTH = "one length, "
# a steady step is no longer than so many medians
_STEADY = 1.5
COLUMNS = (
    *("family", "cell", "what the plan chose", "result", "peak GiB", "planned", "ms a micro-batch"),
    *("fastest to slowest", "predicted", "steady after", "graphs", "compiled"),
)
_COMPILED: Mapping[str, Any] = {"compile": True}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a family and what is asked for."""

    family: str
    name: str
    features: Mapping[str, Any]
    batch: int = 1
    alike: bool = False
    """Every picture has one caption, of the set's mean length."""
    every: bool = False
    """Every micro-batch is a step."""

    def __str__(self) -> str:
        return f"{self.family}/{self.name}"


def cells() -> Iterator[Cell]:
    """All cells, the default plans first."""
    variants: dict[str, Mapping[str, Any]] = {
        "default": {},
        "compiled, graphs": {**_COMPILED, "cuda_graphs": True},
        "bf16": {**_COMPILED, "weights": "bf16", "compute": "bf16"},
    }
    for name, features in variants.items():
        for family in families.names():
            every = family in _COMPARED and name != "default"
            yield Cell(family=family, name=name, features=features, every=every)
            if every:
                yield Cell(
                    family=family, name=f"{ONE_LENGTH}{name}", features=features, every=True, alike=True
                )
    for family in ("flux1_dev", "qwen_image", "kandinsky5"):
        for name, features in variants.items():
            yield Cell(family=family, name=f"batch 4, {name}", features=features, batch=4)
    for budget in ("24GiB", "48GiB"):
        for family in ("flux1_dev", "qwen_image", "flux2_dev"):
            features = {**_COMPILED, "memory_budget": budget}
            yield Cell(family=family, name=f"budget {budget}", features=features)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cells, print them, and write the record."""
    options = parser().parse_args(arguments)
    wanted = [cell for cell in cells() if re.search(options.only, str(cell))]
    if options.list:
        print("\n".join(map(str, wanted)))
        return 0
    idle.require_gpu(remedy="use a machine with one")
    here = description.describe(options.month)  # before threads keep to a share of the cores
    if options.record and options.record.is_file():
        write_record(options, (), here)  # refused before anything is measured
    rows: list[dict[str, Any]] = []
    deadline, lock = time.monotonic() + 60 * options.minutes, threading.Lock()
    turns = _Turns(wanted, deadline)

    def run_all(number: int, gpu: str) -> None:
        # of this thread, and of the processes that it starts
        os.sched_setaffinity(0, share_of_cores(number, len(options.gpus)))
        while (cell := turns.take()) is not None:
            try:
                row = _run(cell, options.work, gpu)
            finally:
                turns.give_back(cell)
            with lock:
                rows.append(row)
                print(json.dumps(row), flush=True)
                if options.record:
                    write_record(options, rows, here)

    for family in {cell.family for cell in wanted}:
        base = options.work / "bases" / family
        if not base.is_dir():
            shutil.rmtree(half := base.with_suffix(".half"), ignore_errors=True)
            build(family, "full", half, weights=False)
            half.rename(base)
    with ThreadPoolExecutor(max_workers=len(options.gpus)) as pool:
        for future in [pool.submit(run_all, *one) for one in enumerate(options.gpus)]:
            future.result()
    for cell in wanted:
        print(f"not begun: {cell}", file=sys.stderr)
    return 0 if all(str(row["result"]).startswith(("proved", "refused")) for row in rows) else 1


def parser() -> argparse.ArgumentParser:
    """The command line."""
    one = types.command_parser("matrix", __doc__)
    one.add_argument("--work", type=types.folder, required=True, help="for bases, caches and runs")
    one.add_argument("--only", default="", metavar="REGEX", help="cells whose FAMILY/NAME it finds")
    one.add_argument("--list", action="store_true", help="print the cells, and run none")
    one.add_argument("--gpus", type=lambda text: text.split(","), default=["0"], metavar="0,1")
    one.add_argument("--minutes", type=types.amount, default=600.0, help="no cell begins later than this")
    one.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(one, "--month")
    return one


class _Turns:
    """The cells that wait, for several GPUs: no two have one family at a time, whose cells share a cache."""

    def __init__(self, wanted: list[Cell], deadline: float) -> None:
        self._wanted, self._deadline, self._busy = wanted, deadline, set[str]()
        self._changed = threading.Condition()

    def take(self) -> Cell | None:
        """The first cell of a family that no other GPU works on, once there is one; it is removed from the
        list. None where no cell waits, or the deadline, of `time.monotonic`, is over.
        """
        with self._changed:
            left = self._deadline - time.monotonic()
            self._changed.wait_for(lambda: not self._wanted or self._first() is not None, max(0.0, left))
            cell = self._first() if time.monotonic() <= self._deadline else None
            if cell is not None:
                self._wanted.remove(cell)
                self._busy.add(cell.family)
            return cell

    def give_back(self, cell: Cell) -> None:
        """Let other GPUs have cells of its family."""
        with self._changed:
            self._busy.discard(cell.family)
            self._changed.notify_all()

    def _first(self) -> Cell | None:
        return next((one for one in self._wanted if one.family not in self._busy), None)


def _run(cell: Cell, work: Path, gpu: str) -> dict[str, Any]:
    """One cell's figures, by the names of `COLUMNS`."""
    base = work / "bases" / cell.family
    folder = work / re.sub(r"\W+", "-", str(cell))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "layer.yaml").write_text(yaml.safe_dump(layer_of(cell, base, work)))
    run = folder / "run"
    for left in (run, run.with_name("run.runtime")):  # a run that goes on would measure nothing
        shutil.rmtree(left, ignore_errors=True)
    run.with_name("run.txt").unlink(missing_ok=True)
    configs = [REPOSITORY / "train_configs" / f"{cell.family}_lora.yaml", folder / "layer.yaml"]
    began = time.monotonic()
    environ = {**environment.snapshot(), "CUDA_VISIBLE_DEVICES": gpu}
    ended = jobs.train(configs, run, (), environ, 0)
    row = {"family": cell.family, "cell": cell.name, "seconds": round(time.monotonic() - began)}
    code, text = ended.code, ended.said
    refused = code in (ExitCode.HARDWARE, ExitCode.BAD_CONFIG) and not (run / METRICS_LOG).exists()
    if code != 0 and not refused:
        print("\n".join(text.strip().splitlines()[-30:]), file=sys.stderr)
        return {**row, "result": f"exit code {code}"}
    if refused:
        lines = [line for line in text.splitlines() if line]
        at = next((number for number, line in enumerate(lines) if line.startswith("error")), 0)
        return {**row, "result": f"refused: {lines[at + 1].partition(': ')[2]}"}
    proved = "proved" in text.lower()
    return {**row, "result": "proved" if proved else "no proof", **run_figures(run, text)}


def layer_of(cell: Cell, base: Path, work: Path) -> dict[str, Any]:
    """The configuration that is laid over the family's shipped one."""
    family = families.get(cell.family)
    shipped = yaml.safe_load((REPOSITORY / "train_configs" / f"{cell.family}_lora.yaml").read_text())
    alone = cell.batch > 1 or cell.every
    accumulation = 1 if alone else shipped["train"].get("gradient_accumulation_steps", 1)
    micro_batches = _BATCHED if cell.batch > 1 else MICRO_BATCHES.get(cell.family, _MICRO_BATCHES)
    if family.sample_kind == "conversation":
        sets: dict[str, str] = {"chat_file": str(_chats(cell.family, work))}
    elif family.control_counts[0]:
        sets = {"img_dir": str(SET / "edits"), "control_dir": str(SET / "controls")}
    else:
        sets = {"img_dir": str(_alike(cell.family, work) if cell.alike else SET / "pictures")}
    steps, cache = micro_batches // accumulation, work / "cache"
    return ours.base_layer(
        base, sets, cache, cell.features, steps=steps, batch=cell.batch, accumulation=accumulation
    )


def _chats(family: str, work: Path) -> Path:
    """The conversations that are no longer than what the family reads: its base's small tokenizer makes half
    as many tokens again of a text as a real one.
    """
    most = families.get(family).defaults["data"]["max_sequence_length"]
    lines = (SET / "chats.jsonl").read_text().splitlines(keepends=True)
    kept = (
        lines[int(row["file"].rpartition(":")[2]) - 1]
        for row in _lengths("chats")
        if int(row[family]) <= most
    )
    path = work / "chats" / f"{family}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(kept))
    return path


def _lengths(of: str) -> list[dict[str, str]]:
    """Rows of lengths.csv: a family's column counts the tokens of its base's small tokenizer."""
    with (SET / "lengths.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["set"] == of]


def _alike(family: str, work: Path) -> Path:
    """The pictures with one caption for all, whose token count is the nearest to the set's mean."""
    rows = _lengths("pictures")
    mean = statistics.fmean(int(row[family]) for row in rows)
    nearest = min(rows, key=lambda row: abs(int(row[family]) - mean))["file"]
    folder = work / "alike" / family
    if not folder.is_dir():
        shutil.copytree(SET / "pictures", folder)
        caption = (SET / "pictures" / nearest).with_suffix(".txt").read_bytes()
        for path in folder.glob("*.txt"):
            path.write_bytes(caption)
    return folder


def run_figures(run: Path, log: str) -> dict[str, Any]:
    """Figures of a run that ended well, by the names of `COLUMNS`."""
    plan = json.loads((run / "plan.json").read_text())
    rows = [row for row in read_metrics(run / METRICS_LOG) if "seconds_per_step" in row]
    each = plan["accumulation_steps"]
    times = [1e3 * row["seconds_per_step"] / each for row in rows]
    half = times[len(times) // 2 :]
    median = statistics.median(half)
    slow = [number for number, one in enumerate(times, 1) if one > _STEADY * median]
    graphs = re.search(r"(\d+) CUDA graphs? of (\d+) sets? of shapes", log)
    compiled = re.search(r"(\d+) graphs? compiled", log)
    largest = re.search(r"micro-batches a step, of (?:\d+ to )?(\d+) sample", log)
    return {
        "what the plan chose": ours.planned(run / "plan.json")["settings"],
        "peak GiB": round(max(row.get("device_memory_reserved_peak_bytes", 0) for row in rows) / GIB, 1),
        "planned": round(_planned(plan, int(largest[1]) if largest else plan["micro_batch_size"]) / GIB, 1),
        "ms a micro-batch": round(median),
        "fastest to slowest": f"{min(half):.0f} to {max(half):.0f}",
        "predicted": round(plan["step_milliseconds"]),
        "steady after": each * slow[-1] if slow else 0,
        "graphs": f"{graphs[1]} of {graphs[2]}" if graphs else "none",
        "compiled": int(compiled[1]) if compiled else 0,
    }


def _planned(plan: Mapping[str, Any], samples: int) -> float:
    """Bytes for micro-batches of so many samples, which may be fewer than the plan has room for.

    Of what they keep, 2 % is lost between blocks of memory, as the plan counts it.
    """
    bytes_of = {row["name"]: row["bytes"] for row in plan["train_memory"]}
    fewer = 1 - samples / plan["micro_batch_size"]
    return float(sum(bytes_of.values()) - 1.02 * fewer * bytes_of.get("activations", 0))


def share_of_cores(number: int, of: int) -> set[int]:
    """The cores of one of several GPUs: what runs beside another must not take that one's."""
    cores = sorted(os.sched_getaffinity(0))
    each = max(1, len(cores) // of)
    return set(cores[number * each : (number + 1) * each] or cores)


def write_record(
    options: argparse.Namespace, rows: Sequence[Mapping[str, Any]], where: description.Machine
) -> None:
    """The record with these rows in the place of those of the same cells."""
    update_table(
        options.record,
        [tuple(str(one.get(name, "")) for name in COLUMNS) for one in rows],
        keys=2,
        title="Every family on sets of real shape",
        where=where,
        command="python -m bench matrix --work DIR --record FILE",
        columns=COLUMNS,
        order=[(cell.family, cell.name) for cell in cells()],
    )
