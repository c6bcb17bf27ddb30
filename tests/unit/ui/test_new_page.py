"""The page of a new run over HTTP, as a browser without scripts uses it."""

from __future__ import annotations

import html
import json
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer import families
from trainer.config import environment
from trainer.config.reading.load import load
from trainer.queue.local import Local
from trainer.ui.studio import Studio, identifier
from trainer.ui.views import planned
from trainer.ui.views.asked import starts

ROOT = Path(__file__).resolve().parents[3]
RTX_4090 = (ROOT / "tests/golden/machines/rtx-4090.json").read_text()
FORM = {"start": "flux1_dev_lora", "facts": RTX_4090}


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shipped files name paths from the repository's root; queue and machine are the test's."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_FACTS", str(ROOT / "tests/golden/machines/cpu.json"))
    planned._machine_at.cache_clear()


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text below those that have an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.texts: dict[str, str] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {key: value or "" for key, value in attrs}
        self.found.append((tag, attributes))
        if tag not in ("input", "meta", "link", "br", "rect", "path", "circle"):
            self._open.append(attributes.get("id", ""))

    def handle_endtag(self, tag: str) -> None:
        if self._open:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        for one in filter(None, self._open):
            self.texts[one] = self.texts.get(one, "") + data

    def having(self, **wanted: str) -> list[dict[str, str]]:
        return [one for _, one in self.found if wanted.items() <= one.items()]


def test_every_key_has_an_input_with_label_and_help(client: TestClient) -> None:
    page = Elements(client.get("/new").text)
    keys = {one["data-field"] for _, one in page.found if "data-field" in one}
    assert len(keys) > 120
    labels = {one["for"] for tag, one in page.found if tag == "label" and "for" in one}
    ids = [one["id"] for _, one in page.found if "id" in one]
    assert len(ids) == len(set(ids))
    for key in keys:
        inputs = [(tag, one) for tag, one in page.found if one.get("name") == key]
        assert inputs, key
        _, one = inputs[0]
        if one.get("type") not in ("radio", "checkbox"):
            assert one["id"] in labels, key
        else:
            (one,) = page.having(id=f"f-{key.replace('.', '-')}")
        help_id, note_id = one["aria-describedby"].split()
        assert page.texts[help_id].strip(), key
        assert note_id in ids


def test_presets_and_starts_are_offered(client: TestClient) -> None:
    page = Elements(client.get("/new?start=qwen3_lora").text)
    assert [one["value"] for one in page.having(name="preset")] == [
        "character", "concept", "fast", "low-vram", "quality", "style"
    ]  # fmt: skip
    chosen = [one["value"] for tag, one in page.found if tag == "option" and "selected" in one]
    assert chosen == ["qwen3_lora"]
    assert client.get("/new?start=../../etc/passwd").status_code == 200


def test_starts_are_in_their_order_behind_the_quickstart(client: TestClient) -> None:
    first, *rest = starts()
    assert first == "quickstart" and rest == sorted(rest)


def test_a_base_model_that_is_not_here_is_told_above_its_plan(client: TestClient) -> None:
    text = client.get("/new", params={"start": "flux1_dev_lora"}).text
    note = text[text.index("The base model comes first") :].partition("</p>")[0]
    assert "33.7 GB to download" in note and "https://huggingface.co/black-forest-labs/FLUX.1-dev" in note
    assert "The base model comes first" not in client.get("/new", params={"start": "quickstart"}).text


def test_a_wrong_value_marks_its_field(client: TestClient) -> None:
    text = client.post("/new", data={**FORM, "lora.rank": "0"}).text
    page = Elements(text)
    (wrong,) = page.having(**{"aria-invalid": "true"})
    assert wrong["name"] == "lora.rank" and wrong["value"] == "0"
    assert "at most 1024" in page.texts[wrong["aria-describedby"].split()[1]]


