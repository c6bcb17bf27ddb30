"""The home page: the queue, and all runs."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.ui import stream
from trainer.ui.looking import Look
from trainer.ui.page import part, render
from trainer.ui.studio import Studio
from trainer.ui.views.queueing.jobs import WORDS, Act, assign_job, change_job, queue_look, queue_view
from trainer.ui.views.runs import FILTERS, RunsView, run_folders, runs_view
from trainer.ui.views.state import row_look


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the list of runs and its stream."""

    def asked(request: Request) -> RunsView:
        shown = request.query_params.get("show", FILTERS[0])
        words = request.query_params.get("words", "")
        return runs_view(studio, words=words, shown=shown if shown in FILTERS else FILTERS[0])

    def show(request: Request) -> Response:
        queue = queue_view(studio)
        return render(request, "runs.html", view=asked(request), queue=queue, words=WORDS, filters=FILTERS)

    def follow(request: Request) -> Response:
        return stream.streamed(
            request,
            stream.events(
                part=lambda: part(
                    request, "_home.html", view=asked(request), queue=queue_view(studio), words=WORDS
                ),
                look=lambda: _look(studio),
                looks=request.app.state.looks,
            ),
        )

    async def look(request: Request) -> Response:
        request.app.state.looks.ask()
        return PlainTextResponse("every stream looks now\n")

    async def change(request: Request) -> Response:
        act = str((await request.form()).get("act", ""))
        if act not in list(Act):
            raise HTTPException(400, "A job can be moved, held, stopped, or taken off the list.")
        await run_in_threadpool(change_job, request.path_params["job"], Act(act))
        return RedirectResponse("/", status_code=303)

    async def assign(request: Request) -> Response:
        gpus = [str(word) for word in (await request.form()).getlist("gpu") if word]
        await run_in_threadpool(assign_job, request.path_params["job"], gpus)
        return RedirectResponse("/", status_code=303)

    return [
        Route("/", show, methods=["GET"]),
        Route("/stream", follow, methods=["GET"]),
        Route("/look", look, methods=["GET"]),
        Route("/queue/{job:int}", change, methods=["POST"]),
        Route("/queue/{job:int}/gpus", assign, methods=["POST"]),
    ]


def _look(studio: Studio) -> Look:
    """A look at the queue and at all runs."""
    queue, runs = queue_look(studio), [row_look(folder) for folder in run_folders(studio)]
    return Look(
        changes=(queue.changes, [one.changes for one in runs]), works=any(one.works for one in (queue, *runs))
    )
