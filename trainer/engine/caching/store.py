"""Encoded samples on disk, one file an entry, named by everything that its tensors depend on.

`<cache directory>/<family>/<kind>/<2 hex>/<key>.safetensors`, outside the data set. Entries are written whole
or not at all, so a run that is killed at any point leaves valid entries, and temporary files that nothing
reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.entry_file import DamagedFileError, read_header, verify, write_safetensors
from trainer.errors import ConfigError, DataError, StorageError
from trainer.files import atomic

if TYPE_CHECKING:
    import torch

_SUFFIX = ".safetensors"
_ENTRY_NAME = re.compile(r"[0-9a-f]{64}\.safetensors")
_STALE_NAME = re.compile(r"\.[0-9a-f]{64}\.safetensors\..*\.tmp")
_STALE_AFTER_SECONDS = 3600.0
MISSING = "it is gone"
"""Fault of an entry that does not exist."""
# Python's own objects for one entry of two tensors
_OBJECT_BYTES = 2048
_ENCODED_ANEW = "start again: it is encoded anew; if this comes back, check the disk"
_GONE = "this cache entry is gone: it was removed while the run used it, by a prune or by hand"
_GONE_REMEDY = "start the same command again, which encodes it anew, and remove no entries while a run lasts"
_MOVE = "move it away, or remove it, and start again"
_LEAVE_ALONE = "leave the cache folder alone while a run writes there, and start again"
# in /proc a folder that cannot be made "does not exist"
_NOT_WRITABLE = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT, errno.ELOOP}
)


class DamagedEntryError(DataError):
    """A cache entry is damaged or gone. It was removed where this user may: the next run encodes it again."""


def entry_key(kind: str, parts: Mapping[str, str]) -> str:
    """The name of an entry: a hash of its kind and of everything that its tensors depend on."""
    text = json.dumps({"kind": kind, "parts": dict(parts)}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


class Cache:
    """The entries of one family in a cache directory; in memory as many of them as `keep_bytes` has room for.

    The entries that were read first are kept: a shuffled epoch reads every entry once, so making room for the
    newest would throw out the next ones. `read` may be called from several threads.
    """

    def __init__(self, directory: Path, family_name: str, *, keep_bytes: int = 0) -> None:
        self.directory = directory
        self.folder = directory / family_name
        self._kept: dict[tuple[str, str], Mapping[str, torch.Tensor]] = {}
        self._room_bytes = keep_bytes
        self._lock = threading.Lock()

    def path(self, kind: str, key: str) -> Path:
        """The file of an entry."""
        return self.folder / kind / key[:2] / f"{key}{_SUFFIX}"

    def has(self, kind: str, key: str) -> bool:
        """Whether the entry is there, with a valid header and the right size; its tensors are not read."""
        return self.damage(kind, key, thorough=False) is None

    def damage(self, kind: str, key: str, *, thorough: bool) -> str | None:
        """The fault of an entry, `MISSING`, or None; `thorough` reads all of it."""
        path = self.path(kind, key)
        try:
            with _reading(path):
                if read_header(path)[0].metadata != {"kind": kind, "key": key}:
                    return "it belongs to another entry"
                if thorough:
                    verify(path)
        except DamagedFileError as error:
            return str(error)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):  # `write` tells
            return MISSING
        return None

    def header(self, kind: str, key: str) -> dict[str, tuple[int, ...]]:
        """Shapes of the entry's tensors by name, without torch. Raises DamagedEntryError,
        StorageError.
        """
        path = self.path(kind, key)
        try:
            with _reading(path):
                return dict(read_header(path)[0].shapes)
        except (DamagedFileError, FileNotFoundError) as error:
            raise self._damaged(kind, key, error) from error

    def held_bytes(self, entries: Collection[tuple[str, str]]) -> int:
        """Memory that these entries, (kind, key), take once they are read; none of those that are gone."""
        found = 0
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # another process found it damaged, and removed it
                # a file has a header besides the tensors, which is more than rounding
                found += _OBJECT_BYTES + self.path(*entry).stat().st_size
        return found

    def read(self, kind: str, key: str) -> Mapping[str, torch.Tensor]:
        """The entry's tensors on the CPU, compared with their checksum: not to be changed, they may be kept.

        Raises DamagedEntryError, StorageError.
        """
        kept = self._kept.get((kind, key))
        if kept is not None:
            return kept
        from safetensors.torch import load

        path = self.path(kind, key)
        try:
            with _reading(path):
                tensors = load(verify(path))
        except (DamagedFileError, FileNotFoundError) as error:
            raise self._damaged(kind, key, error) from error
        size = _OBJECT_BYTES + sum(tensor.nbytes for tensor in tensors.values())
        with self._lock:
            if size <= self._room_bytes and (kind, key) not in self._kept:
                self._room_bytes -= size
                self._kept[kind, key] = tensors
        return tensors

    def remove_damaged(
        self, entries: Iterable[tuple[str, str]], on_entry: Callable[[], None]
    ) -> list[DamagedEntryError]:
        """Read these entries, (kind, key), and remove the damaged ones; `on_entry` runs before each, and may
        raise. Gives an error for each that is damaged or gone.
        """
        found = []
        for kind, key in entries:
            on_entry()
            problem = self.damage(kind, key, thorough=True)
            if problem is not None:
                found.append(self._damaged(kind, key, problem))
        return found

    def write(self, kind: str, key: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write an entry atomically; equal tensors give equal bytes. Raises StorageError, ConfigError."""
        path = self.path(kind, key)
        try:
            with atomic.no_space_told(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_safetensors(path, tensors, {"kind": kind, "key": key})
        except (OSError, StorageError) as error:
            cause = error.__cause__ if isinstance(error, StorageError) else error
            code = cause.errno if isinstance(cause, OSError) else None
            if code == errno.ENOENT and path.parent.is_dir():
                what = "the temporary file of this cache entry was removed while it was written"
                raise StorageError(what, where=str(path), remedy=_LEAVE_ALONE) from error
            if code == errno.EISDIR:
                raise ConfigError(
                    "a folder stands where this entry of the cache belongs", where=str(path), remedy=_MOVE
                ) from error
            if code not in _NOT_WRITABLE:
                raise
            raise ConfigError(
                f"the cache folder cannot be written: {os.strerror(code)}",
                where=str(self.directory),
                remedy="set data.cache_dir or TRAINER_CACHE_DIR to a folder that this user may write",
            ) from error

    def _damaged(self, kind: str, key: str, problem: str | Exception) -> DamagedEntryError:
        """The error for an unusable entry, which is removed so that it is encoded again."""
        path, remedy = self.path(kind, key), _ENCODED_ANEW
        try:
            with atomic.no_space_told(path):
                path.unlink(missing_ok=True)
        except StorageError:
            remedy = "remove it, which this user may not, then start again: it is encoded anew"
        if problem == MISSING or isinstance(problem, FileNotFoundError):
            return DamagedEntryError(_GONE, where=str(path), remedy=_GONE_REMEDY)
        return DamagedEntryError(f"this cache entry is damaged: {problem}", where=str(path), remedy=remedy)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Bytes that a disk cannot give back are damage like any other: the entry is encoded again."""
    with atomic.reading_told(path):
        try:
            yield
        except OSError as error:
            if error.errno == errno.ELOOP:  # a link to itself is no folder: `write` tells
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)) from error
            if error.errno != errno.EIO:
                raise
            raise DamagedFileError("the disk cannot read it") from error


def unused(cache_dir: Path, keep: Collection[str]) -> list[Path]:
    """Files of entries below a folder whose keys are not in `keep`, in their order."""
    kept = frozenset(keep)
    names = (path for path in cache_dir.rglob(f"*{_SUFFIX}") if _ENTRY_NAME.fullmatch(path.name))
    return sorted(path for path in names if path.name.removesuffix(_SUFFIX) not in kept)


def prune(cache_dir: Path, keep: Collection[str]) -> tuple[int, int]:
    """Remove entries whose keys are not in `keep`, and old temporary files; gives (files, bytes) removed.

    Looks only at names that a cache gives, so a wrong folder loses nothing. Temporary files younger than an
    hour may belong to a run that is writing, and stay.
    """
    stale = [path for path in cache_dir.rglob("*.tmp") if _STALE_NAME.fullmatch(path.name)]
    files = removed_bytes = 0
    for path in (*unused(cache_dir, keep), *stale):
        try:
            facts = path.stat()
            if path.suffix != _SUFFIX and time.time() - facts.st_mtime < _STALE_AFTER_SECONDS:
                continue
            path.unlink()
        except FileNotFoundError:
            continue  # another process was faster
        files += 1
        removed_bytes += facts.st_size
    return files, removed_bytes
