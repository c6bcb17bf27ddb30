"""The page of one run, its stream, pictures and files, and what it can be asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from trainer.queue.beside import stop_run
from trainer.telemetry import control
from trainer.telemetry.control import Order
from trainer.telemetry.run_folder import results
from trainer.telemetry.sinks.records import METRICS_LOG
from trainer.ui import stream
from trainer.ui.opened import open_below, webp
from trainer.ui.page import part, render
from trainer.ui.studio import Studio, UnknownIdError, found_by_id
from trainer.ui.views.job import LEVELS, job_view
from trainer.ui.views.queueing.jobs import resume, train_on
from trainer.ui.views.runs import run_folder
from trainer.ui.views.state import run_look

SIDES = {"small": 320, "large": 1024}
"""Pixels of a shown picture's longer side."""
_CHUNK_BYTES = 1 << 18


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of a run: page, stream, previews, downloads, orders."""

    def show(request: Request) -> Response:
        view = job_view(studio, request.path_params["run"], level=request.query_params.get("log", LEVELS[0]))
        return render(request, "job.html", view=view, levels=LEVELS)

    def follow(request: Request) -> Response:
        run, level = request.path_params["run"], request.query_params.get("log", LEVELS[0])
        folder = run_folder(studio, run)
        return stream.streamed(
            request,
            stream.events(
                part=lambda: part(
                    request,
                    "_job.html",
                    view=job_view(studio, run, level=level),
                    levels=LEVELS,
                ),
                look=lambda: run_look(folder),
                looks=request.app.state.looks,
                metrics=folder / METRICS_LOG,
                place=stream.place_from(request.headers.get("last-event-id", "")) or stream.START,
            ),
        )

    return [
        Route("/runs/{run}", show, methods=["GET"]),
        Route("/runs/{run}/stream", follow, methods=["GET"]),
        *_files(studio),
        *_acts(studio),
    ]


def _files(studio: Studio) -> Sequence[BaseRoute]:
    def preview(request: Request) -> Response:
        folder = run_folder(studio, request.path_params["run"])
        side = SIDES.get(request.query_params.get("size", "small"))
        wanted = (request.path_params["step"], request.path_params["number"])
        found = [one for one in results.samples(folder) if (one.step, one.number) == wanted]
        if not found or side is None:
            raise UnknownIdError(request.url.path)
        path = found[0].picture
        picture = webp(studio.runs, path, path.stat().st_mtime_ns, side)
        return Response(picture, media_type="image/webp", headers={"Cache-Control": "private, max-age=60"})

    def download(request: Request) -> Response:
        folder = run_folder(studio, request.path_params["run"])
        files = [one.path for one in results.files(folder)]
        path = found_by_id(folder, request.path_params["file"], files)
        return attachment(open_below(studio.runs, path), path.name)

    return [
        Route("/runs/{run}/previews/{step:int}/{number:int}", preview, methods=["GET"]),
        Route("/runs/{run}/files/{file}", download, methods=["GET"]),
    ]


def _acts(studio: Studio) -> Sequence[BaseRoute]:
    async def ask(request: Request) -> Response:
        run, order = request.path_params["run"], str((await request.form()).get("order", ""))
        if order not in list(Order):
            raise HTTPException(400, "A run can be asked to save, to sample or to stop.")
        folder = run_folder(studio, run)
        if order == Order.STOP:
            await run_in_threadpool(stop_run, folder)
        else:
            await run_in_threadpool(control.ask, folder, Order(order))
        return RedirectResponse(f"/runs/{run}", status_code=303)

    def go_on(request: Request) -> Response:
        resume(studio, request.path_params["run"])
        return RedirectResponse("/", status_code=303)

    async def more(request: Request) -> Response:
        steps = str((await request.form()).get("steps", ""))
        await run_in_threadpool(train_on, studio, request.path_params["run"], steps.strip())
        return RedirectResponse("/", status_code=303)

    starts = [
        Route("/runs/{run}/resume", go_on, methods=["POST"]),
        Route("/runs/{run}/more", more, methods=["POST"]),
    ]
    return [Route("/runs/{run}/ask", ask, methods=["POST"]), *(starts if studio.starts_runs else [])]


def attachment(file: BinaryIO, name: str) -> Response:
    """A file as a download, never shown in the page's place: as long as it is now, though it may grow. It is
    closed at the end.
    """
    plain = "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name
    )
    size = os.fstat(file.fileno()).st_size

    def chunks() -> Iterator[bytes]:
        left = size
        while chunk := file.read(min(left, _CHUNK_BYTES)):
            left -= len(chunk)
            yield chunk

    headers = {
        "Content-Disposition": f'attachment; filename="{plain}"',
        "Content-Length": str(size),
    }
    return StreamingResponse(
        chunks(),
        media_type="application/octet-stream",
        headers=headers,
        background=BackgroundTask(file.close),
    )
