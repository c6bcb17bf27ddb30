"""Floor 6: checkpoints: whole or absent, bit-exact, and refused where they belong to another run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from trainer.errors import ConfigError, NoSpaceError, Problem
from trainer.modeling.tensorfile import split_shards, write_tensors
from trainer.telemetry.atomic import sync_directory, write_text

FORMAT_VERSION = 1
SHARD_BYTES = 10 * 10**9
_STATE = "state.json"
_NAME = re.compile(r"step-\d{6,}")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Where a run stands after `step` optimizer steps. No generator state: draws come from (seed,
    position).
    """

    step: int
    interval_loss: float
    """Sum of the step losses since the last log line."""
    interval_steps: int
    fingerprint: Mapping[str, str]


def folder_of(root: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` steps."""
    return root / f"step-{step:06d}"


def save(
    root: Path,
    snapshot: Snapshot,
    weights: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, torch.Tensor],
    *,
    keep: int,
    on_tensor: Callable[[], None],
) -> Path:
    """Write a checkpoint, make it visible in one rename, then prune to the newest `keep`.

    Raises NoSpaceError with the older checkpoints untouched and the partial one removed.
    """
    target = folder_of(root, snapshot.step)
    temporary = target.with_name(target.name + ".tmp")
    root.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        files = _write_group(temporary, "weights", weights, on_tensor)
        files |= _write_group(temporary, "optimizer", optimizer, on_tensor)
        state = {
            "version": FORMAT_VERSION,
            "step": snapshot.step,
            "interval_loss": snapshot.interval_loss,
            "interval_steps": snapshot.interval_steps,
            "fingerprint": dict(snapshot.fingerprint),
            "files": files,
        }
        write_text(temporary / _STATE, json.dumps(state, indent=1, sort_keys=True))
    except NoSpaceError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(temporary)
    if target.exists():
        shutil.rmtree(target)
    temporary.replace(target)
    sync_directory(root)
    _prune(root, keep, snapshot.step)
    return target


def _write_group(
    folder: Path, group: str, tensors: Mapping[str, torch.Tensor], on_tensor: Callable[[], None]
) -> dict[str, int]:
    shards = split_shards(tensors, SHARD_BYTES)
    sizes: dict[str, int] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{group}-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard, {}, on_tensor)
        sizes[name] = (folder / name).stat().st_size
    return sizes


def _prune(root: Path, keep: int, newest_step: int) -> None:
    """Remove all but the newest `keep` checkpoints up to `newest_step`, and what an interrupted save left.

    Later ones are damaged, since the run went on from an earlier one; they are replaced when it gets there.
    """
    ours = [folder for folder in steps_on_disk(root) if step_of(folder) <= newest_step]
    for folder in ours[:-keep]:
        shutil.rmtree(folder)
    for leftover in root.glob("step-*.tmp"):
        if _NAME.fullmatch(leftover.stem):
            shutil.rmtree(leftover, ignore_errors=True)


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def steps_on_disk(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; folders that somebody renamed are not among them."""
    found = [path for path in root.glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def newest_valid(root: Path, say: Callable[[str], None]) -> tuple[Path, Snapshot] | None:
    """The newest checkpoint whose files are all there and readable; damaged ones are named and passed
    over.
    """
    for folder in reversed(steps_on_disk(root)):
        problem = damage(folder)
        if problem is None:
            return folder, read_snapshot(folder)
        say(f"checkpoint {folder.name} is damaged and is passed over: {problem}")
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        state = json.loads((folder / _STATE).read_text())
    except (OSError, ValueError) as error:
        return f"{_STATE} cannot be read ({error})"
    if not isinstance(state, dict) or not isinstance(state.get("files"), dict):
        return f"{_STATE} is not one of ours"
    if state.get("version") != FORMAT_VERSION:
        return f"format version {state.get('version')}, this trainer reads {FORMAT_VERSION}"
    for name, size in state["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        try:
            with safe_open(path, framework="pt"):
                pass
        except SafetensorError as error:
            return f"{name} is not readable ({error})"
    return None


def read_snapshot(folder: Path) -> Snapshot:
    """The counters and the fingerprint of a valid checkpoint."""
    state = json.loads((folder / _STATE).read_text())
    return Snapshot(
        step=state["step"],
        interval_loss=state["interval_loss"],
        interval_steps=state["interval_steps"],
        fingerprint=state["fingerprint"],
    )


def read_group(folder: Path, group: str, device: str) -> dict[str, torch.Tensor]:
    """Tensors of `weights` or `optimizer` on `device`."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob(f"{group}-*.safetensors")):
        with safe_open(path, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                tensors[name] = file.get_tensor(name)
    return tensors


_OTHERWISE = {"data": "images, captions or what is done with them are not those that the run began with"}
"""What is told where values are hashes."""


def require_same_run(folder: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    """Raise ConfigError listing every difference between a checkpoint's run and this one."""
    problems = []
    for key in sorted({*saved, *current}):
        old, new = saved.get(key, "nothing"), current.get(key, "nothing")
        if old != new:
            told = f"the checkpoint has {old!r}, this run {new!r}"
            problems.append(Problem(what=_OTHERWISE.get(key, told), where=key))
    if problems:
        remedy = "set back what is listed, or choose another output_dir to start afresh"
        heading = Problem(what="the run in this folder was started differently", where=str(folder))
        raise ConfigError([heading, *problems[:-1], dataclasses.replace(problems[-1], remedy=remedy)])
