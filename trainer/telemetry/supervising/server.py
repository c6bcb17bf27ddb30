"""The supervisor's HTTP server: /metrics, /healthz and /readyz, whatever the training does."""

from __future__ import annotations

import contextlib
import errno
import http.server
import math
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from prometheus_client import generate_latest

from trainer.config.environment import LOOPBACK
from trainer.errors import ConfigError
from trainer.telemetry.sinks.metrics import METRICS_FILE, build_registry
from trainer.telemetry.status import Phase, Status, Verdict

PORT_VARIABLE = "TRAINER_METRICS_PORT"
ADDRESS_VARIABLE = "TRAINER_METRICS_ADDRESS"
ALL_IPV4, ALL = "0.0.0.0", "::"
_NO_IPV6 = frozenset({errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL})
_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TEXT_TYPE = "text/plain; charset=utf-8"
_SOCKET_TIMEOUT_SECONDS = 10.0

Answer = tuple[int, str, str]
"""Status, content type, text."""


def metrics_text(
    directory: Path,
    *,
    version: str,
    child_up: bool,
    verdict: Verdict,
    ranks: Sequence[Status | None],
    first_rank: int,
    unified_memory: bool,
    available: int | None,
) -> str:
    """The last metrics of rank 0, if any, and the supervisor's own as text exposition.

    `ranks` are the statuses of the run's processes here, one where it has one; `first_rank` is the lowest
    one's among those of all hosts. `unified_memory`: whether memory floors count.
    """
    try:
        run = (directory / METRICS_FILE).read_text(errors="replace")
    except OSError:
        run = ""
    registry = build_registry("supervisor")
    memory = "true" if unified_memory else "false"
    info = registry.gauges["trainer_supervisor_info"]
    info.labels(version=version, first_rank=first_rank, unified_memory=memory).set(1)
    beats = [0.0 if one is None else one.beat_unix_seconds for one in ranks]
    for rank, (one, beat) in enumerate(zip(ranks, beats, strict=True) if len(ranks) > 1 else ()):
        registry.gauges["trainer_rank_heartbeat_timestamp_seconds"].labels(rank=rank).set(beat)
        seconds = None if one is None else one.median_step_seconds
        if seconds is not None:
            registry.gauges["trainer_rank_step_seconds"].labels(rank=rank).set(seconds)
        held = None if one is None else one.device_memory_reserved_peak_bytes
        if held is not None:
            gauge = registry.gauges["trainer_rank_device_memory_reserved_peak_bytes"]
            gauge.labels(rank=rank).set(held)
    if (first := ranks[0]) is not None:
        for phase in Phase:
            registry.gauges["trainer_phase"].labels(phase=phase.value).set(phase is first.phase)
    registry.gauges["trainer_child_up"].set(child_up)
    registry.gauges["trainer_healthy"].set(verdict.healthy)
    registry.gauges["trainer_heartbeat_timestamp_seconds"].set(max(beats))
    registry.gauges["trainer_host_memory_available_bytes"].set(math.nan if available is None else available)
    return run + generate_latest(registry.collector).decode()


@contextlib.contextmanager
def serving(
    port: int | None,
    *,
    metrics: Callable[[], str],
    health: Callable[[], Verdict],
    address: str = LOOPBACK,
) -> Iterator[None]:
    """Answer HTTP on `address` from a daemon thread until the block ends; nothing when `port` is None.

    `::` is every address of the machine, those of IPv4 as well. `metrics` and `health` are called on the
    server's threads. Raises ConfigError when the port cannot be had.
    """
    if port is None:
        yield
        return

    def answer(path: str) -> Answer:
        match path.partition("?")[0]:
            case "/metrics":
                return 200, _METRICS_TYPE, metrics()
            case "/healthz" | "/readyz" as asked:
                judged = health()
                good = judged.healthy if asked == "/healthz" else judged.ready
                return (200 if good else 503), _TEXT_TYPE, judged.reason + "\n"
        return 404, _TEXT_TYPE, "try /metrics, /healthz or /readyz\n"

    server = _bind(address, port, answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def require_free(port: int | None, address: str) -> None:
    """Raise ConfigError when the port cannot be had now, which is long before a run serves it."""
    if port is not None:
        _bind(address, port, lambda path: (404, _TEXT_TYPE, "")).server_close()


def _bind(address: str, port: int, answer: Callable[[str], Answer]) -> http.server.ThreadingHTTPServer:
    try:
        return _Server(address, port, answer)
    except OSError as error:
        if address == ALL and error.errno in _NO_IPV6:
            return _bind(ALL_IPV4, port, answer)
        if error.errno in _NO_IPV6:
            what = f"this machine has no address {address}"
            remedy = f"write {LOOPBACK} for this machine alone, or {ALL} for all its addresses"
            raise ConfigError(what, where=ADDRESS_VARIABLE, remedy=remedy) from error
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        in_use = error.errno == errno.EADDRINUSE
        what = "is in use by another process" if in_use else "may not be opened by this user"
        remedy = f"choose another port with {PORT_VARIABLE}, or 0 for no server"
        raise ConfigError(f"port {port} {what}", where=PORT_VARIABLE, remedy=remedy) from error


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_port = False  # a second run must be told, not share it
    request_queue_size = 128  # of five, which is the default, the sixth client of a burst waits a second

    def __init__(self, address: str, port: int, answer: Callable[[str], Answer]) -> None:
        self.answer = answer
        self.address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        super().__init__((address, port), _Handler)

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        # HTTPServer's own asks the resolver for this host's name, which can hang where there is no network.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "trainer", self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of a client that went away: a port scanner would fill the log. Our bugs are told."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    timeout = _SOCKET_TIMEOUT_SECONDS

    def do_GET(self) -> None:
        code, kind, text = self.server.answer(self.path)
        body = text.encode()
        with contextlib.suppress(ConnectionError, TimeoutError):  # the client went away
            self.send_response(code)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a probe every few seconds would fill the log."""
