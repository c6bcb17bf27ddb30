"""Data sets: the list, uploads, the grid with captions that are edited in place, one picture."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import unicodedata
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import TypeVar
from urllib.parse import urlencode

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer import families
from trainer.config import fields
from trainer.config.schema import DataSection
from trainer.data.pictures.buckets import buckets
from trainer.errors import DataError, Problem
from trainer.ui.datasets import edits, snapshot, upload, worker
from trainer.ui.datasets.places import Place, folders, new_place, place_of
from trainer.ui.datasets.snapshot import Settings, picture_of
from trainer.ui.page import render
from trainer.ui.studio import Studio, UnknownIdError, found_by_id
from trainer.ui.views import dataset as views
from trainer.words.plurals import numbered

_IMMUTABLE = {"Cache-Control": "private, max-age=604800, immutable"}
_MOST_WORKERS, _MOST_ASKED = 2, 16
"""Workers at a time, each of which may hold a picture of 100 megapixels, and requests that may want one."""
Answer = TypeVar("Answer")
Change = Callable[[Studio, Request, FormData], Response | None]
"""A change by a form; without a response of its own the data set is looked at and shown again."""


class _Turns:
    """Turns of workers; whoever waits for one holds no thread, of which all pages share a few."""

    def __init__(self) -> None:
        self._asked, self._workers = asyncio.Semaphore(_MOST_ASKED), asyncio.Semaphore(_MOST_WORKERS)

    async def take(self, work: Callable[..., Answer], *arguments: object) -> Answer:
        """Give the result of work that asks a worker. Raises HTTPException where too many wait."""
        if self._asked.locked():
            raise HTTPException(503, "many pictures are being decoded: try again in a moment")
        async with self._asked, self._workers:
            return await run_in_threadpool(work, *arguments)


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the list of data sets, of one set and of one picture."""
    turns = _Turns()
    one = "/data/{set}/pictures/{picture}"
    shown = {
        "/data": _list,
        "/data/{set}": _show,
        "/data/{set}/progress": _progress,
        "/data/{set}/replace": _show_replacement,
        one: _show_picture,
        f"{one}/thumbnail": _thumbnail,
    }
    changes: Mapping[str, Change] = {
        "/data": _create,
        "/data/{set}/look": lambda *_: None,
        "/data/{set}/undo": _undo,
        "/data/{set}/files": _to_files,
        "/data/{set}/delete": _delete,
        "/data/{set}/settings": _settings,
        "/data/{set}/replace": _replace,
        f"{one}/caption": _caption,
    }
    return [
        *(Route(path, functools.partial(page, studio), methods=["GET"]) for path, page in shown.items()),
        *(Route(path, _changing(studio, change), methods=["POST"]) for path, change in changes.items()),
        Route(f"{one}/preview", functools.partial(turns.take, functools.partial(_preview, studio))),
        Route("/data/{set}/upload", functools.partial(_upload, studio, turns), methods=["POST"]),
    ]


def _list(
    studio: Studio,
    request: Request,
    *,
    name: str = "",
    problems: Sequence[Problem] = (),
    status_code: int = 200,
) -> Response:
    """The page of all data sets; with a name that cannot be a new one's, and why."""
    rows = views.datasets_view(studio)
    more = {"rows": rows, "folder": studio.data, "new_name": name, "problems": problems}
    return render(request, "datasets.html", status_code=status_code, **more)


def _show(studio: Studio, request: Request) -> Response:
    asked = request.query_params
    page = asked.get("page", "1")
    view = views.dataset_view(
        studio,
        request.path_params["set"],
        show=asked.get("show", ""),
        search=asked.get("search", ""),
        bucket=asked.get("bucket", ""),
        page=int(page) if page.isdecimal() and len(page) < 9 else 1,
    )
    none_chosen = asked.get("chosen") == "none"
    return render(
        request,
        "dataset.html",
        view=view,
        filters=views.FILTERS,
        wait="wait" in asked,
        none_chosen=none_chosen,
    )


def _progress(studio: Studio, request: Request, *, asked: bool = True) -> Response:
    """The page's part on looks; `wait` in the address: its script loads the page again when one is done."""
    look, wait = views.look_view(studio, request.path_params["set"]), "wait" in request.query_params
    return render(request, "_look.html", look=look, asked=asked, wait=wait)