def test_a_way_out_is_a_button_that_types_its_values(client: TestClient) -> None:
    form = {**FORM, "features.memory_budget": "8GiB", "data.resolution": "1536"}
    page = Elements(client.post("/new", data=form).text)
    (button, *_) = page.having(name="set")
    again = client.post("/new", data={**form, "set": button["value"]})
    key, _, value = button["value"].partition("=")
    page = Elements(again.text)
    assert page.having(name=key)[0]["value"] == value
    assert page.having(id="decisions") and not page.having(name="set")


def test_the_plan_alone_has_the_notes_of_all_fields(client: TestClient) -> None:
    text = client.post("/new/plan", data={**FORM, "lora.rank": "8"}).text
    page = Elements(text)
    assert "<html" not in text
    (element,) = [one for _, one in page.found if one.get("id") == "notes"]
    notes: dict[str, Any] = json.loads(element["data-notes"])
    assert notes["lora.rank"][:2] == ["16", "you"]
    assert notes["features.weights"][2] == "fp8"
    assert notes["train.seed"] == ["0", "file", "", "", []]


def test_the_file_loads_to_what_was_typed(client: TestClient, tmp_path: Path) -> None:
    answer = client.post("/new/file", data={**FORM, "lora.rank": "8", "output_dir": 'a"b;é'})
    assert answer.headers["content-type"].startswith("application/yaml")
    assert answer.headers["content-disposition"] == (
        "attachment; filename=\"a-b-.yaml\"; filename*=UTF-8''a%22b%3B%C3%A9.yaml"
    )
    (tmp_path / "x.yaml").write_text(answer.text)
    defaults = {name: families.get(name).defaults for name in families.names()}
    loaded = load([tmp_path / "x.yaml"], family_defaults=defaults, environ={})
    assert loaded.config.lora.rank == 8
    assert client.post("/new/file", data={**FORM, "lora.rank": "x"}).status_code == 422


def test_a_command_has_quotes_where_the_name_of_the_file_needs_them(client: TestClient) -> None:
    for name, shown in (
        ("ä 😀 run", "'ä 😀 run.yaml'"),
        ("cats", "cats.yaml"),
        ("a'$(x)", "'a'\"'\"'$(x).yaml'"),
    ):
        text = client.post("/new", data={**FORM, "output_dir": name}).text
        assert f"<code>trainer train {shown}</code>" in html.unescape(text)


def test_a_problem_names_its_key_once(client: TestClient) -> None:
    """And says what holds without it: here the file's 240, not the schema's 1500."""
    text = client.post("/new", data={"start": "quickstart", "train.max_train_steps": "-5"}).text
    problems = text[text.index('<ul class="problems">') :].partition("</ul>")[0]
    assert problems.count("train.max_train_steps") == 1
    assert "leave it out for 240" in problems and "1500" not in problems


def test_a_start_is_a_job_of_the_queue_and_a_wrong_one_is_none(client: TestClient, studio: Studio) -> None:
    queue = Local(folder=environment.queue_dir())
    for wrong in ({"lora.rank": "0"}, {"facts": RTX_4090}):
        answer = client.post("/new/start", data={"start": "quickstart", **wrong})
        assert answer.status_code == 422
    assert not queue.folder.exists() or queue.jobs() == []
    answer = client.post("/new/start", data={"start": "quickstart", "output_dir": "mine"})
    assert answer.status_code == 303
    ((job, _),) = queue.jobs()
    assert job.run == studio.runs / "mine"
    page = client.get(answer.headers["location"])
    assert "mine is in the queue" in page.text and "trainer queue run" in page.text
    assert "in the queue</b>" not in client.get("/new?added=99").text
    # the same folder again is refused, and the form stays as it was
    again = client.post("/new/start", data={"start": "quickstart", "output_dir": "mine"})
    assert again.status_code == 422
    assert Elements(again.text).having(name="output_dir")[0]["value"] == "mine"


