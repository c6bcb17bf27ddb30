"""Templates rendered into responses: autoescaped, without secrets."""

from __future__ import annotations

import datetime
import functools
import html
import shlex
from pathlib import Path
from typing import Any

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse

from trainer import __version__
from trainer.config import environment
from trainer.config.secrets import names_secret, redacted
from trainer.ui.guard import HEADERS
from trainer.ui.views.bar import bar_view
from trainer.words.sizes import gib

TEMPLATES = Path(__file__).with_name("templates")
STATIC = Path(__file__).with_name("static")
THEME_COOKIE = "theme"
THEMES = ("auto", "light", "dark")
NAV = (
    ("/", "Runs", "g r"),
    ("/new", "New run", "g n"),
    ("/data", "Data sets", "g d"),
    ("/compare", "Compare", "g c"),
    ("/try", "Try", "g t"),
    ("/settings", "Settings", "g s"),
)
"""Path, name and keys of the pages in the bar; those that no route has yet are left out."""


def render(request: Request, name: str, *, status_code: int = 200, **context: Any) -> HTMLResponse:
    """The page of a template: `csrf`, `theme`, `nav`, `path` and `starts_runs` are there besides `context`.

    Every value is escaped; secrets are hidden, as in all that the trainer prints.
    """
    session = request.scope.get("state", {}).get("session")
    theme = request.cookies.get(THEME_COOKIE, THEMES[0])
    paths = {route.path for route in request.app.routes}
    text = templates().get_template(name).render(
        csrf=session.csrf if session else "",
        logged_in=session is not None,
        machine=bar_view(request.app.state.studio) if session else None,
        theme=theme if theme in THEMES else THEMES[0],
        themes=THEMES,
        nav=[row for row in NAV if row[0] in paths],
        path=request.url.path,
        version=__version__,
        starts_runs=request.app.state.studio.starts_runs,
        **context,
    )  # fmt: skip
    return HTMLResponse(shown(text), status_code=status_code, headers=dict(HEADERS))


def part(request: Request, name: str, **context: Any) -> str:
    """The HTML of a template that is a part of a page, with `csrf` and `starts_runs` besides `context`."""
    csrf, starts_runs = request.state.session.csrf, request.app.state.studio.starts_runs
    return shown(templates().get_template(name).render(csrf=csrf, starts_runs=starts_runs, **context))


def shown(text: str) -> str:
    """HTML without secrets, whether or not they were escaped. Bytes of file names that are no UTF-8, which no
    page can hold, are spelled out: `caf\\udce9`.
    """
    environ = environment.snapshot()
    escaped = {f"HTML_{name}": html.escape(value) for name, value in environ.items() if names_secret(name)}
    return redacted(text, {**environ, **escaped}).encode(errors="backslashreplace").decode()


@functools.cache
def templates() -> jinja2.Environment:
    """The environment of all templates; a name that a template misspells is an error."""
    loaded = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    loaded.filters |= {"size": size, "duration": duration, "moment": moment, "quoted": shlex.quote}
    return loaded


def size(count: float) -> str:
    """Bytes as text: `812 B`, `14 KiB`, `1.4 MiB`, `23.6 GiB`."""
    if count < 1 << 10:
        return f"{count:.0f} B"
    return f"{count / (1 << 10):.0f} KiB" if count < 1 << 20 else gib(count)


def duration(seconds: float) -> str:
    """Seconds in words: `45 s`, `12 min`, `3 h 05 min`, `2 d 4 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes = whole // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    return f"{hours} h {minutes % 60:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def moment(unix_seconds: float) -> str:
    """A time of this machine's clock, in its zone: `2026-11-27 16:05`."""
    return datetime.datetime.fromtimestamp(unix_seconds).strftime("%Y-%m-%d %H:%M")
