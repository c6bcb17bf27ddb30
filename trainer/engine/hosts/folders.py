"""Folders of several hosts: one that all see, or one of each host, which gets the files that it goes on with.

Rank 0 writes the run's folder. Where another host does not see it, the checkpoint that a run goes on from and
the LoRA that the last previews are drawn with are sent, in pieces. A cache that hosts share is filled once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import hashlib
import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.data.records import Record
from trainer.engine.caching.entries import data_fingerprint
from trainer.engine.context import Context
from trainer.engine.ranks import PIECE_BYTES, Ranks
from trainer.engine.records import checkpoint
from trainer.engine.records.resume import Start, put_back
from trainer.errors import ConfigError
from trainer.files import atomic
from trainer.telemetry.status import Phase
from trainer.words.plurals import numbered

_SEEN_SECONDS = 3.0
"""Longest time until a file that another host made is seen in a folder of a network."""
_LOOK_SECONDS = 0.1
_SENT_SECONDS = 120.0
_REFUSALS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_FROM = "from"
"""Folder, in the run's, of a checkpoint of another run that was sent."""


@dataclass(frozen=True, kw_only=True)
class _File:
    """A file that rank 0 has, by its path in the folder that is handed out; empty for a single file."""

    name: str
    size: int
    sha256: str


