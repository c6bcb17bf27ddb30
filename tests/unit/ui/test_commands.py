"""S8: what is typed into a form is never a word of a command line, a variable, a shell line or a path that
leads elsewhere; it ends in files as it was typed. Forms are those of the app's pages.
"""

from __future__ import annotations

import io
import itertools
import re
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.testclient import TestClient

from tests.unit.data.pictures import encoded, picture, write_pair
from tests.unit.ui.datasets.sets import key_of, looked, make
from tests.unit.ui.routes import fill, listed
from trainer.config import environment
from trainer.queue import jobfiles
from trainer.queue.database import Job
from trainer.queue.local import Local
from trainer.ui.datasets import worker
from trainer.ui.datasets.places import Place
from trainer.ui.studio import Studio
from trainer.ui.views import planned

MARK = "mark0"
"""A word of each payload, which nothing else says."""
PAYLOADS = (
    f"$(touch {MARK})", f"; touch {MARK}", f"| touch {MARK} &", f"`touch {MARK}`", f"--{MARK}=1", f"-{MARK}",
    f"a\ntouch {MARK}\n", f"' ; touch {MARK} #", f"${{IFS}}{MARK}", f"!!python.name:os.{MARK}",
    f"{{{{ {MARK} }}}}", f"%({MARK})s", f"> {MARK}",
)  # fmt: skip
ONE_LINE = [text for text in PAYLOADS if "\n" not in text]
CHOSEN = ("hidden", "checkbox", "radio", "file")
"""Kinds of inputs into which nothing is typed."""
Started = list[tuple[Sequence[str], dict[str, Any]]]


class Silent:
    """A process that says nothing and ends well."""

    returncode = 0

    def __init__(self, words: Sequence[str]) -> None:
        self.args, self.stdin = words, io.BytesIO()

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *error: object) -> None: ...

    def communicate(self, *given: object, **options: object) -> tuple[bytes, bytes]:
        return b"", b""

    def poll(self) -> int:
        return 0

    wait = poll


class Forms(HTMLParser):
    """Forms that change something, as a browser without scripts would send them: address and fields, each
    with whether it is typed.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, list[tuple[str, str, bool]]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        one = {key: value or "" for key, value in attrs}
        if tag == "form":
            self.found.append((one.get("action", "") if one.get("method") == "post" else "", []))
        elif tag in ("input", "textarea", "select", "button") and one.get("name") and self.found:
            typed = tag in ("textarea", "select") or (
                tag == "input" and one.get("type", "text") not in CHOSEN
            )
            self.found[-1][1].append((one["name"], one.get("value", ""), typed))
        if "formaction" in one:
            self.found.append((one["formaction"], self.found[-1][1]))


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder to start in, which stays empty, and quick looks at data sets."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    planned._machine_at.cache_clear()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """Command lines that would have been started."""
    lines: Started = []

    def start(words: Sequence[str], **options: Any) -> Silent:
        lines.append((words, options))
        return Silent(words)

    monkeypatch.setattr(subprocess, "Popen", start)
    return lines


def require_plain(started: Started) -> None:
    """Nothing that was typed is a word or a variable of a process, and none has a shell."""
    for words, options in started:
        assert isinstance(words, list | tuple) and not options.get("shell"), words
        assert MARK not in "\0".join(map(str, words)), words
        variables = {
            name: value for name, value in (options.get("env") or {}).items() if "PYTEST" not in name
        }
        assert MARK not in repr((variables, options.get("cwd"), options.get("executable")))


def require_nothing_ran(root: Path) -> None:
    """No payload was obeyed: the file that each would make is nowhere."""
    assert not list((root / "here").iterdir())
    assert not [path for path in root.rglob("*") if path.name == MARK]


def test_every_field_of_every_form_is_text(
    client: TestClient, app: Starlette, studio: Studio, tmp_path: Path, started: Started
) -> None:
    """Each typed field by itself, beside what the page has in the others; fields of a new run all at once."""
    routes = listed(app, fill(studio))
    pages = [path for method, path in routes if method == "GET" and not path.endswith("stream")]
    forms: dict[str, list[tuple[str, str, bool]]] = {}
    for path in pages:
        answer = client.get(path)
        if answer.headers["content-type"].startswith("text/html"):
            for action, fields in Forms(answer.text).found:
                if action and len(fields) >= len(forms.get(action, ())):  # a link with values is the same
                    forms[action] = fields
    actions = {path for method, path in routes if method != "GET"}
    actions -= {"/login", "/logout", "/settings/token"}  # after these the session is another one
    typed = {action: {name for name, _, typed in fields if typed} for action, fields in forms.items()}
    assert sum(map(len, typed.values())) > 300 and sum(map(bool, typed.values())) >= 7
    for action in sorted(actions):
        known = action if action in forms else "/new"  # of routes that scripts alone ask
        whole = {name: value for name, value, _ in forms[known]}
        tried = [{name: payload} for name in typed[known] for payload in PAYLOADS[::3]]
        if known.startswith("/new"):
            tried = [dict(zip(sorted(typed[known]), itertools.cycle(PAYLOADS), strict=False))]
        for fields in tried:
            answer = client.post(action, data=whole | fields)
            assert answer.status_code in (200, 303, 400, 404, 409, 422), (action, fields)
    require_plain(started)
    require_nothing_ran(tmp_path)
    roots = {"runs", "data", "models", "runtime", "queue", "here"}
    assert {path.name for path in tmp_path.iterdir()} <= roots


def job_of(studio: Studio, client: TestClient, **typed: str) -> tuple[Local, Job, dict[str, Any]]:
    """A run that was typed into the form of a new one: the queue, its job, the configuration of that."""
    answer = client.post("/new/start", data={"start": "quickstart", **typed})
    assert answer.status_code == 303, re.findall(r'class="what">[^<]*', answer.text)
    queue = Local(folder=environment.queue_dir(), gpus=lambda: ())
    ((job, _),) = queue.jobs()
    path = jobfiles.job_folder(queue.folder, job.id) / jobfiles.CONFIG_FILE
    return queue, job, yaml.safe_load(path.read_text())


@pytest.mark.parametrize("payload", ONE_LINE)
def test_a_new_run_holds_it_and_its_process_does_not(
    client: TestClient, studio: Studio, tmp_path: Path, started: Started, payload: str
) -> None:
    """Trigger word, prompts, folders of the run and of a data set, the job's name."""
    named = payload.replace("${", "$({")  # a variable in a path is refused
    (studio.data / named).mkdir()
    write_pair(studio.data / named, "a.png", payload)
    typed = {"data.trigger_word": payload, "validation.prompts": payload, "output_dir": named}
    queue, job, config = job_of(studio, client, **typed, **{"data.sets.0.img_dir": named})
    assert config["data"]["trigger_word"] == payload
    assert config["validation"]["prompts"] == [payload]
    assert (job.name, job.run) == (named, studio.runs / named)
    assert config["data"]["sets"][0]["img_dir"] == str(studio.data / named)
    assert queue.start_due() == [job]
    assert len(started) == 1, "the process that watches the run"
    require_plain(started)
    require_nothing_ran(tmp_path)


