"""Exit codes and the errors that carry them. Imports nothing of ours."""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_CONTROL = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
"""Escape sequences, unusual line breaks, marks that reorder text, bytes that are not UTF-8."""
_UNPRINTABLE = re.compile(f"[{_CONTROL}]")
_NOT_ON_ONE_LINE = re.compile(f"[\t\n{_CONTROL}]")


def printable(text: str) -> str:
    """`text` with control characters spelled out: a name must not give orders to the terminal."""
    return _UNPRINTABLE.sub(_spelled_out, text)


def one_line(text: object) -> str:
    """`printable` text without line breaks, by which a file's name could forge a line."""
    return _NOT_ON_ONE_LINE.sub(_spelled_out, str(text))


def _spelled_out(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape").decode()


class ExitCode(enum.IntEnum):
    """Exit codes of `trainer`; Kubernetes and Compose files are written against these numbers."""

    OK = 0
    BAD_DATA = 65
    HARDWARE = 69
    DIVERGED = 70
    OUT_OF_MEMORY = 71
    NO_SPACE = 73
    HUNG = 74
    STOPPED = 75
    PEER_LOST = 76
    NO_ACCESS = 77
    BAD_CONFIG = 78


MEANING: dict[ExitCode, str] = {
    ExitCode.OK: "finished",
    ExitCode.BAD_DATA: "bad data",
    ExitCode.HARDWARE: "this hardware cannot do it",
    ExitCode.DIVERGED: "the loss or a gradient became NaN or infinite, or the result changes nothing",
    ExitCode.OUT_OF_MEMORY: "out of memory, or a memory floor was reached",
    ExitCode.NO_SPACE: "no space on a disk, or a disk that fails or refuses",
    ExitCode.HUNG: "no progress within the phase's budget",
    ExitCode.STOPPED: "stopped on request, resumable",
    ExitCode.PEER_LOST: "another machine's rank was lost; resumable",
    ExitCode.NO_ACCESS: "no access to the base model",
    ExitCode.BAD_CONFIG: "bad configuration",
}


GOES_ON = frozenset({ExitCode.STOPPED, ExitCode.PEER_LOST})
"""Codes of a run that did nothing wrong: the same command goes on, and may be tried without a person."""


def meaning(exit_code: int) -> str:
    """An exit code in words, one of another program too."""
    return next((MEANING[known] for known in ExitCode if known == exit_code), "unexpected")


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong: what it is, where it came from, what to do about it."""

    what: str
    where: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{one_line(self.where)}: " if self.where else ""
        remedy = f"\n    -> {one_line(self.remedy)}" if self.remedy else ""
        return f"{where}{one_line(self.what)}{remedy}"


class TrainerError(Exception):
    """A user's mistake or an outside failure, with every problem found and the exit code to end with."""

    exit_code: ExitCode

    def __init__(self, what: str | Sequence[Problem], *, where: str = "", remedy: str = "") -> None:
        if isinstance(what, str):
            self.problems: tuple[Problem, ...] = (Problem(what=what, where=where, remedy=remedy),)
        else:
            self.problems = tuple(what)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[TrainerError], tuple[Sequence[Problem]]]:
        """Pickled with its problems, for the other ranks of a run."""
        return type(self), (self.problems,)


def as_data(exit_code: int, problems: Sequence[Problem]) -> dict[str, object]:
    """An error for programs: `exit_code`, `meaning` and `problems`, each of `what`, `where` and `remedy`.

    Secrets are still in it: they are taken out of the text that it becomes.
    """
    rows = [{"what": one.what, "where": one.where, "remedy": one.remedy} for one in problems]
    return {"exit_code": int(exit_code), "meaning": meaning(exit_code), "problems": rows}


class EndedTogether(Exception):
    """The end of this rank by an error that all ranks raise: rank 0 saves, and says why."""


class PeerLostError(Exception):
    """Another rank of this run is gone: its own end says why, and the supervisor ends this one as well.

    A process ends with PEER_LOST by it. A supervisor whose host has all ranks, which alone sees that, passes
    on STOPPED.
    """


class ConfigError(TrainerError):
    """The configuration cannot be used as written."""

    exit_code = ExitCode.BAD_CONFIG


class DataError(TrainerError):
    """Images, captions or metadata cannot be used as they are."""

    exit_code = ExitCode.BAD_DATA


class HardwareError(TrainerError):
    """This machine, driver or build of torch cannot do what was asked."""

    exit_code = ExitCode.HARDWARE


class DivergedError(TrainerError):
    """The loss or a gradient is not finite."""

    exit_code = ExitCode.DIVERGED


class OutOfMemoryError(TrainerError):
    """Device or host memory ran out."""

    exit_code = ExitCode.OUT_OF_MEMORY


class StorageError(TrainerError):
    """A file could not be written or read: its disk fails, or refuses."""

    exit_code = ExitCode.NO_SPACE


class NoSpaceError(StorageError):
    """A file could not be written because its disk is full."""


class StoppedError(TrainerError):
    """The run was asked to stop; what was saved can be resumed."""

    exit_code = ExitCode.STOPPED


class LostError(TrainerError):
    """Another machine of this run did not come, or is gone; what was saved can be resumed."""

    exit_code = ExitCode.PEER_LOST


class AccessError(TrainerError):
    """The base model is missing, gated or cannot be reached."""

    exit_code = ExitCode.NO_ACCESS


@contextlib.contextmanager
def starts_told() -> Iterator[None]:
    """Turn the system's refusal of one more thread or process inside the block into HardwareError."""
    try:
        yield
    except (BlockingIOError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and str(error) != "can't start new thread":
            raise
        raise HardwareError(
            "no more processes and threads can be started",
            where="this user's limit, or the container's",
            remedy="raise it (`ulimit -u`, `docker run --pids-limit`, a pod's limit of its node), or end"
            " other programs of this user, then start again to resume",
        ) from error
