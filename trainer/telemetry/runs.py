"""Finished and running runs by their folders: settings, figures and losses by step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.config.reading import strict_yaml
from trainer.config.tree import leaves
from trainer.errors import ConfigError, DataError
from trainer.files import atomic
from trainer.telemetry.locks import is_held
from trainer.telemetry.rundir import LOCK_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, SCORES, held_out_line, read_lines
from trainer.words.sizes import GIB

CONFIG_FILE = "config.resolved.yaml"
_DEEPEST = 3
"""Levels of folders that are searched below the one that is named."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run as its folder shows it."""

    folder: Path
    config: Mapping[str, str]
    """Every value by dotted key, as its file has it."""
    losses: Sequence[tuple[int, float]]
    """(step, loss) of every log step, oldest first."""
    held_out: Sequence[tuple[int, float]]
    """(step, loss) of every validation."""
    figures: Mapping[str, str]
    """The cells of its row in `trainer runs list`, by column."""
    rounds: Mapping[int, Mapping[str, float]]
    """Held-out loss and metrics of previews of every validation, by step and name; a later line wins."""
    early_stop: str = ""
    """Why it ended before its last planned step; empty where it did not."""
    damaged_lines: int = 0
    """Lines of its metrics that are damaged, and left out."""


def labels(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its folder's, with what is above it where two would be the same."""
    names = [run.folder.resolve().name for run in runs]
    alone = len(set(names)) == len(names)
    return names if alone else [str(run.folder) for run in runs]


def find_runs(folder: Path, tell: Callable[[str], None]) -> list[Path]:
    """Folders of runs: `folder` itself, else those below it by name. Raises ConfigError without any.

    `tell` is told of each folder that may not be looked into.
    """
    try:
        found = [folder] if is_run(folder) else _below(folder, _DEEPEST, tell) if folder.is_dir() else []
        what = "no run is in this folder" if folder.is_dir() else "no such folder"
    except PermissionError:
        found, what = [], "this user may not look into it"
    if not found:
        remedy = f"name the output_dir of a run, or a folder of several; each has a {CONFIG_FILE}"
        raise ConfigError(what, where=str(folder), remedy=remedy)
    return found


def is_run(folder: Path) -> bool:
    """True if a run wrote into this folder. Raises PermissionError where that may not be asked."""
    return (folder / CONFIG_FILE).is_file()


def _below(folder: Path, depth: int, tell: Callable[[str], None]) -> list[Path]:
    found: list[Path] = []
    for path in sorted(folder.iterdir()):
        try:
            if path.is_dir() and not path.is_symlink():
                found += [path] if is_run(path) else _below(path, depth - 1, tell) if depth > 1 else []
        except PermissionError:
            tell(f"{path}: this user may not look into it")
    return found


def read_run(folder: Path) -> Run:
    """The run of a folder; raises DataError where its settings are damaged, StorageError where its losses
    cannot be read.
    """
    tree, problems = strict_yaml.read(folder / CONFIG_FILE)
    if tree is None or problems:
        raise DataError(problems or "the file is empty", where=str(folder / CONFIG_FILE))
    config: dict[str, str] = {}
    for key in leaves(tree):
        node = tree.get(tuple(key.split(".")))
        if node is not None and not isinstance(node.value, dict | list):
            config[key] = "null" if node.value is None else str(node.value)
    with atomic.reading_told(folder / METRICS_LOG):
        found = [row for _, row in read_lines(folder / METRICS_LOG)]
    rows = [row for row in found if row is not None]
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
        rounds=_rounds(rows),
        early_stop=_early_stop(rows),
        damaged_lines=found.count(None),
    )


def _rounds(rows: Sequence[Mapping[str, float]]) -> dict[int, dict[str, float]]:
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        values = {name: row[name] for name in ("validation_loss", *SCORES) if row.get(name) is not None}
        if values:
            found.setdefault(int(row["step"]), {}).update(values)
    return found


def _early_stop(rows: Sequence[Mapping[str, object]]) -> str:
    """Why the run ended early: with more patience one goes on from there, and writes rows of later steps."""
    early = [row for row in rows if "early_stop" in row]
    return str(early[-1]["early_stop"]) if early and early[-1]["step"] == rows[-1]["step"] else ""


def _figures(folder: Path, config: Mapping[str, str], rows: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """Columns of the table; an empty text where nothing is known."""
    last: Mapping[str, float] = next((row for row in reversed(rows) if "loss" in row), {})
    peak = last.get("device_memory_reserved_peak_bytes", 0)
    held_out = held_out_line(rows) or ""
    return {
        "family": config.get("family", ""),
        "method": config.get("method", ""),
        "state": _state(folder, rows),
        "step": f"{last.get('step', 0)}/{_length(config)}",
        "loss": _short(last.get("loss")),
        "held-out loss": held_out.removeprefix("held-out loss "),
        "s/step": _short(last.get("seconds_per_step")),
        "tokens/s": _whole(last.get("tokens_per_second")),
        "learned/s": _whole(last.get("learned_tokens_per_second")),
        "TFLOP/s": _short(last.get("model_tflops")),
        "MFU": f"{last['mfu']:.0%}" if last.get("mfu") is not None else "",
        "peak GiB": f"{peak / GIB:.1f}" if peak else "",
    }


def _state(folder: Path, rows: Sequence[Mapping[str, object]]) -> str:
    if is_held(folder / LOCK_FILE):
        return "running"
    if any(folder.glob("lora/*.safetensors")) or any(folder.glob("model/**/*.safetensors")):
        return "finished early" if _early_stop(rows) else "finished"
    return "resumable" if any((folder / "checkpoints").glob("step-*")) else "begun"


def _length(config: Mapping[str, str]) -> str:
    """The run's length as it was written: steps, or epochs."""
    epochs = config.get("train.num_train_epochs", "null")
    return config.get("train.max_train_steps", "?") if epochs == "null" else f"{epochs} epochs"


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def differences(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Configuration keys in which the runs differ -> each run's value; `-` where a run has none."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [run.config.get(key, "-") for run in runs] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}