def _show_replacement(studio: Studio, request: Request) -> Response:
    asked = request.query_params
    view = views.replace_view(
        studio, request.path_params["set"], asked.get("find", ""), asked.get("replace", "")
    )
    return render(request, "replace.html", view=view, changed=False)


def _show_picture(studio: Studio, request: Request) -> Response:
    view = views.picture_view(studio, request.path_params["set"], request.path_params["picture"])
    return render(request, "picture.html", view=view)


def _thumbnail(studio: Studio, request: Request) -> Response:
    row = picture_of(place_of(studio, request.path_params["set"]), request.path_params["picture"])
    path = worker.thumbnail_path(studio.folder, row.sha256)
    if not row.sha256 or not path.is_file():
        raise UnknownIdError(row.name)
    # the address has the content's hash
    headers = _IMMUTABLE if request.query_params.get("v") == row.sha256[:8] else {}
    return FileResponse(path, media_type="image/webp", headers=headers)


def _preview(studio: Studio, request: Request) -> Response:
    """The picture, its mask or one of its control images, encoded anew by the worker."""
    place = place_of(studio, request.path_params["set"])
    row = picture_of(place, request.path_params["picture"])
    parts = {"": row.name, "mask": row.mask, **{str(n): name for n, name in enumerate(row.controls)}}
    name = parts.get(request.query_params.get("part", ""), "")
    if not name:
        raise UnknownIdError(row.name)
    return Response(worker.ask("preview", place, name), media_type="image/webp")


async def _upload(studio: Studio, turns: _Turns, request: Request) -> Response:
    place = await run_in_threadpool(place_of, studio, request.path_params["set"])
    kind = request.headers.get("content-type", "")
    # the guard has seen that the length is a number
    coming_bytes = int(request.headers.get("content-length", "0"))
    files = await run_in_threadpool(upload.Upload, place, kind, coming_bytes)
    try:
        async for chunk in request.stream():
            await run_in_threadpool(files.write, chunk)
        told = await turns.take(files.finish)
    except FormParserError as error:
        raise HTTPException(400, f"the form is damaged: {error}") from error
    finally:
        await run_in_threadpool(files.close)
    await run_in_threadpool(worker.ask_for_look, place)
    template = "_told.html" if _is_part(request) else "told.html"
    return await run_in_threadpool(render, request, template, told=told, place=place)


def _changing(studio: Studio, change: Change) -> Callable[[Request], Awaitable[Response]]:
    def apply(request: Request, form: FormData) -> Response:
        answer = change(studio, request, form)
        if answer is not None:
            return answer
        place = place_of(studio, request.path_params["set"])
        worker.ask_for_look(place)
        if _is_part(request):
            return _progress(studio, request, asked=False)
        return RedirectResponse(f"/data/{place.id}?wait=1", status_code=303)

    async def read(request: Request) -> Response:
        return await run_in_threadpool(apply, request, await request.form())

    return read


def _create(studio: Studio, request: Request, form: FormData) -> Response:
    """The way to a new data set; the form again where its name cannot be one."""
    given = _text(form, "name").strip()
    try:
        place = _new_place(studio, given)
    except DataError as error:
        return _list(studio, request, name=given, problems=error.problems, status_code=422)
    return RedirectResponse(f"/data/{place.id}", status_code=303)


def _new_place(studio: Studio, given: str) -> Place:
    if (name := upload.stored_name(given)) != unicodedata.normalize("NFC", given):
        what = "a data set is a folder, whose name has letters, digits, blanks and . , ( ) @ + = ~ _ - alone"
        remedy = "write the name without other signs, and shorter where it is long"
        raise DataError(what, where=given, remedy=remedy)
    return new_place(studio, name)


