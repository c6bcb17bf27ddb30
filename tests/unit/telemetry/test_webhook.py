"""The webhook: told once over TLS, never led elsewhere, and never the run's undoing."""

from __future__ import annotations

import contextlib
import errno
import http.server
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainer.config import environment
from trainer.errors import ConfigError, Problem
from trainer.telemetry.run_folder import process
from trainer.telemetry.status import Phase, StatusWriter, read_status
from trainer.telemetry.supervising import record_end, webhook
from trainer.telemetry.supervising.webhook import Webhook, WebhookError, configured, is_public, send

SECRET = "T0/B0/not-to-be-shown"


@dataclass(eq=False, kw_only=True)
class Receiver:
    """An HTTPS server on this machine's loopback address, for the name `localhost`."""

    port: int
    trusted: ssl.SSLContext
    """Context of a client that trusts its certificate."""
    answer: Callable[[http.server.BaseHTTPRequestHandler], None]
    got: list[tuple[str, str, Any]] = field(default_factory=list)
    """Method, target and JSON of each request."""

    def hook(self, *, host: str = "localhost", allows_private: bool = True) -> Webhook:
        return Webhook(host=host, port=self.port, target=f"/{SECRET}", allows_private=allows_private)


def answering(status: int, **headers: str) -> Callable[[http.server.BaseHTTPRequestHandler], None]:
    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": "0", **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()

    return answer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of `localhost`, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed (Debian, Ubuntu: apt-get install openssl)")
    path = tmp_path_factory.mktemp("certificate") / "localhost.pem"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -noenc -days 2 -subj /CN=localhost"
    files = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(["openssl", *words.split(), *files], check=True, capture_output=True)
    return path


@pytest.fixture
def receiver(certificate: Path) -> Iterator[Receiver]:
    trusted = ssl.create_default_context(cafile=f"{certificate}.crt")
    made = Receiver(port=0, trusted=trusted, answer=answering(204))

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            made.got.append((self.command, self.path, json.loads(text)))
            made.answer(self)

        def do_GET(self) -> None:
            made.got.append((self.command, self.path, None))
            made.answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def finish_request(self, request: Any, client_address: Any) -> None:
            with contextlib.suppress(OSError), context.wrap_socket(request, server_side=True) as wrapped:
                super().finish_request(wrapped, client_address)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{certificate}.crt", certificate)
    with Server(("127.0.0.1", 0), Handler) as server:
        made.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        server.shutdown()
        thread.join()


def test_it_is_told_once(receiver: Receiver) -> None:
    assert send(receiver.hook(), {"run": "Fuß"}, context=receiver.trusted) == 204
    assert receiver.got == [("POST", f"/{SECRET}", {"run": "Fuß"})]


def test_a_redirect_is_not_followed(receiver: Receiver) -> None:
    receiver.answer = answering(302, Location=f"https://localhost:{receiver.port}/elsewhere")
    with pytest.raises(WebhookError, match="localhost answered 302, a redirect, which is not followed"):
        send(receiver.hook(), {}, context=receiver.trusted)
    assert len(receiver.got) == 1


@pytest.mark.parametrize("status", [199, 404, 500])
def test_another_answer_than_a_success_is_told(receiver: Receiver, status: int) -> None:
    receiver.answer = answering(status)
    with pytest.raises(WebhookError, match=f"^localhost answered {status}$"):
        send(receiver.hook(), {}, context=receiver.trusted)


def test_a_private_address_is_not_asked_unless_allowed(receiver: Receiver) -> None:
    with pytest.raises(
        WebhookError, match=r"localhost is at .*, which is not public: TRAINER_WEBHOOK_PRIVATE"
    ):
        send(receiver.hook(allows_private=False), {}, context=receiver.trusted)
    assert receiver.got == []


def resolving_to(*addresses: str) -> Callable[..., list[Any]]:
    """A name server that gives these addresses the first time, and fails after that."""
    left = [addresses]

    def getaddrinfo(host: str, port: int, *rest: Any, **named: Any) -> list[Any]:
        if host != "hooks.example":
            return real(host, port, *rest, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in left.pop()]

    real = socket.getaddrinfo
    return getaddrinfo


def test_one_private_address_among_public_ones_is_enough_to_refuse(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to("93.184.215.14", "127.0.0.1"))
    with pytest.raises(WebhookError, match=r"hooks.example is at 127.0.0.1, which is not public"):
        send(receiver.hook(host="hooks.example", allows_private=False), {}, context=receiver.trusted)
    assert receiver.got == []


