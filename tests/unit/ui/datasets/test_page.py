"""The Data set page over HTTP, without a script."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import html
import os
import re
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.testclient import TestClient

from tests.unit.data.pictures import encoded, picture, write_rows
from tests.unit.ui.conftest import ORIGIN
from tests.unit.ui.datasets.sets import key_of, looked, make, tree
from trainer.ui.datasets import edits, snapshot, upload, worker
from trainer.ui.datasets.places import places
from trainer.ui.pages import dataset
from trainer.ui.studio import Studio


@pytest.fixture(autouse=True)
def no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are asked for, and made by the tests themselves."""
    monkeypatch.setattr(worker, "ask_for_look", worker.note_request)


def field(text: str, name: str) -> str:
    """Value of the first hidden field of a name."""
    found = re.search(rf'name="{name}" value="([^"]*)"', text)
    assert found, f"no field {name}"
    return html.unescape(found[1])


def test_a_set_is_made_and_listed(client: TestClient, studio: Studio) -> None:
    assert "No data set is here yet" in client.get("/data").text
    answer = client.post("/data", data={"name": " My cats "})
    assert answer.status_code == 303
    assert [path.name for path in studio.data.iterdir()] == ["My cats"]
    assert client.get(answer.headers["location"]).status_code == 200
    assert client.post("/data", data={"name": "My cats"}).status_code == 422
    assert client.post("/data", data={"name": ".."}).status_code == 422
    assert "My cats" in client.get("/data").text


def test_a_name_is_kept_or_refused(client: TestClient, studio: Studio) -> None:
    for name in (
        "my cats / ü",
        "../../My cats",
        "a\\b",
        "cats?",
        ".cats",
        "cats.",
        "x" * 200,
        "a.suffix-too-long",
    ):
        answer = client.post("/data", data={"name": name})
        assert answer.status_code == 422 and html.escape(name) in answer.text, name
        assert "letters, digits, blanks" in answer.text
        assert (
            f'name="name" required maxlength="80" autocomplete="off" value="{html.escape(name.strip())}"'
            in (answer.text)
        ), "the form with the name"
    assert not list(studio.data.iterdir())
    # a Mac may spell an accent in two characters
    for name, kept in {"ü": "ü", "u\u0308ber": "über", "a (1), b@c+d=e~_-.f": "a (1), b@c+d=e~_-.f"}.items():
        assert client.post("/data", data={"name": name}).status_code == 303
        assert (studio.data / kept).is_dir()


def test_a_new_set_waits_for_pictures_and_has_no_fault(client: TestClient, studio: Studio) -> None:
    place = make(studio)
    looked(place)
    text = client.get(f"/data/{place.id}").text
    assert "No picture is here yet" in text and "holds no image" not in text and "problem" not in text
    assert '<details class="card" open>\n  <summary>Add pictures' in text
    # a file that is no picture is a fault, and a folder of masks without one
    (place.folder / "note.doc").touch()
    (studio.data / "masks").mkdir()
    made = snapshot.Settings(family=snapshot.read_settings(place).family, mask="masks")
    snapshot.keep(place, snapshot.SETTINGS_NAME, made)
    looked(place)
    text = client.get(f"/data/{place.id}").text
    assert "2 problems with" in text and "note.doc" in text and "holds no image" in text


def test_a_set_is_the_one_of_a_new_run(client: TestClient, studio: Studio) -> None:
    place = make(studio, "~ [cats", a="a cat")
    looked(place)
    form = client.get(f"/data/{place.id}").text.partition('action="/new">')[2].partition("</form>")[0]
    assert "New run with this set" in form
    page = client.post("/new", data={"data.sets.0.img_dir": field(form, "data.sets.0.img_dir")}).text
    typed = re.search(r'<input[^>]*name="data\.sets\.0\.img_dir"[^>]*>', page)
    assert typed and f'value="{place.folder}"' in typed[0]
    assert "outside of the studio" not in page
    # the root of all is no place for a run
    (studio.data / "b.png").write_bytes(encoded(picture(seed=2)))
    (root,) = [one for one in places(studio) if one.name == "."]
    looked(root)
    assert "b.png" in (text := client.get(f"/data/{root.id}").text) and "New run with" not in text


