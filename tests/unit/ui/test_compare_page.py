"""The page of compared runs, and the report that is kept: whole in one file, and asking nobody."""

from __future__ import annotations

import base64
import html
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer.ui.studio import Studio, identifier

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>"


class Tags(HTMLParser):
    """Every tag of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.found if tag == name]


@pytest.fixture
def query(studio: Studio) -> str:
    """Two runs with two previews each."""
    ids = []
    for name, colour in (("a", "red"), ("b", "navy")):
        folder = made.make_run(studio.runs / name, done=100)
        made.samples(folder, 50, [Image.new("RGB", (400, 200), colour)] * 2, ["an owl", HOSTILE])
        ids.append(identifier(studio.runs, folder))
    return f"run={ids[0]}&run={ids[1]}"


def test_two_to_six_runs_are_chosen(client: TestClient, studio: Studio, query: str) -> None:
    boxes = [one for one in Tags(client.get("/compare").text).all("input") if one.get("type") == "checkbox"]
    assert sorted(f"run={one['value']}" for one in boxes) == sorted(query.split("&"))
    one = query.partition("&")[0]
    for wrong in (one, f"{one}&{one}", "&".join(f"run={number}" for number in range(7))):
        answer = client.get(f"/compare?{wrong}")
        assert answer.status_code == 422 and "choose 2 to 6" in answer.text
    marked = [row for row in Tags(client.get(f"/compare?{one}").text).all("input") if "checked" in row]
    assert [row["value"] for row in marked] == [one.partition("=")[2]], "what was chosen stays chosen"
    assert client.get(f"/compare?{one}&run=gone-00000000").status_code == 404
    for path in ("curves", "comparison.csv", "metrics.csv", "comparison.html"):
        answer = client.get(f"/compare/{path}?{one}")
        assert answer.status_code == 422 and "choose 2 to 6" in answer.text


def test_runs_are_marked_on_their_list(client: TestClient, query: str) -> None:
    page = Tags(client.get("/").text)
    boxes = [one for one in page.all("input") if one.get("name") == "run"]
    assert sorted(f"run={one['value']}" for one in boxes) == sorted(query.split("&"))
    (form,) = [one for one in page.all("form") if one.get("id") == "compare"]
    assert form["action"] == "/compare" and all(one["form"] == "compare" for one in boxes)


def test_the_page_has_every_part_without_scripts(client: TestClient, query: str) -> None:
    page = client.get(f"/compare?{query}")
    tags = Tags(page.text)
    assert page.status_code == 200 and len(tags.all("polyline")) == 2
    pictures = [one["src"] for one in tags.all("img")]
    assert len(pictures) == 4
    for address in pictures:
        answer = client.get(str(address))
        assert answer.status_code == 200 and answer.headers["content-type"] == "image/webp"
    for one in [*tags.all("a"), *tags.all("link")]:
        if str(one["href"]).startswith("/compare"):
            assert client.get(str(one["href"])).status_code == 200, one["href"]


def test_hostile_texts_are_texts(client: TestClient, query: str) -> None:
    """S9: in the page, its choice and the report."""
    for path in ("/compare", "/compare/comparison.html"):
        text = client.get(f"{path}?{query}").text
        assert "alert(1)" in text and "<script>alert" not in text
        assert not [one for _, one in Tags(text).found if "onerror" in one]
        assert html.escape(HOSTILE)[:20] in text


def test_the_report_is_one_file_that_asks_nobody(client: TestClient, query: str) -> None:
    answer = client.get(f"/compare/comparison.html?{query}")
    assert answer.headers["content-disposition"].startswith("attachment")
    tags = Tags(answer.text)
    assert not tags.all("script") and not tags.all("link") and not tags.all("a") and not tags.all("iframe")
    addresses = [value for _, one in tags.found for name, value in one.items() if name in ("src", "href")]
    assert len(addresses) == 4 and all(str(one).startswith("data:image/webp;base64,") for one in addresses)
    assert "url(" not in answer.text and "@import" not in answer.text
    sizes = []
    for address in addresses:
        with Image.open(io.BytesIO(base64.b64decode(str(address).partition(",")[2]))) as picture:
            sizes.append(picture.size)
    assert sizes == [(320, 160)] * 4
    (policy,) = [one["content"] for one in tags.all("meta") if "http-equiv" in one]
    assert str(policy).startswith("default-src 'none'; img-src data:;")


def test_a_secret_is_in_no_file_that_is_taken_away(
    client: TestClient, studio: Studio, query: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: a token in one run's configuration."""
    monkeypatch.setenv("HF_TOKEN", "hunter2-hunter2")
    with (studio.runs / "a/config.resolved.yaml").open("a") as file:
        file.write("note: asked with hunter2-hunter2\n")
    for path in ("", "/curves", "/comparison.csv", "/metrics.csv", "/comparison.html"):
        answer = client.get(f"/compare{path}?{query}")
        assert answer.status_code == 200 and "hunter2" not in answer.text
    assert "redacted" in client.get(f"/compare/comparison.csv?{query}").text


def test_records_are_shown_below_the_choice(client: TestClient, studio: Studio, tmp_path: Path) -> None:
    from tests.unit.ui.test_compare import RECORD

    (studio.runs / "one.json").write_text(json.dumps(RECORD | {"rows": [[HOSTILE, "1.0"]]}))
    page = client.get("/compare").text
    assert "A beside B" in page and "<script>alert" not in page and html.escape(HOSTILE)[:20] in page