def test_the_connection_goes_to_the_address_that_was_looked_at(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second look-up would fail; the certificate is still that of the name, and this one is another's."""
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to("127.0.0.1"))
    with pytest.raises(
        WebhookError, match=r"hooks.example: its certificate is not trusted: Hostname mismatch"
    ):
        send(receiver.hook(host="hooks.example"), {}, context=receiver.trusted)
    assert receiver.got == []


def test_the_next_address_is_asked_where_one_takes_no_connection(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asked = socket.create_connection, list[str]()

    def create_connection(address: tuple[str, int], *rest: Any) -> socket.socket:
        asked.append(address[0])
        if address[0] == "203.0.113.1":
            raise ConnectionRefusedError(111, "Connection refused")
        return real(address, *rest)

    monkeypatch.setattr(socket, "create_connection", create_connection)
    monkeypatch.setattr(socket, "getaddrinfo", resolving_to("203.0.113.1", "127.0.0.1"))
    with pytest.raises(WebhookError, match="Hostname mismatch"):
        send(receiver.hook(host="hooks.example"), {}, context=receiver.trusted)
    assert asked == ["203.0.113.1", "127.0.0.1"]


def test_an_unknown_certificate_is_not_trusted(receiver: Receiver) -> None:
    with pytest.raises(WebhookError, match="localhost: its certificate is not trusted"):
        send(receiver.hook(), {})
    assert receiver.got == []


def test_a_receiver_that_answers_a_byte_at_a_time_is_not_waited_for(receiver: Receiver) -> None:
    ended = threading.Event()

    def drip(handler: http.server.BaseHTTPRequestHandler) -> None:
        with contextlib.suppress(OSError):
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX: ")
            while not ended.wait(0.05):
                handler.wfile.write(b"x")

    receiver.answer = drip
    try:
        with pytest.raises(WebhookError, match="localhost did not answer within 1 s"):
            send(receiver.hook(), {}, context=receiver.trusted, timeout_seconds=0.6)
    finally:
        ended.set()


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.215.14", True), ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", True), ("10.1.2.3", False),
        ("172.31.0.1", False), ("192.168.0.1", False), ("127.0.0.1", False), ("169.254.169.254", False),
        ("100.64.0.1", False), ("0.0.0.0", False), ("224.0.0.1", False), ("255.255.255.255", False),
        ("192.0.2.1", False), ("::1", False), ("::", False), ("fe80::1%eth0", False), ("fc00::1", False),
        ("fec0::1", False), ("ff02::1", False), ("::ffff:10.0.0.1", False), ("::ffff:93.184.215.14", True),
        ("64:ff9b::a00:1", False), ("64:ff9b::5db8:d70e", True), ("2002:a00:1::", False),
        ("2001:0:a00:1::", False), ("2001:db8::1", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    """By the special-purpose registries of IANA, and what carries an IPv4 address by that one."""
    assert is_public(address) is public


def hook_of(tmp_path: Path, text: str | bytes, **more: str) -> Webhook | None:
    file = tmp_path / "hook"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return configured({webhook.FILE_VARIABLE: str(file), **more})


def test_the_address_comes_from_a_file(tmp_path: Path) -> None:
    assert configured({}) is None
    assert hook_of(tmp_path, "") is hook_of(tmp_path, "\n") is None
    found = hook_of(tmp_path, "https://Hooks.example/a/b?key=1#x\n")
    assert found == Webhook(host="hooks.example", port=443, target="/a/b?key=1", allows_private=False)
    found = hook_of(tmp_path, "https://10.0.0.7:8443", TRAINER_WEBHOOK_PRIVATE="true")
    assert found == Webhook(host="10.0.0.7", port=8443, target="/", allows_private=True)
    assert SECRET not in repr(hook_of(tmp_path, f"https://hooks.example/{SECRET}"))


def test_an_empty_file_that_cannot_be_read_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compose mounts one with the mode that it has on the host."""

    def denied(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    (tmp_path / "hook").touch()
    assert configured({webhook.FILE_VARIABLE: str(tmp_path / "hook")}) is None
    os.truncate(tmp_path / "hook", 1)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        configured({webhook.FILE_VARIABLE: str(tmp_path / "hook")})


@pytest.mark.parametrize(
    "text",
    [
        f"http://hooks.example/{SECRET}",
        f"file:///{SECRET}",
        f"https:///{SECRET}",
        f"https://me:word@hooks.example/{SECRET}",
        f"https://hooks.example:port/{SECRET}",
        f"https://hooks.example/{SECRET}\nhttps://other.example",
        f"https://hooks.example/{SECRET} and more",
        f"https://hooks.example/{SECRET}\r\nX-Header: 1",
        f"https://höoks.example/{SECRET}",
        b"\xff\xfe",
        SECRET,
    ],
)
def test_another_address_is_refused_before_a_run_and_not_shown(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(ConfigError) as told:
        hook_of(tmp_path, text)
    assert "TRAINER_WEBHOOK_FILE" in str(told.value) and SECRET not in str(told.value)


def test_a_file_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        configured({webhook.FILE_VARIABLE: str(tmp_path / "nowhere")})


def ended(tmp_path: Path, hook: Webhook | None, code: int) -> tuple[Path, Path]:
    run_dir, runtime = tmp_path / "my-lora", tmp_path / "runtime"
    run_dir.mkdir()
    StatusWriter(runtime).beat(Phase.TRAIN, step=12, total=40)
    record_end.record_and_tell(run_dir, runtime, hook, code, "")
    return run_dir, runtime


def test_an_end_is_told_with_its_reason_and_without_secrets(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = webhook.send
    monkeypatch.setattr(webhook, "send", lambda hook, body: real(hook, body, context=receiver.trusted))
    monkeypatch.setenv("HF_TOKEN", "secret-of-the-hub")
    (tmp_path / "runtime").mkdir()
    error = {"problems": [{"what": "401 for secret-of-the-hub", "where": "", "remedy": ""}]}
    (tmp_path / "runtime/error.json").write_text(json.dumps(error))
    run_dir, _ = ended(tmp_path, receiver.hook(), 77)
    ((_, _, told),) = receiver.got
    line = "my-lora: no access to the base model (exit code 77): 401 for <redacted>"
    assert (told["text"], told["content"]) == (line, line)
    assert (told["run"], told["exit_code"], told["step"], told["steps"]) == ("my-lora", 77, 12, 40)
    assert told["cause"] == "401 for <redacted>" and told["seconds"] >= 0
    assert "webhook: localhost answered 204" in capfd.readouterr().err
    found = process.read_process(run_dir)
    assert found is not None and found.problems == (Problem(what="401 for <redacted>"),)


def test_a_good_end_tells_all_its_steps(tmp_path: Path) -> None:
    """By beats as a run gives them: pictures before, a save without their total, an end without a step."""
    writer = StatusWriter(tmp_path)
    writer.beat(Phase.CACHE, step=3, total=7)
    assert record_end.body(tmp_path, 0, "", (), read_status(tmp_path))["step"] is None
    writer.beat(Phase.TRAIN, step=40, total=40)
    for phase, step in ((Phase.SAVE, 40), (Phase.PREVIEW, None), (Phase.SAVE, None), (Phase.DONE, None)):
        writer.beat(phase, step=step)
    told = record_end.body(tmp_path, 0, "", (), read_status(tmp_path))
    assert (told["step"], told["steps"]) == (40, 40)


def test_a_clock_that_was_set_back_gives_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    StatusWriter(tmp_path).beat(Phase.TRAIN, step=40, total=40)
    now = time.time()
    monkeypatch.setattr(record_end.time, "time", lambda: now - 6 * 3600)
    assert record_end.body(tmp_path, 0, "", (), read_status(tmp_path))["seconds"] is None


def test_a_receiver_that_is_not_there_changes_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        hook = Webhook(host="127.0.0.1", port=port, target=f"/{SECRET}", allows_private=True)
        run_dir, _ = ended(tmp_path, hook, 0)
    said = capfd.readouterr().err
    assert "warning: the webhook was not told: 127.0.0.1: Connection refused" in said and SECRET not in said
    found = process.read_process(run_dir)
    assert found is not None and found.exit_code == 0


def test_the_address_is_hidden_wherever_it_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.config.secrets import redacted

    (tmp_path / "hook").write_text(f"https://hooks.example/{SECRET}\n")
    monkeypatch.setenv("TRAINER_WEBHOOK_FILE", str(tmp_path / "hook"))
    assert SECRET not in redacted(f"posting to https://hooks.example/{SECRET} failed")
    assert {"TRAINER_WEBHOOK_FILE", "TRAINER_WEBHOOK_PRIVATE"} <= {one.name for one in environment.VARIABLES}
