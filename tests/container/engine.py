"""A container engine for tests: the one that runs here, or a private one that ends with the tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PATIENCE_SECONDS = 60.0
_BRIDGE = "docker0"
_NETWORK = "172.30.0.1/24"


class NoEngineError(Exception):
    """There is no engine, and this user cannot start one."""


class EngineError(Exception):
    """An engine that should work does not."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A client that can build, and the engine that it talks to."""

    client: str
    host: str = ""
    """Address of a private engine; empty: whatever the client finds by itself."""

    def environment(self) -> dict[str, str]:
        """Environment of the client, and of other programs that talk to the engine (compose)."""
        address = {"DOCKER_HOST": self.host} if self.host else {}
        return {**os.environ, **address, "DOCKER_BUILDKIT": "1", "BUILDKIT_PROGRESS": "plain"}

    def run(self, *arguments: str, timeout: float = 600) -> subprocess.CompletedProcess[str]:
        """The client's answer, whatever its exit code; its errors are in `stdout` too."""
        return subprocess.run(
            [self.client, *arguments],
            env=self.environment(),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=timeout,
        )

    def ask(self, *arguments: str, timeout: float = 600) -> str:
        """Output of the docker client without surrounding blanks; raises EngineError when it fails."""
        answer = self.run(*arguments, timeout=timeout)
        if answer.returncode != 0:
            raise EngineError(f"docker {' '.join(arguments)}: {answer.returncode}\n{answer.stdout[-6000:]}")
        return answer.stdout.strip()


def find_client() -> str:
    """A docker client that can build with BuildKit. Clients from 23 on need the plugin buildx for that."""
    folders = os.get_exec_path()
    found = [path for folder in folders if os.access(path := str(Path(folder) / "docker"), os.X_OK)]
    for client in found:
        if subprocess.run([client, "buildx", "version"], capture_output=True).returncode == 0:
            return client
        answer = subprocess.run([client, "--version"], capture_output=True, text=True).stdout
        version = answer.removeprefix("Docker version ").partition(".")[0]
        if version.isdigit() and int(version) < 23:
            return client
    if found:
        raise NoEngineError(f"{found[0]} cannot build: it lacks the plugin buildx")
    raise NoEngineError("there is no docker client: install docker.io and debootstrap")


@contextlib.contextmanager
def engine(folder: Path) -> Iterator[Engine]:
    """The running engine, else a private one that keeps its images in `folder`. Raises NoEngineError."""
    existing = Engine(client=find_client())
    if existing.run("info", timeout=PATIENCE_SECONDS).returncode == 0:
        yield existing
        return
    if os.geteuid() != 0:
        raise NoEngineError("no container engine answers, and only root can start one")
    if shutil.which("dockerd") is None:
        raise NoEngineError("no container engine answers, and dockerd is not installed")
    with _private(existing.client, folder) as host:
        private = Engine(client=existing.client, host=host)
        yield private
        # each change of the code leaves an image without a name; the layers that builds reuse stay
        private.run("image", "prune", "--force", timeout=PATIENCE_SECONDS)


@contextlib.contextmanager
def _private(client: str, folder: Path) -> Iterator[str]:
    """An engine that leaves the firewall alone: its containers reach each other and this machine, no more."""
    had_bridge = Path("/sys/class/net", _BRIDGE).exists()
    folder.mkdir(parents=True, exist_ok=True)
    # a socket's path may have 108 characters: not below the folder of a test
    with tempfile.TemporaryDirectory(prefix="engine-", ignore_cleanup_errors=True) as short:
        host = f"unix://{short}/docker.sock"
        command = [
            "dockerd",
            "--data-root",
            str(folder),
            "--exec-root",
            f"{short}/exec",
            "-p",
            f"{short}/pid",
        ]
        command += ["-H", host, "--bip", _NETWORK, "--iptables=false", "--ip6tables=false"]
        with Path(short, "log").open("wb") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait_for(Engine(client=client, host=host), daemon, Path(short, "log"))
            yield host
        finally:
            daemon.terminate()
            try:
                daemon.wait(timeout=PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
            if not had_bridge:
                subprocess.run(["ip", "link", "delete", _BRIDGE], capture_output=True)


def _wait_for(engine: Engine, daemon: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while engine.run("info", timeout=PATIENCE_SECONDS).returncode != 0:
        if daemon.poll() is not None or time.monotonic() > end:
            raise EngineError(f"dockerd does not start:\n{log.read_text(errors='replace')[-4000:]}")
        time.sleep(0.2)
