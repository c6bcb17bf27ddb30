"""The HTTP server on its own."""

from __future__ import annotations

import contextlib
import errno
import http.client
import select
import socket
import struct
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ports import free_port
from trainer.errors import ConfigError, ExitCode
from trainer.telemetry.status import Phase, Status, Verdict
from trainer.telemetry.supervising import server as server_module
from trainer.telemetry.supervising.server import metrics_text, require_free, serving

SICK = Verdict(healthy=False, ready=False, reason="no heartbeat")
CACHING = Verdict(healthy=True, ready=False, reason="phase cache")


def get(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
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
        assert get(port, "/etc/passwd")[0] == 404
        assert get(port, "/metrics", "POST")[0] == 501
    with server(SICK) as port:
        assert get(port, "/healthz") == (503, "no heartbeat\n")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_has_the_bytes_that_it_announces_and_a_head_none(method: str) -> None:
    said = Verdict(healthy=True, ready=False, reason="Füße \u732b")
    with server(said) as port, socket.create_connection(("127.0.0.1", port), timeout=60) as client:
        client.sendall(f"{method} /healthz HTTP/1.0\r\n\r\n".encode())
        head, _, body = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
    announced = f"{said.reason}\n".encode()
    assert f"Content-Length: {len(announced)}".encode() in head.splitlines()
    assert body == (announced if method == "GET" else b"")


def test_a_run_that_is_healthy_and_not_ready_is_served_so_with_the_newest_beat(tmp_path: Path) -> None:
    first, second = (
        Status(
            phase=Phase.CACHE, beat=1.0, beat_unix_seconds=beat, boot_id="", pid=1, started_unix_seconds=1.0
        )
        for beat in (50.0, 100.0)
    )
    for ranks in ([first, second, None], [second, first]):
        text = metrics_text(
            tmp_path, version="1", child_up=False, verdict=CACHING, ranks=ranks, first_rank=0,
            unified_memory=False, available=None,
        )  # fmt: skip
        lines = text.splitlines()
        assert "trainer_healthy 1.0" in lines and "trainer_child_up 0.0" in lines
        assert "trainer_heartbeat_timestamp_seconds 100.0" in lines


def test_a_client_that_says_nothing_blocks_nobody() -> None:
    with server(CACHING) as port, socket.create_connection(("127.0.0.1", port)):
        assert get(port, "/healthz")[0] == 200


def test_only_this_machine_is_answered_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bound, ports = [], [free_port(), free_port()]
    bind = socket.socket.bind

    def remember(self: socket.socket, address: tuple[str, int]) -> None:
        bound.append(address[0])
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", remember)
    for port, address in zip(ports, ({}, {"address": "::"}), strict=True):
        with serving(port, metrics=str, health=lambda: CACHING, **address):
            pass
    assert bound == ["127.0.0.1", "::"]


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_every_address_is_that_of_ipv4_and_of_ipv6(host: str) -> None:
    """Kubelets of clusters with IPv6 alone have no other."""
    port = free_port()
    with serving(port, metrics=str, health=lambda: CACHING, address="::"):
        connection = http.client.HTTPConnection(host, port, timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()


def test_every_address_of_a_machine_without_ipv6_is_that_of_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    bind = server_module._Server.server_bind

    def refuse(self: server_module._Server) -> None:
        if self.address_family == socket.AF_INET6:
            raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")
        bind(self)

    monkeypatch.setattr(server_module._Server, "server_bind", refuse)
    port = free_port()
    with serving(port, metrics=str, health=lambda: CACHING, address="::"):
        assert get(port, "/healthz")[0] == 200


def test_an_address_of_another_machine_is_told() -> None:
    with pytest.raises(
        ConfigError, match=r"TRAINER_METRICS_ADDRESS: this machine has no address 192\.0\.2\.1"
    ):
        require_free(free_port(), "192.0.2.1")  # for documentation, by RFC 5737


def test_a_burst_of_clients_waits_for_nobody() -> None:
    """A client that finds the queue full would send again only after a second."""
    port, held = free_port(), threading.Event()
    listening = server_module._Server("127.0.0.1", port, lambda path: (200, "", ""))  # it accepts nobody yet
    try:
        clients = [socket.socket() for _ in range(40)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
        held.wait(0.2)
        _, connected, _ = select.select([], clients, [], 0)
        assert len(connected) == 40
    finally:
        for client in clients:
            client.close()
        listening.server_close()


@pytest.mark.parametrize(
    "sent",
    [b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"GET", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n",
     b"GET /metrics\r\nX" * 200, b"A" * 70_000, b"GET /metrics HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
     b"GET \xff\xfe HTTP/1.1\r\n\r\n", b""],
    ids=lambda sent: repr(sent[:16]),
)  # fmt: skip
def test_requests_that_are_malformed_and_cut_off_are_not_told(
    sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with server(CACHING) as port:
        for _ in range(3):
            client = socket.create_connection(("127.0.0.1", port))
            # reset instead of closed: what is answered meets an error
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall(sent)
            client.close()
        assert get(port, "/healthz")[0] == 200
    assert capfd.readouterr().err == ""


def test_the_port_is_free_again_afterwards() -> None:
    with server(CACHING) as port:
        pass
    with serving(port, metrics=str, health=lambda: SICK), pytest.raises(ConfigError) as caught:  # noqa: SIM117
        with serving(port, metrics=str, health=lambda: SICK):
            pass
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert "TRAINER_METRICS_PORT: port" in str(caught.value)


def test_no_port_means_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket.socket, "bind", lambda *_: pytest.fail("it listens"))
    with serving(None, metrics=str, health=lambda: SICK):
        pass


def test_odd_metrics_of_the_child_do_not_hide_our_own(tmp_path: Path) -> None:
    for write in (lambda path: None, lambda path: path.write_bytes(b"\xff\n"), lambda path: path.mkdir()):
        path = tmp_path / "metrics.prom"
        path.unlink(missing_ok=True)
        write(path)
        text = metrics_text(
            tmp_path,
            version="1",
            child_up=False,
            verdict=SICK,
            ranks=[None],
            first_rank=8,
            unified_memory=True,
            available=None,
        )
        assert 'trainer_supervisor_info{first_rank="8",unified_memory="true",version="1"} 1.0' in text
        assert "trainer_child_up 0.0" in text
        assert "trainer_host_memory_available_bytes NaN" in text
