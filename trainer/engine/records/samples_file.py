"""The samples that a run trains on, in its folder: so that a start which is refused can name what changed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.data.records import Record
from trainer.engine.caching.entries import sample_rows
from trainer.files import atomic
from trainer.words.plurals import numbered

SAMPLES_FILE = "samples.jsonl"
_TOLD = 3


def write(records: Sequence[Record], run_dir: Path) -> None:
    """Write a line for each sample: its name, and a hash of all that training depends on. Raises
    StorageError.
    """
    rows = (json.dumps({"sample": name, "sha256": digest}) for name, digest in sample_rows(records))
    atomic.write_text(run_dir / SAMPLES_FILE, "".join(f"{row}\n" for row in rows))


def differences(records: Sequence[Record], run_dir: Path) -> str:
    """Samples that are new, gone or changed since the run in `run_dir` began, in words; empty where it kept
    no list, as older versions, or only their order is another.
    """
    before = _read(run_dir / SAMPLES_FILE)
    if before is None:
        return ""
    now = _by_name(sample_rows(records))
    kinds = {
        "new": [name for name in now if name not in before],
        "gone": [name for name in before if name not in now],
        "changed": [name for name in now if name in before and now[name] != before[name]],
    }
    return "; ".join(_told(kind, names) for kind, names in kinds.items() if names)


def _told(kind: str, names: Sequence[str]) -> str:
    more = f" and {numbered(len(names) - _TOLD, 'other')}" if len(names) > _TOLD else ""
    return f"{kind}: {', '.join(names[:_TOLD])}{more}"


def _by_name(rows: Sequence[tuple[str, str]]) -> Mapping[str, Sequence[str]]:
    """Hashes by sample: a picture has one for each of its views."""
    found: dict[str, list[str]] = {}
    for name, digest in rows:
        found.setdefault(name, []).append(digest)
    return found


def _read(path: Path) -> Mapping[str, Sequence[str]] | None:
    """None for a file that is not there, or was not written here."""
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return _by_name([(str(row["sample"]), str(row["sha256"])) for row in rows])
    except (OSError, ValueError, TypeError, KeyError):
        return None
