"""The HTTP server on its own."""

from __future__ import annotations

import contextlib
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.errors import ConfigError, ExitCode
from trainer.telemetry.server import metrics_text, serving
from trainer.telemetry.status import Verdict

from .conftest import free_port

SICK = Verdict(healthy=False, ready=False, reason="no heartbeat")
CACHING = Verdict(healthy=True, ready=False, reason="phase cache")


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@contextlib.contextmanager
def server(verdict: Verdict) -> Iterator[int]:
    port = free_port()
    with serving(port, metrics=lambda: "text\n", health=lambda: verdict):
        yield port


def test_answers_follow_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    with server(CACHING) as port:
        assert get(port, "/healthz") == (200, "phase cache\n")
        assert get(port, "/readyz") == (503, "phase cache\n")
        assert get(port, "/metrics?x=1") == (200, "text\n")
        assert get(port, "/metrics", "HEAD") == (200, "")
        assert get(port, "/etc/passwd")[0] == 404
        assert get(port, "/metrics", "POST")[0] == 501
    with server(SICK) as port:
        assert get(port, "/healthz") == (503, "no heartbeat\n")
    assert capsys.readouterr() == ("", "")


def test_a_client_that_says_nothing_blocks_nobody() -> None:
    with server(CACHING) as port, socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/healthz")[0] == 200


def test_the_port_is_free_again_afterwards() -> None:
    with server(CACHING) as port:
        pass
    with serving(port, metrics=str, health=lambda: SICK), pytest.raises(ConfigError) as caught:  # noqa: SIM117
        with serving(port, metrics=str, health=lambda: SICK):
            pass
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert "TRAINER_METRICS_PORT: port" in str(caught.value)


def test_no_port_means_no_server() -> None:
    with serving(None, metrics=str, health=lambda: SICK):
        pass


def test_odd_metrics_of_the_child_do_not_hide_our_own(tmp_path: Path) -> None:
    for write in (lambda path: None, lambda path: path.write_bytes(b"\xff\n"), lambda path: path.mkdir()):
        path = tmp_path / "metrics.prom"
        path.unlink(missing_ok=True)
        write(path)
        text = metrics_text(tmp_path, version="1", child_up=False, verdict=SICK, status=None, available=None)
        assert "trainer_child_up 0.0" in text
        assert "trainer_host_memory_available_bytes NaN" in text
