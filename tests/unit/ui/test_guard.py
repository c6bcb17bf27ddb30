"""S2, S4, S5, S6, S12: no route is reached past the guard; routes are those of the app."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from tests.unit.ui.conftest import ORIGIN
from tests.unit.ui.routes import fill, listed, snapshot
from trainer.ui import guard
from trainer.ui.app import create_app
from trainer.ui.guard import HEADERS
from trainer.ui.studio import Studio


@pytest.fixture
def every(app: Starlette, studio: Studio) -> list[tuple[str, str]]:
    """All routes but streams, which never end: those have a test of their own."""
    found = listed(app, fill(studio))
    assert len(found) > 8
    return [(method, path) for method, path in found if not path.endswith("stream")]


@pytest.fixture
def changing(every: list[tuple[str, str]]) -> list[str]:
    found = [path for method, path in every if method != "GET"]
    assert found
    return found


def test_every_route_is_one_that_the_guard_knows(app: Starlette) -> None:
    """No websocket and no second mount: the guard judges HTTP, and opens the static files to all."""
    mounts = [route.path for route in app.routes if isinstance(route, Mount)]
    assert mounts == ["/static"]
    assert all(isinstance(route, Route | Mount) for route in app.routes)
    methods = {method for route in app.routes if isinstance(route, Route) for method in route.methods or ()}
    assert methods <= {"GET", "HEAD", "POST", "DELETE"}


def test_without_a_session_no_route_answers(stranger: TestClient, app: Starlette, studio: Studio) -> None:
    """S2: but the login, and streams as well."""
    for method, path in listed(app, fill(studio)):
        answer = stranger.request(method, path)
        if path == "/login":
            assert (method, answer.status_code) in (("GET", 200), ("POST", 401))
        else:
            assert answer.status_code == 401, (method, path)
            assert 'action="/login"' in answer.text and "cats" not in answer.text
    for name in ("studio.css", "vendor/htmx.min.js"):
        assert stranger.get(f"/static/{name}").status_code == 200


def test_a_wrong_cookie_is_none(stranger: TestClient, app: Starlette) -> None:
    name = app.state.access.cookie_name
    for value in ("", "0" * 64, app.state.access.token, "é"):
        assert stranger.get("/", headers={"Cookie": f"{name}={value}".encode()}).status_code == 401


@pytest.mark.parametrize(
    "path",
    ["/static/../", "/static/%2e%2e/", "/static/..%2fpage.py", "/static//etc/passwd", "/static/vendor"],
)
def test_static_files_are_no_way_around(stranger: TestClient, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code in (401, 404) and "import" not in answer.text


@pytest.mark.parametrize(
    "origin", ["null", "http://evil.example", "http://127.0.0.1:1", "", "file://", ORIGIN + ".evil.example"]
)
def test_a_change_from_another_origin_is_refused(
    client: TestClient, changing: list[str], origin: str
) -> None:
    """S4, with the session and its CSRF value."""
    for path in changing:
        answer = client.post(path, headers={"Origin": origin})
        assert answer.status_code == 403, path


def test_a_change_without_an_origin_is_refused(client: TestClient, changing: list[str]) -> None:
    del client.headers["Origin"]
    assert {client.post(path).status_code for path in changing} == {403}


@pytest.mark.parametrize("token", ["", "0" * 64, "None"])
def test_a_change_without_the_sessions_value_is_refused(
    client: TestClient, changing: list[str], token: str
) -> None:
    """S4: but the login, which brings the studio's token."""
    paths = [path for path in changing if path != "/login"]
    assert paths
    for path in paths:
        header = client.post(path, headers={"X-CSRF-Token": token})
        field = client.post(path, headers={"X-CSRF-Token": ""}, data={"csrf": token, "theme": "dark"})
        assert (header.status_code, field.status_code) == (403, 403), path


