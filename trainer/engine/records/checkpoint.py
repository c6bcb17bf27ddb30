"""Checkpoints: whole or absent, bit-exact, and refused where they belong to another run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from trainer.engine.records.early_stop import Patience
from trainer.engine.records.fingerprint import REFUSED, Change, changes
from trainer.errors import ConfigError, Problem
from trainer.files.atomic import (
    kept_aside,
    no_space_told,
    reading_told,
    remove_folder,
    sync_directory,
    unused_name,
    whole_folder,
    write_text,
)
from trainer.modeling.rows import Rows
from trainer.modeling.tensor_file import (
    DTYPES,
    Writable,
    require_whole,
    split_shards,
    take_part,
    write_files,
)

FORMAT_VERSION = 1
SHARD_BYTES = 10 * 10**9
_STATE = "state.json"
_OWN = "state_sha256"
_NAME = re.compile(r"step-\d{6,}")
_CHUNK_BYTES = 1 << 24
_FILES_AT_ONCE = 8
"""Files that are read and hashed side by side."""
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The counters of a run after `step` optimizer steps. No RNG state: draws come from (seed, position)."""

    step: int
    interval_loss: float
    """Sum of the step losses since the last log line."""
    interval_steps: int
    fingerprint: Mapping[str, str]
    """Values that a run that goes on must share, by name."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Values of which a resume tells the changes, by name; empty in checkpoints of earlier versions."""
    early_stop: Mapping[str, Any] = field(default_factory=dict)
    """Rounds of validation, as `early_stop.Patience`; empty in older checkpoints."""


def save(
    root: Path,
    snapshot: Snapshot,
    weights: Mapping[str, Writable],
    optimizer: Mapping[str, Writable],
    *,
    least_bytes: int,
    keep: int,
    on_tensor: Callable[[], None],
    beside: Callable[[Path], None] = lambda folder: None,
) -> Path:
    """Write a checkpoint, make it visible in one rename, then prune to the newest `keep`. `beside` writes
    into its folder more than a resume reads.

    Raises StorageError with the older checkpoints untouched and the partial one removed, and DataError for a
    tensor that is empty or for `weights` of less than `least_bytes`.
    """
    target = root / f"step-{snapshot.step:06d}"
    require_whole(weights, target, least_bytes)
    require_whole(optimizer, target)
    with no_space_told(target):
        with whole_folder(target) as temporary:
            shards = {temporary / name: shard for name, shard in _files(weights, optimizer).items()}
            checksums = {path.name: one for path, one in write_files(shards, {}, on_tensor).items()}
            state: dict[str, Any] = {
                "version": FORMAT_VERSION,
                **dataclasses.asdict(snapshot),
                "files": {name: (temporary / name).stat().st_size for name in checksums},
                "sha256": checksums,
            }
            state[_OWN] = _own_checksum(state)
            beside(temporary)
            # it makes the folder a whole checkpoint
            write_text(temporary / _STATE, json.dumps(state, indent=1, sort_keys=True))
        # later ones are damaged, since the run went on from an earlier one, and are replaced on its way
        ours = [folder for folder in steps_on_disk(root) if step_of(folder) <= snapshot.step]
        for folder in ours[:-keep]:
            remove_folder(folder)  # the next save tries again
    remove_unfinished(root)
    return target


def remove_unfinished(root: Path) -> None:
    """Remove what saves that were killed left of their checkpoints."""
    for folder in root.glob("step-*.tmp"):
        if _NAME.fullmatch(folder.stem):
            shutil.rmtree(folder, ignore_errors=True)


def take_part_in_save(weights: Mapping[str, Writable], optimizer: Mapping[str, Writable]) -> None:
    """Give the rows that this rank has of what another one saves."""
    take_part(list(_files(weights, optimizer).values()))


def _files(
    weights: Mapping[str, Writable], optimizer: Mapping[str, Writable]
) -> dict[str, dict[str, Writable]]:
    """Names of a checkpoint's files, and the tensors of each."""
    found: dict[str, dict[str, Writable]] = {}
    for group, tensors in (("weights", weights), ("optimizer", optimizer)):
        shards = split_shards(tensors, SHARD_BYTES)
        for number, shard in enumerate(shards, start=1):
            found[f"{group}-{number:05d}-of-{len(shards):05d}.safetensors"] = shard
    return found


