"""The webhook: one HTTPS request that tells of a run's end.

The address is a secret in a file. The name is resolved once, and every address that it resolves to has to be
public unless the user said otherwise; the connection goes to one of these, so no second answer of a name
server leads elsewhere. No proxy is used and no redirect followed. Nothing that goes wrong here changes the
run's exit code.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import queue
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainer.config import environment
from trainer.errors import ConfigError

FILE_VARIABLE, PRIVATE_VARIABLE = "TRAINER_WEBHOOK_FILE", "TRAINER_WEBHOOK_PRIVATE"
TIMEOUT_SECONDS = 10.0
"""Longest time for everything: the name's resolution, the connection, the answer."""
_MOST_BYTES = 4096
_EMBEDDED = ipaddress.IPv6Network("64:ff9b::/96")
"""Addresses of NAT64, whose last 32 bits are an IPv4 address."""
_HTTPS = 443


class WebhookError(Exception):
    """The receiver was not told; the text says why, and holds nothing of the address but the host's name."""


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """A receiver of a run's end."""

    host: str
    port: int
    target: str = field(repr=False)
    """Path and query, which are the secret of most services."""
    allows_private: bool


def configured(environ: Mapping[str, str] | None = None) -> Webhook | None:
    """The webhook of TRAINER_WEBHOOK_FILE; None where it is not set, and for an empty file.

    Raises ConfigError for a file that cannot be read or holds no https address; the address is not shown.
    """
    file = environment.read(FILE_VARIABLE, environ)
    if file is None:
        return None
    remedy = "write one address into it, https://HOST/PATH, or leave the variable out"
    try:
        path = Path(file).expanduser()
        # compose's file for no webhook, which this user may not read where the umask was 027
        if path.is_file() and not path.stat().st_size:
            return None
        with path.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode().strip()
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ConfigError(f"{file} cannot be read: {reason}", where=FILE_VARIABLE, remedy=remedy) from error
    if not text:
        return None
    try:
        parts = urllib.parse.urlsplit(text)
        host, port = parts.hostname, parts.port or _HTTPS
    except ValueError:
        parts, host, port = urllib.parse.SplitResult("", "", "", "", ""), None, _HTTPS
    plain = text.isascii() and text.isprintable() and " " not in text
    if parts.scheme != "https" or not host or parts.username is not None or not plain:
        what = f"{file} holds no https address without a user name"
        raise ConfigError(what, where=FILE_VARIABLE, remedy=remedy)
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    allowed = environment.switch(PRIVATE_VARIABLE, environ) or False
    return Webhook(host=host, port=port, target=target, allows_private=allowed)


def send(
    webhook: Webhook,
    body: Mapping[str, object],
    *,
    timeout_seconds: float = TIMEOUT_SECONDS,
    context: ssl.SSLContext | None = None,
) -> int:
    """Post `body` as JSON and return the status, 200 to 299. Raises WebhookError, at the latest after
    `timeout_seconds`.

    `context` holds the certificates to trust, the system's if not given.
    """
    answers: queue.SimpleQueue[int | WebhookError] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(_post(webhook, json.dumps(body).encode(), timeout_seconds, context))
        except WebhookError as error:
            answers.put(error)
        except (OSError, http.client.HTTPException, ValueError) as error:
            answers.put(WebhookError(f"{webhook.host}: {_words(error)}"))

    # resolving a name has no timeout, and a receiver may answer a byte at a time
    threading.Thread(target=work, daemon=True, name="webhook").start()
    try:
        answer = answers.get(timeout=timeout_seconds)
    except queue.Empty:
        raise WebhookError(f"{webhook.host} did not answer within {timeout_seconds:.0f} s") from None
    if isinstance(answer, WebhookError):
        raise answer
    return answer


def is_public(address: str) -> bool:
    """True for an address of the open internet, also where it is written inside an IPv6 one."""
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour
        if found in _EMBEDDED:
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(str(inner))
        if found.teredo is not None or found.is_site_local:
            return False
    return found.is_global and not found.is_multicast and not found.is_reserved


def _post(webhook: Webhook, body: bytes, timeout: float, context: ssl.SSLContext | None) -> int:
    addresses = _resolved(webhook)
    connection = http.client.HTTPSConnection(webhook.host, webhook.port, timeout=timeout)
    trusted = ssl.create_default_context() if context is None else context
    try:
        with _connected(addresses, webhook.port, timeout) as plain:
            connection.sock = trusted.wrap_socket(plain, server_hostname=webhook.host)
            headers = {"Content-Type": "application/json", "User-Agent": "trainer"}
            connection.request("POST", webhook.target, body=body, headers=headers)
            status = connection.getresponse().status
    finally:
        connection.close()
    if not 200 <= status < 300:
        more = ", a redirect, which is not followed" if 300 <= status < 400 else ""
        raise WebhookError(f"{webhook.host} answered {status}{more}")
    return status


def _resolved(webhook: Webhook) -> list[str]:
    """Addresses of the host. Raises WebhookError where one of them may not be asked, OSError."""
    rows = socket.getaddrinfo(webhook.host, webhook.port, type=socket.SOCK_STREAM)
    addresses = list(dict.fromkeys(str(row[4][0]) for row in rows))
    private = [one for one in addresses if not is_public(one)]
    if private and not webhook.allows_private:
        what = f"{webhook.host} is at {private[0]}, which is not public"
        raise WebhookError(f"{what}: {PRIVATE_VARIABLE}=true allows it")
    return addresses


def _connected(addresses: list[str], port: int, timeout: float) -> socket.socket:
    """A connection to the first of the addresses that takes one; raises the last one's OSError."""
    for address in addresses[:-1]:
        try:
            return socket.create_connection((address, port), timeout / len(addresses))
        except OSError:
            continue
    return socket.create_connection((addresses[-1], port), timeout / len(addresses))


def _words(error: Exception) -> str:
    """A reason without the request's target, which libraries' texts may hold."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
