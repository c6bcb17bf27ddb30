"""The page that compares runs, its curves, and what can be taken away from it."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.ui.opened import webp
from trainer.ui.page import part, render, shown
from trainer.ui.pages.job import SIDES
from trainer.ui.studio import Studio
from trainer.ui.views.comparing import compare, exports
from trainer.ui.views.comparing.compare import FEWEST, MOST, CompareView, compare_view
from trainer.ui.views.comparing.curves import HEIGHT, OVER, WIDTH, aligned
from trainer.ui.views.runs import runs_view


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the choice of runs, the page, its curves as JSON, two CSV files and the report."""

    def of_runs(answer: Callable[[Request], Response]) -> Callable[[Request], Response]:
        """The answer for a request that names as many runs as can be compared; the choice for others."""

        def handle(request: Request) -> Response:
            ids = _ids(request)
            if "choose" in request.query_params or not FEWEST <= len(ids) <= MOST:
                return _choice(request, studio, ids)
            return answer(request)

        return handle

    def show(request: Request) -> Response:
        view = _asked(request, studio)
        return render(request, "compare.html", view=view, over=OVER, width=WIDTH, height=HEIGHT)

    def curves(request: Request) -> Response:
        return JSONResponse(aligned(_asked(request, studio).curves))

    def table(request: Request) -> Response:
        return _file("comparison.csv", "text/csv", exports.table_csv(_asked(request, studio)))

    def numbers(request: Request) -> Response:
        runs = compare.read_runs(studio, _ids(request))
        return _file("metrics.csv", "text/csv", exports.numbers_csv(studio, runs))

    def report(request: Request) -> Response:
        view = _asked(request, studio)
        text = part(
            request,
            "report.html",
            view=view,
            pictures=_pictures(studio, view),
            width=WIDTH,
            height=HEIGHT,
        )
        return _file("comparison.html", "text/html", text)

    return [
        Route("/compare", of_runs(show), methods=["GET"]),
        Route("/compare/curves", of_runs(curves), methods=["GET"]),
        Route("/compare/comparison.csv", of_runs(table), methods=["GET"]),
        Route("/compare/metrics.csv", of_runs(numbers), methods=["GET"]),
        Route("/compare/comparison.html", of_runs(report), methods=["GET"]),
    ]


def _ids(request: Request) -> list[str]:
    return list(dict.fromkeys(request.query_params.getlist("run")))


def _asked(request: Request, studio: Studio) -> CompareView:
    step, over = request.query_params.get("step", ""), request.query_params.get("over", OVER[0])
    known = step.isascii() and step.isdecimal() and len(step) < 10
    return compare_view(
        studio, _ids(request), step=int(step) if known else None, over=over if over in OVER else OVER[0]
    )


def _choice(request: Request, studio: Studio, chosen: Sequence[str]) -> Response:
    wrong = chosen and not FEWEST <= len(chosen) <= MOST
    problem = f"{len(chosen)} of the runs were chosen: choose {FEWEST} to {MOST}." if wrong else ""
    return render(
        request,
        "compare_choice.html",
        status_code=422 if problem else 200,
        view=runs_view(studio),
        chosen=chosen,
        problem=problem,
        fewest=FEWEST,
        most=MOST,
        records=exports.records(studio),
    )


def _pictures(studio: Studio, view: CompareView) -> Mapping[Path, str]:
    """Addresses that hold the previews themselves, by the file of each."""
    found = {}
    for sample in (one for row in view.grid for one in row.cells if one is not None):
        path = sample.picture
        picture = webp(studio.runs, path, path.stat().st_mtime_ns, SIDES["small"])
        found[path] = f"data:image/webp;base64,{base64.b64encode(picture).decode()}"
    return found


def _file(name: str, kind: str, text: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(shown(text), media_type=f"{kind}; charset=utf-8", headers=headers)
