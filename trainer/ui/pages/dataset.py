"""Data sets: the list, uploads, the grid with captions that are edited in place, one picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from pydantic import ValidationError
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer import families
from trainer.config.schema import DataSection
from trainer.data.pictures.buckets import buckets
from trainer.errors import DataError, Problem
from trainer.ui.datasets import edits, snapshot, upload, worker
from trainer.ui.datasets.places import Place, folders, place_of
from trainer.ui.datasets.snapshot import Settings, picture_of
from trainer.ui.page import render
from trainer.ui.studio import Studio, UnknownIdError, found_by_id
from trainer.ui.views.dataset import (
    FILTERS,
    dataset_view,
    datasets_view,
    look_view,
    picture_view,
    replace_view,
    tile_view,
)

Change = Callable[[Studio, Place, FormData], None]
"""A change by a form."""
_IMMUTABLE = {"Cache-Control": "private, max-age=604800, immutable"}


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the list of data sets, of one set and of one picture."""

    def listed(request: Request) -> Response:
        return render(request, "datasets.html", rows=datasets_view(studio), folder=studio.data)

    def shown(request: Request) -> Response:
        asked = request.query_params
        view = dataset_view(
            studio,
            request.path_params["set"],
            show=asked.get("show", ""),
            search=asked.get("search", ""),
            bucket=asked.get("bucket", ""),
            page=int(page) if (page := asked.get("page", "1")).isdecimal() and len(page) < 9 else 1,
        )
        return render(request, "dataset.html", view=view, filters=FILTERS, wait="wait" in asked)

    def progress(request: Request) -> Response:
        return _looking(studio, request, asked=True)

    def picture(request: Request) -> Response:
        view = picture_view(studio, request.path_params["set"], request.path_params["picture"])
        return render(request, "picture.html", view=view)

    def replacement(request: Request) -> Response:
        asked = request.query_params
        view = replace_view(
            studio, request.path_params["set"], asked.get("find", ""), asked.get("replace", "")
        )
        return render(request, "replace.html", view=view, changed=False)

    at = "/data/{set}"
    one = at + "/pictures/{picture}"
    changes = [
        Route(f"{at}/{name}", _changing(studio, change), methods=["POST"]) for name, change in CHANGES.items()
    ]
    return [
        Route("/data", listed, methods=["GET"]),
        Route("/data", _creating(studio), methods=["POST"]),
        Route(at, shown, methods=["GET"]),
        Route(f"{at}/progress", progress, methods=["GET"]),
        Route(f"{at}/replace", replacement, methods=["GET"]),
        Route(f"{at}/replace", _replacing(studio), methods=["POST"]),
        Route(f"{at}/upload", _uploading(studio), methods=["POST"]),
        *changes,
        Route(one, picture, methods=["GET"]),
        Route(f"{one}/caption", _captioning(studio), methods=["POST"]),
        Route(f"{one}/thumbnail", lambda request: _thumbnail(studio, request), methods=["GET"]),
        Route(f"{one}/preview", lambda request: _preview(studio, request), methods=["GET"]),
    ]


def _looking(studio: Studio, request: Request, *, asked: bool) -> Response:
    """The page's part on looks; `wait` in the address has the page load again when one is done."""
    look, wait = look_view(studio, request.path_params["set"]), "wait" in request.query_params
    answer = render(request, "_look.html", look=look, asked=asked, wait=wait)
    if wait and not look.is_looking:
        answer.headers["HX-Refresh"] = "true"
    return answer


def _thumbnail(studio: Studio, request: Request) -> Response:
    place = place_of(studio, request.path_params["set"])
    row = picture_of(place, request.path_params["picture"])
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


def _creating(studio: Studio) -> Callable[[Request], object]:
    async def create(request: Request) -> Response:
        form = await request.form()
        place = await run_in_threadpool(_new_set, studio, _text(form, "name"))
        return RedirectResponse(f"/data/{place.id}", status_code=303)

    return create


def _new_set(studio: Studio, given: str) -> Place:
    """A new, empty data set. Raises DataError where the name is taken, or is none."""
    name = upload.stored_name(given)
    if not name or name.startswith("."):
        raise DataError("the data set needs a name of letters or digits", remedy="write one, such as cats")
    try:
        (studio.data / name).mkdir()
    except FileExistsError as error:
        raise DataError("there is a data set of this name", where=name, remedy="choose another") from error
    return Place(root=studio.data, studio=studio.folder, name=name)


def _uploading(studio: Studio) -> Callable[[Request], object]:
    async def receive(request: Request) -> Response:
        place = await run_in_threadpool(place_of, studio, request.path_params["set"])
        with upload.receiving(place, request.headers.get("content-type", "")) as files:
            try:
                async for chunk in request.stream():
                    await run_in_threadpool(files.write, chunk)
                told = await run_in_threadpool(files.finish)
            except FormParserError as error:
                raise HTTPException(400, f"the form is damaged: {error}") from error
        await run_in_threadpool(worker.ask_for_look, place)
        name = "_told.html" if _is_part(request) else "told.html"
        return render(request, name, told=told, set_id=place.id, set_name=place.folder.name)

    return receive


def _changing(studio: Studio, change: Change) -> Callable[[Request], object]:
    async def apply(request: Request) -> Response:
        form = await request.form()
        place = await run_in_threadpool(place_of, studio, request.path_params["set"])
        await run_in_threadpool(change, studio, place, form)
        await run_in_threadpool(worker.ask_for_look, place)
        if _is_part(request):
            return _looking(studio, request, asked=False)
        return RedirectResponse(f"/data/{place.id}?wait=1", status_code=303)

    return apply


