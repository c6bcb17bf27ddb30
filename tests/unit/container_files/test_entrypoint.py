"""The entrypoint itself: the real script under bash, with a trainer that says how it was called."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.cli.commands import COMMANDS
from trainer.cli.errors import error_text
from trainer.cli.health import NO_RUN
from trainer.container.appliance import SECRETS
from trainer.errors import ConfigError, ExitCode

ENTRYPOINT = Path(__file__).resolve().parents[3] / "docker" / "entrypoint.sh"
# what `trainer preflight` does is in $PREFLIGHT; any other call tells its words, environment and process
TRAINER = """#!/bin/bash
if [[ $1 == preflight ]]; then
    echo "checked:$(printf ' <%s>' "${@:2}")" >> "$CALLS"
    eval "$PREFLIGHT"
    exit
fi
words="$(printf ' <%s>' "$@")"
echo "trainer:$words pid=$$ alloc=${PYTORCH_ALLOC_CONF-} token=${HF_TOKEN-} file=${HF_TOKEN_FILE-}"
exit "${ENDS_WITH:-0}"
"""

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(*words, NAME=value): the entrypoint with nothing but coreutils, bash and that trainer."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "trainer").write_text(TRAINER)
    (programs / "trainer").chmod(0o755)

    def run(*words: str, **variables: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "CALLS": str(tmp_path / "calls"),
            "PREFLIGHT": ":",
        }
        return subprocess.Popen(
            [str(ENTRYPOINT), *words],
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # tests that run in the background of a shell have it ignored, and children would inherit that
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    return run


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(start: Start) -> Run:
    """Run the entrypoint to its end: exit code, stdout with SAME for its own process id, and stderr."""

    def ended(*words: str, **variables: str) -> tuple[int, str, str]:
        process = start(*words, **variables)
        out, err = process.communicate(timeout=30)
        return process.returncode, out.replace(f"pid={process.pid} ", "pid=SAME "), err

    return ended


@pytest.fixture
def checked(tmp_path: Path) -> Callable[[], list[str]]:
    """The words of every preflight."""

    def calls() -> list[str]:
        path = tmp_path / "calls"
        return path.read_text().splitlines() if path.exists() else []

    return calls


def ours(words: str, *, alloc: str = "", token: str = "", file: str = "") -> str:
    return f"trainer: {words} pid=SAME alloc={alloc} token={token} file={file}\n"


@pytest.mark.parametrize(
    ("words", "called"),
    [
        ((), "<probe>"),
        (("trainer",), "<probe>"),
        (("--help",), "<--help>"),
        (("train", "/config/my run.yaml", "--set", "a=b c"), "<train> </config/my run.yaml> <--set> <a=b c>"),
        (("trainer", "train", "x.yaml"), "<train> <x.yaml>"),
        (("trian", "x.yaml"), "<trian> <x.yaml>"),
        (("/config/my.yaml",), "</config/my.yaml>"),
        (("plan", "*"), "<plan> <*>"),
    ],
)
def test_words_for_the_trainer(
    run: Run, checked: Callable[[], list[str]], words: tuple[str, ...], called: str
) -> None:
    assert run(*words) == (0, ours(called), "")
    assert checked() == [f"checked: <--> {called}"]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_the_trainers_also_where_a_program_has_its_name(
    run: Run, tmp_path: Path, command: str
) -> None:
    (tmp_path / "bin" / command).symlink_to("/bin/false")
    if command == "preflight":
        assert run(command)[0] == 0
    else:
        assert run(command) == (0, ours(f"<{command}>"), "")


def test_the_scripts_tables_are_the_appliances() -> None:
    text = ENTRYPOINT.read_text()
    tables = dict(re.findall(r"^([A-Z]+)=\((.*)\)$", text, flags=re.M))
    assert tables["COMMANDS"].split() == list(COMMANDS)
    assert tables["SECRETS"].split() == list(SECRETS)
    codes = {name: int(code) for name, code in re.findall(r"^([A-Z_]+)=(\d+)$", text, flags=re.M)}
    assert codes == {name: ExitCode[name] for name in codes} and set(codes) == {"STOPPED", "BAD_CONFIG"}


def test_any_other_program_runs_as_it_is(run: Run, checked: Callable[[], list[str]]) -> None:
    code, out, err = run("bash", "-c", 'echo "pid=$$ $0 $1"; exit 7', "a b", "*", PREFLIGHT="exit 69")
    assert (code, out, err) == (7, "pid=SAME a b *\n", "")
    assert run("/bin/echo", "hello", PREFLIGHT="exit 69")[1] == "hello\n"
    assert checked() == [], "its machine may be any"


def test_of_any_other_program_no_run_is_expected(run: Run, tmp_path: Path) -> None:
    assert run("/bin/echo", "hello", TRAINER_RUNTIME_DIR=str(tmp_path)) == (0, "hello\n", "")
    assert (tmp_path / NO_RUN).exists()
    assert run("/bin/echo", "hello", TRAINER_RUNTIME_DIR=str(tmp_path / "absent")) == (0, "hello\n", "")


def test_other_programs_get_secrets_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hf_abc\n")
    assert run("printenv", "HF_TOKEN", HF_TOKEN_FILE=str(tmp_path / "token")) == (0, "hf_abc\n", "")


def test_what_preflight_says_is_shown_and_never_a_program(run: Run, tmp_path: Path) -> None:
    said = f"export PYTORCH_ALLOC_CONF=x; touch {tmp_path}/made"
    code, out, err = run("train", PREFLIGHT=f"echo '{said}'; echo note >&2")
    assert (code, out, err) == (0, f"{said}\n{ours('<train>')}", "note\n")
    assert not (tmp_path / "made").exists()


def test_the_users_variables_reach_the_command(run: Run) -> None:
    assert run("train", PYTORCH_ALLOC_CONF="a b") == (0, ours("<train>", alloc="a b"), "")


@pytest.mark.parametrize("code", [69, 78, 1])
def test_what_preflight_refuses_is_not_started(run: Run, code: int) -> None:
    refusal = f"echo 'error: no' >&2; exit {code}"
    assert run("train", "x.yaml", PREFLIGHT=refusal) == (code, "", "error: no\n")


def test_the_commands_exit_code_is_the_containers(run: Run) -> None:
    assert run("train", ENDS_WITH="75")[0] == 75


def test_a_secret_by_value(run: Run) -> None:
    assert run("train", HF_TOKEN="hf_abc") == (0, ours("<train>", token="hf_abc"), "")


@pytest.mark.parametrize("ending", ["", "\n", "\r\n"])
def test_a_secret_by_file(run: Run, tmp_path: Path, ending: str) -> None:
    (tmp_path / "my token").write_bytes(b"hf_$(abc)" + ending.encode())
    code, out, err = run("train", HF_TOKEN="", HF_TOKEN_FILE=str(tmp_path / "my token"))
    assert (code, err) == (0, "")
    assert out == ours("<train>", token="hf_$(abc)"), "and the file's name is gone"


def test_an_empty_file_is_no_secret(run: Run, tmp_path: Path) -> None:
    """Compose files mount one where there is no token."""
    (tmp_path / "token").touch()
    assert run("train", HF_TOKEN_FILE=str(tmp_path / "token")) == (0, ours("<train>"), "")
    assert run("bash", "-c", "[[ -v HF_TOKEN ]]", HF_TOKEN_FILE=str(tmp_path / "token"))[0] == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="runs the script as a user who may not read the file")
@pytest.mark.parametrize("text", ["", "hf_abc"])
def test_an_empty_file_is_none_whoever_may_read_it(text: str) -> None:
    """Compose mounts `no-token` with the mode that it has on the host: 0640 where the umask was 027."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "entrypoint.sh").write_bytes(ENTRYPOINT.read_bytes())
        (folder / "trainer").write_text("#!/bin/sh\n")
        for program in ("entrypoint.sh", "trainer"):
            (folder / program).chmod(0o755)
        (folder / "token").write_text(text)
        (folder / "token").chmod(0o600)
        ended = subprocess.run(
            [folder / "entrypoint.sh", "train"],
            env={"PATH": f"{folder}:/usr/bin:/bin", "HF_TOKEN_FILE": str(folder / "token")},
            user=65534,
            capture_output=True,
            text=True,
            timeout=60,
        )
    if text:
        assert ended.returncode == 78 and "cannot be read by user 65534" in ended.stderr
    else:
        assert (ended.returncode, ended.stderr) == (0, "")