def _own_checksum(state: Mapping[str, Any]) -> str:
    """SHA-256 of the content of state.json besides this checksum."""
    said = {key: value for key, value in state.items() if key != _OWN}
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def step_of(folder: Path) -> int:
    """The step in a checkpoint folder's name."""
    return int(folder.name.removeprefix("step-"))


def steps_on_disk(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first; renamed folders are not among them."""
    found = [path for path in root.glob("step-*") if path.is_dir() and _NAME.fullmatch(path.name)]
    return sorted(found, key=step_of)


def steps_kept_aside(root: Path) -> list[Path]:
    """Checkpoints that a killed save was replacing, by the names that `atomic.put_back` gives them."""
    return [target for target in kept_aside(root) if _NAME.fullmatch(target.name)]


def newest_valid(
    root: Path, say: Callable[[str], None], on_chunk: Callable[[], None]
) -> tuple[Path, Snapshot] | None:
    """The newest checkpoint that is as it was written; damaged ones are named and passed over.

    `on_chunk` runs every so often while files are read, and may raise to stop. Raises ConfigError for one of
    a newer trainer, and StorageError where the disk does not give the bytes: neither is damage, and passing
    over it would lose steps.
    """
    for folder in reversed(steps_on_disk(root)):
        problem = damage(folder, on_chunk)
        if problem is None:
            if not _read_state(folder)["sha256"]:
                say(f"checkpoint {folder.name} is of an earlier version and has no checksums to check it by")
            return folder, read_snapshot(folder)
        say(f"checkpoint {folder.name} is damaged and is passed over: {problem}")
    return None


def set_aside(root: Path, step: int, say: Callable[[str], None]) -> None:
    """Rename the checkpoints after `step`: all of them are damaged, and the run gets there again."""
    for folder in steps_on_disk(root):
        if step_of(folder) <= step:
            continue
        aside = unused_name(folder.with_name(folder.name + ".damaged"))
        folder.rename(aside)
        # a run resumed from elsewhere has no folder of its own yet, and nothing to rename
        sync_directory(root)
        say(f"the damaged checkpoint is kept as {aside.name}; remove it when nobody wants to look at it")


def damage(folder: Path, on_chunk: Callable[[], None]) -> str | None:
    """The fault of a checkpoint, or None; every byte is read where the checkpoint has checksums.

    Raises as `newest_valid`.
    """
    try:
        state = _read_state(folder)
    except _DamagedError as error:
        return str(error)
    if _NAME.fullmatch(folder.name) and step_of(folder) != state["step"]:
        return f"{_STATE} is of step {state['step']}"
    for name, size in state["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, not {size}"
        if not state["sha256"]:
            try:
                with safe_open(path, framework="pt"):
                    pass
            except SafetensorError as error:
                return f"{name} is not readable ({error})"
    found = _checksums([folder / name for name in state["files"] if state["sha256"]], on_chunk)
    for name, checksum in found.items():
        if checksum != state["sha256"].get(name):
            return f"the checksum of {name} is wrong: its bytes are not those that were written"
    return None


class _DamagedError(Exception):
    """state.json was not written by a trainer, or was changed since."""


def _read_state(folder: Path) -> dict[str, Any]:
    """The content of state.json; what an older trainer did not write is empty. Raises _DamagedError."""
    path = folder / _STATE
    try:
        with reading_told(path):
            state = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _DamagedError(f"{_STATE} cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise _DamagedError(f"{_STATE} is not one of ours")
    # first: a damaged digit of the version is no newer trainer
    if _OWN in state and state[_OWN] != _own_checksum(state):
        raise _DamagedError(f"the checksum of {_STATE} is wrong")
    version = state.get("version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise ConfigError(
            f"a newer trainer wrote this checkpoint (format {version}, this one reads {FORMAT_VERSION})",
            where=str(folder),
            remedy="go on with that trainer, or move the checkpoint away to go on from the one before",
        )
    state = {"settings": {}, "sha256": {}, "early_stop": {}, **state}
    for key, kind in _STATE_TYPES.items():
        if not isinstance(state.get(key), kind):
            raise _DamagedError(f"{_STATE} is not one of ours: {key} is {state.get(key)!r:.80}")
    if unknown := state["early_stop"].keys() - {one.name for one in dataclasses.fields(Patience)}:
        raise _DamagedError(f"{_STATE} is not one of ours: early_stop has {min(unknown)!r:.80}")
    return state


_STATE_TYPES: Mapping[str, Any] = {
    **dict.fromkeys(("version", "step", "interval_steps"), int),
    "interval_loss": float | int,
    **dict.fromkeys(("fingerprint", "settings", "files", "sha256", "early_stop"), dict),
}


def _checksums(paths: Sequence[Path], on_chunk: Callable[[], None]) -> dict[str, str]:
    """SHA-256 of files by name, some side by side; `on_chunk` runs every so often, and may raise to stop."""
    given_up = threading.Event()

    def checksum(path: Path) -> str:
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        with reading_told(path), path.open("rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not given_up.is_set():
                digest.update(buffer[:count])
        return digest.hexdigest()

    with ThreadPoolExecutor(max_workers=_FILES_AT_ONCE) as pool:
        try:
            futures = {path.name: pool.submit(checksum, path) for path in paths}
            while wait(futures.values(), timeout=_PAUSE_SECONDS).not_done:
                on_chunk()
            return {name: future.result() for name, future in futures.items()}
        finally:
            given_up.set()


def identity(folder: Path) -> str:
    """SHA-256 of the content of a valid checkpoint's state.json, which holds the checksums of its files."""
    return _own_checksum(_read_state(folder))


def read_snapshot(folder: Path) -> Snapshot:
    """The counters and the values of a valid checkpoint."""
    state = _read_state(folder)
    return Snapshot(**{one.name: state[one.name] for one in dataclasses.fields(Snapshot)})


def shapes(folder: Path, group: str) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of `weights` or `optimizer`, whole, from the files that state.json names."""
    found: dict[str, tuple[int, ...]] = {}
    for name in sorted(_read_state(folder)["files"]):
        if name.startswith(f"{group}-"):
            with safe_open(folder / name, framework="pt") as file:
                found |= {label: tuple(file.get_slice(label).get_shape()) for label in file.keys()}  # noqa: SIM118
    return found


def read_group(
    folder: Path, group: str, device: str, rows: Mapping[str, Rows] = MappingProxyType({})
) -> dict[str, torch.Tensor]:
    """Tensors of `weights` or `optimizer` on `device`, from the files that state.json names; of parameters
    that `rows` names, and of their state, these rows.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name in sorted(_read_state(folder)["files"]):
        if name.startswith(f"{group}-"):
            tensors |= _read_rows(folder / name, device, rows) if rows else load_file(folder / name, device)
    return tensors


def _read_rows(path: Path, device: str, rows: Mapping[str, Rows]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for label in file.keys():  # noqa: SIM118 (not a mapping)
            own = rows[label.partition("/")[0]]
            if own.start < own.stop:
                tensors[label] = file.get_slice(label)[own.start : own.stop].to(device)
            else:  # nothing of it is this rank's
                whole = file.get_slice(label)
                dtype = DTYPES[whole.get_dtype()]
                tensors[label] = torch.empty(0, *own.shape[1:], dtype=dtype, device=device)
    return tensors


_OTHERWISE = {
    "data": "images, captions, conversations, what is done with them or which are held out"
    " (validation.held_out, validation.seed) are not as when the run began",
    "sample_order": "this version puts other samples into a step than the one that began the run",
}
"""Told of values that say nothing to a reader."""


def require_same_run(
    folder: Path,
    saved: Mapping[str, str],
    current: Mapping[str, str],
    say: Callable[[str], None],
    samples: Callable[[], str] = lambda: "",
) -> list[Change]:
    """Values that go on with what the old ones left. Raises ConfigError listing every other difference
    between a checkpoint's run and this one; `samples()` says which samples are others, where `data` differs.

    A value that an older trainer did not record cannot be compared, and is said.
    """
    found, unrecorded = changes(saved, current)
    refused = [change for change in found if not change.succeeds]
    if refused:
        problems = []
        for change in refused:
            told = _OTHERWISE.get(change.name, change.words)
            told += f" ({words})" if change.name == "data" and (words := samples()) else ""
            keys = REFUSED.get(change.name) or (change.name,)
            problems.append(Problem(what=told, where=keys[0] if len(keys) == 1 else change.name))
        set_back = "set back what is listed"
        if any(change.name == "sample_order" for change in refused):  # no key has it
            set_back = "go on with the version that began the run"
        remedy = f"{set_back}, or choose another output_dir to start afresh"
        heading = Problem(what="the run in this folder was started differently", where=str(folder))
        raise ConfigError([heading, *problems[:-1], dataclasses.replace(problems[-1], remedy=remedy)])
    if unrecorded:
        say(f"{folder.name} is of an older trainer and could not be compared in: {', '.join(unrecorded)}")
    return [change for change in found if change.succeeds]