def test_the_value_of_another_session_is_refused(client: TestClient, app: Starlette, open_client) -> None:
    other = open_client(app)
    value = other.headers["X-CSRF-Token"]
    assert value != client.headers["X-CSRF-Token"]
    assert client.post("/theme", data={"theme": "dark"}, headers={"X-CSRF-Token": value}).status_code == 403


def test_a_form_brings_it_wherever_its_field_stands(client: TestClient) -> None:
    """A box of another place of the page, with the form's name in `form=`, is sent before the form's own."""
    token = client.headers.pop("X-CSRF-Token")
    for theme, fields in {
        "dark": {"csrf": token, "theme": "dark"},
        "light": {"theme": "light", "filler": "&csrf=" + "x" * 70_000, "csrf": token},
        "auto": {"theme": "auto", "csrf": token, "other": "x"},
    }.items():
        assert client.post("/theme", data=fields).status_code == 303
        assert client.cookies["theme"] == theme, "the page still reads what the guard has looked at"
    inside = {"theme": f"dark&csrf={token}"}
    assert client.post("/theme", data=inside).status_code == 403


def test_a_form_with_files_brings_it_as_its_first_part(client: TestClient) -> None:
    """Nothing of a large body is read before it is known whose it is."""
    token = client.headers.pop("X-CSRF-Token")
    first = {name: (None, value) for name, value in {"csrf": token, "theme": "light"}.items()}
    assert client.post("/theme", files=first).status_code == 303
    assert client.cookies["theme"] == "light"
    later = dict(reversed(first.items()))
    assert client.post("/theme", files=later).status_code == 403


