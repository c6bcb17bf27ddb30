"""S3: the token, its file, its sessions, and the wait after wrong ones."""

from __future__ import annotations

import errno
import math
import os
import stat
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.ui.conftest import ORIGIN
from trainer.errors import ConfigError, NoSpaceError
from trainer.files import atomic
from trainer.ui.access import FREE_TRIES, SESSION_SECONDS, TOKEN_FILE, Access, TooManyTriesError


class Clock:
    """A clock that only a test moves."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def test_the_token_is_made_once_in_a_closed_folder(tmp_path: Path) -> None:
    folder = tmp_path / "studio"
    first, second = Access(folder), Access(folder)
    assert (first.made, second.made) == (True, False)
    assert first.token == second.token == (folder / TOKEN_FILE).read_text().strip()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / TOKEN_FILE).stat().st_mode) == 0o600
    others = {Access(tmp_path / str(number)).token for number in range(50)}
    assert len(others) == 50
    # base64 has 6 bits a letter
    assert all(len(token) * 6 >= 256 for token in others)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"(?s)file/studio: cannot make the studio's folder.*--folder"):
        Access(tmp_path / "file" / "studio")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_token_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    Access(tmp_path)
    (tmp_path / TOKEN_FILE).chmod(mode)
    with pytest.raises(ConfigError, match="others may read"):
        Access(tmp_path)


@pytest.mark.parametrize("text", ["", "password", "x" * 42])
def test_a_short_token_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / TOKEN_FILE
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="damaged"):
        Access(tmp_path)


def test_a_link_in_its_place_is_refused(tmp_path: Path) -> None:
    Access(tmp_path / "other")
    (tmp_path / "studio").mkdir()
    (tmp_path / "studio" / TOKEN_FILE).symlink_to(tmp_path / "other" / TOKEN_FILE)
    with pytest.raises(ConfigError):
        Access(tmp_path / "studio")


def test_a_session_outlives_the_process_and_its_file_opens_none(tmp_path: Path) -> None:
    clock = Clock()
    access = Access(tmp_path, clock=clock)
    cookie = access.log_in(access.token)
    assert cookie is not None
    again = Access(tmp_path, clock=clock).session(cookie)
    assert again == access.session(cookie) and again is not None
    kept = "".join(path.read_text() for path in tmp_path.iterdir() if path.name != TOKEN_FILE)
    assert again.key in kept and cookie not in kept and again.csrf not in kept and access.token not in kept
    assert access.session(again.key) is None
    clock.now += SESSION_SECONDS + 1
    assert access.session(cookie) is None and len(Access(tmp_path, clock=clock).sessions) == 0


def test_a_logout_and_a_new_token_end_sessions(tmp_path: Path) -> None:
    access = Access(tmp_path)
    one, two = access.log_in(access.token), access.log_in(access.token)
    assert one and two and one != two and len(access.sessions) == 2
    access.log_out(access.session(one).key)  # type: ignore[union-attr]
    assert access.session(one) is None and access.session(two) is not None
    old, name = access.token, access.cookie_name
    assert access.session(access.rotate()) is not None and len(access.sessions) == 1
    assert access.session(two) is None and access.log_in(old) is None and access.cookie_name != name
    assert stat.S_IMODE((tmp_path / TOKEN_FILE).stat().st_mode) == 0o600
    assert Access(tmp_path).token == access.token != old


def test_a_full_disk_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions end with the studio then, those that were kept too; the old token stays."""
    access = Access(tmp_path)
    one, token = access.log_in(access.token), access.token
    write = atomic.write_text

    def full(path: Path, text: str, *, sync: bool = True) -> None:
        write(path, text, sync=sync)
        path.unlink()
        raise NoSpaceError("the disk is full", where=str(path))

    monkeypatch.setattr(atomic, "write_text", full)
    two = access.log_in(token)
    assert two and access.session(two) is not None
    access.log_out(access.session(one or "").key)  # type: ignore[union-attr]
    assert access.session(two) is not None and len(Access(tmp_path).sessions) == 0
    monkeypatch.setattr(os, "open", lambda *_, **__: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
    with pytest.raises(NoSpaceError):
        access.rotate()
    assert access.token == token == Access(tmp_path).token and access.session(two) is not None


def test_a_new_token_needs_no_old_file(tmp_path: Path) -> None:
    access = Access(tmp_path)
    (tmp_path / TOKEN_FILE).unlink()
    (tmp_path / f"{TOKEN_FILE}.new").write_text("half")
    assert access.session(access.rotate()) is not None
    assert Access(tmp_path).token == access.token and not (tmp_path / f"{TOKEN_FILE}.new").exists()


def test_wrong_tokens_are_waited_for_longer_and_longer(tmp_path: Path) -> None:
    clock = Clock()
    access = Access(tmp_path, clock=clock)
    for _ in range(FREE_TRIES):
        assert access.log_in("wrong") is None
    waits = []
    for _ in range(8):
        with pytest.raises(TooManyTriesError) as told:
            access.log_in(access.token)  # not even the right one is looked at
        waits.append(told.value.seconds)
        clock.now += told.value.seconds
        assert access.log_in("wrong") is None
    assert waits == pytest.approx([2, 4, 8, 16, 32, 60, 60, 60])
    clock.now += 60
    assert access.log_in(access.token) is not None
    for _ in range(FREE_TRIES):  # the count began anew
        assert access.log_in("wrong") is None


def test_a_clock_that_was_set_back_makes_no_wait_longer(tmp_path: Path) -> None:
    clock = Clock()
    access = Access(tmp_path, clock=clock)
    for _ in range(FREE_TRIES):
        access.log_in("wrong")
    clock.now -= 3600
    assert access.log_in(access.token) is not None


def test_sessions_of_a_token_that_was_removed_do_not_come_back(tmp_path: Path) -> None:
    """At the start after the one that made the new token."""
    access = Access(tmp_path)
    access.log_in(access.token)
    (tmp_path / TOKEN_FILE).unlink()
    assert [len(Access(tmp_path).sessions) for _ in range(2)] == [0, 0]


@pytest.mark.parametrize("call", ["exists", "read_text"])
def test_a_folder_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """System's answer is made here: tests may run as root, who is refused nothing."""
    Access(tmp_path)
    plain = getattr(Path, call)

    def refused(path: Path, **options: str) -> object:
        if path == tmp_path / TOKEN_FILE:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path, **options)

    monkeypatch.setattr(Path, call, refused)
    with pytest.raises(ConfigError, match=r"(?s)may not use the studio's folder.*export UID.*--folder"):
        Access(tmp_path)


