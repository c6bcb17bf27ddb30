"""Locks on folders: a run holds one for as long as it, or a child that inherited the lock, lives.

The kernel lets go of a lock when its last holder ends, however that ends; the file stays and says who held
it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypedDict

from trainer.errors import ConfigError, Problem, StoppedError

_PATIENCE_SECONDS = 120.0
_LOOK_SECONDS = 0.2
# `is_held` takes a lock for a moment
_PROBE_SECONDS = 1.0
# what a file system without locks answers
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PROCESSES = Path("/proc/self/ns/pid")
_FIRST = Path("/proc/1/stat")


@contextlib.contextmanager
def holding(
    path: Path,
    *,
    supervisor: int,
    taken: Problem,
    on_wait: Callable[[str], None],
    patience_seconds: float = _PATIENCE_SECONDS,
) -> Iterator[int]:
    """Hold the lock file `path`; gives its descriptor. `supervisor` is the process that watches this run.

    A holder whose supervisor is gone, or is another machine's, is about to end: it is waited for, and
    `on_wait(text)` runs meanwhile, once with a text. Raises ConfigError with `taken` where its supervisor
    lives, StoppedError (resumable) when it does not end. A file system without locks is told by `on_wait`
    too, and keeps no two runs apart.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        link = f"{path} is a link, and is not followed"
        raise ConfigError(link, where=taken.where, remedy="remove it, and start again") from error
    try:
        try:
            _take(descriptor, taken, on_wait, patience_seconds)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            on_wait(f"warning: {path} is on a file system without locks: two runs here are not kept apart")
        # on a full disk nothing says who holds it, which is what an unknown holder is
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({**place(), "supervisor": supervisor}).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def sharing(path: Path) -> Iterator[None]:
    """Hold the lock file `path` together with all others that do so."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for no more than the look of `is_held`
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def using(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path` together with all others that use what it stands for; `on_wait()` runs while
    one holds it `alone`, and may raise. Nothing is held where it cannot be made, or without locks.
    """
    descriptor = _opened(path)
    try:
        while descriptor is not None and _taken(descriptor, fcntl.LOCK_SH) is False:
            on_wait()
            time.sleep(_LOOK_SECONDS)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool | None]:
    """Hold the lock file `path` if nobody else does, without waiting; gives whether it is held, None where it
    cannot be made, or without locks.
    """
    descriptor = _opened(path)
    try:
        yield None if descriptor is None else _taken(descriptor, fcntl.LOCK_EX)
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _opened(path: Path) -> int | None:
    """A descriptor of a lock file that several users may share, made with its folder where it is missing;
    None where neither is possible.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    # a server's locks that are held alone want a file open for writing, which another user's is not
    for flags in (os.O_RDWR | os.O_CREAT, os.O_RDONLY):
        with contextlib.suppress(OSError):
            return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    return None


def _taken(descriptor: int, kind: int) -> bool | None:
    """True once a lock is held, False where another one stands in its way, None without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def is_held(path: Path, *, shared: bool = False) -> bool | None:
    """True if a process holds the lock file; None where that is not known.

    With `shared` also where processes hold it together; then two that ask at once may see each other.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if shared else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None  # a file system without locks
    finally:
        os.close(descriptor)
    return False


def _take(descriptor: int, taken: Problem, on_wait: Callable[[str], None], patience_seconds: float) -> None:
    """Take the lock, or wait for it by the rules of `holding`."""
    began = time.monotonic()
    told = False
    while True:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        waited = time.monotonic() - began
        if _may_live(descriptor):
            if waited > _PROBE_SECONDS:
                raise ConfigError([taken])
        elif waited > patience_seconds:
            text = f"{taken.what}, and has not ended within {patience_seconds:.0f} s"
            raise StoppedError(text, where=taken.where, remedy=taken.remedy)
        else:
            tell = not told and waited > _PROBE_SECONDS
            on_wait(f"{taken.what}, which is about to end: waiting for it" if tell else "")
            told = told or tell
        time.sleep(_LOOK_SECONDS)


def is_held_by(path: Path, holder: Mapping[str, object]) -> bool:
    """True if the lock file `path` is held, and by `holder`: its `supervisor`, and the `place` of that.

    On a file system without locks the supervisor's process has to be there.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        same = _holder(descriptor) == holder
    finally:
        os.close(descriptor)
    held = is_held(path)
    if held is None:
        supervisor = holder["supervisor"]
        here = all(holder[name] == value for name, value in place().items())
        held = here and isinstance(supervisor, int) and is_alive(supervisor)
    return same and held


def supervisor_here(path: Path) -> int | None:
    """The process that the last holder of a lock file named as its supervisor; None where it is another
    machine's or container's, or not known.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        holder = _holder(descriptor)
    finally:
        os.close(descriptor)
    if holder is None or any(holder.get(name) != value for name, value in place().items()):
        return None
    return holder["supervisor"] if isinstance(holder["supervisor"], int) else None


def _holder(descriptor: int) -> dict[str, object] | None:
    """The words that the last holder of a lock file wrote; None where they are not ours."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return None
    return holder if isinstance(holder, dict) and isinstance(holder.get("supervisor"), int) else None


def _may_live(descriptor: int) -> bool:
    """True if the run that holds a lock may go on for long; an unsupervised one does not."""
    holder = _holder(descriptor)
    if holder is None:
        return True  # nothing is known of it
    if any(holder.get(name) != value for name, value in place().items()):
        return False  # another machine's or container's: it was sent away, or this run would not be here
    supervisor = holder["supervisor"]
    return isinstance(supervisor, int) and is_alive(supervisor)


def is_alive(pid: int) -> bool:
    """True if a process of this id exists here and has not ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # "PID (name) STATE ...", and a name may hold brackets
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


class Place(TypedDict):
    """The boot of a machine and a set of its processes: only within them process ids can be compared.

    The kernel gives the number of a container's set to a later one: the start of its first process tells them
    apart.
    """

    boot: str
    processes: str


def place() -> Place:
    """The place of this process; empty words where the kernel does not tell."""
    try:
        processes = str(_PROCESSES.readlink())
    except OSError:
        return {"boot": "", "processes": ""}
    # hidden from some users of a machine, which is one set of processes for as long as its boot
    with contextlib.suppress(OSError):
        # field 22, in clock ticks since the boot; the second field, a name, may hold spaces and brackets
        started = _FIRST.read_text().rpartition(")")[2].split()[19]
        processes = f"{processes} since {started}"
    return {"boot": boot_id(), "processes": processes}


def boot_id() -> str:
    """The kernel's name for this boot: monotonic clocks of two boots must not be compared."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
