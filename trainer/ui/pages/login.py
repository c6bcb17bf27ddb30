"""Login by the token, logout, and the theme: what a browser keeps of the studio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from urllib.parse import unquote, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Match, Route

from trainer.ui.access import SESSION_SECONDS, Access, TooManyTriesError
from trainer.ui.page import THEME_COOKIE, THEMES, render
from trainer.ui.studio import Studio
from trainer.ui.views.welcome import was_welcomed

_YEAR_SECONDS = 365 * 24 * 3600


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of login, logout and theme."""
    return [
        Route("/login", _show, methods=["GET"]),
        Route("/login", _log_in, methods=["POST"]),
        Route("/logout", _log_out, methods=["POST"]),
        Route("/theme", _set_theme, methods=["POST"]),
    ]


def login_page(request: Request, *, status_code: int = 200, problem: str = "") -> Response:
    """The page that asks for the token."""
    return render(request, "login.html", status_code=status_code, problem=problem)


def _show(request: Request) -> Response:
    return login_page(request)


async def _log_in(request: Request) -> Response:
    access: Access = request.app.state.access
    token = (await request.form()).get("token", "")
    try:
        cookie = access.log_in(token.strip() if isinstance(token, str) else "")
    except TooManyTriesError as error:
        seconds = math.ceil(error.seconds)
        answer = login_page(request, status_code=429, problem=f"Too many wrong tokens: wait {seconds} s.")
        answer.headers["Retry-After"] = str(seconds)
        return answer
    if cookie is None:
        return login_page(request, status_code=401, problem="That is not the token of this studio.")
    studio: Studio = request.app.state.studio
    return entered(request, cookie, "/" if was_welcomed(studio) else "/welcome")


def entered(request: Request, cookie: str, target: str) -> Response:
    """The way to `target` for a browser that gets the cookie of its session."""
    access: Access = request.app.state.access
    answer = RedirectResponse(target, status_code=303)
    answer.set_cookie(
        access.cookie_name,
        cookie,
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=request.headers["origin"].startswith("https:"),
    )
    return answer


def _log_out(request: Request) -> Response:
    access: Access = request.app.state.access
    access.log_out(request.state.session.key)
    answer = RedirectResponse("/login", status_code=303)
    answer.delete_cookie(access.cookie_name)
    return answer


async def _set_theme(request: Request) -> Response:
    theme = (await request.form()).get("theme")
    # the guard let only our own pages through; of their address path and query are taken alone
    page = urlsplit(request.headers.get("referer", "/"))
    path = f"/{page.path.lstrip('/')}"
    # mistakes of some forms are shown at addresses to which a browser cannot come back without its form
    asked = {"type": "http", "method": "GET", "path": unquote(path), "headers": []}
    shown = any(route.matches(asked)[0] is Match.FULL for route in request.app.routes)
    target = f"{path}?{page.query}".rstrip("?") if shown else "/"
    answer = RedirectResponse(target, status_code=303)
    if theme in THEMES:
        answer.set_cookie(THEME_COOKIE, str(theme), max_age=_YEAR_SECONDS, httponly=True, samesite="strict")
    return answer
