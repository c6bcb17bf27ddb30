"""The first-run page, to which the first login leads."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.errors import Problem, TrainerError
from trainer.ui.page import render
from trainer.ui.studio import Studio
from trainer.ui.views.welcome import add_quickstart, end_welcome, welcome_view


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the page, of its first run, and of the way past it."""

    def show(request: Request, failed: Sequence[Problem] = (), status_code: int = 200) -> Response:
        view = welcome_view(studio)
        return render(request, "welcome.html", status_code=status_code, view=view, failed=failed)

    def quickstart(request: Request) -> Response:
        try:
            add_quickstart(studio)
        except TrainerError as error:
            return show(request, error.problems, 422)
        end_welcome(studio)
        return RedirectResponse("/", status_code=303)

    def leave(request: Request) -> Response:
        end_welcome(studio)
        return RedirectResponse("/", status_code=303)

    return [
        Route("/welcome", lambda request: show(request), methods=["GET"]),
        *([Route("/welcome/quickstart", quickstart, methods=["POST"])] if studio.starts_runs else []),
        Route("/welcome/leave", leave, methods=["POST"]),
    ]
