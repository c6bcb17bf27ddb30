"""Uploads: told one by one, nothing outside, nothing overwritten, limits held while bytes come in."""

from __future__ import annotations

import asyncio
import contextlib
import html
import io
import json
import re
import shutil
import unicodedata
from collections import namedtuple
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient
from starlette.types import Message

from tests.unit.data.pictures import bomb, encoded, picture
from tests.unit.ui.conftest import ORIGIN
from tests.unit.ui.datasets.sets import make, tree
from trainer.data.sets.look import look
from trainer.errors import DataError
from trainer.ui.datasets import upload, worker
from trainer.ui.datasets.places import Place
from trainer.ui.datasets.snapshot import listed, read_settings
from trainer.ui.studio import Studio

PNG, OTHER = encoded(picture(seed=1)), encoded(picture(seed=2))
Files = list[tuple[str, bytes]]


@pytest.fixture(autouse=True)
def judged_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's judgement without its process, which a test of its own starts."""
    monkeypatch.setattr(worker, "ask_for_look", worker.note_request)
    monkeypatch.setattr(
        worker, "ask", lambda name, place, path: json.dumps(worker.judge(place, Path(path))).encode()
    )


def send(client: TestClient, place: Place, files: Files, existing: str = "keep") -> dict[str, str]:
    """Words of the page for each file, by the name that was sent."""
    answer = client.post(
        f"/data/{place.id}/upload",
        data={"existing": existing},
        files=[("files", (name, io.BytesIO(data), "image/png")) for name, data in files],
    )
    assert answer.status_code == 200, answer.text
    rows = re.findall(r"<li[^>]*>\s*<b>(.*?)</b>\s*(.*?)\s*</li>", answer.text, re.DOTALL)
    return {html.unescape(name): html.unescape(text) for name, text in rows}