def test_a_bucket_that_holds_all_usable_pictures_is_full(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee", c="a cow")
    (place.folder / "c.txt").unlink()
    looked(place)
    assert '<progress max="2" value="2" ' in client.get(f"/data/{place.id}").text


def test_a_first_set_makes_the_folder_of_all(client: TestClient, studio: Studio) -> None:
    studio.data.rmdir()
    assert "No data set is here yet" in client.get("/data").text and not studio.data.exists()
    assert client.post("/data", data={"name": "cats"}).status_code == 303
    assert (studio.data / "cats").is_dir()


def test_a_folder_of_all_that_is_none_is_told_with_its_option(client: TestClient, studio: Studio) -> None:
    studio.data.rmdir()
    studio.data.touch()
    answer = client.get("/data")
    assert answer.status_code == 422 and "cannot be read" in answer.text and "--data" in answer.text


def test_the_grid_shows_pictures_with_captions_and_faults(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a <b>cat</b>")
    (place.folder / "bare.png").write_bytes(encoded(picture(seed=5)))
    assert "not looked at yet" in client.get(f"/data/{place.id}").text
    (first, _) = looked(place).pictures
    text = client.get(f"/data/{place.id}").text
    assert "a &lt;b&gt;cat&lt;/b&gt;</textarea>" in text and "<b>cat" not in text
    assert "the image has no caption" in text
    key = key_of(place, "cats/a.png")
    thumbnail = client.get(f"/data/{place.id}/pictures/{key}/thumbnail?v={first.sha256[:8]}")
    assert thumbnail.headers["content-type"] == "image/webp" and thumbnail.content[8:12] == b"WEBP"
    assert "immutable" in thumbnail.headers["cache-control"]
    for part in ("mask", "0", "../a.png", "-1"):
        assert client.get(f"/data/{place.id}/pictures/{key}/preview?part={part}").status_code == 404
    shown = client.get(f"/data/{place.id}/pictures/{key}").text
    assert f'viewBox="0 0 {first.width} {first.height}"' in shown and "data-crop=" in shown


def test_a_caption_is_saved_undone_and_kept_from_others(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    looked(place)
    path, key = place.folder / "a.txt", key_of(place, "cats/a.png")
    address = f"/data/{place.id}/pictures/{key}"
    etag = field(client.get(address).text, "etag")
    answer = client.post(f"{address}/caption", data={"caption": " a grey\n cat ", "etag": etag})
    assert answer.status_code == 303 and path.read_text() == "a grey cat\n"
    # another program writes meanwhile
    etag = field(client.get(address).text, "etag")
    path.write_text("a dog")
    answer = client.post(f"{address}/caption", data={"caption": "a white cat", "etag": etag})
    assert answer.status_code == 409 and "a dog" in answer.text and "a white cat" in answer.text
    assert path.read_text() == "a dog"
    again = client.post(f"{address}/caption", data={"caption": "mine", "etag": field(answer.text, "etag")})
    assert again.status_code == 303 and path.read_text() == "mine\n"
    client.post(f"/data/{place.id}/undo")
    assert path.read_text() == "a dog"
    # the step before is no longer as it was left: told, not overwritten
    answer = client.post(f"/data/{place.id}/undo")
    assert answer.status_code == 422 and "changed since" in answer.text and path.read_text() == "a dog"
    assert client.post(f"/data/{place.id}/undo").status_code == 303


def test_a_button_of_an_older_page_takes_back_nothing_else(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee")
    looked(place)
    for name in "ab":
        address = f"/data/{place.id}/pictures/{key_of(place, f'cats/{name}.png')}"
        etag = field(client.get(address).text, "etag")
        client.post(f"{address}/caption", data={"caption": "mine", "etag": etag})
        if name == "a":
            older = field(client.get(f"/data/{place.id}").text, "change")
    answer = client.post(f"/data/{place.id}/undo", data={"change": older})
    assert answer.status_code == 422 and "nothing was done" in answer.text
    assert [(place.folder / f"{name}.txt").read_text() for name in "ab"] == ["mine\n"] * 2
    now = field(client.get(f"/data/{place.id}").text, "change")
    assert client.post(f"/data/{place.id}/undo", data={"change": now}).status_code == 303
    assert (place.folder / "b.txt").read_text() == "a bee"
    # pressed twice
    assert client.post(f"/data/{place.id}/undo", data={"change": now}).status_code == 422
    assert (place.folder / "a.txt").read_text() == "mine\n"


def test_a_script_gets_the_form_alone(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    looked(place)
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}"
    etag = field(client.get(address).text, "etag")
    part = {"HX-Request": "true"}
    saved = client.post(f"{address}/caption", data={"caption": "a bee", "etag": etag}, headers=part)
    assert saved.status_code == 200 and "Saved" in saved.text and "<html" not in saved.text
    assert field(saved.text, "etag") != etag
    # a console calls 409 an error, and the form says it
    late = client.post(f"{address}/caption", data={"caption": "a cow", "etag": etag}, headers=part)
    assert late.status_code == 200 and "changed on the disk" in late.text and "a cow</textarea>" in late.text
    empty = client.post(
        f"{address}/caption", data={"caption": " \n", "etag": field(saved.text, "etag")}, headers=part
    )
    assert "the caption is empty" in empty.text and "Saved" not in empty.text
    assert (place.folder / "a.txt").read_text() == "a bee\n"


COMMANDS = ("$(touch x)", "; rm -rf .", "--flag", "{{ 7 * 7 }}", "<script>alert(1)</script>", "`id`")


@pytest.mark.parametrize("text", COMMANDS)
def test_text_stays_text(client: TestClient, studio: Studio, text: str) -> None:
    """S8, S9: what is written ends in the file unchanged, and on the page escaped."""
    place = make(studio, a="a cat")
    looked(place)
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}"
    etag = field(client.get(address).text, "etag")
    client.post(f"{address}/caption", data={"caption": text, "etag": etag})
    assert (place.folder / "a.txt").read_text() == text + "\n"
    assert html.escape(text, quote=False) in client.get(address).text.replace("&#34;", '"')
    assert "<script>alert" not in client.get(f"/data/{place.id}").text


def test_a_replacement_is_what_was_looked_at(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat", b="a big cat", c="a cow")
    looked(place)
    address = f"/data/{place.id}/replace"
    shown = client.get(address, params={"find": "cat", "replace": "dog"}).text
    assert "2 captions would change" in shown and "a big dog" in shown
    asked = {"find": "cat", "replace": "dog", "seen": field(shown, "seen")}
    (place.folder / "b.txt").write_text("another cat")
    late = client.post(address, data=asked)
    assert late.status_code == 409 and (place.folder / "a.txt").read_text() == "a cat"
    assert client.post(address, data=asked | {"seen": field(late.text, "seen")}).status_code == 303
    texts = [(place.folder / f"{name}.txt").read_text() for name in "abc"]
    assert texts == ["a dog\n", "another dog\n", "a cow"]
    client.post(f"/data/{place.id}/undo")
    assert [(place.folder / f"{name}.txt").read_text() for name in "abc"] == ["a cat", "another cat", "a cow"]


def test_deleting_moves_to_the_trash_and_back(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat", b="a bee")
    looked(place)
    before = tree(place.folder)
    client.post(f"/data/{place.id}/delete", data={"picture": [key_of(place, "cats/a.png")]})
    assert set(tree(place.folder)) == {"b.png", "b.txt"}
    kept = sorted(path.read_bytes() for path in (studio.folder / "trash").rglob("*") if path.is_file())
    assert kept == sorted([before["a.png"], before["a.txt"]])
    client.post(f"/data/{place.id}/undo")
    assert tree(place.folder) == before


def test_a_trash_without_a_choice_is_told_on_the_page_that_it_was_asked_on(
    client: TestClient, studio: Studio
) -> None:
    place = make(studio, a="a dog", b="a bee")
    looked(place)
    page = f"/data/{place.id}?show=all&search=bee&page=1"
    assert "No picture is selected" not in client.get(page).text
    names = ("show", "bucket", "search", "page")
    shown = {name: field(client.get(page).text.partition('id="delete"')[2], name) for name in names}
    answer = client.post(f"/data/{place.id}/delete", data=shown)
    assert answer.status_code == 303 and len(tree(place.folder)) == 4
    text = client.get(answer.headers["location"]).text
    assert "No picture is selected" in text and "a bee" in text and "a dog" not in text


def test_a_badge_says_what_it_means(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    looked(place)
    text = client.get(f"/data/{place.id}").text
    assert re.search(r'title="It is smaller [^"]+ blurs it">Enlarged .[0-9.]+</span>', text)


def test_a_long_caption_is_one_of_many_bytes(client: TestClient, studio: Studio) -> None:
    """Beside its picture as in the filter: letters of 3 bytes."""
    place = make(studio, a="\u732b" * 700)
    looked(place)
    text = client.get(f"/data/{place.id}?show=long").text
    assert 'Long caption <span class="soft">1</span>' in text and "Long caption</span>" in text


def test_metadata_becomes_files_and_comes_back(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="x", b="y")
    for name in "ab":
        (place.folder / f"{name}.txt").unlink()
    write_rows(place.folder, [{"file_name": f"{name}.png", "text": f"row {name}"} for name in "ab"])
    looked(place)
    before = tree(place.folder)
    assert "2 captions are rows of metadata" in client.get(f"/data/{place.id}").text
    client.post(f"/data/{place.id}/files")
    assert tree(place.folder) == {
        "a.png": before["a.png"], "a.txt": b"row a\n", "b.png": before["b.png"], "b.txt": b"row b\n",
    }  # fmt: skip
    assert not any(one.problem for one in looked(place).pictures)
    client.post(f"/data/{place.id}/undo")
    assert tree(place.folder) == before


def test_settings_are_those_that_a_run_takes(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    looked(place)
    text = client.get(f"/data/{place.id}").text
    family = re.findall(r'<option value="([a-z0-9_]+)"', text.partition('name="family"')[2])[-1]
    asked = {"family": family, "resolution": "512", "trigger_word": "zwx", "mask": ""}
    assert client.post(f"/data/{place.id}/settings", data=asked).status_code == 303
    (row,) = looked(place).pictures
    assert 512 * 512 * 0.8 < row.bucket[0] * row.bucket[1] <= 512 * 512
    for wrong in (
        {"resolution": "9999999"},
        {"resolution": "big"},
        {"family": "none"},
        {"mask": "../../etc"},
    ):
        assert client.post(f"/data/{place.id}/settings", data=asked | wrong).status_code in (404, 422)
    refused = client.post(f"/data/{place.id}/settings", data=asked | {"resolution": "big"}).text
    assert re.search("expected a whole number .*, got 'big'", html.unescape(refused))
    assert 'value="512"' in client.get(f"/data/{place.id}").text


def test_a_read_only_set_is_shown_and_not_edited(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make(studio, a="a cat")
    looked(place)
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}"
    # whoever runs the tests may be root, whom no mode keeps out
    monkeypatch.setattr("trainer.ui.datasets.places.os.access", lambda *_: False)
    text = client.get(f"/data/{place.id}").text
    assert "read-only" in text and "Add pictures" not in text and "textarea" in text
    assert '<div class="line"><button>Save</button>' not in text
    etag = field(client.get(address).text, "etag")
    answer = client.post(f"{address}/caption", data={"caption": "a dog", "etag": etag})
    assert answer.status_code == 422 and (place.folder / "a.txt").read_text() == "a cat"
    assert (
        client.post(f"/data/{place.id}/delete", data={"picture": key_of(place, "cats/a.png")}).status_code
        == 422
    )


def test_a_caption_that_cannot_be_read_is_told_beside_its_picture(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, plain = make(studio, a="a cat", b="a bee", c="a cow"), os.open
    (place.folder / "a.txt").unlink()
    (place.folder / "a.txt").mkdir()
    looked(place)

    def closed(path: str | Path, *arguments: int, **options: int | None) -> int:
        if Path(path).name == "b.txt":  # whoever runs the tests may be root, whom no mode keeps out
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return plain(path, *arguments, **options)

    monkeypatch.setattr(os, "open", closed)
    answer = client.get(f"/data/{place.id}")
    assert answer.status_code == 200 and "a cow" in answer.text
    assert "Is a directory" in answer.text and "Permission denied" in answer.text
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/b.png')}/caption"
    late = client.post(address, data={"caption": "x", "etag": ""})
    assert late.status_code == 422 and "Permission denied" in late.text
    # nor is it held open
    held = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    assert str(place.folder.resolve() / "a.txt") not in held


def test_captions_that_changed_during_a_replacement_are_told(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last look at them, before they are written."""
    place, plain = make(studio, a="a cat"), edits.write_captions
    looked(place)
    address, asked = f"/data/{place.id}/replace", {"find": "cat", "replace": "dog"}
    seen = field(client.get(address, params=asked).text, "seen")

    def meanwhile(*arguments: Any) -> None:
        (place.folder / "a.txt").write_text("another cat")
        plain(*arguments)

    monkeypatch.setattr(edits, "write_captions", meanwhile)
    answer = client.post(address, data=asked | {"seen": seen})
    assert answer.status_code == 422 and "changed on the disk meanwhile" in answer.text
    assert (place.folder / "a.txt").read_text() == "another cat"


def test_nothing_slow_runs_between_the_requests(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload walks the set, removes what is left over and draws a page in threads."""
    place, run, on_loop = make(studio, a="a cat"), [], []

    def watched(module: Any, name: str) -> None:
        plain = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            run.append(name)
            with contextlib.suppress(RuntimeError):  # which a thread without a loop raises
                asyncio.get_running_loop()
                on_loop.append(name)
            return plain(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    monkeypatch.setattr(worker, "ask", lambda *_: b'{"b.png": ""}')
    for module, name in ((upload, "_size"), (upload.shutil, "rmtree"), (dataset, "render"), (worker, "ask")):
        watched(module, name)
    files = [("files", ("b.png", encoded(picture(seed=5)), "image/png"))]
    assert client.post(f"/data/{place.id}/upload", files=files).status_code == 200
    assert (run, on_loop) == (["_size", "ask", "rmtree", "render"], [])


def test_pages_answer_while_pictures_are_decoded(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More requests than there are threads wait for workers that do not end before another page was shown."""
    place, shown, asked = make(studio, a="a cat"), threading.Event(), []
    looked(place)

    def ask(*_: object) -> bytes:
        asked.append(shown.is_set())
        shown.wait()
        return b"picture"

    monkeypatch.setattr(worker, "ask", ask)
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}/preview"

    async def many() -> list[int]:
        transport = httpx2.ASGITransport(client.app)
        async with httpx2.AsyncClient(
            transport=transport, base_url=ORIGIN, cookies=client.cookies
        ) as browser:
            previews = [asyncio.create_task(browser.get(address)) for _ in range(50)]
            # only against waiting for ever, where this fails
            try:
                page = await asyncio.wait_for(browser.get("/data"), 60)
            finally:
                shown.set()
            return [page.status_code, *[(await one).status_code for one in previews]]

    page, *previews = asyncio.run(many())
    assert page == 200
    assert (previews.count(200), previews.count(503)) == (16, 34)
    assert len(asked) == 16 and asked.count(False) <= 2


def test_asking_twice_changes_nothing(client: TestClient, studio: Studio, tmp_path: Path) -> None:
    """S5, of all that is read: no file appears, none changes."""
    place = make(studio, a="a cat")
    looked(place)
    one = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}"
    addresses = ["/data", f"/data/{place.id}", f"/data/{place.id}/progress", one, f"{one}/thumbnail"]
    addresses += [f"{one}/preview", f"/data/{place.id}/replace?find=a&replace=b"]
    client.get("/data")
    before = tree(tmp_path)
    for address in addresses * 2:
        assert client.get(address).status_code == 200, address
    assert tree(tmp_path) == before


def test_names_on_the_disk_stay_text(client: TestClient, studio: Studio) -> None:
    """S9: of the set, of a picture, of a stray file and of a folder of masks."""
    payload = '"><img src=x onerror=alert(1)>'
    place = make(studio, payload, **{payload: "a cat"})
    (place.folder / f"{payload}.doc").write_text("stray")
    (place.folder / f"folder {payload}").mkdir()
    (row,) = looked(place).pictures
    key, escaped = key_of(place, row.name), html.escape(payload).replace("&quot;", "&#34;")
    addresses = ["/data", f"/data/{place.id}", f"/data/{place.id}/pictures/{key}"]
    addresses += [f"/data/{place.id}?search={escaped}", f"/data/{place.id}/replace?find=a&replace={escaped}"]
    for address in addresses:
        text = client.get(address).text
        assert escaped in text and payload not in text, address
    files = [("files", (payload + ".png", b"no picture", "image/png"))]
    told = client.post(f"/data/{place.id}/upload", files=files).text
    assert "img src" in told and "<img" not in told


def test_settings_of_another_version_are_plain_ones(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    place.state.mkdir(parents=True)
    for text in ('{"family": "of-tomorrow"}', '{"unknown": 1}', ""):
        (place.state / "settings.json").write_text(text)
        (place.state / "snapshot.json").write_text(text)
        (place.state / "opened.json").write_text(text)
        assert client.get(f"/data/{place.id}").status_code == 200
    assert [one.name for one in looked(place).pictures] == ["cats/a.png"]
