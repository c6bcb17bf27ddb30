"""Checks of every request before a page sees it: host, size, session, and the proof that a change was meant.

A page cannot forget it: routes are not asked, and a new one is behind it like all others.
"""

from __future__ import annotations

import hmac
import http
import re
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trainer.ui.access import Access

CSRF_FIELD, CSRF_HEADER = "csrf", "X-CSRF-Token"
LOGIN_PATH, STATIC_PREFIX = "/login", "/static/"
"""Paths that need no session; a login brings the token, and its Origin is looked at too."""
SMALL_BODY_BYTES = 1 << 20
LARGE_BODIES: Sequence[tuple[re.Pattern[str], int]] = ((re.compile(r"/data/[^/]+/upload"), 20 << 30),)
"""Paths that take more than SMALL_BODY_BYTES, and how many bytes."""
# fmt: off
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy":
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # no-referrer would have browsers send `Origin: null` with forms
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
"""Headers of every response; one that a page set itself stays."""
# fmt: on
_SAFE = frozenset({"GET", "HEAD"})
_FIELD = re.compile(rb"(?:^|&)csrf=([0-9a-f]{64})(?:&|$)")
"""The field of a form, wherever it stands: boxes and fields of other places of a page may come before it."""
_FIRST_PART = re.compile(
    rb'--[^\r\n]{1,80}\r\nContent-Disposition: form-data; name="csrf"\r\n\r\n([0-9a-f]{64})\r\n--'
)
"""The same of a form with files, of which it is the first part: the files are not read before it is known."""
_HEAD_BYTES = 512


class _TooLargeError(Exception):
    """The body went over its limit while it was read."""


class Guard:
    """Middleware of the whole studio; see the module. `hosts` are names and addresses without ports, in any
    case; `told` makes the page of a status and a text.

    Answers 400 to another Host, 413 to a body over its limit, 401 without a session, 403 to a change without
    the session's CSRF value or with an Origin that is not its Host. Sets `state.session` of what passes.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        hosts: frozenset[str],
        refused: ASGIApp,
        told: Callable[[int, str], ASGIApp],
    ) -> None:
        self._app, self._access, self._refused, self._told = app, access, refused, told
        self._hosts = frozenset(map(str.lower, hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        if scope["type"] != "http":
            return
        body = _Body(receive, _limit(scope["path"]))
        guarded = _Answer(send, scope["path"])
        answer = await self._judge(scope, body)
        try:
            await (answer or self._app)(scope, body.receive, guarded.send)
        except _TooLargeError:
            if guarded.started:
                raise
            refusal = self._refusal(scope, 413, f"more than {body.limit} bytes")
            await refusal(scope, receive, guarded.send)

    async def _judge(self, scope: Scope, body: _Body) -> ASGIApp | None:
        """The refusal of a request; None where it may pass."""
        headers, path = Headers(scope=scope), scope["path"]
        if not _is_host(headers.getlist("host"), self._hosts):
            return _as_text(400, "not a name of this studio: start it with --allow-host NAME to add one")
        declared = headers.get("content-length", "0")
        if not declared.isdecimal() or int(declared) > body.limit:
            return self._refusal(scope, 413, f"more than {body.limit} bytes")
        state = scope.setdefault("state", {})
        state["session"] = None
        changes = scope["method"] not in _SAFE
        if changes and not _same_origin(headers):
            return self._refusal(scope, 403, "the request came from another site's page")
        if path.startswith(STATIC_PREFIX):
            return None
        cookie = HTTPConnection(scope).cookies.get(self._access.cookie_name, "")
        session = state["session"] = self._access.session(cookie)
        if path == LOGIN_PATH:
            return None
        if session is None:
            return self._refused
        if changes:
            given = headers.get(CSRF_HEADER) or await _field(headers, body)
            if not hmac.compare_digest(given.encode(), session.csrf.encode()):
                return self._refusal(scope, 403, "the page is too old: load it again, and repeat the change")
        return None

    def _refusal(self, scope: Scope, code: int, text: str) -> ASGIApp:
        """A page with a way back for a browser that shows it, a line of text for a script."""
        shown = "text/html" in Headers(scope=scope).get("accept", "")
        return self._told(code, text) if shown else _as_text(code, text)


class _Body:
    """The body of a request: its beginning can be looked at before a page reads it, and it has a limit."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self.limit = receive, limit
        self._ahead: list[Message] = []
        self._read = 0

    async def head(self, count: int) -> bytes:
        """The first bytes of the body, at least `count` where it has as many."""
        text, more = b"", True
        while more and len(text) < count:
            message = await self._taken()
            self._ahead.append(message)
            text += message.get("body", b"")
            more = message.get("more_body", False)
        return text

    async def receive(self) -> Message:
        return self._ahead.pop(0) if self._ahead else await self._taken()

    async def _taken(self) -> Message:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if self._read > self.limit:
            raise _TooLargeError
        return message


class _Answer:
    """The response: its `send` adds HEADERS, and it knows whether it has begun."""

    def __init__(self, send: Send, path: str) -> None:
        self._send, self.started = send, False
        self._caching = "no-cache" if path.startswith(STATIC_PREFIX) else "no-store"

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = MutableHeaders(scope=message)
            for name, value in {**HEADERS, "Cache-Control": self._caching}.items():
                headers.setdefault(name, value)
        await self._send(message)


def _limit(path: str) -> int:
    return next((limit for pattern, limit in LARGE_BODIES if pattern.fullmatch(path)), SMALL_BODY_BYTES)


def _is_host(given: Sequence[str], hosts: frozenset[str]) -> bool:
    """True if a request names one of `hosts`, once and with any port: ports are forwarded."""
    name = (
        re.fullmatch(r"(\[[0-9a-f:.]+\]|[^:@/\[\]]+)(:\d{1,5})?", given[0].lower())
        if len(given) == 1
        else None
    )
    return name is not None and name[1] in hosts


def _same_origin(headers: Headers) -> bool:
    """True if the one Origin is an address of the Host; `null` and none are not."""
    origins = headers.getlist("origin")
    if len(origins) != 1:
        return False
    parts = urlsplit(origins[0])
    return parts.scheme in ("http", "https") and parts.netloc.lower() == headers["host"].lower()


async def _field(headers: Headers, body: _Body) -> str:
    """The CSRF value that a form brings; empty where there is none."""
    if headers.get("content-type", "").startswith("multipart/"):
        found = _FIRST_PART.match(await body.head(_HEAD_BYTES))
    else:
        found = _FIELD.search(await body.head(SMALL_BODY_BYTES))
    return found[1].decode() if found else ""


def _as_text(code: int, text: str) -> ASGIApp:
    title = http.HTTPStatus(code).phrase
    return PlainTextResponse(f"{code} {title}: {text}\n", status_code=code)
