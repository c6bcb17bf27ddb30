"""S1, S15 and the command: where the studio listens, what it says then, and that there is one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

import trainer
from trainer.cli import main
from trainer.errors import ConfigError
from trainer.queue.scheduler import is_scheduled
from trainer.telemetry import locks
from trainer.ui import scheduling
from trainer.ui.access import Access
from trainer.ui.page import STATIC, TEMPLATES
from trainer.ui.serve import LOCK_FILE, greeting, is_everywhere, is_loopback, named, serve
from trainer.ui.studio import Studio
from trainer.ui.views.settings import have_webhook_file


@pytest.mark.parametrize(
    ("host", "loopback", "hosts"),
    [
        ("127.0.0.1", True, {"127.0.0.1"}),
        ("::1", True, {"[::1]"}),
        ("localhost", True, {"localhost"}),
        ("0.0.0.0", False, set()),
        ("::", False, set()),
        ("192.0.2.7", False, {"192.0.2.7"}),
        ("studio.example", False, {"studio.example"}),
    ],
)
def test_an_address_that_others_reach_is_told(
    studio: Studio, host: str, loopback: bool, hosts: set[str]
) -> None:
    """S1: with a token made now and with an old one; there is no start without one."""
    assert (is_loopback(host), named(host)) == (loopback, hosts)
    for made_now in (True, False):
        access = Access(studio.folder)
        lines = greeting(studio, access, host=host, port=8660)
        assert ("anyone on the path reads the token" in lines[-1]) is not loopback
        assert (access.token in "".join(lines)) is made_now is access.made, "it is shown once"
        assert is_everywhere(host) or host in lines[0]
        assert any("--allow-host" in line for line in lines) is is_everywhere(host)


def test_a_port_that_is_published_on_the_loopback_address_is_not_warned_of(studio: Studio) -> None:
    access = Access(studio.folder)
    for published, warned in (("127.0.0.1", False), ("", True), ("192.0.2.7", True)):
        told = "".join(greeting(studio, access, host="0.0.0.0", port=8660, published=published))
        assert ("anyone on the path" in told) is warned
        assert f"warning: {published or '0.0.0.0'} is not" in told or not warned


def test_a_port_that_is_taken_is_told(studio: Studio) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="in use") as told:
            serve(studio, host="127.0.0.1", port=port, allowed=(), tell=print)
    assert "--port" in told.value.problems[0].remedy
    assert not studio.folder.exists(), "no token was made for nothing"


def test_an_address_that_is_not_here_is_told(studio: Studio) -> None:
    with pytest.raises(ConfigError, match="cannot listen"):
        serve(studio, host="192.0.2.7", port=0, allowed=(), tell=print)


def test_a_second_studio_does_not_share_the_folder(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """S15."""
    monkeypatch.setattr(locks, "_PROBE_SECONDS", 0.0)
    Access(studio.folder)
    taken = ConfigError("held").problems[0]
    with (
        locks.holding(
            studio.folder / LOCK_FILE, supervisor=os.getpid(), taken=taken, on_wait=lambda text: None
        ),
        pytest.raises(ConfigError, match="another studio"),
    ):
        serve(studio, host="127.0.0.1", port=0, allowed=(), tell=print)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "trainer", "ui", "--no-queue", "--port", "0"]
    words += ["--runs", str(tmp_path / "runs")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        link = re.search(r"(http://127\.0\.0\.1:\d+/login)#token=(\S+)", process.stdout.readline())
        assert link
        token = tmp_path / "runs/.studio/token"
        assert token.read_text().strip() == link[2] and token.stat().st_mode & 0o777 == 0o600
        with urllib.request.urlopen(link[1]) as answer:
            assert answer.status == 200 and "server" not in {name.lower() for name in answer.headers}
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(link[1].replace("/login", "/"))
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(urllib.request.Request(link[1], headers={"Host": "evil.example"}))
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        origin = {"Origin": link[1].removesuffix("/login")}
        opener.open(urllib.request.Request(link[1], data=f"token={link[2]}".encode(), headers=origin))
        with opener.open(link[1].replace("/login", "/stream")) as stream:
            assert stream.readline() == b"retry: 1000\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            assert process.stderr is not None and not process.stderr.read(), (
                "the open stream is ended in order"
            )


def wait_for(look: Callable[[], bool]) -> None:
    """Wait until `look` is true."""
    end = time.monotonic() + 60
    while not look():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_queues_jobs_are_started_while_it_serves(tmp_path: Path, signum: signal.Signals) -> None:
    """However it ends, the process that starts them ends as well."""
    words = [sys.executable, "-m", "trainer", "ui", "--port", "0", "--runs", str(tmp_path / "runs")]
    environ = {**os.environ, "TRAINER_QUEUE_DIR": str(tmp_path / "queue")}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ) as process:
        wait_for(lambda: is_scheduled(tmp_path / "queue"))
        if signum == signal.SIGTERM:  # a second one changes nothing
            other = subprocess.run(words, capture_output=True, env=environ, timeout=60)
            assert b"another studio" in other.stderr and is_scheduled(tmp_path / "queue")
        process.send_signal(signum)
        process.communicate(timeout=60)
    wait_for(lambda: not is_scheduled(tmp_path / "queue"))
    assert "queue in" in (tmp_path / "runs/.studio/queue.log").read_text()


def test_what_starts_jobs_is_started_again_beside_another_and_knows_the_webhook(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a program in its place, which says where the webhook is kept, and ends; another has the lock."""
    said, program = tmp_path / "said", tmp_path / "program.py"
    program.write_text(
        "import os, sys\nfrom trainer.telemetry.supervising.webhook import configured\n"
        "print(os.environ['TRAINER_WEBHOOK_FILE'], configured(), file=open(sys.argv[1], 'a'))\n"
    )
    monkeypatch.delenv("TRAINER_WEBHOOK_FILE", raising=False)
    monkeypatch.setattr(scheduling, "_COMMAND", (str(program), str(said)))
    monkeypatch.setattr(scheduling, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(scheduling, "_LOOK_SECONDS", 0.1)
    Access(studio.folder)
    have_webhook_file(studio)
    present = tmp_path / "queue/scheduler.lock"
    present.parent.mkdir()
    taken = ConfigError("held").problems[0]
    with (
        locks.holding(present, supervisor=os.getpid(), taken=taken, on_wait=lambda text: None),
        scheduling.scheduling(studio),
    ):
        assert is_scheduled(tmp_path / "queue")
        wait_for(lambda: said.exists() and len(said.read_text().splitlines()) > 1)
    assert set(said.read_text().splitlines()) == {f"{studio.folder / 'webhook'} None"}


def test_what_starts_jobs_is_started_once_its_log_can_be_opened(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, said = tmp_path / "program.py", tmp_path / "said"
    program.write_text("import sys\nopen(sys.argv[1], 'a')\n")
    monkeypatch.setattr(scheduling, "_COMMAND", (str(program), str(said)))
    monkeypatch.setattr(scheduling, "_PAUSE_SECONDS", 0.1)
    monkeypatch.setattr(scheduling, "_LOOK_SECONDS", 0.1)
    assert not studio.folder.exists()
    with scheduling.scheduling(studio):
        time.sleep(0.5)
        studio.folder.mkdir()
        wait_for(said.exists)


@pytest.mark.parametrize(
    ("words", "starts", "queue"),
    [([], True, True), (["--no-queue"], True, False), (["--runs-elsewhere"], False, False)],
)
def test_runs_are_started_here_unless_it_is_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], starts: bool, queue: bool
) -> None:
    asked = list[tuple[bool, bool]]()

    def serve(studio: Studio, *, queue: bool, **more: object) -> None:
        asked.append((studio.starts_runs, queue))

    monkeypatch.setattr("trainer.ui.serve.serve", serve)
    assert main(["ui", "--runs", str(tmp_path), *words]) == 0
    assert asked == [(starts, queue)]