def test_a_run_in_the_folder_is_told_and_gone_on_with_only_where_that_is_ticked(
    client: TestClient, studio: Studio
) -> None:
    run = made.make_run(studio.runs / "mine", steps=240, done=240)
    made.result(run)
    made.checkpoint(run, 240)
    made.ended(run, 0)
    form = {"start": "quickstart", "output_dir": "mine", "train.max_train_steps": "2000"}
    told = (
        "mine holds a run: finished, step 240 of 240. "
        "A start there goes on with it from step 240 to step 2000, and replaces its LoRA"
    )
    text = client.post("/new/plan", data=form).text
    (tick,) = Elements(text).having(name="goes_on")
    assert told in text and "checked" not in tick
    queue = Local(folder=environment.queue_dir())
    for other in ("", str(studio.runs / "other")):
        answer = client.post("/new/start", data={**form, "goes_on": other})
        assert answer.status_code == 422 and not queue.jobs()
        assert "name another folder, or tick “go on with the run in this folder”" in answer.text
        assert Elements(answer.text).having(name="goes_on", type="checkbox")
    ticked = {**form, "goes_on": tick["value"]}
    assert "checked" in Elements(client.post("/new/plan", data=ticked).text).having(name="goes_on")[0]
    answer = client.post("/new/start", data=ticked)
    assert answer.status_code == 303 and len(queue.jobs()) == 1
    page = client.get(answer.headers["location"]).text
    assert f"it goes on with the run in <code>{run}</code>" in page and "it will write to" not in page


@pytest.mark.parametrize(
    ("steps", "more", "told", "asks"),
    [
        (
            "300",
            {},
            "stopped, step 120 of 300. A start there goes on with it from step 100 to step 300",
            True,
        ),
        ("100", {}, "Its 100 steps are trained: a start there only proves its LoRA again", True),
        ("90", {}, "A start there is refused: its newest checkpoint is of step 100, beyond 90", False),
        ("300", {"checkpoint.resume_from_checkpoint": "never"}, "A start there is refused: ", False),
        ("300", {"output_dir": "free"}, "", False),
        ("300", {"output_dir": "refused"}, "", False),
        ("300", {"facts": RTX_4090}, "", False),
    ],
)
def test_a_folder_is_told_by_what_a_start_in_it_does(
    client: TestClient, studio: Studio, steps: str, more: dict[str, str], told: str, asks: bool
) -> None:
    run = made.make_run(studio.runs / "mine", done=120)
    made.checkpoint(run, 100)
    made.ended(run, 75)
    (studio.runs / "refused").mkdir()
    made.ended(studio.runs / "refused", 78)
    form = {"start": "quickstart", "output_dir": "mine", "train.max_train_steps": steps, **more}
    page = Elements(client.post("/new/plan", data=form).text)
    assert told in page.texts.get("occupied", "") and bool(page.having(name="goes_on")) is asks
    assert ("occupied" in page.texts) is bool(told)
    if told:
        given = {"goes_on": "" if asks else str(run)}
        assert client.post("/new/start", data={**form, **given}).status_code == 422


def test_a_run_that_trains_or_cannot_be_read_is_told_too(client: TestClient, studio: Studio) -> None:
    form = {"start": "quickstart", "output_dir": "mine", "train.max_train_steps": "300"}
    run = made.make_run(studio.runs / "mine", done=20)
    with made.running(run, studio.runtime / "one", step=20, steps=300):
        text = client.post("/new/plan", data=form).text
        assert "training, step 20 of 300. A start there waits for its end" in text
    text = client.post("/new/plan", data=form).text
    assert "It has no checkpoint: a start there trains from step 0 to step 300" in text
    (run / "config.resolved.yaml").write_text("[")
    page = Elements(client.post("/new/plan", data=form).text)
    assert "a run that cannot be read" in page.texts["occupied"] and not page.having(name="goes_on")


@pytest.mark.parametrize("path", ["/new/file", "/new/start"])
def test_the_way_back_to_a_form_with_mistakes_is_a_form(client: TestClient, path: str) -> None:
    assert client.post(path, data={**FORM, "lora.rank": "x"}).status_code == 422
    answer = client.get(path)
    assert answer.status_code == 200 and Elements(answer.text).having(name="output_dir")


