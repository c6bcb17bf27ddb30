"""The page of settings."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from trainer.errors import Problem, TrainerError
from trainer.ui.access import Access
from trainer.ui.page import render
from trainer.ui.pages.login import entered
from trainer.ui.studio import Studio
from trainer.ui.views.settings import set_hub_token, set_webhook, settings_view, sign_out

_PATH = "/settings"


def routes(studio: Studio) -> Sequence[BaseRoute]:
    """Routes of the page, of sessions, of the token, and of the secrets that are written and never shown."""

    def show(request: Request, problems: Sequence[Problem] = (), status_code: int = 200) -> Response:
        view = settings_view(studio, request.app.state.access, request.state.session)
        return render(request, "settings.html", status_code=status_code, view=view, problems=problems)

    def end_session(request: Request) -> Response:
        sign_out(request.app.state.access, request.path_params["session"])
        return RedirectResponse(_PATH, status_code=303)

    def new_token(request: Request) -> Response:
        """End every session; the browser that asked goes on in a new one."""
        access: Access = request.app.state.access
        return entered(request, access.rotate(), _PATH)

    async def keep_secret(request: Request) -> Response:
        form = await request.form()
        name, text = form.get("name"), form.get("value", "")
        if name not in ("hub_token", "webhook") or not isinstance(text, str):
            raise HTTPException(400, "An access token or a webhook can be kept.")
        text = "" if "remove" in form else text
        if not text.strip() and "remove" not in form:
            return RedirectResponse(_PATH, status_code=303)
        try:
            if name == "hub_token":
                await run_in_threadpool(set_hub_token, text)
            else:
                await run_in_threadpool(set_webhook, studio, text)
        except TrainerError as error:
            return await run_in_threadpool(show, request, error.problems, 422)
        return RedirectResponse(_PATH, status_code=303)

    return [
        Route(_PATH, lambda request: show(request), methods=["GET"]),
        Route("/settings/sessions/{session}/end", end_session, methods=["POST"]),
        Route("/settings/token", new_token, methods=["POST"]),
        Route("/settings/secret", keep_secret, methods=["POST"]),
    ]
