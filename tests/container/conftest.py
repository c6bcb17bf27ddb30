"""An engine, the cpu image, and a way to run it as careful users do: read-only, without network."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from tests.container.boxes import Box
from tests.container.engine import Engine, NoEngineError
from tests.container.engine import engine as running_engine
from tests.container.images import Source, build, find_source

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer-container-tests"
"""Images and bases stay here, so that the next run of the tests starts at once."""
CPU_IMAGE = "trainer:test-cpu"
SOMEBODY = 4321
"""A user that neither this machine nor the image knows."""
SEALED = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges:true")
SCRATCH = ("--tmpfs", "/tmp:exec,mode=1777", "--tmpfs", "/run/trainer:mode=1777")
_numbers = itertools.count()


class Start(Protocol):
    def __call__(
        self, *command: str, options: Sequence[str] = (), user: str | None = ..., network: str = ...
    ) -> Box: ...


@contextlib.contextmanager
def skipping() -> Iterator[None]:
    """Skip what cannot run here; but root can install what it needs: there that is a failure."""
    try:
        yield
    except NoEngineError as error:
        if os.geteuid() == 0:
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The engine of this machine, or a private one."""
    with skipping(), running_engine(CACHE / "engine") as found:
        yield found


@pytest.fixture(scope="session")
def source(engine: Engine) -> Source:
    """Source of a build's base and packages."""
    return source_of(engine)


def source_of(engine: Engine) -> Source:
    """The value of `source`."""
    with skipping():
        return find_source(engine, CACHE)


@pytest.fixture(scope="session")
def cpu_image(engine: Engine, source: Source) -> str:
    """The name of the image with the CPU build of torch, built from this working tree."""
    build(engine, source, target="cpu", tag=CPU_IMAGE)
    return CPU_IMAGE


@contextlib.contextmanager
def starting(engine: Engine, image: str) -> Iterator[Start]:
    """Start containers of an image; whatever is left of them at the end is removed."""
    started: list[Box] = []

    def run(
        *command: str,
        options: Sequence[str] = (),
        user: str | None = f"{SOMEBODY}:{SOMEBODY}",
        network: str = "none",
    ) -> Box:
        box = Box(engine=engine, name=f"trainer-test-{os.getpid()}-{next(_numbers)}")
        started.append(box)
        who = () if user is None else ("--user", user)
        words = ("run", "-d", "--name", box.name, "--network", network, *SEALED, *SCRATCH, *who, *options)
        engine.ask(*words, image, *command)
        return box

    try:
        yield run
    finally:
        for box in started:
            engine.run("rm", "-f", "-v", box.name)


@pytest.fixture
def start(engine: Engine, cpu_image: str) -> Iterator[Start]:
    """Start a container of the cpu image; whatever is left at the end is removed."""
    with starting(engine, cpu_image) as run:
        yield run


@pytest.fixture(scope="session")
def samples_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for /cache, shared by tests whose matter is not the encoding of pictures."""
    return somebodys(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder for /output that belongs to `SOMEBODY`."""
    folder = tmp_path / "output"
    folder.mkdir()
    return somebodys(folder)


def somebodys(folder: Path, *, uid: int = SOMEBODY, gid: int = SOMEBODY, mode: int = 0o755) -> Path:
    """Give a folder away."""
    os.chown(folder, uid, gid)
    folder.chmod(mode)
    return folder


def mounts(**folders: Path) -> tuple[str, ...]:
    """Options that mount folders below /; `data` and `config` cannot be written."""
    access = {"data": ":ro", "config": ":ro"}
    return tuple(w for name, f in folders.items() for w in ("-v", f"{f}:/{name}{access.get(name, '')}"))
