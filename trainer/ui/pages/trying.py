"""The page where a LoRA is tried: pictures without it and with it, drawn by a job of the queue."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.errors import Problem, TrainerError
from trainer.telemetry.run_folder import tries
from trainer.ui.opened import webp
from trainer.ui.page import part, render
from trainer.ui.pages.job import SIDES
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.trying.choice import ChoiceView, Typed, choice_view, typed_as
from trainer.ui.views.trying.drawn import TryView, tries_of, try_folder, try_of, try_view
from trainer.ui.views.trying.started import start_try

_MOST_CHARACTERS = 1 << 16
"""Longest text of a field."""


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the form, of its start, of one try, of the part of it that follows, and of its pictures."""

    def choose(request: Request) -> Response:
        run, like = (request.query_params.get(name, "") for name in ("run", "like"))
        typed = typed_as(studio, run, try_of(studio, run, int(like))) if run and _is_number(like) else None
        return _form(request, studio, choice_view(studio, run, typed))

    async def start(request: Request) -> Response:
        typed = _typed(await request.form())
        return await run_in_threadpool(_started, request, studio, request.path_params["run"], typed)

    def show(request: Request) -> Response:
        view = try_view(studio, request.path_params["run"], request.path_params["try"])
        return render(request, "try.html", view=view, viewed=_viewed(request, view))

    def follow(request: Request) -> Response:
        view = try_view(studio, request.path_params["run"], request.path_params["try"])
        return HTMLResponse(part(request, "_try.html", view=view, viewed=_viewed(request, view)))

    def picture(request: Request) -> Response:
        run, number, column, row = (request.path_params[name] for name in ("run", "try", "column", "row"))
        one, side = try_of(studio, run, number), SIDES.get(request.query_params.get("size", "small"))
        if side is None or column > len(one.loras) or row >= len(one.prompts):
            raise UnknownIdError(request.url.path)
        path = tries.picture(try_folder(studio, run, number), column, row)
        if not path.is_file():
            raise UnknownIdError(request.url.path)
        shown = webp(studio.runs, path, path.stat().st_mtime_ns, side)
        return Response(shown, media_type="image/webp", headers={"Cache-Control": "private, max-age=60"})

    one = "/try/{run}/{try:int}"
    return [
        Route("/try", choose, methods=["GET"]),
        *([Route("/try/{run}/start", start, methods=["POST"])] if studio.starts_runs else []),
        Route(one, show, methods=["GET"]),
        Route(f"{one}/part", follow, methods=["GET"]),
        Route(f"{one}/{{column:int}}/{{row:int}}", picture, methods=["GET"]),
    ]


def _typed(form: FormData) -> Typed:
    """The form that a request brings; files are not read, and texts are cut."""

    def text(name: str) -> str:
        value = form.get(name, "")
        return value[:_MOST_CHARACTERS] if isinstance(value, str) else ""

    return Typed(
        prompts=text("prompts"),
        negative_prompt=text("negative_prompt"),
        seed=text("seed"),
        resolution=text("resolution"),
        num_inference_steps=text("num_inference_steps"),
        strength=text("strength"),
        loras=tuple(dict.fromkeys(one for one in form.getlist("lora") if isinstance(one, str))),
    )


def _form(
    request: Request, studio: Studio, view: ChoiceView, problems: Sequence[Problem] | None = None
) -> Response:
    """The page with the form, and what is wrong with what was sent, where something was."""
    return render(
        request,
        "try_form.html",
        status_code=200 if problems is None else 422,
        view=view,
        problems=problems or (),
        tries=tries_of(studio, view.id) if view.id else (),
        limits=tries,
    )


def _started(request: Request, studio: Studio, run: str, typed: Typed) -> Response:
    """The page of the new try; the form with what is wrong where there is none."""
    view = choice_view(studio, run, typed)
    try:
        number = start_try(studio, view)
    except TrainerError as error:
        return _form(request, studio, view, [one for one in error.problems if one not in view.problems])
    return RedirectResponse(f"/try/{run}/{number}", status_code=303)


def _viewed(request: Request, view: TryView) -> tuple[int, int] | None:
    """Row and column of the pictures that are shown large: those that were asked for, else the first; None
    where they are not drawn.
    """
    row, column = (request.query_params.get(name, "") for name in ("row", "column"))
    place = (int(row) if _is_number(row) else 0, int(column) if _is_number(column) else 1)
    if view.answers or place[0] >= len(view.rows) or not 0 < place[1] < len(view.columns):
        return None
    cells = view.rows[place[0]]
    return place if cells[0].is_drawn and cells[place[1]].is_drawn else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
