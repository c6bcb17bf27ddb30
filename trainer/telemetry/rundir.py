"""A run's folder: the names that a run writes there, none of which may lead elsewhere."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import ConfigError, Problem

LOCK_FILE = ".lock"
"""Lock file that the process holds which trains in the folder."""
CONFIG_FILE = "config.resolved.yaml"
"""The configuration of a run, with what was decided when it began."""
_FOLDERS = ("checkpoints", "samples")
"""Folders whose entries a run prunes."""
# fmt: off
_WRITTEN = frozenset((
    *_FOLDERS, LOCK_FILE, "before_after.png", "best", CONFIG_FILE, "left_out.jsonl", "log.jsonl",
    "lora", "metrics.jsonl", "model", "plan.json", "process.json", "run.json", "tensorboard", "wandb",
    "wandb.id",
))
# fmt: on
_MOST_TOLD = 10


def require_no_links(run_dir: Path) -> None:
    """Raise ConfigError where something that a run writes, cuts or removes is a symbolic link.

    The folder itself may be one. A folder that was unpacked to go on with it must not reach other files.
    """
    written = [path for path in run_dir.iterdir() if path.name in _WRITTEN] if run_dir.is_dir() else []
    folders = [path for path in written if path.name in _FOLDERS and path.is_dir() and not path.is_symlink()]
    pruned = [path for folder in folders for path in folder.glob("step-*")]
    links = sorted(path for path in (*written, *pruned) if path.is_symlink())
    if not links:
        return
    problems = [Problem(what=f"a link to {path.readlink()}", where=str(path)) for path in links[:_MOST_TOLD]]
    more = f" and {len(links) - _MOST_TOLD} more" if len(links) > _MOST_TOLD else ""
    what = f"a run writes there, and does not follow links inside its folder{more}"
    remedy = "put what they lead to in their place, or point output_dir to the other disk"
    raise ConfigError([*problems, Problem(what=what, where=str(run_dir), remedy=remedy)])