def test_roots_have_one_name_however_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run folders of jobs are compared with them."""
    asked: list[Studio] = []
    monkeypatch.setattr("trainer.ui.serve.serve", lambda studio, **rest: asked.append(studio))
    (tmp_path / "here").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    monkeypatch.chdir(tmp_path / "here")
    assert main(["ui", "--runs", "../runs", "--data", "../link/data"]) == 0
    (studio,) = asked
    assert (studio.runs, studio.folder) == (tmp_path / "runs", tmp_path / "runs/.studio")
    assert (studio.data, studio.models) == (tmp_path / "real/data", tmp_path / "here/models")


def test_a_missing_extra_is_told_with_the_command_that_installs_it(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['starlette'] = None\n"
        "from trainer.cli import main; sys.exit(main(['ui', '--runs', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 78
    assert "starlette is not installed" in done.stderr and ".[ui]" in done.stderr


def test_a_wheel_has_every_template_and_static_file() -> None:
    """By the globs of package-data, as setuptools takes them."""
    root = Path(trainer.__file__).parent
    project = tomllib.loads((root.parent / "pyproject.toml").read_text())
    globs = project["tool"]["setuptools"]["package-data"]["trainer"]
    packed = {path for pattern in globs for path in root.glob(pattern) if path.is_file()}
    needed = {path for folder in (TEMPLATES, STATIC) for path in folder.rglob("*") if path.is_file()}
    assert len(needed) > 15 and needed <= packed
