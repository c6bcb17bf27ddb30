"""Standard streams that outlive their reader.

A terminal that closes, `| head`, a `tee` that ends or a full disk behind `2>` must not end a run of hours:
what was meant for them is dropped, the run goes on, and its log tells. The result of a command is another
matter: a failure to write it is an error.
"""

from __future__ import annotations

import errno
import io
import os
import select
import sys
from typing import TYPE_CHECKING, TextIO

from trainer.errors import StorageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

_GONE = frozenset({errno.EPIPE, errno.EIO, errno.EBADF, errno.ECONNRESET, errno.ENXIO})
"""Errors of a pipe without a reader, a closed terminal or descriptor, and a connection that was cut."""
_NAMES = ("stdin", "stdout", "stderr")


class ReaderGone(Exception):
    """Nobody reads a command's result any more. It is no OSError: click ends a command by those with 1."""


class _LastingFile(io.FileIO):
    """A raw file that waits for its reader, also at a non-blocking pipe, and drops what cannot be written."""

    def write(self, data: Buffer, /) -> int:
        """Write a part of `data`, or give it up; gives its bytes."""
        try:
            while (written := super().write(data)) is None:
                select.select([], [self.fileno()], [])
        except OSError as error:
            self.give_up(error)
            return memoryview(data).nbytes
        return written

    def give_up(self, error: OSError) -> None:
        """Drop what was not written; once the reader went away the descriptor leads to the null device."""
        if error.errno in _GONE:  # not a full disk: later lines may find room again
            _lead_nowhere(self.fileno())
            name = _NAMES[self.fileno()]
            _tell(f"nobody reads {name} any more ({error.strerror}); the work goes on without it")


class _ResultFile(_LastingFile):
    """A raw file for what a command was asked for."""

    def give_up(self, error: OSError) -> None:
        """Raise ReaderGone where nobody reads it, StorageError for a disk."""
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        _lead_nowhere(self.fileno())  # what waits to be written would fail again at the process's end
        what = f"{error.strerror or error} while writing it"
        raise StorageError(what, where=_NAMES[self.fileno()], remedy="send it elsewhere") from error


def outlive_readers(*, stdout: bool) -> None:
    """Have what this process writes to stderr, with `stdout` to that too, never end it.

    Standard streams that it was started without lead to the null device: else the next file that it opens
    would become descriptor 2, and take what native code writes there.
    """
    for descriptor in range(len(_NAMES)):
        try:
            os.fstat(descriptor)
        except OSError:
            _lead_nowhere(descriptor)
    sys.stderr = _over(_LastingFile, sys.stderr, 2)
    # a command whose reader left ends early (`trainer config show | head`); work that lasts does not
    sys.stdout = _over(_LastingFile if stdout else _ResultFile, sys.stdout, 1)


def _over(kind: type[io.FileIO], stream: TextIO | None, descriptor: int) -> TextIO:
    """`stream` over a raw file of a kind; one that is no longer the process's own stays as it is."""
    raw = kind(descriptor, "wb", closefd=False)
    if stream is None:
        return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", line_buffering=True)
    try:
        if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != descriptor:
            return stream
    except OSError:  # text in memory
        return stream
    stream.flush()
    # PYTHONIOENCODING may name an encoding that lacks letters: they are spelled out
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    # fmt: off
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=errors, newline="\n",
        line_buffering=stream.line_buffering, write_through=stream.write_through,
    )
    # fmt: on


def _lead_nowhere(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != descriptor:
        os.dup2(null, descriptor)
        os.close(null)
    else:
        os.set_inheritable(descriptor, True)


def _tell(text: str) -> None:
    """Write a warning to the run's log alone: this is called while a line is written to stderr."""
    import logging

    logger = logging.getLogger("trainer")
    record = logger.makeRecord("trainer.streams", logging.WARNING, __file__, 0, text, (), None)
    for handler in logger.handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
