"""A process that has imported what runs import: tests fork runs from it, slow ones hundreds.

    python -P -m tests.e2e.nursery DESCRIPTOR

Each request is the words after `python` and an environment. They are run by a child as `python -m` would run
them: own environment, signals, descriptors, streams and exit. A supervisor that came from here forks its rank
0 the same way, and the others where `make test` has compared the bits of such ranks, or where a test says so;
a comparison forks its runs, and a launcher from here the trainer of each rank. Else other ranks, launchers'
processes, and runs of `make test` that are about more than their end are started by Python itself: they prove
what a start has to do, and that ranks need no common order of hashes. Slow tests compare such a rank with one
process for each family that shares its base with another one, for one family a kind on a set of real shape,
with other options, and on another host.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import math
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
ALL_RANKS = "TESTS_FORK_ALL_RANKS"
"""Variable of a run whose ranks are all forked, in place of the first one alone."""
LAUNCHERS = ("torch.distributed.run", "accelerate.commands.launch")
"""Modules that start a trainer for each rank."""
_MOST_BYTES = 1 << 20
_LOOK_SECONDS = 0.005


class Forked:
    """A run that was forked, with what `subprocess.Popen` has for tests; it is a child of a child of ours."""

    def __init__(self, pid: int, stderr: int, ended: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stderr: io.FileIO | None = io.FileIO(stderr)
        self._ended = ended

    def poll(self) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            told = os.read(self._ended, 64)
            os.close(self._ended)
            self.returncode = int(told) if told else -signal.SIGKILL
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None and not select.select([self._ended], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("forked run", timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, timeout: float = 300.0) -> tuple[None, str]:
        """Read stderr to its end, then wait."""
        end, parts = time.monotonic() + timeout, []
        while self.stderr is not None:
            if not select.select([self.stderr], [], [], max(0.0, end - time.monotonic()))[0]:
                raise subprocess.TimeoutExpired("forked run", timeout)
            parts.append(self.stderr.read(_MOST_BYTES))
            if not parts[-1]:
                self.stderr.close()
                self.stderr = None
        self.wait(max(0.0, end - time.monotonic()))
        return None, b"".join(parts).decode()

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The process and the way to ask it; another module imports something else."""

    def __init__(self, environ: Mapping[str, str], module: str = "tests.e2e.nursery") -> None:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-P", "-m", module, str(theirs.fileno())]
        path = {"PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(words, cwd=ROOT, env={**environ, **path}, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(
        self,
        words: Sequence[str],
        environ: Mapping[str, str],
        *,
        stdout: Path | None = None,
        with_errors: bool = False,
    ) -> Forked:
        """Run the words that would follow `python`; what it prints goes to the end of the file `stdout`, if
        any, and its errors too if asked.
        """
        read, write = os.pipe()
        ended, tell = os.pipe()
        asked = {
            "words": list(words),
            "environ": dict(environ),
            "stdout": stdout and str(stdout),
            "with_errors": with_errors,
        }
        socket.send_fds(self._ours, [json.dumps(asked).encode()], [write, tell])
        os.close(write)
        os.close(tell)
        return Forked(int(self._ours.recv(64)), read, ended)

    def run(self, words: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run the words to their end, as `subprocess.run` with its outputs captured."""
        with tempfile.NamedTemporaryFile() as printed:
            started = self.start(words, environ, stdout=Path(printed.name))
            try:
                _, errors = started.communicate()
            finally:
                started.kill()  # nothing where it has ended
            return subprocess.CompletedProcess(
                words, started.wait(), Path(printed.name).read_text(encoding="utf-8"), errors
            )

    def end(self) -> None:
        self._ours.close()
        self._process.wait(10)


@contextlib.contextmanager
def nurseries(environ: Mapping[str, str]) -> Iterator[Callable[..., Nursery]]:
    """Give one, or two in turn, made when they are asked for: strings have other hashes in the second one."""
    made: list[Nursery] = []

    def another(*, alternate: bool) -> Nursery:
        if len(made) < 1 + alternate:
            made.append(Nursery(environ))
        elif alternate:
            made.reverse()
        return made[-1]

    try:
        yield another
    finally:
        for one in made:
            one.end()


def _import_all() -> None:
    """Import what a run imports, and keep it out of every later collection of garbage."""
    gc.disable()
    import torch._dynamo

    import trainer.cli.commands
    import trainer.cli.compare
    import trainer.cli.jobs
    import trainer.cli.measure
    import trainer.cli.train
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    import diffusers
    import peft
    import torch.utils.tensorboard
    import transformers

    import trainer.engine.building.base_load_check
    import trainer.engine.run
    import trainer.planning.kept_decisions
    import trainer.planning.render

    for library, names in (
        (diffusers, ("FluxTransformer2DModel", "AutoencoderKL", "FluxPipeline")),
        (transformers, ("AutoTokenizer", "CLIPTextModel", "T5EncoderModel", "LlamaForCausalLM")),
    ):
        for name in names:
            getattr(library, name)
    del peft, torch, trainer
    gc.freeze()
    gc.enable()


def _serve(requests: socket.socket) -> None:
    """Answer requests until the tests are gone. What forks a run waits for it and tells how it ended."""
    waiting: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 2)
        waiting = {one for one in waiting if os.waitpid(one, os.WNOHANG if message else 0)[0] == 0}
        if not message:
            return
        stderr, ended = descriptors
        if waits := os.fork():
            waiting.add(waits)
            os.close(stderr)
            os.close(ended)
            continue
        asked = json.loads(message)
        pid = os.fork()
        if not pid:
            os.dup2(stderr, 2)
            if asked["stdout"] is not None:
                os.dup2(os.open(asked["stdout"], os.O_WRONLY | os.O_APPEND), 1)
            if asked["with_errors"]:
                os.dup2(1, 2)
            _become(asked["words"], asked["environ"], kept=())
        os.close(stderr)
        requests.send(str(pid).encode())
        requests.close()
        _, status = os.waitpid(pid, 0)
        os.write(ended, str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)


def _become(words: Sequence[str], environ: Mapping[str, str], kept: Sequence[int]) -> NoReturn:
    """Be the process that `python *words` would be, from its start to its end."""
    for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        if signum != signal.SIGHUP or callable(signal.getsignal(signum)):  # one that is ignored stays so
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    low = 3
    for descriptor in sorted(kept):
        os.closerange(low, descriptor)
        low = descriptor + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environ)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    gc.set_threshold(700, 10, 10)
    tempfile.tempdir = None  # the environment names it
    vars(weakref.finalize)["_registry"].clear()  # temporary folders of the supervisor are not this process's
    at = min(words.index(one) for one in ("-m", "-c") if one in words)
    module, arguments = words[at + 1], list(words[at + 2 :])
    sys.argv = [module if words[at] == "-m" else "-c", *arguments]
    code = 1
    try:
        is_code = words[at] == "-c"
        if is_code or (module in ("trainer", "tests.e2e.harness") and "--child" not in arguments):
            _fork_ranks()
        if arguments[:1] == ["compare"]:
            _fork_compared()
        if module in LAUNCHERS:
            _fork_launched()
        if is_code:
            exec(compile(module, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as Python's end does
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


class _Child:
    """A child that was forked, with what its parent asks of `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = math.inf) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() >= end:
                raise subprocess.TimeoutExpired("forked child", timeout)
            time.sleep(_LOOK_SECONDS)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def _fork_ranks() -> None:
    """Have the supervisor of this process fork rank 0 or all of them, which Python itself would start."""
    from trainer.telemetry.supervising import supervisor

    def start(command: list[str], **rest: Any) -> _Child | subprocess.Popen[bytes]:
        environ = rest["env"]
        if environ.get("RANK", "0") != "0" and ALL_RANKS not in environ:
            return subprocess.Popen(command, **rest)
        return _fork(command[1:], environ, kept=rest["pass_fds"])

    vars(supervisor)["subprocess"] = _with_popen(start)


def _fork_compared() -> None:
    """Have the comparison of this process fork its runs, each tied to it as its own start ties one."""
    from trainer.engine.comparing import child, tied
    from trainer.telemetry.stop import die_with_parent

    def start(command: list[str], **rest: Any) -> _Child:
        parent, _, *run = command[command.index(tied.__name__) + 1 :]
        output = rest["stdout"].fileno()

        def ready() -> None:
            die_with_parent(int(parent))
            os.dup2(output, 1)
            os.dup2(output, 2)

        return _fork(run, rest["env"], kept=(), ready=ready)

    vars(child)["subprocess"] = _with_popen(start)


def _fork_launched() -> None:
    """Have the launcher of this process fork its trainers, each in a session of its own."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args: Sequence[str], env: Mapping[str, str], **_: Any) -> _Child:
        words = args[1:]
        trainer = _fork(words, env, kept=(), lead=os.setsid)
        while os.getpgid(trainer.pid) != trainer.pid:  # the launcher may signal its group at once
            time.sleep(_LOOK_SECONDS)
        return trainer

    vars(subprocess_handler)["Popen"] = start


def _with_popen(start: Callable[..., Any]) -> types.SimpleNamespace:
    """The module `subprocess` with another Popen."""
    return types.SimpleNamespace(**{**vars(subprocess), "Popen": start})


def _fork(
    words: Sequence[str],
    environ: Mapping[str, str],
    kept: Sequence[int],
    ready: Callable[[], None] = lambda: None,
    lead: Callable[[], Any] | None = None,
) -> _Child:
    """Fork what `python *words` would be, in a group of its own, or as the child's `lead` makes it; `ready`
    runs in it first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if lead is None:
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whichever of the two comes first
    elif not pid:
        lead()
    if pid:
        return _Child(pid)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    ready()
    _become(words, environ, kept=kept)


def main(import_all: Callable[[], None] = _import_all) -> None:
    requests = socket.socket(fileno=int(sys.argv[1]))
    import_all()
    _serve(requests)


if __name__ == "__main__":
    main()