def test_a_variable_goes_with_an_empty_file(run: Run, tmp_path: Path) -> None:
    """Compose mounts one where nobody named a file, and `docker compose run -e` gives the variable."""
    (tmp_path / "token").touch()
    given = {"HF_TOKEN": "hf_given", "HF_TOKEN_FILE": str(tmp_path / "token")}
    assert run("printenv", "HF_TOKEN", **given) == (0, "hf_given\n", "")
    assert run("printenv", "HF_TOKEN_FILE", **given)[0] == 1


@pytest.mark.parametrize("case", ["both", "missing", "folder"])
def test_secrets_that_cannot_be_had(
    run: Run, checked: Callable[[], list[str]], tmp_path: Path, case: str
) -> None:
    token = tmp_path / "token"
    variables = {"HF_TOKEN_FILE": str(token)}
    if case == "both":
        token.write_text("hf_abc")
        variables["HF_TOKEN"] = "hf_secret"
        problem = ("HF_TOKEN is set too", "leave one of them out")
    elif case == "missing":
        problem = (f"there is no file {token}", "mount it, or leave HF_TOKEN_FILE out")
    else:
        token.mkdir()
        problem = (
            f"{token} is a folder",
            "Docker makes one where the file to mount does not exist: check that path",
        )
    said = error_text(ConfigError(problem[0], where="HF_TOKEN_FILE", remedy=problem[1]))
    assert run("train", **variables) == (78, "", f"{said}\n")
    assert checked() == []


