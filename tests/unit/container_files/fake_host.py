"""A host made of fake programs, for tests of the scripts that people run on theirs."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.unit.house.sources import ROOT

# the only real ones: a docker or an nvidia-smi of this machine must not be found
TOOLS = [
    "awk", "basename", "bash", "cat", "chown", "cp", "dirname", "find", "grep", "id", "mkdir", "mktemp",
    "pwd", "rm", "sed", "sleep", "sort", "tail", "timeout", "tr", "uname", "wc",
]  # fmt: skip
# each fake: what it answers, out of variables that a test may set
FAKES = {
    "nvidia-smi": """
        [ -z "$SMI_FAILS" ] || { echo "$SMI_FAILS"; exit 9; }
        case $1 in
            *driver_version*) echo "${DRIVER:-580.95.05}" ;;
            *compute_cap*) echo "${GPU:-9.0, NVIDIA H200}" ;;
        esac""",
    "nvidia-ctk": """
        case "$1 $2" in
            "--version "*)
                echo "NVIDIA Container Toolkit CLI version ${TOOLKIT:-1.17.7}"
                echo "commit: 0123" ;;
            "cdi list")
                echo "INFO[0000] Found 2 CDI devices" >&2
                [ -n "$NO_CDI" ] || printf 'nvidia.com/gpu=0\\nnvidia.com/gpu=all\\n' ;;
        esac""",
    "docker": """
        case "$1 $2" in
            "version "*) [ -z "$NO_ENGINE" ] || exit 1; echo "${DOCKER:-28.2.2}" ;;
            "info "*)
                case $3 in
                    *Runtimes*) [ -n "$NO_RUNTIME" ] && echo '{"runc":{}}' || echo '{"nvidia":{}}' ;;
                    *) echo / ;;
                esac ;;
            "compose version") [ -z "$NO_COMPOSE" ] || exit 1; echo "${COMPOSE:-2.36.2}" ;;
            "buildx version") [ -z "$NO_BUILDX" ] || exit 1; echo "buildx v0.24.0 0123" ;;
            "ps -q") [ -z "$NO_ENGINE" ] || exit 1; printf '0a\\n0b\\n' ;;
        esac""",
    "df": """
        case $2 in $DF_FAILS) echo "df: $2: No such file or directory" >&2; exit 1 ;; esac
        echo "Filesystem 1024-blocks Used Available Capacity Mounted on"
        case $2 in
            /dev/shm) echo "tmpfs 9999999 ${SHM_USED_KIB:-0} 9 0% /dev/shm" ;;
            *) echo "/dev/sda 9 9 ${FREE_KIB:-99999999} 9% /" ;;
        esac""",
    "id": """
        case $1 in
            -u) echo "${USER_ID:-1000}" ;;
            -un) echo tester ;;
            -nG) echo "${GROUPS_OF_USER:-tester docker}" ;;
        esac""",
    "uname": """echo "${MACHINE:-x86_64}" """,
    "sudo": """exec "$@" """,
    "systemctl": "",
}


def real(name: str) -> Path:
    found = shutil.which(name)
    assert found, f"{name} is not installed here"
    return Path(found)


@dataclass(kw_only=True)
class Host:
    """A machine made of fakes: what was called, and with what result a script ran."""

    folder: Path
    absent: frozenset[str] = frozenset()
    calls: list[str] = field(default_factory=list)

    def run(
        self, script: str, *arguments: str, answers: str = "", environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        tools = self.folder / "bin"
        if not tools.exists():
            tools.mkdir()
            for name in TOOLS:
                (tools / name).symlink_to(real(name))
            for name, body in FAKES.items():
                if name in self.absent:
                    continue
                (tools / name).unlink(missing_ok=True)
                (tools / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$CALLS"\n{body}\n:\n')
                (tools / name).chmod(0o755)
        log = self.folder / "calls"
        log.write_text("")
        result = subprocess.run(
            [str(ROOT / script), *arguments],
            env={
                "PATH": str(tools),
                "CALLS": str(log),
                "HOST_ROOT": str(self.folder / "root"),
                **(environ or {}),
            },
            input=answers,
            capture_output=True,
            text=True,
            timeout=120,
        )
        self.calls = log.read_text().splitlines()
        return result

    def changes(self) -> list[str]:
        """Calls that alter the host, in their order."""
        return [call for call in self.calls if re.match(r"nvidia-ctk (runtime|cdi generate)|systemctl", call)]


def os_release(host: Host, text: str, *, kernel: str = "Linux version 6.8") -> None:
    for path, content in (("etc/os-release", text), ("proc/version", kernel)):
        file = host.folder / "root" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
