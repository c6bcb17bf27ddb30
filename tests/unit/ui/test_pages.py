"""S7, S9, S11 and the pages themselves: what files say is shown as text, and nothing else is reached."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import html
import io
import json
import os
import re
import urllib.parse
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.ui import made
from tests.unit.ui.conftest import ORIGIN
from tests.unit.ui.routes import fill, listed, snapshot
from trainer.config import environment
from trainer.errors import Problem
from trainer.queue.launcher import CPU, Request
from trainer.queue.local import Local
from trainer.ui.app import create_app
from trainer.ui.pages.job import attachment
from trainer.ui.studio import Studio, identifier

SLASH = "\N{DIVISION SLASH}"
PAYLOADS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "{{ 7 * 7 }}{% raw %}",
    "</pre></textarea></title><iframe src=javascript:alert(1)>",
    "javascript:alert(1)",
)


class Shapes(HTMLParser):
    """Names of tags and attributes, as a browser would find them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[tuple[str, ...]] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.add((tag, *sorted(name for name, _ in attrs)))


@pytest.mark.parametrize("payload", PAYLOADS)
def test_no_text_of_a_run_becomes_markup(client: TestClient, studio: Studio, payload: str) -> None:
    """S9: name of the folder, settings, log, prompt inside a picture, cause, problems, answers, plan."""
    name = payload.replace("/", SLASH)
    folder = made.make_run(studio.runs / name, family=repr(payload))
    plan = json.loads((folder / "plan.json").read_text())
    plan |= {
        "decisions": [dict.fromkeys(("feature", "value", "source", "reason"), payload)],
        "warnings": [payload],
    }
    (folder / "plan.json").write_text(json.dumps(plan))
    made.log(folder, "error", payload)
    made.samples(folder, 10, [Image.new("RGB", (32, 32))], [payload])
    made.ended(folder, 65, problems=[Problem(what=payload, where=payload, remedy=payload)])
    quiet = made.make_run(studio.runs / "quiet")
    made.samples(quiet, 10, [Image.new("RGB", (32, 32))], ["a cat"])
    made.ended(quiet, 65, problems=[Problem(what="a", where="b", remedy="c")])
    quiet_plan = dict.fromkeys(("feature", "value", "source", "reason"), "a")
    (quiet / "plan.json").write_text(json.dumps(plan | {"decisions": [quiet_plan], "warnings": ["a"]}))
    made.log(quiet, "error", "a")
    pages = ("/", f"/runs/{identifier(studio.runs, quiet)}", "/?words=quiet", "/?words=none")
    own = set().union(*(Shapes(client.get(path).text).found for path in pages))
    run = f"/runs/{identifier(studio.runs, folder)}"
    for path, shown in (
        (run, payload),
        (run, name),
        ("/", name),
        (f"/?words={urllib.parse.quote(payload)}", payload),
    ):
        page = client.get(path).text
        assert shown in html.unescape(page), path
        assert Shapes(page).found <= own, "tags that a page without the payload does not have"


def test_a_picture_is_made_anew_and_a_file_is_a_download(client: TestClient, studio: Studio) -> None:
    """S9: bytes of a folder never reach the browser as what they say they are."""
    values = fill(studio)
    texts = client.get(f"/runs/{values['run']}/previews/10/0")
    assert texts.headers["content-type"] == "image/webp"
    with Image.open(io.BytesIO(texts.content)) as picture:
        assert (picture.format, picture.size, picture.info.get("prompt")) == ("WEBP", (64, 64), None)
    page = studio.runs / "cats/lora/page.html"
    page.parent.mkdir()
    page.write_text("<script>alert(1)</script>")
    answer = client.get(f"/runs/{values['run']}/files/{identifier(studio.runs / 'cats', page)}")
    assert answer.content == page.read_bytes()
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-disposition"] == 'attachment; filename="page.html"'


@pytest.mark.parametrize(
    "content", [b"", b"<svg onload='alert(1)'/>", b"GIF89a", b"\x89PNG\r\n\x1a\n" + b"x" * 50]
)
def test_what_is_no_picture_is_not_shown(client: TestClient, studio: Studio, content: bytes) -> None:
    values = fill(studio)
    (studio.runs / "cats/samples/step-000010/00.png").write_bytes(content)
    assert client.get(f"/runs/{values['run']}/previews/10/0").status_code == 404


def test_a_picture_of_too_many_pixels_is_not_opened(client: TestClient, studio: Studio) -> None:
    """S12: 20,000 by 20,000 in some kilobytes."""
    values = fill(studio)
    Image.new("1", (20_000, 20_000)).save(studio.runs / "cats/samples/step-000010/00.png")
    assert client.get(f"/runs/{values['run']}/previews/10/0").status_code == 404