def test_lines_of_prompts_are_prompts(client: TestClient, studio: Studio) -> None:
    _, _, config = job_of(studio, client, **{"validation.prompts": f"a cat\n--{MARK}\n$(touch {MARK})"})
    assert config["validation"]["prompts"] == ["a cat", f"--{MARK}", f"$(touch {MARK})"]


def field(text: str, name: str) -> str:
    (value,) = set(re.findall(rf'name="{name}" value="([^"]*)"', text))
    return str(value)


@pytest.fixture
def place(studio: Studio) -> Place:
    found = make(studio, a="a cat", b="a [c.t] (1)")
    looked(found)
    return found


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_caption_is_the_file_and_what_looks_at_it_is_not_told(
    client: TestClient, studio: Studio, tmp_path: Path, started: Started, place: Place, payload: str
) -> None:
    address = f"/data/{place.id}/pictures/{key_of(place, 'cats/a.png')}"
    etag = field(client.get(address).text, "etag")
    assert client.post(f"{address}/caption", data={"caption": payload, "etag": etag}).status_code == 303
    # a caption is one line: blanks and ends of lines are one blank
    assert (place.folder / "a.txt").read_text() == " ".join(payload.split()) + "\n"
    assert started and worker.last_request(place)
    require_plain(started)
    require_nothing_ran(tmp_path)


@pytest.mark.parametrize("payload", ONE_LINE)
def test_find_and_replace_is_no_pattern_and_no_template(
    client: TestClient, place: Place, tmp_path: Path, started: Started, payload: str
) -> None:
    address = f"/data/{place.id}/replace"
    for find, replacement in (("[c.t] (1)", payload), (payload, r"\1 \g<0>"), (r"\1 \g<0>", "[c.t] (1)")):
        asked = {"find": find, "replace": replacement}
        seen = field(client.get(address, params=asked).text, "seen")
        assert client.post(address, data=asked | {"seen": seen}).status_code == 303
        assert (place.folder / "b.txt").read_text() == f"a {replacement}\n"
        looked(place)
    assert (place.folder / "a.txt").read_text() == "a cat"
    require_plain(started)
    require_nothing_ran(tmp_path)


def test_names_of_files_are_stored_as_names(
    client: TestClient, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one process that judges them is a real one."""
    lines, real = Started(), subprocess.Popen

    def recorded(words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        lines.append((words, options))
        return real(words, **options)

    monkeypatch.setattr(worker, "ask_for_look", worker.note_request)
    monkeypatch.setattr(subprocess, "Popen", recorded)
    before = {path.name for path in place.folder.iterdir()}
    files = [
        ("files", (f"{text}{number}{suffix}", content))
        for number, text in enumerate(ONE_LINE)
        for suffix, content in ((".png", encoded(picture(seed=number))), (".txt", text.encode()))
    ]
    answer = client.post(f"/data/{place.id}/upload", data={"existing": "keep"}, files=files)
    assert answer.status_code == 200 and len(lines) == 1
    stored = {path.name: path for path in place.folder.iterdir() if path.name not in before}
    assert len(stored) == len(files)
    assert all(re.fullmatch(r"[\w .()+=,@-]+", name) for name in stored)
    assert {path.read_text() for path in stored.values() if path.suffix == ".txt"} == set(ONE_LINE)
    require_plain(lines)
    require_nothing_ran(tmp_path)
