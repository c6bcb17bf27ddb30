"""Files as the rules see them: keys with their values and lines, whatever the format was."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

MOST_BYTES = 1 << 20
"""Largest file that is read."""
MOST_ENTRIES = 20_000
"""Most keys of a file: a data set is no configuration."""
MOST_DEPTH = 40
KINDS = {
    "accelerate": "accelerate configuration",
    "deepspeed": "DeepSpeed configuration",
    "llamafactory": "LLaMA-Factory configuration",
    "axolotl": "axolotl configuration",
    "arguments": "training arguments",
    "script": "shell script",
    "dockerfile": "Dockerfile",
    "compose": "compose file",
    "kubernetes": "Kubernetes manifest",
    "datasets": "LLaMA-Factory's list of data sets",
    "conversations": "file of conversations",
    "packages": "list of packages",
    "environment": "environment",
    "machine": "machine",
    "ours": "configuration of this trainer",
    "unknown": "kind of file that the doctor does not know",
}
"""Kinds of documents, in words."""
TRAINING = ("llamafactory", "axolotl", "arguments")
"""Kinds that hold the settings of a training run."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One key with its value."""

    path: tuple[str, ...]
    """Keys and list positions from the document's root."""
    value: str
    """Text as it is written; empty for a section."""
    line: int = 0
    """Line that the key stands in, counted from 1; 0 where there is no file."""
    section: bool = False
    """True for a mapping or a list."""
    first_line: int = 0
    """Line that the same key was written in before; 0 where it was not."""

    @cached_property
    def dotted(self) -> str:
        """The path as rules write it; a dot within a key is an underscore."""
        return ".".join(part.replace(".", "_") for part in self.path)

    @property
    def name(self) -> str:
        """The last key of the path."""
        return self.path[-1] if self.path else ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of one kind: a file, a part of it, an environment or a machine."""

    kind: str
    place: str
    """The file's path, or words such as `environment`."""
    entries: tuple[Entry, ...]
    is_ours: bool = False
    """True for the variables that this trainer itself would have."""
    has_defaults: bool = True
    """False for a command's arguments where a key that is not among them may have been written elsewhere, in
    a variable or a file, or where they are no words of HF's Trainer.
    """

    @cached_property
    def by_last(self) -> dict[str, list[Entry]]:
        """Entries by the last key of their path."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries:
            found.setdefault(entry.dotted.rpartition(".")[2], []).append(entry)
        return found

    def where(self, line: int) -> str:
        """The place of a line in words."""
        return f"{self.place}:{line}" if line else self.place


def with_repeats(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """`entries`, of which those that repeat an earlier key know its line; keys within them do not."""
    seen: dict[tuple[str, ...], int] = {}
    repeated: set[tuple[str, ...]] = set()
    found: list[Entry] = []
    for entry in entries:
        again = seen.get(entry.path, 0)
        seen.setdefault(entry.path, entry.line)
        if again and any(entry.path[:depth] in repeated for depth in range(1, len(entry.path))):
            again = 0
        elif again:
            repeated.add(entry.path)
        found.append(
            Entry(
                path=entry.path, value=entry.value, line=entry.line, section=entry.section, first_line=again
            )
        )
    return tuple(found)