def _caption(studio: Studio, request: Request, form: FormData) -> Response:
    """Save one caption; a conflict and a text that is no caption are shown beside what was written."""
    place, key = place_of(studio, request.path_params["set"]), request.path_params["picture"]
    row, text = picture_of(place, key), _text(form, "caption")
    conflict, problem = None, ""
    try:
        written = {edits.caption_file(row): (text, _text(form, "etag"))}
        edits.write_captions(place, written, f"caption of {PurePosixPath(row.name).name}")
    except edits.ConflictError as error:
        (conflict,) = error.now.values()
    except DataError as error:
        problem = error.problems[0].what
    else:
        worker.ask_for_look(place)
        if not _is_part(request):
            return RedirectResponse(f"/data/{place.id}/pictures/{key}", status_code=303)
    tile, failed = views.tile_view(place, key), bool(conflict or problem)
    return render(
        request,
        "_caption.html" if _is_part(request) else "caption.html",
        # a browser's console would call the status of a script's request an error
        status_code=200 if _is_part(request) else 409 if conflict else 422,
        tile=tile,
        place=place,
        text=text if failed else tile.caption,
        saved=not failed,
        conflict=conflict,
        problem=problem,
    )


def _replace(studio: Studio, request: Request, form: FormData) -> Response | None:
    """Make a replacement exactly as it was shown, or show it again."""
    view = views.replace_view(studio, request.path_params["set"], _text(form, "find"), _text(form, "replace"))
    if view.seen != _text(form, "seen"):
        return render(request, "replace.html", status_code=409, view=view, changed=True)
    texts = {name: (then, etag) for name, (_, then, etag) in view.found.items()}
    edits.write_captions(view.place, texts, f"{view.find!r} replaced in {numbered(len(texts), 'caption')}")
    return None


def _undo(studio: Studio, request: Request, form: FormData) -> None:
    place = place_of(studio, request.path_params["set"])
    if kept := edits.undo(place, _text(form, "change")):
        what = f"these were changed since, and stay as they are: {', '.join(kept[:20])}"
        raise DataError(what, where=place.folder.name, remedy="all others are as before")


def _to_files(studio: Studio, request: Request, form: FormData) -> None:
    edits.captions_to_files(place_of(studio, request.path_params["set"]))


def _delete(studio: Studio, request: Request, form: FormData) -> Response | None:
    """Move pictures to the trash; the page that they would have been chosen on says so where none was."""
    place = place_of(studio, request.path_params["set"])
    pictures = [picture_of(place, str(key)) for key in form.getlist("picture")]
    if not pictures:
        shown = {name: _text(form, name) for name in ("show", "bucket", "search", "page")}
        asked = urlencode({**shown, "chosen": "none"})
        return RedirectResponse(f"/data/{place.id}?{asked}#delete", status_code=303)
    edits.delete(place, pictures)
    return None


def _settings(studio: Studio, request: Request, form: FormData) -> None:
    """Keep what buckets and problems depend on. Raises DataError for a value that a run would not take."""
    place = place_of(studio, request.path_params["set"])
    below = [studio.data / one for one in folders(studio)]
    mask, *controls = (
        found_by_id(studio.data, str(given), below).relative_to(studio.data).as_posix() if given else ""
        for given in (_text(form, "mask"), *form.getlist("controls"))
    )
    family, trigger_word = _text(form, "family"), _text(form, "trigger_word").strip()
    if family not in {one.name for one in snapshot.picture_families()}:
        raise DataError("no such family of models", where=family, remedy="choose one of the list")
    values = {"resolution": _text(form, "resolution"), "trigger_word": trigger_word or None}
    try:
        data = DataSection.model_validate({"sets": [{"img_dir": place.folder}], **values})
    except ValidationError as error:
        raise DataError([_refused(one["loc"], one["input"]) for one in error.errors()]) from error
    buckets(data.resolution, families.get(family).pixel_multiple)
    made = Settings(family=family, resolution=data.resolution, trigger_word=trigger_word, mask=mask)
    made = dataclasses.replace(made, controls=tuple(filter(None, controls)))
    snapshot.keep(place, snapshot.SETTINGS_NAME, made)


def _refused(place: Sequence[int | str], given: object) -> Problem:
    path = ("data", *map(str, place))
    what = f"expected {fields.expected(path)}, got '{str(given)[:60]}'"
    return Problem(what=what, where=str(place[-1]), remedy="correct it, and save again")


def _text(form: FormData, name: str) -> str:
    """A field of a form; empty where it is missing."""
    return str(form.get(name, ""))


def _is_part(request: Request) -> bool:
    """True if a script asks, which puts the answer into its page."""
    return request.headers.get("HX-Request") == "true"
