"""The images that tests run, built without network on a base made of this machine's distribution.

Where there is no debootstrap or no root, the Dockerfile's own base is pulled and packages come from the
network.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.container.engine import Engine, EngineError, NoEngineError

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = ROOT / "docker" / "Dockerfile"
WHEELS = ROOT / "build" / "test-wheels"
"""Folder of CPU wheels; not build/wheels, which the Dockerfile reads for GPU images too."""
_LEFT_OUT = (
    "etc/resolv.conf", "etc/hostname", "debootstrap", "var/cache/apt", "var/lib/apt/lists", "var/log",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Source:
    """Source of a build's base and packages, as options of `docker build`."""

    options: tuple[str, ...]


def packages() -> list[str]:
    """Debian packages: the Dockerfile's own list, and the one that its tools need."""
    match = re.search(r'^ARG PACKAGES="([^"]+)"', DOCKERFILE.read_text(), re.MULTILINE)
    assert match is not None, "the Dockerfile names its packages"
    return [*match[1].split(), "python3-venv"]


def find_source(engine: Engine, folder: Path) -> Source:
    """Everything from this machine; what is missing is made once and kept in `folder` and `WHEELS`.

    Raises NoEngineError where this machine lacks the means.
    """
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        index = os.environ.get("TORCH_INDEX", "")
        if not index:
            raise NoEngineError(
                "as root and with debootstrap the images are built from this machine's packages; else set"
                " TORCH_INDEX to the package index of PyTorch's CPU builds"
            )
        return Source(options=("--build-arg", f"TORCH_INDEX={index}"))
    base = _base(engine, folder)
    python = engine.ask("run", "--rm", "--network", "none", base, "python3", "-c", _ASK_VERSION)
    _fill_wheels(python)
    arguments = (f"BASE_IMAGE={base}", f"WHEELS={WHEELS.relative_to(ROOT)}", "PIP_NO_INDEX=1")
    options = [word for argument in arguments for word in ("--build-arg", argument)]
    return Source(options=("--network", "none", *options))


_ASK_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def build(engine: Engine, source: Source, *, target: str, tag: str, context: Path = ROOT) -> str:
    """Build a target; gives what the builder printed."""
    words = ("build", "-f", str(context / "docker" / "Dockerfile"), "--target", target, "-t", tag)
    return engine.ask(*words, *source.options, str(context), timeout=1500)


def _base(engine: Engine, folder: Path) -> str:
    """An image of this machine's distribution with what the Dockerfile wants of it."""
    release = platform.freedesktop_os_release()
    wanted = packages()
    name = f"trainer-test-base:{release['ID']}-{release['VERSION_CODENAME']}-{_digest(wanted)}"
    if engine.run("image", "inspect", name).returncode == 0:
        return name
    archive = folder / f"{name.partition(':')[2]}.tar"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _make_base(archive, release["VERSION_CODENAME"], wanted)
    engine.ask("import", str(archive), name)
    return name


def _make_base(archive: Path, codename: str, wanted: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=archive.parent, ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "root"
        command = ["debootstrap", "--variant=minbase", f"--include={','.join(wanted)}", codename, str(root)]
        _call([*command, *_mirror(codename)])
        for name in _LEFT_OUT:
            path = root / name
            if path.is_dir():
                shutil.rmtree(path)
                path.mkdir()
            else:
                path.unlink(missing_ok=True)
        for library in (root / "usr" / "lib").rglob("libpython3*.a"):
            library.unlink()
        partial = archive.with_suffix(".partial")
        with tarfile.open(partial, "w") as tar:
            tar.add(root, arcname=".")
        partial.rename(archive)


def _mirror(codename: str) -> list[str]:
    """Address of this machine's package mirror; empty: debootstrap's own choice."""
    form = "$(CREATED_BY) $(CODENAME) $(REPO_URI)"
    listed = subprocess.run(["apt-get", "indextargets", "--format", form], capture_output=True, text=True)
    rows = [line.split() for line in listed.stdout.splitlines()]
    return [row[2] for row in rows if row[:2] == ["Packages", codename]][:1]


def _fill_wheels(python: str) -> None:
    """Put what the cpu target installs into `WHEELS`, through this machine's pip."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [word for extra in ("plots", "ui") for word in project["optional-dependencies"][extra]]
    wanted = ["setuptools", *project["dependencies"], *extras]
    stamp = WHEELS / f".complete-{python}-{_digest([*wanted, (ROOT / 'constraints.txt').read_text()])}"
    if stamp.exists():
        return
    WHEELS.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    where = ["-d", str(WHEELS), "--find-links", str(WHEELS), "-c", str(ROOT / "constraints.txt")]
    only = ["--only-binary=:all:", "--python-version", python]
    # torch first: a build that pip is configured to find is taken before another package asks for torch
    torch = [name for name in wanted if re.match(r"torch\b(?!-)", name)]
    for names in (torch, wanted):
        _call([*pip, *where, *only, *names])
    if not list(WHEELS.glob("torch-*+cpu-*.whl")):
        raise EngineError(
            f"pip found no CPU build of torch (see {WHEELS}): set PIP_EXTRA_INDEX_URL to the index of them"
        )
    stamp.touch()


def _call(command: Sequence[str]) -> None:
    answer = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if answer.returncode != 0:
        raise EngineError(f"{' '.join(command)}: {answer.returncode}\n{answer.stdout[-4000:]}")


def _digest(words: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
