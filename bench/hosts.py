"""One command on several stand-ins for hosts: `python -m bench.hosts COUNT COMMAND...`. No torch.

Each host is the command in a session of its own, with its number, a runtime folder of its own, and its share
of the visible GPUs; they meet at a free port of this machine's loopback address. A signal goes to all of
them. The exit code is that of host 0.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from bench.processes import VISIBLE, visible
from trainer.config import environment


def launcher(count: int) -> Callable[[list[str]], list[str]]:
    """The command that starts a module with its arguments, `-m MODULE ...`, on `count` hosts."""
    return lambda words: [sys.executable, "-m", "bench.hosts", str(count), sys.executable, *words]


def runtime_of(runtime: Path, host: int) -> Path:
    """The runtime folder of a host, where that of host 0 is `runtime`."""
    return runtime.with_name(f"{runtime.name}-{host}") if host else runtime


def main(count: int, command: Sequence[str]) -> int:
    """Start the hosts, wait for the end of all, and give host 0's exit code."""
    children: list[subprocess.Popen[bytes]] = []

    def pass_on(signum: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, pass_on)
    with socket.create_server((environment.LOOPBACK, 0)) as free:
        master = f"{environment.LOOPBACK}:{free.getsockname()[1]}"
    gpus, environ = visible(), environment.snapshot()
    for host in range(count):
        runtime = runtime_of(Path(environ["TRAINER_RUNTIME_DIR"]), host)
        own = {
            "TRAINER_NODES": str(count),
            "TRAINER_NODE_RANK": str(host),
            "TRAINER_MASTER": master,
            "TRAINER_RUNTIME_DIR": str(runtime),
            "TRAINER_METRICS_PORT": environ["TRAINER_METRICS_PORT"] if host == 0 else "0",
        }
        share = [] if gpus == [""] else gpus[host * len(gpus) // count : (host + 1) * len(gpus) // count]
        seen = {VISIBLE: ",".join(share)} if share else {}
        children.append(subprocess.Popen(command, env={**environ, **own, **seen}, start_new_session=True))
    codes = [child.wait() for child in children]
    return codes[0] if codes[0] >= 0 else 128 - codes[0]


def kill_host(launched: int, host: int) -> None:
    """SIGKILL to all processes of a host's session, where `launched` is the process id of the launcher."""
    leader = int(Path(f"/proc/{launched}/task/{launched}/children").read_text().split()[host])
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