SHAPES = (
    "..", ".", "", "/", "//", "~", "\x00", "cats\x00", "cats/..", "..\\secret.txt", "....//secret.txt",
    "/etc/passwd", "/proc/self/environ", "file:///etc/passwd", "CON", "cats\n", "\uff43ats", "..\u00c0\u00af",
    "\uff0e\uff0e/secret.txt", "link", "cats/link", "\u216b", "a" * 5000, "-rf", "$(touch x)", ";", "|", "*",
    "[a]", "\udcff",
)  # fmt: skip


WAYS: tuple[Callable[[str], str], ...] = (
    str,
    lambda text: text.replace("/", "%2f").replace(".", "%2e"),
    lambda text: urllib.parse.quote(text, safe="", errors="surrogatepass"),
    lambda text: f"cats-{text}",
    lambda text: f"{text}-00000000",
    lambda text: f"{text}/../secret.txt",
)
NAMES = [*("../" * depth + "secret.txt" for depth in range(1, 9)), *SHAPES]
"""Names that lead out of the roots, or to nothing, each of which is written in several ways."""


def asked(app: Starlette, cookie: str, csrf: str, method: str, path: str) -> tuple[int, bytes]:
    """Status and body of a request whose path no client has put in order."""
    headers = {"host": ORIGIN[7:], "origin": ORIGIN, "x-csrf-token": csrf, "cookie": cookie}
    scope = {
        "type": "http", "http_version": "1.1", "scheme": "http", "method": method, "path": path,
        "query_string": b"", "raw_path": path.encode(errors="surrogateescape"), "root_path": "",
        "client": ("127.0.0.1", 1),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]
    return sent[0]["status"], b"".join(one.get("body", b"") for one in sent)


def test_no_name_leads_out_of_the_roots(
    client: TestClient, app: Starlette, studio: Studio, tmp_path: Path
) -> None:
    """S7: each name in each place of each route's path, as the server gets it; that of a run is written
    in two ways a route, in turn: each name in each way, and each way at each route.
    """
    values = fill(studio)
    (tmp_path / "secret.txt").write_text("the secret words")
    (studio.runs / "cats" / "link").symlink_to(tmp_path / "secret.txt")
    (studio.runs / "link").symlink_to(tmp_path, target_is_directory=True)
    before = snapshot(tmp_path)
    assert len({way(name) for name in NAMES for way in WAYS}) >= 200
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    plain, seen = listed(app, values), {"run": 0, "file": 0}
    for at, name in enumerate(NAMES):
        for place in ("run", "file"):
            written = [listed(app, {**values, place: way(name)}) for way in WAYS]
            for route, own in enumerate(plain):
                turns = (at + route, at + route + 3) if place == "run" else range(len(WAYS))
                for method, path in {written[turn % len(WAYS)][route] for turn in turns} - {own}:
                    status, text = asked(app, cookie, client.headers["X-CSRF-Token"], method, path)
                    assert status in (307, 400, 404, 405), (method, path)
                    assert b"secret words" not in text
                    seen[place] += 1
    assert seen["run"] > 800 and seen["file"] > 200, seen
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("folder", ["lora", "."])
def test_a_link_in_a_run_is_no_download(
    client: TestClient, studio: Studio, tmp_path: Path, folder: str
) -> None:
    values = fill(studio)
    (tmp_path / "secret.txt").write_text("the secret words")
    link = studio.runs / "cats" / folder / ("left_out.jsonl" if folder == "." else "a.safetensors")
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(tmp_path / "secret.txt")
    page = client.get(f"/runs/{values['run']}").text
    assert link.name not in page
    answer = client.get(f"/runs/{values['run']}/files/{identifier(studio.runs / 'cats', link)}")
    assert answer.status_code == 404
    (studio.runs / "cats/log.jsonl").unlink()
    (studio.runs / "cats/log.jsonl").symlink_to(tmp_path / "secret.txt")
    assert "secret words" not in client.get(f"/runs/{values['run']}").text


SECRETS = {
    "HF_TOKEN": "hunter2&hunter2<hunter2",
    "MY_API_KEY": 'quote"in"it-0123',
    "WANDB_API_KEY": "0123456789abcdef0123",
}