def _captioning(studio: Studio) -> Callable[[Request], object]:
    async def write(request: Request) -> Response:
        form = await request.form()
        return await run_in_threadpool(_write_caption, studio, request, form)

    return write


def _write_caption(studio: Studio, request: Request, form: FormData) -> Response:
    """Save one caption; a conflict and a text that is no caption are shown beside what was written."""
    place = place_of(studio, request.path_params["set"])
    key = request.path_params["picture"]
    row, text = picture_of(place, key), _text(form, "caption")
    conflict, problem = None, ""
    try:
        name = edits.caption_file(row)
        what = f"caption of {PurePosixPath(row.name).name}"
        edits.write_captions(place, {name: (text, _text(form, "etag"))}, what)
    except edits.ConflictError as error:
        (conflict,) = error.now.values()
    except DataError as error:
        problem = error.problems[0].what
    else:
        worker.ask_for_look(place)
        if not _is_part(request):
            back = "" if _text(form, "back") == "grid" else f"/pictures/{key}"
            return RedirectResponse(f"/data/{place.id}{back}", status_code=303)
    tile = tile_view(studio, place.id, key)
    context = {"tile": tile, "set_id": place.id, "saved": not (conflict or problem), "conflict": conflict}
    context |= {"text": text if conflict or problem else tile.caption, "problem": problem, "writable": True}
    if _is_part(request):
        return render(request, "_caption.html", **context)
    code = 409 if conflict else 422
    return render(request, "caption.html", status_code=code, set_name=place.folder.name, **context)


def _replacing(studio: Studio) -> Callable[[Request], object]:
    async def replace(request: Request) -> Response:
        form = await request.form()
        return await run_in_threadpool(_replace, studio, request, form)

    return replace


def _replace(studio: Studio, request: Request, form: FormData) -> Response:
    """Make a replacement exactly as it was shown, or show it again."""
    find, new = _text(form, "find"), _text(form, "replace")
    place = place_of(studio, request.path_params["set"])
    view = replace_view(studio, place.id, find, new)
    if view.seen != _text(form, "seen"):
        return render(request, "replace.html", status_code=409, view=view, changed=True)
    found = edits.replaced(place, snapshot.pictures_by_id(place).values(), find, new)
    texts = {name: (then, etag) for name, (_, then, etag) in found.items()}
    edits.write_captions(place, texts, f"{find!r} replaced in {len(texts)} captions")
    worker.ask_for_look(place)
    return RedirectResponse(f"/data/{place.id}", status_code=303)


def _look(studio: Studio, place: Place, form: FormData) -> None:
    """Nothing but the look that follows every change."""


def _undo(studio: Studio, place: Place, form: FormData) -> None:
    kept = edits.undo(place)
    if kept:
        what = f"these were changed since, and stay as they are: {', '.join(kept[:20])}"
        raise DataError(what, where=place.folder.name, remedy="all others are as before")


def _to_files(studio: Studio, place: Place, form: FormData) -> None:
    found = snapshot.read_snapshot(place)
    if found is not None:
        edits.captions_to_files(place, found)


def _delete(studio: Studio, place: Place, form: FormData) -> None:
    pictures = [picture_of(place, key) for key in form.getlist("picture") if isinstance(key, str)]
    if pictures:
        edits.delete(place, pictures)


def _settings(studio: Studio, place: Place, form: FormData) -> None:
    """Keep what buckets and problems depend on. Raises DataError for a value that a run would not take."""
    names = {family.name for family in snapshot.picture_families()}
    family, resolution = _text(form, "family"), _text(form, "resolution")
    if family not in names:
        raise DataError("no such family of models", where=family, remedy="choose one of the list")
    trigger_word = _text(form, "trigger_word").strip()
    values = {
        "sets": [{"img_dir": place.folder}],
        "resolution": resolution,
        "trigger_word": trigger_word or None,
    }
    try:
        data = DataSection.model_validate(values)
    except ValidationError as error:
        problems = [Problem(what=one["msg"], where=".".join(map(str, one["loc"]))) for one in error.errors()]
        raise DataError(problems) from error
    buckets(data.resolution, families.get(family).pixel_multiple)
    below = [studio.data / name for name in folders(studio.data)]

    def folder(given: str) -> str:
        return found_by_id(studio.data, given, below).relative_to(studio.data).as_posix() if given else ""

    controls = [folder(given) for given in form.getlist("controls") if isinstance(given, str)]
    made = Settings(
        family=family,
        resolution=data.resolution,
        trigger_word=trigger_word,
        mask=folder(_text(form, "mask")),
        controls=tuple(name for name in controls if name),
    )
    snapshot.write_settings(place, made)


CHANGES: Mapping[str, Change] = {
    "look": _look,
    "undo": _undo,
    "files": _to_files,
    "delete": _delete,
    "settings": _settings,
}
"""Changes by the end of their address."""


def _text(form: FormData, name: str) -> str:
    """A field of a form; empty where it is missing."""
    value = form.get(name, "")
    return value if isinstance(value, str) else ""


def _is_part(request: Request) -> bool:
    """True if a script asks, which puts the answer into its page."""
    return request.headers.get("HX-Request") == "true"
