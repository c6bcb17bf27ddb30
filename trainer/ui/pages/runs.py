"""The home page: runs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trainer.ui.page import render
from trainer.ui.studio import Studio
from trainer.ui.views.runs import runs_view


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Route of the list of runs."""

    def show(request: Request) -> Response:
        return render(request, "runs.html", view=runs_view(studio))

    return [Route("/", show, methods=["GET"])]