class Forms(HTMLParser):
    """Forms of a page that change something, each with its fields as a browser sends them: in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str | None]] = {}
        self.fields: dict[str, list[dict[str, str | None]]] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        if tag == "form":
            self._open = given.get("id") or f"form {len(self.found)}"
            self.found[self._open] = given
        elif tag in ("input", "button", "select", "textarea") and given.get("name"):
            self.fields.setdefault(given.get("form") or self._open, []).append(given)

    def handle_endtag(self, tag: str) -> None:
        self._open = "" if tag == "form" else self._open


def test_every_form_of_every_page_brings_it(client: TestClient, every: list[tuple[str, str]]) -> None:
    """A form with files as its first field in the page, with fields of other places that are its own."""
    token, kinds = client.headers["X-CSRF-Token"], set()
    for path in [path for method, path in every if method == "GET"]:
        answer = client.get(path)
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        page = Forms(answer.text)
        for name, form in page.found.items():
            if form.get("method") != "post" or form.get("action") == "/login":
                continue
            fields = page.fields[name]
            values = [one.get("value") for one in fields if one["name"] == "csrf"]
            assert values == [token], (path, form)
            kinds.add(form.get("enctype"))
            if form.get("enctype"):
                assert fields[0]["name"] == "csrf", (path, form)
    assert kinds == {None, "multipart/form-data"}


def test_a_refusal_that_a_browser_shows_leads_back(client: TestClient, stranger: TestClient) -> None:
    shown = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8", "X-CSRF-Token": "0" * 64}
    large = {"Content-Length": str(guard.SMALL_BODY_BYTES + 1)}
    for code, headers, words in (
        (403, {}, "the page is too old"),
        (403, {"Origin": "null"}, "another site"),
        (413, large, "more than"),
    ):
        page = client.post("/theme", headers=shown | headers, content=b"theme=dark")
        assert page.status_code == code and words in page.text and '<a href="/">' in page.text
        line = client.post("/theme", headers={"X-CSRF-Token": "0" * 64, **headers}, content=b"theme=dark")
        assert line.status_code == code and words in line.text and "<" not in line.text
    # whoever has no session is told no more than before
    page = stranger.post("/theme", headers=shown | {"Origin": "null"})
    assert page.status_code == 403 and "machine-" not in page.text


def test_looking_changes_nothing(client: TestClient, every: list[tuple[str, str]], tmp_path: Path) -> None:
    """S5: every GET twice."""
    before = snapshot(tmp_path)
    assert len(before) > 10
    for path in [path for method, path in every if method == "GET"]:
        answers = [client.get(path) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200], path
        assert "set-cookie" not in answers[0].headers
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8660",
        "127.0.0.1.evil.example",
        "localhost.",
        "",
        "127.0.0.1@evil.example",
        "[::1",
        "10.0.0.1",
    ],
)
def test_another_host_is_refused(client: TestClient, host: str) -> None:
    """S6: a name that leads here is not enough."""
    for path in ("/", "/login", "/static/studio.css"):
        assert client.get(path, headers={"Host": host}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:9", "localhost:8660", "LOCALHOST", "[::1]:8660"])
def test_its_own_names_are_taken_with_any_port(stranger: TestClient, host: str) -> None:
    assert stranger.get("/login", headers={"Host": host}).status_code == 200


def test_a_large_body_is_refused_before_and_while_it_is_read(client: TestClient) -> None:
    """S12."""
    limit = guard.SMALL_BODY_BYTES
    assert client.post("/theme", content=b"x" * (limit + 1)).status_code == 413

    def parts():
        for _ in range(20):
            yield b"theme=" + b"x" * (limit // 16)

    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/theme", content=parts(), headers=form).status_code == 413
    assert client.post("/theme", content=b"theme=dark", headers=form).status_code == 303


def test_some_paths_take_more(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "LARGE_BODIES", ((re.compile("/theme"), 4 << 20),))
    assert client.post("/theme", content=b"x" * (3 << 20)).status_code == 303
    assert client.post("/theme", content=b"x" * (5 << 20)).status_code == 413


def test_every_answer_has_the_headers(client: TestClient, stranger: TestClient, app: Starlette) -> None:
    """Pages, refusals, errors and faults of ours."""

    def fault(request: Request) -> Response:
        raise RuntimeError("a bug")

    app.router.routes.insert(0, Route("/fault", fault))
    quiet = TestClient(app, base_url=ORIGIN, raise_server_exceptions=False, cookies=client.cookies)
    answers = {
        200: client.get("/"), 401: stranger.get("/"), 403: client.post("/theme", headers={"Origin": "null"}),
        404: client.get("/none"), 405: client.get("/logout"), 400: client.get("/", headers={"Host": "x"}),
        500: quiet.get("/fault"), 303: client.post("/theme"),
    }  # fmt: skip
    assert {answer.status_code for answer in answers.values()} == set(answers)
    for code, answer in answers.items():
        for name, value in HEADERS.items():
            assert answer.headers[name] == value, (code, name)
    assert "a bug" not in answers[500].text and "Traceback" not in answers[500].text
    assert (
        client.get("/static/studio.css").headers["Content-Security-Policy"]
        == HEADERS["Content-Security-Policy"]
    )


def test_the_policy_allows_nothing_but_its_own_files() -> None:
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy.pop("default-src") == policy.pop("frame-ancestors") == policy.pop("base-uri") == "'none'"
    assert set(policy) == {"script-src", "style-src", "img-src", "connect-src", "form-action"}
    assert set(policy.values()) == {"'self'"}


def test_a_websocket_is_not_taken(app: Starlette) -> None:
    with pytest.raises(WebSocketDisconnect) as told, TestClient(app, base_url=ORIGIN).websocket_connect("/"):
        pass
    assert told.value.code == 1008


def test_a_name_has_no_case(studio: Studio) -> None:
    """RFC 9110, 4.2.3: browsers send it in small letters, however it was given."""
    app = create_app(studio, hosts=frozenset({"Studio.Example"}))
    client = TestClient(app, base_url="http://studio.example:8660")
    assert client.get("/login").status_code == 200
    assert client.get("/login", headers={"Host": "STUDIO.example"}).status_code == 200
    assert client.get("/login", headers={"Host": "other.example"}).status_code == 400
