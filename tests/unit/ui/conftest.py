"""A studio over empty folders, and a browser's part in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from trainer.ui.app import create_app
from trainer.ui.studio import Studio

MACHINE = Path(__file__).resolve().parents[2] / "golden/machines/cpu.json"
ORIGIN = "http://127.0.0.1:8660"


@pytest.fixture
def studio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Studio:
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINE))
    roots = {name: tmp_path / name for name in ("runs", "data", "models", "runtime")}
    for root in roots.values():
        root.mkdir()
    return Studio(folder=roots["runs"] / ".studio", **roots)


@pytest.fixture
def app(studio: Studio) -> Starlette:
    return create_app(studio)


@pytest.fixture
def stranger(app: Starlette) -> TestClient:
    """A client without a session."""
    return TestClient(app, base_url=ORIGIN, follow_redirects=False, headers={"Origin": ORIGIN})


def opened(app: Starlette) -> TestClient:
    """A client with a session, which sends what a page of the studio would: Origin and CSRF header."""
    client = TestClient(app, base_url=ORIGIN, follow_redirects=False, headers={"Origin": ORIGIN})
    answer = client.post("/login", data={"token": app.state.access.token})
    assert answer.status_code == 303
    (cookie,) = client.cookies.values()
    client.headers["X-CSRF-Token"] = app.state.access.session(cookie).csrf
    return client


@pytest.fixture
def client(app: Starlette) -> TestClient:
    return opened(app)


@pytest.fixture
def open_client() -> Callable[[Starlette], TestClient]:
    """Log in to an app that a test made itself."""
    return opened