def test_no_page_shows_a_secret(
    client: TestClient, app: Starlette, studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S11: planted in every text of a run; the studio's own token is nowhere either."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    values = fill(studio)
    folder = studio.runs / "cats"
    for value in [*SECRETS.values(), "hf_" + "a" * 30, "https://me:pass-word@example.com/x"]:
        made.log(folder, "error", f"asked with {value}")
        with (folder / "config.resolved.yaml").open("a") as file:
            file.write(f"# {value}\n")
    made.samples(folder, 20, [Image.new("RGB", (32, 32))], [SECRETS["HF_TOKEN"]])
    made.ended(folder, 77, cause=SECRETS["MY_API_KEY"], problems=[Problem(what=SECRETS["HF_TOKEN"])])
    forms = {
        form
        for value in SECRETS.values()
        for form in (value, html.escape(value), html.escape(value, quote=False))
    }
    forms |= {"a" * 30, "pass-word", app.state.access.token}
    (cookie,) = client.cookies.values()
    forms.add(cookie)
    for method, path in listed(app, values):
        if method == "GET" and not path.endswith("stream") and "/files/" not in path:
            answer = client.get(path)
            assert not [form for form in forms if form in answer.text], path
            assert not [form for form in forms if form in str(answer.headers)], path
    assert (
        "&lt;redacted&gt;" in client.get(f"/runs/{values['run']}").text
        or "redacted" in client.get(f"/runs/{values['run']}").text
    )


def test_a_studio_without_runs_says_how_one_begins(client: TestClient) -> None:
    page = client.get("/").text
    assert "No runs yet" in page and 'href="/welcome"' in page


def test_what_waits_is_no_studio_without_runs(client: TestClient, studio: Studio) -> None:
    run = studio.runs / "cats"
    rest = {"config": "{}", "working_folder": studio.runs, "gpus": (CPU,)}
    Local(folder=environment.queue_dir()).submit([Request(name="cats", run=run, **rest)])  # type: ignore[arg-type]
    assert "No runs yet" not in client.get("/").text


def test_a_proved_lora_is_offered_with_its_programs_and_its_picture(
    client: TestClient, studio: Studio
) -> None:
    folder = made.make_run(studio.runs / "cats", done=20)
    page = f"/runs/{identifier(studio.runs, folder)}"
    made.result(folder)
    (folder / "lora/cats.comfyui.safetensors").write_bytes(bytes(2**20))
    Image.new("RGB", (8, 8)).save(folder / "before_after.png")
    assert "is proved" not in client.get(page).text
    made.log(folder, "info", "LoRA: a, b (ComfyUI). Proved: reloaded from disk, 69 layers.")
    made.ended(folder, 0)
    text = client.get(page).text
    box = text[text.index('id="result-title"') : text.index('aria-label="Progress"')]
    assert "Reloaded from disk, 69 layers." in box
    for words in ("For ComfyUI: cats.comfyui.safetensors", "For diffusers: cats.safetensors"):
        assert words in box
    for address in re.findall(r'(?:href|src)="(/runs/[^"]+)"', box):
        assert client.get(address).status_code == 200
    assert len(re.findall(r'<img[^>]+src="/runs/', box)) == 1


def test_a_run_on_a_cpu_has_no_gpu_memory(client: TestClient, studio: Studio) -> None:
    """The allocator of GPUs has nothing there, and the plan's prediction is of the host's memory."""
    folder = made.make_run(studio.runs / "cats")
    row = dataclasses.replace(made.step_record(130), device_memory_reserved_bytes=0)
    with (folder / "metrics.jsonl").open("w") as file:
        file.write(json.dumps({**dataclasses.asdict(row), "device_memory_reserved_peak_bytes": 0}) + "\n")
    (folder / "plan.json").write_text(json.dumps(made.PLAN | {"device": "cpu"}))
    page = client.get(f"/runs/{identifier(studio.runs, folder)}").text
    assert "GPU memory" not in page and "device_memory" not in page
    memory = re.search(r'<th scope="row">Host memory</th>.*?</tr>', page, re.DOTALL)
    assert memory and "16.0 GiB" in memory[0] and "not known" in memory[0]
    other = made.make_run(studio.runs / "dogs")
    runs = "&".join(f"run={identifier(studio.runs, one)}" for one in (folder, other))
    assert '<th scope="row">Host memory or GPU memory</th>' in client.get(f"/compare?{runs}").text


def test_a_stop_on_request_is_no_trouble_and_counts_its_checkpoint(
    client: TestClient, studio: Studio
) -> None:
    folder = made.make_run(studio.runs / "cats", done=20)
    made.checkpoint(folder, 26)
    told = Problem(what="stopped on request", remedy="start the same command again to resume")
    made.ended(folder, 75, problems=[told])
    text = client.get(f"/runs/{identifier(studio.runs, folder)}").text
    assert told.remedy not in text and "Step 26 of 300" in text and "Resume" in text


def test_a_run_without_settings_has_those_of_its_job_or_says_why_not(
    client: TestClient, studio: Studio
) -> None:
    folder = made.make_run(studio.runs / "cats")
    (folder / "config.resolved.yaml").unlink()
    made.ended(folder, 65)
    run = identifier(studio.runs, folder)
    text = client.get(f"/runs/{run}").text
    assert "It was refused before it wrote its settings" in text and "no job of this queue has" in text
    assert "Settings as this run has them" not in text and "New run like this</a>" not in text
    assert client.get(f"/new?run={run}").status_code == 404
    queue = Local(folder=environment.queue_dir())
    for rank in (4, 8):
        config = f"family: flux1_dev\nlora:\n  rank: {rank}\ndata:\n  sets:\n  - img_dir: pictures\n"
        rest = {"run": folder, "working_folder": studio.data, "gpus": (CPU,)}
        queue.submit([Request(config=config, name="cats", **rest)])  # type: ignore[arg-type]
        queue.hold(str(rank // 4))
        if rank == 4:
            queue.forget("1")
    text = client.get(f"/runs/{run}").text
    assert f'href="/new?run={run}">New run like this</a>' in text
    assert "It was refused before it wrote its settings" in text and "no job of this queue has" not in text
    assert "Settings that its job was given" in text and "rank: 8" in text
    form = client.get(f"/new?run={run}").text
    assert str(studio.data / "pictures") in form and "cats-2" in form
    (folder / "config.resolved.yaml").write_text("family: flux1_dev\n")
    assert "Settings as this run has them" in client.get(f"/runs/{run}").text


def test_an_error_of_a_run_is_told_with_its_place_and_remedy(client: TestClient, studio: Studio) -> None:
    folder = made.make_run(studio.runs / "cats")
    (folder / "config.resolved.yaml").write_text("train: [1\n")
    answer = client.get(f"/runs/{identifier(studio.runs, folder)}")
    assert answer.status_code == 422 and "config.resolved.yaml" in answer.text
    assert "config.resolved.yaml" in client.get("/").text, "the list names it, and shows the others"


def test_a_removed_run_is_a_page_of_its_own(client: TestClient) -> None:
    answer = client.get("/runs/cats-00000000")
    assert answer.status_code == 404 and "removed meanwhile" in answer.text


def test_a_closed_folder_is_told(client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel's answer, which root does not get."""
    closed, scandir = studio.runs / "closed", os.scandir

    def refuse(folder: Path) -> Any:
        if folder == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    closed.mkdir()
    monkeypatch.setattr(os, "scandir", refuse)
    assert "may not look into it" in client.get("/").text


def test_names_that_are_no_text_are_spelled_out(client: TestClient, studio: Studio) -> None:
    """Bytes of Latin-1 as an older disk has them: of runs, data sets and base models."""
    name = os.fsdecode(b"caf\xe9")
    runs = []
    for number in range(2):
        folder = studio.runs / f"{name}-{number}"
        made.make_run(studio.runs / str(number), done=20).rename(folder)
        runs.append(identifier(studio.runs, folder))
    for root in (studio.data, studio.models):
        (root / name).mkdir()
    (studio.models / name / "config.json").write_text("{}")
    both = f"?run={runs[0]}&run={runs[1]}"
    paths = ["/", f"/runs/{runs[0]}", "/data", f"/data/{identifier(studio.data, studio.data / name)}"]
    paths += ["/welcome", "/compare", f"/compare{both}", f"/compare/comparison.csv{both}"]
    for path in paths:
        answer = client.get(path)
        assert answer.status_code == 200 and r"caf\udce9" in answer.text, path
    answer = client.get("/new")
    assert answer.status_code == 200 and '"caf' not in answer.text, "it cannot be chosen by a form"


def test_a_download_is_as_long_as_it_said(tmp_path: Path) -> None:
    """Also of a file that grows or shrinks meanwhile."""
    for content, later in ((b"x" * 300_000, b"more"), (b"", b"more"), (b"abc", b"")):
        path = tmp_path / "log.jsonl"
        path.write_bytes(content)
        answer = attachment(path.open("rb"), path.name)
        with path.open("ab") as file:
            file.write(later)
        parts = asyncio.run(collected(answer))
        assert parts == content and answer.headers["content-length"] == str(len(content))


async def collected(answer: Any) -> bytes:
    return b"".join([part async for part in answer.body_iterator])


def test_where_runs_are_started_elsewhere_a_new_one_is_a_file(studio: Studio, open_client: Any) -> None:
    """No page has a button, and no route an answer, that would put a job where nothing starts it."""
    folder = made.make_run(studio.runs / "cats", done=20)
    made.checkpoint(folder, 20)
    made.ended(folder, 75)
    run = f"/runs/{identifier(studio.runs, folder)}"
    adding = {"/new/start": "/new", "/welcome/quickstart": "/welcome", f"{run}/resume": run}
    here = open_client(create_app(studio))
    there = open_client(create_app(dataclasses.replace(studio, starts_runs=False)))
    for path, page in adding.items():
        assert path in here.get(page).text
        assert path not in there.get(page).text and there.post(path).status_code in (404, 405)
    assert "/new/file" in there.get("/new").text and "queue run" not in there.get("/welcome").text
    assert 'type="password"' not in there.get("/settings").text, "no run would read it"
    assert not (studio.folder.parent.parent / "queue").exists()