def test_a_run_like_another_has_its_configuration_and_a_new_folder(
    client: TestClient, studio: Studio
) -> None:
    text = client.post("/new/file", data={**FORM, "lora.rank": "24", "output_dir": "first"}).text
    run = studio.runs / "first"
    run.mkdir()
    (run / "config.resolved.yaml").write_text(text)
    (run / "run.lock").touch()
    (run / "metrics.jsonl").touch()
    page = Elements(client.get(f"/new?run={identifier(studio.runs, run)}").text)
    assert not page.having(name="goes_on"), "it has a folder of its own"
    (chosen,) = [one["value"] for tag, one in page.found if tag == "option" and "selected" in one]
    again = client.post("/new/file", data={"start": chosen, "facts": RTX_4090}).text
    assert again == text.replace("runs/first", "runs/first-2")
    assert client.get("/new?run=first-00000000").status_code == 404


def test_a_form_outlives_the_run_that_it_begins_with(client: TestClient, studio: Studio) -> None:
    """Who removes the failed run before the start of another loses nothing that was typed."""
    run = made.make_run(studio.runs / "first")
    address = f"/new?run={identifier(studio.runs, run)}"
    page = Elements(client.get(address).text)
    (chosen,) = [one["value"] for tag, one in page.found if tag == "option" and "selected" in one]
    shutil.rmtree(run)
    form = {"start": chosen, "facts": RTX_4090, "validation.prompts": "a heron at dawn"}
    for path, code in {"/new/start": 422, "/new/file": 422, "/new": 200}.items():
        answer = client.post(path, data=form)
        assert answer.status_code == code, path
        assert "a heron at dawn" in answer.text and "was removed" in answer.text
    assert "was removed" in client.post("/new/plan", data=form).text
    answer = client.post("/new", data={**form, "start": "quickstart"})
    assert "a heron at dawn" in answer.text and "was removed" not in answer.text
    assert client.get(address).status_code == 404


PAYLOADS = (
    '"><script>alert(1)</script>',
    "</textarea><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }}",
    "' onclick='x",
)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_nothing_that_is_typed_becomes_a_part_of_the_page(client: TestClient, payload: str) -> None:
    plain = {tag for tag, _ in Elements(client.get("/new").text).found}
    keys = (
        "data.trigger_word",
        "validation.prompts",
        "lora.target_modules",
        "model.revision",
        "features.memory_budget",
    )
    for form in (
        {key: payload for key in keys},
        {"foreign": payload},
        {"foreign": f"network_dim: {json.dumps(payload)}\n{json.dumps(payload)}: 1"},
        {"start": payload},
        {"own": payload, "start": "own"},
        {"facts": payload},
    ):
        for address in ("/new", "/new/plan"):
            page = Elements(client.post(address, data={"start": "quickstart", **form}).text)
            assert {tag for tag, _ in page.found} <= plain | {"ul", "li", "tt", "rect", "title", "figure"}
            assert not any(name.startswith("on") for _, one in page.found for name in one)
            scripts = [one for tag, one in page.found if tag == "script"]
            assert all(one["src"].startswith("/static/") for one in scripts)


def test_a_configuration_of_another_trainer_is_told_key_by_key(client: TestClient) -> None:
    form = {**FORM, "foreign": "network_dim: 24\nnoise_offset: 0.1\n"}
    page = Elements(client.post("/new", data=form).text)
    assert page.having(name="lora.rank")[0]["value"] == "24"
    assert "network_dim" in page.texts["translated"] and "predict noise" in page.texts["translated"]
    page = Elements(client.post("/new", data={**FORM, "foreign": "just words"}).text)
    assert not page.having(id="translated")
    assert page.texts["foreign"].strip() == "just words"


def test_fields_that_are_no_keys_are_not_read(client: TestClient) -> None:
    odd = {"data.sets.999.img_dir": "x", "data.sets.x.img_dir": "y", "no.such": "1", "data.sets.0.no": "2"}
    text = client.post("/new", data={**FORM, **odd}).text
    keys = {one.get("data-field", "") for _, one in Elements(text).found}
    assert not keys & odd.keys()
    assert max(int(key.split(".")[2]) for key in keys if key.startswith("data.sets.")) == 1