def found(context: Context) -> Context:
    """The context with what is known of the hosts' folders; as it is for one host.

    Raises ConfigError on all hosts where a full fine-tune's folder is not seen by all of them.
    """
    ranks = context.ranks
    if ranks.hosts == 1:
        return context
    cache = _which_see(ranks, context.cache_dir, refusing=True)
    run = _which_see(ranks, context.run_dir)
    group = tuple(rank for rank in range(ranks.size) if cache[rank // ranks.ranks_here] == cache[ranks.host])
    shared = run[ranks.host] == 0
    if ranks.speaks and not shared:
        context.tell(f"{context.run_dir} is this host's own: the run's files are written on host 0")
    apart = [host for host, lead in enumerate(run) if lead]
    if context.plan.in_rows and apart:
        names = " and ".join(f"host {host}" for host in apart)
        with ranks.together():
            raise ConfigError(
                f"{names} do{'es' if len(apart) == 1 else ''} not see the folder of host 0, and a full"
                " fine-tune's checkpoints and model are read by all",
                where="output_dir",
                remedy="name a folder of a network's file system that is mounted on all hosts",
            )
    return dataclasses.replace(context, cache_ranks=group, shares_run_dir=shared)


def _which_see(ranks: Ranks, folder: Path, *, refusing: bool = False) -> list[int]:
    """The first host whose folder each host sees as its own one, by host. With `refusing` a folder that takes
    no file may be one of them: where nobody else's file is seen in it, it is the host's own.

    Raises StorageError.
    """
    name = _mark(ranks, folder, refusing=refusing) if ranks.speaks else ""
    names = ranks.gathered(name)[:: ranks.ranks_here]
    seen: set[int] = set()
    if ranks.speaks:
        end = time.monotonic() + _SEEN_SECONDS
        while len(seen) < sum(map(bool, names)) and time.monotonic() < end:
            there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
            seen = {host for host, one in enumerate(names) if one in there}
            time.sleep(_LOOK_SECONDS)
        seen = seen or {ranks.host}
    told = ranks.gathered(seen)[:: ranks.ranks_here]
    if name:
        (folder / name).unlink(missing_ok=True)
    return [min(one) for one in told]


def _mark(ranks: Ranks, folder: Path, *, refusing: bool) -> str:
    """The name of this host's file in the folder; empty where that takes none."""
    mark = folder / f".host-{ranks.host}-{uuid.uuid4().hex}"
    with atomic.no_space_told(mark):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
        except OSError as error:
            if not refusing or error.errno not in _REFUSALS:
                raise
            return ""
    return mark.name


def first_other_sample(context: Context, records: Sequence[Record]) -> str:
    """The first sample in which the data sets of two hosts differ, in words; empty where none is found."""
    ranks = context.ranks
    rows = [(one.identifier, data_fingerprint([one])) for one in records] if ranks.speaks else []
    by_host = ranks.gathered(rows)[:: ranks.ranks_here]
    for host, theirs in enumerate(by_host[1:], start=1):
        if theirs == by_host[0]:
            continue
        for ours, other in itertools.zip_longest(by_host[0], theirs, fillvalue=("nothing", "")):
            if ours == other:
                continue
            counts = f"{numbered(len(by_host[0]), 'sample')} on host 0, {len(theirs)} on host {host}"
            if ours[0] == other[0]:
                return f"{ours[0]} is another file, or has another caption, on host {host} than on host 0"
            return f"{counts}; the first that differs is {ours[0]} on host 0 and {other[0]} on host {host}"
    return ""


def with_checkpoint(context: Context, start: Start) -> Start:
    """The start with the checkpoint of rank 0 as this host has it; it is sent to hosts that do not see it.

    Raises ConfigError on all hosts where another one has a later checkpoint of its own than rank 0.
    """
    ranks = context.ranks
    if ranks.hosts == 1:
        return start
    root, step = context.run_dir / "checkpoints", 0 if start.found is None else start.found[1].step
    own = 0
    if ranks.speaks and not context.shares_run_dir:
        put_back(context.run_dir, context.tell)
        own = max(map(checkpoint.step_of, checkpoint.steps_on_disk(root)), default=0)
    later = [(host, one) for host, one in enumerate(ranks.gathered(own)[:: ranks.ranks_here]) if one > step]
    if later:
        host, newest = later[0]
        with ranks.together():
            raise ConfigError(
                f"host {host} has a checkpoint of step {newest} in its own folder, and host 0 goes on from"
                f" step {step}",
                where=f"output_dir of host {host}",
                remedy="start that machine with TRAINER_NODE_RANK=0, or copy the checkpoint to host 0, or"
                " remove it there",
            )
    if start.found is None:
        return start
    folder = handed(context, start.found[0])
    if ranks.speaks and not context.shares_run_dir:
        keep = context.config.checkpoint.checkpoints_total_limit
        for older in checkpoint.steps_on_disk(root)[:-keep]:
            atomic.remove_folder(older)
    return dataclasses.replace(start, found=(folder, start.found[1]))


def handed(context: Context, path: Path) -> Path:
    """The file or folder `path` of rank 0 as this host has it: all ranks call it together.

    Where all see it nothing is sent. Hosts with a folder of their own get what they have not, at the same
    place in it. Raises StorageError where it cannot be written on one.
    """
    ranks = context.ranks
    path, inside, files = ranks.agreed(functools.partial(_described, context, path))[0]
    if ranks.hosts == 1:
        return path
    target = path
    if not context.shares_run_dir:
        target = context.run_dir / (inside or Path(_FROM) / path.name)
        if not inside and not _lacks(path, files):
            target = path
    elif ranks.speaks:
        _await_seen(context, path, files)
    wants = not context.shares_run_dir and ranks.speaks and _lacks(target, files)
    if True in ranks.gathered(wants):
        _send(context, path, target if wants else None, files)
        ranks.meet()  # the first rank of a host writes for its others, which have heard all a moment before
    return target


def _described(context: Context, path: Path) -> tuple[Path, Path | None, list[_File]]:
    """The path, its place in the run's folder, and its files; of rank 0, whose path it is."""
    if not context.ranks.first or context.ranks.hosts == 1:
        return path, None, []
    inside = path.relative_to(context.run_dir) if path.is_relative_to(context.run_dir) else None
    every = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
    return path, inside, [_file(path, one, lambda: context.alive(Phase.LOAD)) for one in every]


def _file(root: Path, path: Path, on_piece: Callable[[], None]) -> _File:
    digest = hashlib.sha256()
    for piece in _pieces(path):
        on_piece()
        digest.update(piece)
    name = "" if path == root else str(path.relative_to(root))
    return _File(name=name, size=path.stat().st_size, sha256=digest.hexdigest())


def _pieces(path: Path) -> Iterator[bytes]:
    with atomic.reading_told(path), path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _lacks(target: Path, files: list[_File]) -> bool:
    """True if one of the files is missing at `target`, or is another one."""
    for one in files:
        path = target / one.name if one.name else target
        if not path.is_file() or path.stat().st_size != one.size:
            return True
        if _file(target, path, lambda: None).sha256 != one.sha256:
            return True
    return False


def _await_seen(context: Context, path: Path, files: list[_File]) -> None:
    """Wait until a shared folder shows here what rank 0 wrote. Raises ConfigError where it does not."""
    end = time.monotonic() + _SENT_SECONDS
    while _lacks(path, files):
        context.alive(Phase.LOAD)
        if time.monotonic() > end:
            what = f"{path} of host 0 is not seen here after {_SENT_SECONDS:.0f} s, or has other bytes"
            raise ConfigError(what, where="output_dir", remedy="look at the network's file system")
        with contextlib.suppress(OSError):
            sorted(path.parent.iterdir())  # a file system of a network looks again
        time.sleep(_LOOK_SECONDS)


def _send(context: Context, path: Path, target: Path | None, files: list[_File]) -> None:
    """Send files of rank 0; a host with a `target` writes them, all or none."""
    ranks = context.ranks
    with contextlib.ExitStack() as stack:
        folder = None
        if target is not None:
            whole = bool(files[0].name)
            if not whole:
                with atomic.no_space_told(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(atomic.whole_folder(target)) if whole else target
        for file in files:
            source = path / file.name if file.name else path
            pieces = _pieces(source) if ranks.first else iter(())
            into = None if folder is None else (folder / file.name if file.name else folder)
            with contextlib.nullcontext() if into is None else _writing(into) as write:
                for _ in range(-(-file.size // PIECE_BYTES)):
                    piece = ranks.from_first(next(pieces, b""))
                    context.status.beat(context.status.phase or Phase.LOAD)
                    if write is not None:
                        write(piece)
    if target is not None:
        context.tell(f"{path.name}: {sum(one.size for one in files) / 2**20:.1f} MiB came from host 0")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[Callable[[bytes], object]]:
    with atomic.no_space_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.writing(path) as file:
            yield file.write