def test_libraries_that_ask_for_a_user_get_one(run: Run) -> None:
    assert run("printenv", "USER") == (0, "trainer\n", "")
    assert run("printenv", "USER", USER="me") == (0, "me\n", "")


def test_a_signal_reaches_the_command(start: Start) -> None:
    """exec: the process that tini started is the command, and the script's own trap is gone."""
    command = 'trap "echo got it; exit 3" TERM; echo "pid=$$"; while :; do sleep 0.05; done'
    process = start("bash", "-c", command)
    assert process.stdout is not None
    assert process.stdout.readline() == f"pid={process.pid}\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "got it\n"
    assert process.returncode == 3


FOR_LONG = "for ((i = 0; i < 1000; i++)); do sleep 0.05; done"


def stopped(start: Start, tmp_path: Path, number: int, preflight: str) -> tuple[int, str, str]:
    """Exit code and output of the entrypoint that got a signal while its preflight was at work."""
    process = start("train", PREFLIGHT=f"{preflight}; touch $CALLS.ready; {FOR_LONG}")
    until = time.monotonic() + 30
    while not (tmp_path / "calls.ready").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(number)
    out, err = process.communicate(timeout=30)
    return process.returncode, out, err


SIGNALS = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])


@SIGNALS
@pytest.mark.parametrize("preflight", [":", "trap 'exit 0' TERM", "trap 'exit 75' TERM"])
def test_a_stop_before_the_start_is_a_stop(start: Start, tmp_path: Path, number: int, preflight: str) -> None:
    assert stopped(start, tmp_path, number, preflight) == (75, "", "")


@SIGNALS
@pytest.mark.parametrize("code", [1, 69, 78])
def test_a_stop_while_preflight_tells_of_an_error_ends_that_with_its_code(
    start: Start, tmp_path: Path, number: int, code: int
) -> None:
    telling = f"trap 'echo not all were told >&2; sleep 0.2; exit {code}' TERM"
    assert stopped(start, tmp_path, number, telling) == (code, "", "not all were told\n")


def test_the_script_is_short_and_can_be_run() -> None:
    text = ENTRYPOINT.read_text()
    assert len(text.splitlines()) < 100
    assert text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
    assert os.access(ENTRYPOINT, os.X_OK)
    assert not re.search(
        r"\b(curl|wget|pip|git|apt-get|python3?)\b", re.sub(r"^\s*#.*", "", text, flags=re.M)
    )
