"""The home page: runs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from trainer.ui import stream
from trainer.ui.page import part, render
from trainer.ui.studio import Studio
from trainer.ui.views.runs import FILTERS, RunsView, run_folders, runs_view
from trainer.ui.views.state import signature


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the list of runs and its stream."""

    def asked(request: Request) -> RunsView:
        shown = request.query_params.get("show", FILTERS[0])
        words = request.query_params.get("words", "")
        return runs_view(studio, words=words, shown=shown if shown in FILTERS else FILTERS[0])

    def show(request: Request) -> Response:
        return render(request, "runs.html", view=asked(request), filters=FILTERS)

    def follow(request: Request) -> Response:
        return stream.streamed(
            request,
            stream.events(
                part=lambda: part(request, "_runs.html", view=asked(request)),
                changed=lambda: [signature(folder) for folder in run_folders(studio)],
            ),
        )

    return [Route("/", show, methods=["GET"]), Route("/stream", follow, methods=["GET"])]
