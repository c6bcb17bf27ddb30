"""The studio as an ASGI application: the guard, the pages' routes, and what errors look like."""

from __future__ import annotations

import asyncio
import http
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from trainer.errors import MEANING, TrainerError
from trainer.ui.access import Access
from trainer.ui.guard import Guard
from trainer.ui.looking import Looks
from trainer.ui.page import STATIC, render
from trainer.ui.pages import compare, dataset, job, login, new, runs, settings, trying, welcome
from trainer.ui.stream import Seats
from trainer.ui.studio import Studio, UnknownIdError

PAGES: Sequence[Callable[[Studio], Sequence[BaseRoute]]] = (
    login.routes,
    runs.routes,
    job.routes,
    new.routes,
    dataset.routes,
    compare.routes,
    trying.routes,
    settings.routes,
    welcome.routes,
)
"""Routes of each page; a new page is a row."""
LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
_TITLES = {404: "Nothing is here", 405: "That cannot be asked here", 409: "Changed meanwhile"}


def create_app(
    studio: Studio, *, access: Access | None = None, hosts: frozenset[str] = LOOPBACK_HOSTS
) -> Starlette:
    """The application over the folders of `studio`. `access` is the one of its folder if not given.

    `hosts` are the names and addresses, without ports, by which it may be asked. Raises ConfigError where
    the token cannot be used.
    """
    access = access or Access(studio.folder)
    pages = [route for routes in PAGES for route in routes(studio)]
    static = Mount("/static", StaticFiles(directory=STATIC, follow_symlink=False), name="static")

    async def refused(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = app
        await login.login_page(Request(scope), status_code=401)(scope, receive, send)

    def told(code: int, text: str) -> ASGIApp:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            scope["app"] = app
            page = _page(Request(scope), code, title=http.HTTPStatus(code).phrase, text=text)
            await page(scope, receive, send)

        return answer

    guard: ASGIApp = refused
    app = Starlette(
        routes=[*pages, static],
        middleware=[Middleware(Guard, access=access, hosts=hosts, refused=guard, told=told)],
        exception_handlers={
            HTTPException: _http_error,
            UnknownIdError: _unknown,
            TrainerError: _told,
            ClientDisconnect: _left,
            Exception: _bug,
        },
    )
    app.state.studio, app.state.access, app.state.seats = studio, access, Seats()
    app.state.looks, app.state.ending = Looks(), asyncio.Event()
    return app


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    title = _TITLES.get(error.status_code, error.detail)
    return _page(request, error.status_code, title=title, text=error.detail)


def _unknown(request: Request, error: Exception) -> Response:
    return _page(request, 404, title=_TITLES[404], text="It was removed meanwhile, or the address is wrong.")


def _left(request: Request, error: Exception) -> Response:
    """An answer that nobody reads: who was sending a form went away, which is no fault of ours."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=400)


def _told(request: Request, error: Exception) -> Response:
    """An error that names its problems, in the words of the command line."""
    assert isinstance(error, TrainerError)
    return _page(request, 422, title=MEANING[error.exit_code], problems=error.problems)


def _bug(request: Request, error: Exception) -> Response:
    """A fault of ours: the traceback goes to the studio's log, and never into a page."""
    return _page(request, 500, title="The studio failed", text="Its log has a traceback; other pages work.")


def _page(request: Request, code: int, *, title: str, text: str = "", problems: object = ()) -> Response:
    return render(
        request, "error.html", status_code=code, code=code, title=title, text=text, problems=problems
    )