def test_the_page_tells_the_wait(stranger: TestClient, app: Starlette) -> None:
    for _ in range(FREE_TRIES):
        assert stranger.post("/login", data={"token": "wrong"}).status_code == 401
    answer = stranger.post("/login", data={"token": app.state.access.token})
    assert answer.status_code == 429 and "wait" in answer.text
    assert 1 <= int(answer.headers["Retry-After"]) <= math.ceil(2.0)
    assert "set-cookie" not in answer.headers


def test_the_cookie_is_for_this_site_alone_and_no_script(stranger: TestClient, app: Starlette) -> None:
    answer = stranger.post("/login", data={"token": f" {app.state.access.token}\n"})
    assert answer.status_code == 303 and answer.headers["location"] == "/welcome"
    words = {word.strip().lower().partition("=")[0] for word in answer.headers["set-cookie"].split(";")[1:]}
    assert {"httponly", "samesite", "path", "max-age"} <= words and "domain" not in words
    assert "samesite=strict" in answer.headers["set-cookie"].lower() and "secure" not in words
    secure = TestClient(app, base_url=ORIGIN.replace("http:", "https:"), follow_redirects=False)
    given = secure.post(
        "/login", data={"token": app.state.access.token}, headers={"Origin": "https://127.0.0.1:8660"}
    )
    assert "; secure" in given.headers["set-cookie"].lower()


def test_a_logout_ends_the_session_for_good(client: TestClient) -> None:
    (cookie,) = client.cookies.items()
    assert client.post("/logout").headers["location"] == "/login"
    client.cookies.set(*cookie)
    assert client.get("/").status_code == 401


@pytest.mark.parametrize(
    "referer", ["http://127.0.0.1:8660//evil.example/x", "//evil.example", "http://evil.example/"]
)
def test_a_theme_leads_back_to_a_page_of_the_studio(client: TestClient, referer: str) -> None:
    location = client.post("/theme", data={"theme": "dark"}, headers={"Referer": referer}).headers["location"]
    assert location.startswith("/") and not location.startswith("//")


def test_a_theme_leads_back_to_the_page_as_it_was_asked(client: TestClient) -> None:
    for page in ("/compare?run=a&run=b", "/data"):
        headers = {"Referer": f"{ORIGIN}{page}"}
        assert client.post("/theme", data={"theme": "dark"}, headers=headers).headers["location"] == page


@pytest.mark.parametrize("page", ["/settings/secret", "/welcome/quickstart", "/data/cats-1/upload"])
def test_a_theme_leads_home_from_an_address_that_shows_no_page(client: TestClient, page: str) -> None:
    """Mistakes of a form are shown there, to which a browser cannot come back: 405."""
    headers = {"Referer": f"{ORIGIN}{page}"}
    assert client.post("/theme", data={"theme": "dark"}, headers=headers).headers["location"] == "/"
