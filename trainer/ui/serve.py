"""The studio's process: its port, its lock, and the link that opens it."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn

from trainer.config.environment import LOOPBACK
from trainer.errors import ConfigError, Problem
from trainer.telemetry import locks
from trainer.ui.access import TOKEN_FILE, Access
from trainer.ui.app import LOOPBACK_HOSTS, create_app
from trainer.ui.looking import RESTING_SECONDS, until_next
from trainer.ui.scheduling import scheduling
from trainer.ui.studio import Studio
from trainer.ui.views.new import warm
from trainer.ui.views.runs import runs_view
from trainer.ui.views.settings import have_webhook_file

LOCK_FILE = "lock"
_MOST_REQUESTS = 256
_LAST_SECONDS = 2
_WARM_AFTER_SECONDS = 2
"""Wait before the first plans of families, so that the first page is not waited for."""


class _Server(uvicorn.Server):
    """A server that wakes every 15 s where nobody asks; uvicorn's own wakes ten times a second.

    `ending` is set once it is told to end.
    """

    def __init__(self, config: uvicorn.Config, ending: asyncio.Event) -> None:
        super().__init__(config)
        self._asked_to_end = ending
        self._loop: asyncio.AbstractEventLoop | None = None

    async def main_loop(self) -> None:
        """Tick until the server is to end."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):  # at 0 it also sets the date of its answers
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_next(RESTING_SECONDS)):
                    await self._asked_to_end.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Have the server end: at once, not at its next tick."""
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._asked_to_end.set)


def serve(
    studio: Studio,
    *,
    host: str,
    port: int,
    allowed: tuple[str, ...],
    queue: bool = False,
    published: str = "",
    tell: Callable[[str], None],
) -> None:
    """Answer on `host` and `port` until SIGTERM or Ctrl-C; `tell` gets the lines for people.

    `allowed` are further names by which it may be asked. Port 0 takes a free one. With `queue` a process
    beside it starts the queue's jobs. `published` is the address of a container's host that the port is
    published on. Raises ConfigError where port or token cannot be used, or another studio has the folder.
    """
    with _bound(host, port) as listening:
        access = Access(studio.folder)
        taken = Problem(
            what="another studio uses this folder", where=str(studio.folder), remedy="end it, or name another"
        )
        with locks.holding(
            studio.folder / LOCK_FILE, supervisor=os.getpid(), taken=taken, on_wait=lambda text: None
        ):
            have_webhook_file(studio)
            for line in greeting(
                studio, access, host=host, port=listening.getsockname()[1], published=published
            ):
                tell(line)
            app = create_app(studio, access=access, hosts=LOOPBACK_HOSTS | named(host) | frozenset(allowed))
            config = uvicorn.Config(
                app,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_level="warning",
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=_MOST_REQUESTS,
                timeout_graceful_shutdown=_LAST_SECONDS,
            )
            plans = threading.Timer(_WARM_AFTER_SECONDS, warm, (studio,))
            plans.daemon = True
            plans.start()
            # rows of runs are kept once they were read: the first page need not wait for all of them
            threading.Thread(target=runs_view, args=(studio,), daemon=True).start()
            with scheduling(studio) if queue else contextlib.nullcontext():
                _Server(config, app.state.ending).run(sockets=[listening])


def greeting(studio: Studio, access: Access, *, host: str, port: int, published: str = "") -> list[str]:
    """Lines that a start prints: the address, the token where it was made now, else where it lies; for an
    address that others reach, what they can read. That is `host`, or where a container's port is `published`.
    """
    name = LOOPBACK if is_everywhere(host) else f"[{host}]" if ":" in host else host
    url = f"http://{name}:{port}/login"
    if access.made:
        lines = [f"studio: {url}#token={access.token}", "this link opens a session; it is shown once"]
    else:
        lines = [f"studio: {url}", f"the token is in {studio.folder / TOKEN_FILE}"]
    if is_everywhere(host):
        lines.append("other machines ask for it by the names that --allow-host gives, and by no other")
    reached = published or host
    if not is_loopback(reached):
        lines.append(
            f"warning: {reached} is not this machine alone, and there is no TLS: anyone on the path reads the"
            " token. Publish the port on the host's loopback address, or put a proxy with TLS before it"
        )
    return lines


def is_loopback(host: str) -> bool:
    """True for an address of this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """True for the address that stands for all of a machine's."""
    return host in ("0.0.0.0", "::")


def named(host: str) -> frozenset[str]:
    """The name of a request's Host for the address that is listened on; none for all addresses."""
    return frozenset() if is_everywhere(host) else frozenset({f"[{host}]" if ":" in host else host})


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        remedy = f"write {LOOPBACK} for this machine alone, and a port up to 65535"
        raise ConfigError(f"cannot listen there: {error}", where=f"{host}:{port}", remedy=remedy) from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        remedy = "choose another port with --port, or 0 for a free one"
        what = f"cannot listen there: {error.strerror}"
        raise ConfigError(what, where=f"{host}:{port}", remedy=remedy) from error
    return listening
