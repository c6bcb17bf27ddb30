"""The page of a new run: the form, its plan as it is typed, the file, and the start."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Sequence
from urllib.parse import quote

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.config.reading import presets
from trainer.errors import Problem, TrainerError
from trainer.ui.page import part, render
from trainer.ui.studio import Studio
from trainer.ui.views.asked import OWN, RUN, Asked, form_of, is_key, settings_of, starts
from trainer.ui.views.foreign import Translated, brought
from trainer.ui.views.new import NewRun, add_to_queue, added, new_run
from trainer.ui.views.planned import with_one_key
from trainer.ui.views.queueing.goes_on import TICK

DEPTHS = ("needed", "usual", "all")
_MOST_CHARACTERS = 1 << 19
"""Longest text of a field."""
_NOT_ADDED = {"added": None, "added_goes_on": False}
_SENT = ("/new/file", "/new/start")
"""Addresses that a form is sent to, and that show it again where it has mistakes."""


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the page, of its plan, of the configuration as a file, and of the start."""
    form_of(
        1
    )  # helps are a syntax tree, of which CPython 3.11 cannot make two at once: before there are threads

    def show(request: Request) -> Response:
        start, run = (request.query_params.get(name, "") for name in ("start", "run"))
        start = f"{RUN}{run}" if run else start
        if run:
            settings_of(studio, run)  # a link to a run that is not there leads to no form
        view = new_run(studio, Asked(start=start) if run or start in starts() else Asked())
        job, goes_on = (request.query_params.get(name, "") for name in ("added", "goes_on"))
        return _page(request, view, added=added(job), added_goes_on=bool(goes_on))

    async def change(request: Request) -> Response:
        form = await request.form(max_fields=4000)
        return await run_in_threadpool(_changed, studio, request, form)

    def posted(answer: Callable[[Request, NewRun], Response]) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            asked = asked_by(await request.form(max_fields=4000))
            return await run_in_threadpool(lambda: answer(request, new_run(studio, asked)))

        return handle

    return [
        Route("/new", show, methods=["GET"]),
        Route("/new", change, methods=["POST"]),
        Route("/new/plan", posted(_plan), methods=["POST"]),
        Route("/new/file", posted(_file), methods=["POST"]),
        *([Route("/new/start", posted(_started), methods=["POST"])] if studio.starts_runs else []),
        # mistakes are shown at these addresses, to which a browser may come back without its form
        *(Route(path, show, methods=["GET"]) for path in _SENT),
    ]


def asked_by(form: FormData) -> Asked:
    """The form that a request brings; fields that are no keys, and files, are not read."""
    typed = dict[str, str]()
    for key, value in form.multi_items():
        if isinstance(value, str) and is_key(key) and len(value) <= _MOST_CHARACTERS:
            typed[key] = f"{typed[key]}\n{value}" if key in typed else value
    # a button of a way out types its values
    for line in filter(None, _text(form, "set").splitlines()):
        key, _, value = line.partition("=")
        typed |= {key: value} if is_key(key) else {}
    known = presets.names()
    return Asked(
        start=_text(form, "start") or Asked().start,
        own=_text(form, "own"),
        presets=tuple(one for one in form.getlist("preset") if isinstance(one, str) and one in known),
        depth=depth if (depth := _text(form, "depth")) in DEPTHS else DEPTHS[0],
        facts=_text(form, "facts"),
        goes_on=_text(form, "goes_on"),
        typed=typed,
    )


def _text(form: FormData, name: str) -> str:
    value = form.get(name, "")
    return value if isinstance(value, str) else ""


def _changed(studio: Studio, request: Request, form: FormData) -> Response:
    """The whole page for a form, with another trainer's configuration translated where one was pasted."""
    asked, foreign = asked_by(form), _text(form, "foreign")
    rows, problems = tuple[Translated, ...](), tuple[Problem, ...]()
    if foreign.strip():
        try:
            asked, rows = brought(studio, asked, foreign)
        except TrainerError as error:
            problems = error.problems
    kept = foreign if problems else ""
    return _page(request, new_run(studio, asked), rows=rows, foreign=kept, foreign_problems=problems)


def _page(request: Request, view: NewRun, status_code: int = 200, **more: object) -> Response:
    context = {"rows": (), "foreign": "", "foreign_problems": (), "start_problems": (), **_NOT_ADDED, **more}
    return render(
        request,
        "new.html",
        status_code=status_code,
        view=view,
        notes=_notes(view),
        tick=TICK,
        starts=starts(),
        own=OWN,
        presets=presets.names(),
        **context,
    )


def _plan(request: Request, view: NewRun) -> Response:
    return HTMLResponse(part(request, "_plan.html", view=view, notes=_notes(view), tick=TICK))


def _notes(view: NewRun) -> str:
    """JSON of the texts beside each field, for the script that writes them there."""
    notes = {
        one.field.key: [
            one.below,
            one.origin,
            one.decided,
            one.reason,
            [f"{problem.what}. {problem.remedy}" for problem in one.problems],
        ]
        for one in view.fields
    }
    return json.dumps(notes, ensure_ascii=False)


def _file(request: Request, view: NewRun) -> Response:
    """The configuration as a file to keep; the page with its mistakes where it has some."""
    if not view.yaml:
        return _page(request, view, status_code=422)
    # the second one for programs that read no UTF-8 in the first
    name, plain = (
        quote(view.file_name, safe="", errors="surrogateescape"),
        re.sub(r"[^A-Za-z0-9_.-]+", "-", view.file_name),
    )
    headers = {"Content-Disposition": f"attachment; filename=\"{plain}\"; filename*=UTF-8''{name}"}
    return PlainTextResponse(view.yaml, media_type="application/yaml", headers=headers)


def _started(request: Request, view: NewRun) -> Response:
    """The form for another run, with the job that was added; with what is wrong where none was."""
    try:
        job = add_to_queue(view)
    except TrainerError as error:
        return _page(request, view, status_code=422, start_problems=tuple(map(with_one_key, error.problems)))
    goes_on = "&goes_on=1" if view.occupied else ""
    return RedirectResponse(f"/new?added={job}{goes_on}", status_code=303)
