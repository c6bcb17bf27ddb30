"""Floor 3: what finished and running runs left in their folders: settings, figures and losses by step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config import strict_yaml
from trainer.config.tree import leaves
from trainer.errors import ConfigError, DataError
from trainer.telemetry.records import METRICS_LOG, held_out_line, read_metrics

CONFIG_FILE = "config.resolved.yaml"
_GIB = 1024**3
_DEEPEST = 3
"""Folders below the one that is named are looked into this deep."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run."""

    folder: Path
    config: Mapping[str, str]
    """Every value by dotted key, as its file has it."""
    losses: Sequence[tuple[int, float]]
    """(step, loss) of every log step, oldest first."""
    held_out: Sequence[tuple[int, float]]
    """(step, loss) of every validation."""
    figures: Mapping[str, str]
    """What the table of `trainer runs list` shows, by column."""


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, with what is above it where two would be the same."""
    names = [run.folder.resolve().name for run in runs]
    alone = len(set(names)) == len(names)
    return names if alone else [str(run.folder) for run in runs]


def find_runs(folder: Path) -> list[Path]:
    """Folders of runs: `folder` itself, else those below it by name. Raises ConfigError without any."""
    found = [folder] if is_run(folder) else _below(folder, _DEEPEST) if folder.is_dir() else []
    if not found:
        what = "no run is in this folder" if folder.is_dir() else "no such folder"
        remedy = f"name the output_dir of a run, or a folder of several; each has a {CONFIG_FILE}"
        raise ConfigError(what, where=str(folder), remedy=remedy)
    return found


def is_run(folder: Path) -> bool:
    """Whether a run wrote into this folder."""
    return (folder / CONFIG_FILE).is_file()


def _below(folder: Path, depth: int) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            found += [path] if is_run(path) else _below(path, depth - 1) if depth > 1 else []
    return found


def read_run(folder: Path) -> Run:
    """The run of a folder; raises DataError where its files are damaged."""
    tree, problems = strict_yaml.read(folder / CONFIG_FILE)
    if tree is None or problems:
        raise DataError(problems or "the file is empty", where=str(folder / CONFIG_FILE))
    config: dict[str, str] = {}
    for key in leaves(tree):
        node = tree.get(tuple(key.split(".")))
        if node is not None and not isinstance(node.value, dict | list):
            config[key] = "null" if node.value is None else str(node.value)
    try:
        rows = read_metrics(folder / METRICS_LOG)
    except json.JSONDecodeError as error:
        raise DataError(f"a line is no JSON ({error})", where=str(folder / METRICS_LOG)) from error
    losses = [(row["step"], row["loss"]) for row in rows if row.get("loss") is not None]
    held_out = [
        (row["step"], row["validation_loss"]) for row in rows if row.get("validation_loss") is not None
    ]
    return Run(
        folder=folder,
        config=config,
        losses=losses,
        held_out=held_out,
        figures=_figures(folder, config, rows),
    )


def _figures(folder: Path, config: Mapping[str, str], rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Columns of the table; an empty text where nothing is known."""
    last: Mapping[str, float] = next((row for row in reversed(rows) if "loss" in row), {})
    peak = last.get("device_memory_reserved_peak_bytes", 0)
    held_out = held_out_line(rows) or ""
    return {
        "family": config.get("family", ""),
        "method": config.get("method", ""),
        "state": _state(folder),
        "step": f"{last.get('step', 0)}/{config.get('train.max_train_steps', '?')}",
        "loss": _short(last.get("loss")),
        "held-out loss": held_out.removeprefix("held-out loss "),
        "s/step": _short(last.get("seconds_per_step")),
        "peak GiB": f"{peak / _GIB:.1f}" if peak else "",
    }


def _state(folder: Path) -> str:
    if any(folder.glob("lora/*.safetensors")) or any(folder.glob("model/**/*.safetensors")):
        return "finished"
    return "resumable" if any((folder / "checkpoints").glob("step-*")) else "begun"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Configuration keys in which the runs differ -> each run's value; `-` where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key, "-") for run in runs] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}
