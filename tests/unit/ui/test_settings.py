"""Settings: secrets go in and never out, sessions end, and a new token leaves the others outside."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.ui.routes import listed
from trainer.telemetry.supervising import webhook
from trainer.ui.access import FREE_TRIES
from trainer.ui.studio import Studio
from trainer.ui.views.settings import VENDOR, have_webhook_file, hub_token_file

TOKEN, ADDRESS = "hub-0123456789abcdef", "https://hooks.example.com/services/T0123/secret-part"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "HF_TOKEN_FILE", "HF_TOKEN_PATH", webhook.FILE_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def keep(client: TestClient, name: str, value: str, **more: str) -> int:
    answer = client.post("/settings/secret", data={"name": name, "value": value, **more})
    assert value.strip() not in answer.text or not value.strip()
    return answer.status_code


@pytest.mark.parametrize(("name", "value", "file"), [
    ("hub_token", TOKEN, "hf/token"), ("webhook", ADDRESS, "runs/.studio/webhook"),
])  # fmt: skip
def test_a_secret_is_kept_for_this_user_and_shown_nowhere(
    client: TestClient, app: Starlette, tmp_path: Path, name: str, value: str, file: str
) -> None:
    """S11: also where an older file was open to others."""
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("older")
    path.chmod(0o644)
    assert keep(client, name, f" {value}\n") == 303
    assert path.read_text() == value and path.stat().st_mode & 0o777 == 0o600
    assert not [one for one in path.parent.iterdir() if one.name.startswith(".") and "webhook" in one.name]
    for method, address in listed(app, {}):
        if method == "GET" and not address.endswith("stream"):
            assert value not in client.get(address).text, address
    assert client.get("/settings").text.count("is set") == 1
    assert keep(client, name, "") == 303 and path.exists(), "an empty field changes nothing"
    assert keep(client, name, "", remove="1") == 303 and path.read_text() == ""
    assert client.get("/settings").text.count("is not set") == 2


def test_the_hub_reads_the_token_from_that_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own library says where it looks."""
    code = "from huggingface_hub.constants import HF_TOKEN_PATH; print(HF_TOKEN_PATH)"
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    cases = (
        {"HF_HOME": str(tmp_path / "home")},
        {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        {"HF_HOME": str(tmp_path / "home"), "HF_TOKEN_PATH": str(tmp_path / "named")},
    )
    monkeypatch.delenv("HF_HOME")
    for variables in cases:
        said = subprocess.run(
            [sys.executable, "-c", code], env=plain | variables, capture_output=True, text=True, check=True
        )
        with monkeypatch.context() as patched:
            for name, text in variables.items():
                patched.setenv(name, text)
            assert str(hub_token_file()) == said.stdout.strip()


@pytest.mark.parametrize("value", [
    "http://hooks.example.com/x", "hooks.example.com", "https://me:word@hooks.example.com/x", "https://",
    "https://a b/", "ftp://hooks.example.com/x",
])  # fmt: skip
def test_a_wrong_webhook_is_refused_and_the_old_one_stays(
    client: TestClient, studio: Studio, value: str
) -> None:
    assert keep(client, "webhook", ADDRESS) == 303
    answer = client.post("/settings/secret", data={"name": "webhook", "value": value})
    assert answer.status_code == 422 and "no https address" in answer.text
    assert (studio.folder / "webhook").read_text() == ADDRESS
    assert not (studio.folder / ".webhook.trial").exists()


def test_runs_read_the_webhook_that_is_kept(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(webhook.FILE_VARIABLE, str(tmp_path / "hook"))
    assert keep(client, "webhook", ADDRESS) == 303
    found = webhook.configured()
    assert found is not None and (found.host, found.target) == (
        "hooks.example.com",
        "/services/T0123/secret-part",
    )
    assert keep(client, "webhook", "", remove="1") == 303
    assert webhook.configured() is None, "a run that is told of a file which is gone would fail"


def test_a_file_of_the_webhook_is_there_before_there_is_an_address(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        have_webhook_file(studio)
        monkeypatch.setenv(webhook.FILE_VARIABLE, str(studio.folder / "webhook"))
        assert webhook.configured() is None
    monkeypatch.setenv(webhook.FILE_VARIABLE, str(studio.folder / "other"))
    have_webhook_file(studio)
    assert not (studio.folder / "other").exists(), "a file that somebody else names is theirs"


def test_an_empty_file_is_no_token_to_the_hub(client: TestClient, tmp_path: Path) -> None:
    """Its own library says so."""
    code = "from huggingface_hub import get_token; print(get_token())"
    plain = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_"))}
    said = []
    for text, more in ((TOKEN, {}), ("", {"remove": "1"})):
        assert keep(client, "hub_token", text, **more) == 303
        words = [sys.executable, "-c", code]
        variables = plain | {"HF_TOKEN_PATH": str(tmp_path / "hf/token")}
        said.append(subprocess.run(words, env=variables, capture_output=True, text=True, check=True).stdout)
    assert [one.strip() for one in said] == [TOKEN, "None"]


def test_a_secret_that_could_not_be_kept_is_not_asked_for(
    client: TestClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's mount may be read-only to root as well."""
    closed, asked = tmp_path / "closed", os.access
    closed.mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and asked(path, mode))
    assert client.get("/settings").text.count('type="password"') == 2
    monkeypatch.setenv("HF_TOKEN_PATH", str(closed / "token"))
    page = client.get("/settings").text
    assert page.count('type="password"') == 1 and 'value="webhook"' in page
    monkeypatch.setenv(webhook.FILE_VARIABLE, str(closed / "secrets/webhook"))
    page = client.get("/settings").text
    assert 'type="password"' not in page and page.count("The studio cannot keep it here") == 2


@pytest.mark.parametrize("value", ["two words", "ключ", "x" * 3000, "a\nb"])
def test_a_text_that_is_no_access_token_is_refused(client: TestClient, tmp_path: Path, value: str) -> None:
    assert keep(client, "hub_token", value) == 422
    assert not (tmp_path / "hf/token").exists()


def test_only_the_two_secrets_can_be_written(client: TestClient) -> None:
    assert client.post("/settings/secret", data={"name": "token", "value": "x"}).status_code == 400


def test_one_session_is_ended_and_the_others_go_on(
    client: TestClient, app: Starlette, open_client: Callable[[Starlette], TestClient]
) -> None:
    other, third = open_client(app), open_client(app)
    own = app.state.access.session(next(iter(client.cookies.values()))).key
    key = app.state.access.session(next(iter(other.cookies.values()))).key
    page = client.get("/settings").text
    assert own not in page and key not in page, "a whole key is nobody's business"
    assert page.count("A browser") == 2 and page.count("This browser") == 1
    assert client.post(f"/settings/sessions/{key[:16]}/end").status_code == 303
    assert [one.get("/settings").status_code for one in (client, other, third)] == [200, 401, 200]
    assert client.post(f"/settings/sessions/{key[:16]}/end").status_code == 404


def test_a_new_token_leaves_every_other_browser_outside(
    client: TestClient, app: Starlette, studio: Studio, open_client: Callable[[Starlette], TestClient]
) -> None:
    other, old = open_client(app), app.state.access.token
    for _ in range(FREE_TRIES + 1):
        other.post("/login", data={"token": "wrong"})
    answer = client.post("/settings/token")
    new = (studio.folder / "token").read_text().strip()
    assert answer.status_code == 303 and new != old
    assert new not in answer.text + str(answer.headers)
    assert client.get("/settings").status_code == 200, "this browser goes on"
    assert other.get("/settings").status_code == 401
    assert other.post("/login", data={"token": new}).status_code == 429, "a guess is waited for as before"
    app.state.access._next_try = 0.0
    assert other.post("/login", data={"token": old}).status_code == 401
    app.state.access._next_try = 0.0
    assert other.post("/login", data={"token": new}).status_code == 303


def test_vendored_packages_are_named_with_the_licence_that_is_served(client: TestClient) -> None:
    page = client.get("/settings").text
    for line in (VENDOR / "VENDOR").read_text().splitlines():
        if line.startswith("package "):
            _, name, version, licence, _ = line.split()
            assert all(f">{word}<" in page for word in (name, version, licence))
    for name in ("htmx-LICENSE.txt", "uPlot-LICENSE.txt"):
        assert f"/static/vendor/{name}" in page and client.get(f"/static/vendor/{name}").status_code == 200


def test_a_folder_that_is_closed_is_told(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's answer, which root does not get."""
    access = os.access
    assert "this user may not write there" not in client.get("/settings").text
    monkeypatch.setattr(os, "access", lambda path, mode: path != studio.runs and access(path, mode))
    assert "this user may not write there" in client.get("/settings").text


def test_a_folder_that_is_not_there_is_told(client: TestClient, studio: Studio) -> None:
    assert "it is not there" not in client.get("/settings").text
    studio.models.rmdir()
    assert "it is not there" in client.get("/settings").text