@pytest.mark.parametrize("comes", ["together", "later"])
def test_a_picture_that_metadata_has_under_a_name_that_cannot_be_kept_is_told(
    client: TestClient, studio: Studio, comes: str
) -> None:
    """Stored under another name it would have no caption, and nobody would know."""
    place = make(studio)
    rows = [{"file_name": name, "text": f"a {name}"} for name in ("cat's nap #2.png", "dog.png")]
    metadata: Files = [("metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())]
    pictures: Files = [("cat's nap #2.png", PNG), ("dog.png", OTHER)]
    told: dict[str, str] = {}
    for files in [[*pictures, *metadata]] if comes == "together" else [metadata, pictures]:
        told |= send(client, place, files)
    assert "rename it in both" in told["cat's nap #2.png"] and "cat_s nap _2.png" in told["cat's nap #2.png"]
    assert {name for name in tree(place.folder) if not name.startswith(".")} == {"dog.png", "metadata.jsonl"}
    # without a row it is stored under another name, as ever
    send(client, place, [("dog's.png", encoded(picture(seed=3)))])
    assert (place.folder / "dog_s.png").is_file()


def test_good_files_are_stored_and_bad_ones_told(client: TestClient, studio: Studio, tmp_path: Path) -> None:
    place = make(studio)
    broken = encoded(picture(300, 300))[:5000]
    told = send(
        client,
        place,
        [
            ("good.png", PNG),
            ("good.txt", "ein Kätzchen\r\n".encode()),
            ("broken.png", broken),
            ("bomb.png", bomb()),
            ("drawing.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
            ("../x.png", PNG),
            ("page.html", b"<script>"),
            ("latin.txt", "Kätzchen".encode("latin-1")),
            ("empty.png", b""),
            (".hidden.png", PNG),
        ],
    )
    assert told["good.png"] == told["good.txt"] == "stored"
    assert "damaged" in told["broken.png"] and "178 million" in told["bomb.png"]
    assert "an SVG drawing" in told["drawing.png"] and told["../x.png"] == "stored as x.png"
    assert "neither a picture" in told["page.html"] and "not UTF-8" in told["latin.txt"]
    assert "empty" in told["empty.png"] and told[".hidden.png"] == "stored as hidden.png"
    assert tree(place.folder) == {
        "hidden.png": PNG,
        "good.png": PNG,
        "good.txt": "ein Kätzchen\r\n".encode(),
        "x.png": PNG,
    }
    assert not list(place.folder.glob(".*")) and not list(tmp_path.rglob("broken.png"))


@pytest.mark.parametrize(
    ("existing", "names", "told"),
    [
        ("keep", {"a.png": PNG, "a.txt": b"old", "a-2.png": OTHER, "a-2.txt": b"new"}, "stored as a-2.png"),
        ("replace", {"a.png": OTHER, "a.txt": b"new"}, "stored"),
        ("skip", {"a.png": PNG, "a.txt": b"old"}, "there already"),
    ],
)
def test_nothing_is_overwritten(
    client: TestClient, studio: Studio, existing: str, names: dict[str, bytes], told: str
) -> None:
    place = make(studio)
    send(client, place, [("a.png", PNG), ("a.txt", b"old")])
    found = send(client, place, [("a.png", OTHER), ("a.txt", b"new")], existing)
    assert told in found["a.png"]
    assert tree(place.folder) == names
    if existing != "skip":  # which is no change to take back
        client.post(f"/data/{place.id}/undo")
    assert tree(place.folder) == {"a.png": PNG, "a.txt": b"old"}
    client.post(f"/data/{place.id}/undo")
    assert not tree(place.folder)


@pytest.mark.parametrize("existing", ["keep", "replace", "skip"])
def test_a_part_that_is_sent_again_is_stored_once(client: TestClient, studio: Studio, existing: str) -> None:
    """Its answer was lost on the way: what is there already, byte for byte, is told as stored."""
    place = make(studio, b="a bee")
    files: Files = [("a.png", encoded(picture(seed=5), "PNG")), ("a.txt", b"a cat")]
    files += [("b.png", encoded(picture(seed=6), "PNG")), ("b.txt", b"another bee")]
    first = send(client, place, files, existing)
    before = {path.name: path.read_bytes() for path in place.folder.iterdir() if path.is_file()}
    again = send(client, place, files, existing)
    assert {path.name: path.read_bytes() for path in place.folder.iterdir() if path.is_file()} == before
    assert again == first
    changed = send(client, place, [files[0], ("a.txt", b"a dog")], existing)
    kept = {"keep": "stored as a-2.txt", "replace": "stored", "skip": "left out"}[existing]
    assert changed["a.txt"].endswith(kept)


def test_a_picture_of_the_same_stem_is_in_the_way_too(client: TestClient, studio: Studio) -> None:
    """Captions go by stems: a.jpg beside a.png would be refused by a run."""
    place = make(studio, a="a cat")
    jpg = encoded(picture(seed=3), "JPEG")
    assert send(client, place, [("a.jpg", jpg)], "skip")["a.jpg"].endswith("left out")
    assert send(client, place, [("a.jpg", jpg)])["a.jpg"] == "stored as a-2.jpg"
    assert send(client, place, [("a.jpg", jpg)], "replace")["a.jpg"] == "stored"
    assert set(tree(place.folder)) == {"a.jpg", "a.txt", "a-2.jpg"}


@pytest.mark.parametrize("existing", ["keep", "replace", "skip"])
def test_names_of_one_upload_are_kept_apart(client: TestClient, studio: Studio, existing: str) -> None:
    """A name that one file would get is another's of the same upload, and two pictures have one stem."""
    place, jpg = make(studio, cat="a cat"), encoded(picture(seed=3), "JPEG")
    before = tree(place.folder)
    told = send(
        client, place, [("cat.png", OTHER), ("cat-2.png", PNG), ("dog.png", PNG), ("dog.jpg", jpg)], existing
    )
    files = tree(place.folder)
    stored = {"keep": "stored as cat-3.png", "replace": "stored"}.get(existing, upload._THERE)
    assert told["cat.png"] == stored and told["cat-2.png"] == told["dog.png"] == "stored"
    assert files["cat-2.png"] == files["dog.png"] == PNG
    assert told["dog.jpg"] == ("stored as dog-2.jpg" if existing == "keep" else upload._THERE)
    names = {"keep": {"cat-3.png", "dog-2.jpg"}}.get(existing, set())
    assert set(files) == {"cat.png", "cat.txt", "cat-2.png", "dog.png"} | names
    assert files["cat.png"] == (OTHER if existing == "replace" else before["cat.png"])
    client.post(f"/data/{place.id}/undo")
    assert tree(place.folder) == before


@pytest.mark.parametrize("at_once", [True, False])
def test_pictures_that_metadata_names_keep_their_names(
    client: TestClient, studio: Studio, at_once: bool
) -> None:
    """Also where two have one stem; the rows would name neither of them else."""
    place = make(studio)
    lines = [{"file_name": name, "text": f"the {name}"} for name in ("a.png", "a.jpg")]
    metadata = ("metadata.jsonl", "\n".join(map(json.dumps, lines)).encode())
    pictures = [("a.png", PNG), ("a.jpg", encoded(picture(seed=3), "JPEG"))]
    for files in [[*pictures, metadata]] if at_once else [[metadata], pictures]:
        told = send(client, place, files)
        assert told == dict.fromkeys((name for name, _ in files), "stored")
    assert set(tree(place.folder)) == {"a.jpg", "a.png", "metadata.jsonl"}
    found, problems = look(listed(place, read_settings(place)), place.root, ())
    assert [(one.name, one.caption, one.problem) for one in found] == [
        (f"{place.name}/a.jpg", "the a.jpg", ""),
        (f"{place.name}/a.png", "the a.png", ""),
    ]
    assert not problems
    told = send(client, place, [("a.png", OTHER), ("a.webp", encoded(picture(), "WEBP"))])
    assert told == {"a.png": "stored as a-2.png", "a.webp": "stored as a-3.webp"}


def test_an_upload_that_is_cut_off_is_no_bug(app: Starlette, client: TestClient, studio: Studio) -> None:
    """Who closes the tab: it was a traceback in the studio's log."""
    place = make(studio)
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    messages = iter([{"type": "http.request", "body": head + PNG, "more_body": True}])
    headers = {
        "host": ORIGIN.removeprefix("http://"),
        "origin": ORIGIN,
        "cookie": "; ".join(f"{name}={value}" for name, value in client.cookies.items()),
        "x-csrf-token": client.headers["X-CSRF-Token"],
        "content-type": "multipart/form-data; boundary=x",
        "content-length": "99999",
    }
    scope = {
        "type": "http", "method": "POST", "path": f"/data/{place.id}/upload", "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    sent: list[Message] = []

    async def receive() -> Message:
        return next(messages, {"type": "http.disconnect"})

    async def send_on(message: Message) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send_on))
    assert sent[0]["status"] == 400 and not list(place.folder.iterdir())


def test_a_caption_for_a_picture_that_is_there(client: TestClient, studio: Studio) -> None:
    place = make(studio, a="a cat")
    (place.folder / "a.txt").unlink()
    assert send(client, place, [("a.txt", b"a new cat")])["a.txt"] == "stored"
    assert "there already" in send(client, place, [("a.txt", b"another")])["a.txt"]
    assert (place.folder / "a.txt").read_bytes() == b"a new cat"


def test_one_caption_file_is_read_before_it_is_stored(client: TestClient, studio: Studio) -> None:
    place = make(studio)
    told = send(client, place, [("metadata.jsonl", b'{"file_name": "../../a.png", "text": "x"}\n')])
    assert "points out of the folder" in told["metadata.jsonl"] and not tree(place.folder)
    good = b'{"file_name": "a.png", "text": "x"}\n'
    assert send(client, place, [("metadata.jsonl", good)])["metadata.jsonl"] == "stored"
    assert (
        "there already"
        in send(client, place, [("metadata.csv", b"file_name,text\na.png,y\n")])["metadata.csv"]
    )


def test_limits_hold_while_bytes_come_in(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make(studio)
    files = [("a.png", PNG), ("b.png", OTHER), ("c.png", PNG)]
    monkeypatch.setattr(upload, "MOST_FILE_BYTES", len(PNG) - 1)
    assert all("MiB" in text for text in send(client, place, files).values())
    monkeypatch.setattr(upload, "MOST_FILE_BYTES", 1 << 20)
    monkeypatch.setattr(upload, "MOST_SET_BYTES", len(PNG) + len(OTHER) + 10)
    told = send(client, place, files)
    assert [text == "stored" for text in told.values()] == [True, True, False]
    assert "would have more" in told["c.png"]
    monkeypatch.setattr(upload, "MOST_SET_BYTES", 1 << 30)
    monkeypatch.setattr(upload, "MOST_FILES", 3)
    told = send(client, place, [("d.png", PNG), ("e.png", PNG)])
    assert told["d.png"] == "stored" and "3 files" in told["e.png"]
    monkeypatch.setattr(worker, "MOST_PIXELS", 1000)
    monkeypatch.setattr(upload, "MOST_FILES", 99)
    assert "megapixels" in send(client, place, [("f.png", PNG)])["f.png"]
    assert set(tree(place.folder)) == {"a.png", "b.png", "d.png"}


def test_a_full_disk_is_told_before_and_while(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, usage, plain = make(studio), namedtuple("usage", "total used free"), shutil.disk_usage
    # it fills while the file comes in, is full before, and would be with it
    free = iter([1 << 40, 5, 5, upload.RESERVE_BYTES + 100])
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage(0, 0, next(free)) if path == place.folder else plain(path)
    )
    monkeypatch.setattr(upload, "_LOOK_BYTES", 100)
    for _ in range(3):
        answer = client.post(f"/data/{place.id}/upload", files=[("files", ("a.png", PNG, "image/png"))])
        assert answer.status_code == 422 and "uploads leave" in answer.text
    assert next(free, None) is None
    assert not list(place.folder.iterdir())


def test_bytes_reach_the_disk_as_they_come(studio: Studio) -> None:
    """Nothing waits in memory for the end of the form, and what is cut off leaves nothing behind."""
    place = make(studio)
    head = b'--x\r\nContent-Disposition: form-data; name="files"; filename="a.png"\r\n\r\n'
    with contextlib.closing(upload.Upload(place, "multipart/form-data; boundary=x")) as files:
        files.write(head)
        for count in range(1, 40):
            files.write(b"0" * 65536)
            (staged,) = place.folder.glob(".upload-*/a.png")
            assert staged.stat().st_size > (count - 2) * 65536
    assert not list(place.folder.iterdir())


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "multipart/form-data", "application/x-www-form-urlencoded"]
)
def test_other_bodies_are_refused(studio: Studio, kind: str) -> None:
    with pytest.raises(DataError, match="no form"):
        upload.Upload(make(studio), kind)


def test_a_damaged_form_is_refused(client: TestClient, studio: Studio) -> None:
    place = make(studio)
    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (b"no form at all", b"--x\r\nbroken header\r\n\r\n--x--"):
        assert client.post(f"/data/{place.id}/upload", content=body, headers=headers).status_code == 400
    assert not list(place.folder.iterdir())


@given(st.text(max_size=300) | st.text(alphabet="./\\ aé\x00\n\u202e~-", max_size=40))
def test_stored_names_are_plain(given_name: str) -> None:
    name = upload.stored_name(given_name)
    assert not name or (
        name == Path(name).name
        and not name.startswith(".")
        and len(name.encode()) < 230
        and not any(unicodedata.category(letter) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for letter in name)
        and not set(name) & set('/\\:*?"<>|\x00')
    )


def test_the_worker_judges_in_a_process_of_its_own(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    place = make(studio)
    folder = place.folder / ".upload-1"
    folder.mkdir()
    (folder / "a.png").write_bytes(PNG)
    (folder / "b.png").write_bytes(PNG[:100])
    told = json.loads(worker.ask("judge", place, str(folder)))
    assert told["a.png"] == "" and "damaged" in told["b.png"]
