"""S7: 200 names that lead elsewhere, at every route of the Data set page: none opens, writes or removes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from urllib.parse import quote

import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from tests.unit.data.pictures import encoded, picture
from tests.unit.ui.conftest import ORIGIN
from tests.unit.ui.datasets.sets import key_of, looked, make, tree
from trainer.errors import DataError
from trainer.ui.datasets import edits, upload, worker
from trainer.ui.datasets.places import held, opened, places
from trainer.ui.datasets.snapshot import read_settings
from trainer.ui.pages import dataset
from trainer.ui.studio import Studio

SECRET = "the-secret-of-the-neighbour"
STEPS = (
    "..",
    "../..",
    "../../..",
    "../outside",
    "../outside/secret.txt",
    "/etc/passwd",
    "~",
    ".",
    "",
    "cats",
)
FORMS = (
    lambda text: text,
    lambda text: text + "\x00",
    lambda text: text + "\x00.png",
    lambda text: text.replace("/", "\\"),
    lambda text: text.replace(".", "%2e").replace("/", "%2f"),
    lambda text: text.replace("/", "%252f").replace(".", "%252e"),
    lambda text: text.replace("..", "....//"),
    lambda text: text.replace(".", "\uff0e").replace("/", "\u2215"),
    lambda text: "cats/" + text,
    lambda text: "\u202e" + text,
    lambda text: text + "/",
    lambda text: "./" + text,
    lambda text: "cats/../" + text,
    lambda text: "file://" + text,
    lambda text: text + "\r\nX-Header: 1",
    lambda text: "C:\\" + text,
    lambda text: text.upper(),
    lambda text: "$(" + text + ")",
    lambda text: text + ";v=1",
    lambda text: text + " ",
)
NAMES = [form(step) for step in STEPS for form in FORMS]


def test_there_are_200_names() -> None:
    assert len(NAMES) == 200


def addresses(studio: Studio, name: str, place_id: str) -> list[tuple[str, str]]:
    """Method and address of every route with a name in it, in place of each id."""
    found = []
    for route in dataset.routes(studio):
        assert isinstance(route, Route)
        (method,) = (route.methods or set()) - {"HEAD"}
        parameters = re.findall(r"\{(\w+)\}", route.path)
        for hostile in parameters:
            path = route.path
            for parameter in parameters:
                value = quote(name, safe="") if parameter == hostile else place_id
                path = path.replace("{" + parameter + "}", value)
            found.append((method, path))
    return found


# all of them take a quarter of a minute
@pytest.mark.parametrize(
    "step", [step if step < 2 else pytest.param(step, marks=pytest.mark.slow) for step in range(len(STEPS))]
)
def test_no_name_in_an_address_leads_anywhere(
    client: TestClient, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    monkeypatch.setattr(worker, "ask_for_look", worker.note_request)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text(SECRET)
    place = make(studio, a="a cat")
    looked(place)
    before = tree(tmp_path)
    forms = {"caption": "x", "etag": edits.NO_FILE, "picture": "../../outside/secret.txt", "existing": "keep"}
    seen = 0
    for number, name in enumerate(NAMES[step * len(FORMS) : (step + 1) * len(FORMS)]):
        # every other address, in turn: each of them has each step, and each form at every other step
        for method, path in addresses(studio, name, place.id)[(step + number) % 2 :: 2]:
            answer = client.get(path) if method == "GET" else client.post(path, data=forms)
            # an empty name is another route's address, and one that ends in a slash is asked for without it
            refused = answer.status_code in (400, 404, 405, 422)
            assert refused or name.strip("./ ") == "" or answer.status_code == 307, (path, answer)
            assert answer.headers.get("location", ORIGIN).startswith((ORIGIN, "/data"))
            assert SECRET not in answer.text and "root:" not in answer.text
            seen += 1
    assert seen == len(FORMS) // 2 * len(addresses(studio, "x", "y"))
    assert len(addresses(studio, "x", "y")) >= 17
    # a request to look, by an address without a name, is written down
    assert without(tree(tmp_path), "/asked") == without(before, "/asked")


def without(files: dict[str, bytes], end: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if not name.endswith(end)}


def test_no_name_in_a_form_leads_anywhere(
    client: TestClient, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ask_for_look", worker.note_request)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret.txt").write_text(SECRET)
    place = make(studio, a="a cat")
    looked(place)
    settings = {"family": read_settings(place).family, "resolution": "512"}
    before = tree(tmp_path)
    for number, name in enumerate(NAMES):
        assert client.post(f"/data/{place.id}/delete", data={"picture": name}).status_code == 404 or not name
        key = ("mask", "controls")[number % 2]
        answer = client.post(f"/data/{place.id}/settings", data=settings | {key: name})
        assert answer.status_code == (303 if not name else 404), name
    found = without(tree(tmp_path), "settings.json")
    assert without(found, "/asked") == without(before, "/asked")
    for name in NAMES:
        client.post("/data", data={"name": name})
    assert without(tree(tmp_path), "settings.json") == found
    made = list(studio.data.iterdir())
    assert {path.name for path in made} == {"cats", "CATS", "~"}, "all others would have been changed"
    assert {path.parent for path in tmp_path.rglob("*") if path.is_dir() and path in made} == {studio.data}


def test_no_name_of_an_uploaded_file_leads_anywhere(studio: Studio, tmp_path: Path) -> None:
    """All names at once, quoted in a form as no browser would."""
    place, data = make(studio), encoded(picture(seed=1))
    with contextlib.closing(upload.Upload(place, "multipart/form-data; boundary=x")) as files:
        for name in NAMES:
            raw = name.encode().replace(b"\r\n", b"").replace(b'"', b"")
            files.write(
                b'--x\r\nContent-Disposition: form-data; name="files"; filename="' + raw + b'.png"\r\n\r\n'
            )
            files.write(data + b"\r\n")
        files.write(b"--x--\r\n")
        inside = set(place.folder.glob(".upload-*/*"))
        told = files.finish()
    assert len(told) == 200 and 5 < len(inside) <= 200
    everything = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix == ".png"]
    assert {path.parent for path in everything} == {place.folder}
    assert (
        len(everything)
        == len([one for one in told if one.stored])
        == len({one.stored for one in told} - {""})
    )


def test_links_are_not_followed(studio: Studio, tmp_path: Path) -> None:
    """Neither a link in place of a set, nor one in place of a folder or of a file that was listed before."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.txt").write_text(SECRET)
    (studio.data / "linked").symlink_to(outside)
    place = make(studio, name="cats")
    inner = place.folder / "inner"
    inner.mkdir()
    (inner / "a.png").write_bytes(encoded(picture()))
    (inner / "a.txt").write_text("a cat")
    assert [one.name for one in places(studio)] == ["cats"]
    (row,) = looked(place).pictures
    name = edits.caption_file(row)
    etag = edits.caption_now(place, name).etag
    (inner / "a.txt").unlink()
    (inner / "a.txt").symlink_to(outside / "a.txt")
    with pytest.raises(DataError, match="link"), opened(place, name):
        pass
    inner.rename(tmp_path / "moved")
    (place.folder / "inner").symlink_to(outside)
    with pytest.raises(DataError, match="link"), held(place, name):
        pass
    with pytest.raises(DataError, match="link"):
        edits.write_captions(place, {name: ("mine", etag)}, "edit")
    with pytest.raises(DataError, match="link"):
        edits.delete(place, [row])
    with pytest.raises(DataError, match="link"):
        worker.ask("preview", place, row.name)
    assert (outside / "a.txt").read_text() == SECRET and len(list(outside.iterdir())) == 1


def test_a_caption_that_is_a_link_is_replaced_not_followed(studio: Studio, tmp_path: Path) -> None:
    """Within the set, where a run follows it: the file that it leads to stays as it is."""
    place = make(studio, a="a cat", b="a bee")
    (place.folder / "b.txt").unlink()
    (place.folder / "b.txt").symlink_to("a.txt")
    looked(place)
    with pytest.raises(DataError, match="link"):
        edits.caption_now(place, "cats/b.txt")
    edits.delete(place, [one for one in looked(place).pictures if one.name == "cats/b.png"])
    assert set(tree(place.folder)) == {"a.png", "a.txt"}
    assert (place.folder / "a.txt").read_text() == "a cat"
    assert key_of(place, "cats/a.png")
