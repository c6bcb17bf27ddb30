"""Tries: the form, what it refuses, the job that it adds, and the page of its pictures."""

from __future__ import annotations

import dataclasses
import errno
import html
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from PIL import Image
from starlette.testclient import TestClient

from tests.unit.ui import made
from tests.unit.ui.test_acts import ROOT, quickstart
from trainer.config import environment
from trainer.errors import ConfigError, DataError, Problem
from trainer.files import safetensors
from trainer.queue import jobfiles
from trainer.queue.launcher import CPU, Request, State
from trainer.queue.local import Local
from trainer.queue.overview import overview
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import Try
from trainer.ui.app import create_app
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.queueing.jobs import queue_view
from trainer.ui.views.trying import choice, started
from trainer.ui.views.trying.choice import Typed, asked, choice_view, lora_files
from trainer.ui.views.trying.drawn import tries_of, try_view
from trainer.ui.views.trying.started import start_try

STEP = "checkpoints/step-000080/lora/style-step-000080.safetensors"
HOSTILE = "--lora=/etc/passwd $(touch x); <script>alert(1)</script>"


def lora(path: Path, family: str = "flux1_dev") -> None:
    """A file with the header of a LoRA of this family, without tensors; with a proof beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"__metadata__": {"family": family}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    assert safetensors.read_header(path).metadata["family"] == family
    path.with_suffix(".proof.json").write_text("{}")


@pytest.fixture
def run(studio: Studio) -> Path:
    """The quickstart's run with a LoRA, and one of a checkpoint."""
    folder = quickstart(studio)
    lora(folder / "lora/style.safetensors")
    lora(folder / "lora/style.comfyui.safetensors")
    lora(folder / STEP)
    return folder


@pytest.fixture
def queue(studio: Studio) -> Local:
    return Local(folder=environment.queue_dir())


def page_of(studio: Studio, run: Path) -> str:
    return f"/try/{identifier(studio.runs, run)}"


def typed(studio: Studio, run: Path, **texts: object) -> Typed:
    view = choice_view(studio, identifier(studio.runs, run))
    return dataclasses.replace(view.typed, **{"prompts": "an owl", **texts})


def problems_of(studio: Studio, run: Path, **texts: object) -> tuple[Problem, ...]:
    with pytest.raises(ConfigError) as told:
        asked(studio, choice_view(studio, identifier(studio.runs, run), typed(studio, run, **texts)))
    return told.value.problems


def test_the_form_has_the_runs_own_values_and_its_files(studio: Studio, run: Path) -> None:
    made.make_run(studio.runs / "without")
    view = choice_view(studio, "")
    assert view.runs == ((identifier(studio.runs, run), "style"),)
    assert [one.name for one in view.loras] == ["final", "step 80"], "ComfyUI's file is the same LoRA again"
    assert view.typed.loras == (view.loras[0].id,) and view.draws and not view.takes_negative
    assert (view.typed.resolution, view.typed.num_inference_steps, view.typed.strength) == ("128", "16", "1")
    one = asked(
        studio, dataclasses.replace(view, typed=dataclasses.replace(view.typed, prompts=" a \n\nb\n"))
    )
    assert one == Try(
        prompts=("a", "b"),
        loras=("lora/style.safetensors",),
        labels=("final",),
        resolution=128,
        num_inference_steps=16,
    )


@pytest.mark.parametrize(
    ("texts", "where"),
    [
        ({"prompts": " \n "}, "Prompts"),
        ({"prompts": "a\nb\nc\nd\ne"}, "Prompts"),
        ({"prompts": "a" * 10_001}, "Prompts"),
        ({"loras": ()}, "LoRA files"),
        ({"loras": tuple("abcde")}, "LoRA files"),
        ({"strength": "1.51"}, "Strength"),
        ({"strength": "-0.1"}, "Strength"),
        ({"strength": "nan"}, "Strength"),
        ({"seed": str(2**32)}, "Seed"),
        ({"seed": "1.5"}, "Seed"),
        ({"loras": ("gone-1234abcd",)}, "LoRA files"),
        ({"resolution": "16"}, "Size"),
        ({"resolution": "120"}, "Size"),
        ({"num_inference_steps": "0"}, "Steps"),
    ],
)
def test_what_is_wrong_is_told_by_its_field(
    studio: Studio, run: Path, texts: dict[str, object], where: str
) -> None:
    (problem,) = problems_of(studio, run, **texts)
    assert problem.where == where and problem.remedy


def test_everything_that_is_wrong_is_told_at_once(studio: Studio, run: Path) -> None:
    found = problems_of(studio, run, prompts="", seed="x", strength="x")
    assert [one.where for one in found] == ["Prompts", "Seed", "Strength"]


def test_files_that_cannot_be_used_are_refused(studio: Studio, run: Path) -> None:
    view = choice_view(studio, identifier(studio.runs, run))
    view = dataclasses.replace(view, typed=typed(studio, run))
    (run / "lora/style.proof.json").unlink()
    with pytest.raises(DataError, match="no proof beside it"):
        asked(studio, view)
    lora(run / "lora/style.safetensors", "llama")
    with pytest.raises(DataError, match="a LoRA of llama, and the configuration is of flux1_dev"):
        asked(studio, view)
    (run / "lora/style.safetensors").write_bytes(b"pickle")
    with pytest.raises(DataError, match="cannot be read as safetensors"):
        asked(studio, view)
    (run / "lora/style.safetensors").unlink()
    with pytest.raises(ConfigError, match="removed meanwhile"):
        asked(studio, view)
    (run / "lora/style.safetensors").symlink_to("/etc/passwd")
    assert [one.name for one in choice_view(studio, identifier(studio.runs, run)).loras] == ["step 80"]


def test_a_try_is_a_job_whose_words_are_in_a_file(
    client: TestClient, studio: Studio, run: Path, queue: Local
) -> None:
    view = choice_view(studio, identifier(studio.runs, run))
    form = {"prompts": f"an owl\n{HOSTILE}", "lora": [one.id for one in view.loras], "seed": "7"}
    answer = client.post(f"{page_of(studio, run)}/start", data={**form, "strength": "0.8"})
    assert answer.headers.get("location") == f"{page_of(studio, run)}/1", answer.text
    ((job, seen),) = queue.jobs()
    assert (job.run, job.gpus, seen.state) == (run / "tries/1", (CPU,), State.WAITING)
    one = tries.read_record(job.run)
    assert one.prompts == ("an owl", HOSTILE) and one.labels == ("final", "step 80")
    assert one.loras == ("tries/1/lora-1/lora.safetensors", "tries/1/lora-2/lora.safetensors")
    assert (one.seed, one.strength, one.resolution) == (7, 0.8, 128)
    folder = jobfiles.job_folder(queue.folder, job.id)
    assert jobfiles.pictures(folder) == one.pictures == 6
    assert HOSTILE not in (folder / "config.yaml").read_text()
    assert str(ROOT / "assets/tiny-flux") in (folder / "config.yaml").read_text()
    (entry,) = overview(queue)
    assert (entry.step, entry.note) == (None, "makes 6 samples")
    (row,) = queue_view(studio).rows
    assert (row.name, row.page) == ("style-try-1", f"{page_of(studio, run)}/1")
    page = client.get(row.page).text
    assert "waiting" in page and "makes 6 samples" in page and "Nothing starts what waits" in page
    assert html.escape(HOSTILE, quote=False) in page and HOSTILE not in page
    assert 'hx-swap="outerMorph"' in page and "not yet" in page, "focus, scroll and a drag stay"
    again = client.post(f"{page_of(studio, run)}/start", data={**form, "strength": "1"})
    assert again.headers["location"] == f"{page_of(studio, run)}/2", (
        "tries of one run wait one behind the other"
    )


def test_a_wrong_form_stays_and_adds_nothing(
    client: TestClient, studio: Studio, run: Path, queue: Local
) -> None:
    answer = client.post(f"{page_of(studio, run)}/start", data={"prompts": "my owl", "seed": "x"})
    assert (
        answer.status_code == 422 and "my owl" in answer.text and "0 are given, 1 to 4 can be" in answer.text
    )
    assert not (run / "tries").exists() and queue.jobs() == []


def test_a_run_that_cannot_be_planned_leaves_no_folder(studio: Studio, run: Path, queue: Local) -> None:
    text = (run / "config.resolved.yaml").read_text()
    (run / "config.resolved.yaml").write_text(text.replace("assets/tiny-flux", "assets/gone"))
    view = choice_view(studio, identifier(studio.runs, run), typed(studio, run))
    with pytest.raises(Exception, match="gone"):
        start_try(studio, view)
    assert list((run / "tries").iterdir()) == [] and queue.jobs() == []


def test_a_size_that_the_family_cannot_draw_names_two_that_it_can(
    client: TestClient, studio: Studio, run: Path
) -> None:
    (problem,) = problems_of(studio, run, resolution="120")
    assert (problem.what, problem.remedy) == ("120 is no multiple of 16", "write 112 or 128")
    text = (run / "config.resolved.yaml").read_text()
    (run / "config.resolved.yaml").write_text(text.replace("resolution: 128", "resolution: 140"))
    page = client.get("/try").text
    assert 'min="32" max="4096" step="16" value="128"' in page


@pytest.mark.parametrize("is_linked", [True, False])
def test_a_try_keeps_its_lora_when_the_run_replaces_it(
    studio: Studio, run: Path, monkeypatch: pytest.MonkeyPatch, is_linked: bool
) -> None:
    def refuse(*args: object, **rest: object) -> None:
        raise PermissionError(1, "no hard links here")

    if not is_linked:
        monkeypatch.setattr(os, "link", refuse)
    view, name = choice_view(studio, identifier(studio.runs, run)), identifier(studio.runs, run)
    both = typed(studio, run, loras=tuple(one.id for one in view.loras))
    wanted, inode = (run / STEP).read_bytes(), (run / STEP).stat().st_ino
    start_try(studio, dataclasses.replace(view, typed=both))
    shutil.rmtree(run / "checkpoints/step-000080")
    one = tries.read_record(run / "tries/1")
    kept = run / one.loras[1]
    assert kept.read_bytes() == wanted and (kept.stat().st_ino == inode) is is_linked
    assert try_view(studio, name, 1).columns == ("without", "final", "step 80")


def test_an_adapters_configuration_lies_beside_it(studio: Studio, run: Path) -> None:
    view = choice_view(studio, identifier(studio.runs, run), typed(studio, run))
    view = dataclasses.replace(view, draws=False)
    with pytest.raises(ConfigError, match="final: it was removed meanwhile"):
        start_try(studio, view)
    (run / "lora/adapter_config.json").write_text("{}")
    start_try(studio, view)
    names = {path.name for path in (run / "tries/1/lora-1").iterdir()}
    assert names == {"lora.safetensors", "adapter_config.json"}


def test_a_lora_that_cannot_be_kept_is_told_in_the_form(
    client: TestClient, studio: Studio, run: Path, queue: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **rest: object) -> None:
        raise OSError(errno.ELOOP, "not today")

    monkeypatch.setattr(os, "link", fail)
    monkeypatch.setattr(shutil, "copyfileobj", fail)
    (marked,) = typed(studio, run).loras
    answer = client.post(f"{page_of(studio, run)}/start", data={"prompts": "my owl", "lora": marked})
    assert answer.status_code == 422 and "my owl" in answer.text
    assert "final: it cannot be copied: not today" in answer.text
    assert list((run / "tries").iterdir()) == [] and queue.jobs() == []


def test_a_lora_that_is_gone_keeps_the_form(client: TestClient, studio: Studio, run: Path) -> None:
    marked = choice_view(studio, identifier(studio.runs, run)).loras[1].id
    for gone in (run / "checkpoints", run / "lora"):
        shutil.rmtree(gone)
        answer = client.post(f"{page_of(studio, run)}/start", data={"prompts": "my owl", "lora": marked})
        assert answer.status_code == 422 and "my owl" in answer.text
        assert "it was removed meanwhile" in answer.text and "mark another" in answer.text


def test_an_error_of_ours_leaves_no_folder(
    studio: Studio, run: Path, queue: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **rest: object) -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(started, "try_request", fail)
    with pytest.raises(AssertionError, match="ours"):
        start_try(studio, choice_view(studio, identifier(studio.runs, run), typed(studio, run)))
    assert list((run / "tries").iterdir()) == [] and queue.jobs() == []


def failed(queue: Local) -> None:
    """The newest job of a queue failed."""
    job = max((job for job, _ in queue.jobs()), key=lambda job: job.id)
    folder = jobfiles.job_folder(queue.folder, job.id)
    jobfiles.write_began(folder, job.start)
    jobfiles.write_exit(folder, job.start, 71)


def test_a_number_that_a_job_has_is_not_given_again(studio: Studio, run: Path, queue: Local) -> None:
    view = choice_view(studio, identifier(studio.runs, run), typed(studio, run))
    assert start_try(studio, view) == 1
    failed(queue)
    shutil.rmtree(run / "tries/1")
    assert start_try(studio, view) == 2


def test_the_newest_job_of_a_folder_counts(studio: Studio, run: Path, queue: Local, drawn: Path) -> None:
    tries.picture(drawn, 1, 1).unlink()
    wanted = Request(config="{}", name="try", run=drawn, working_folder=run, gpus=(CPU,), pictures=4)
    queue.submit([wanted])
    failed(queue)
    assert try_view(studio, identifier(studio.runs, run), 4).state.kind == "bad"
    queue.submit([wanted])
    assert try_view(studio, identifier(studio.runs, run), 4).follows


def test_the_newest_lora_is_opened(
    client: TestClient, studio: Studio, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = studio.runs / "another"
    shutil.copytree(run, other)
    looked: list[Path] = []
    monkeypatch.setattr(choice, "lora_files", lambda folder: looked.append(folder) or lora_files(folder))
    for newest, older in ((run, other), (other, run)):
        for path in older.rglob("lora"):
            os.utime(path, (1_000, 1_000))
        for path in newest.rglob("lora"):
            os.utime(path, (2_000, 2_000))
        view = choice_view(studio, "")
        assert [name for _, name in view.runs] == [newest.name, older.name]
        assert (view.name, looked) == (newest.name, [newest]), "sizes of other runs are not read"
        looked.clear()


def test_the_newest_checkpoint_counts_beyond_a_million_steps_too(studio: Studio, run: Path) -> None:
    other = studio.runs / "another"
    shutil.copytree(run, other)
    lora(run / "checkpoints/step-999999/lora/one.safetensors")
    lora(run / "checkpoints/step-1000000/lora/one.safetensors")
    for path in (*run.rglob("lora"), *other.rglob("lora")):
        os.utime(path, (1_000, 1_000))
    os.utime(other / "lora", (2_000, 2_000))
    os.utime(run / "checkpoints/step-1000000/lora", (3_000, 3_000))
    assert [name for _, name in choice_view(studio, "").runs] == [run.name, other.name]


@pytest.mark.parametrize(("method", "remedy"), [("lora", "wait for its end"), ("full", "sample --model")])
def test_a_run_without_a_lora_is_told(
    client: TestClient, studio: Studio, run: Path, method: str, remedy: str
) -> None:
    other = made.make_run(studio.runs / "without", family="flux1_dev")
    text = (other / "config.resolved.yaml").read_text()
    (other / "config.resolved.yaml").write_text(text.replace("method: lora", f"method: {method}"))
    name = identifier(studio.runs, other)
    page = client.get(f"/try?run={name}").text
    assert "this run has no LoRA file" in page and remedy in page and "/start" not in page
    assert f'<option value="{name}" selected>without' in page, "not another run's name"


@pytest.mark.parametrize("is_link", [True, False])
def test_a_folder_of_tries_that_leads_elsewhere_is_not_written(
    studio: Studio, run: Path, tmp_path: Path, is_link: bool
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    if is_link:
        (run / "tries").symlink_to(outside)
    else:
        (run / "tries").write_text("")
    view = choice_view(studio, identifier(studio.runs, run), typed(studio, run))
    with pytest.raises(ConfigError, match="no folder can be made there"):
        start_try(studio, view)
    assert list(outside.iterdir()) == []


@pytest.fixture
def drawn(run: Path) -> Path:
    """A try of two prompts, drawn."""
    own = "tries/4/lora-1/lora.safetensors"
    one = Try(prompts=("an owl", "a tulip"), loras=(own,), labels=("final",), seed=3, strength=0.5)
    colours = ("white", "silver", "navy", "blue")
    return made.tried(run, 4, one, [Image.new("RGB", (400, 400), colour) for colour in colours])


def test_a_drawn_try_shows_its_pictures(client: TestClient, studio: Studio, run: Path, drawn: Path) -> None:
    path = f"{page_of(studio, run)}/4"
    view = try_view(studio, identifier(studio.runs, run), 4)
    assert (view.columns, view.state.word, view.follows) == (("without", "final"), "drawn", False)
    page = client.get(path).text
    assert "hx-get" not in page and "data-wipe" in page
    shown = [one for one in re.findall(r'src="([^"]+)"', page) if one.startswith("/try")]
    large = [f"{path}/0/0?size=large", f"{path}/1/0?size=large"]
    assert shown == [*large, *(f"{path}/{column}/{row}" for row in range(2) for column in range(2))]
    for one in shown:
        answer = client.get(one)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "image/webp")
    other = client.get(f"{path}?row=1&column=1").text
    assert f"{path}/1/1?size=large" in other and f"{path}/1/0?size=large" not in other
    assert client.get(f"{path}?row=9&column=x").status_code == 200
    for wrong in ("/2/0", "/0/2", "/0/0?size=huge"):
        assert client.get(path + wrong).status_code == 404
    assert client.get(f"{page_of(studio, run)}/5").status_code == 404
    again = client.get(f"/try?run={identifier(studio.runs, run)}&like=4").text
    assert 'value="0.5"' in again and "an owl\na tulip" in again and again.count(" checked") == 1


def test_answers_are_shown_as_text(client: TestClient, studio: Studio, run: Path, drawn: Path) -> None:
    for column in range(2):
        for row in range(2):
            tries.picture(drawn, column, row).with_suffix(".txt").write_text(f"<b>{column}{row}</b>\n")
    page = client.get(f"{page_of(studio, run)}/4").text
    assert "&lt;b&gt;11&lt;/b&gt;" in page and "data-wipe" not in page


def test_states_follow_the_job_and_the_pictures(studio: Studio, run: Path, queue: Local, drawn: Path) -> None:
    tries.picture(drawn, 1, 1).unlink()
    name = identifier(studio.runs, run)
    assert try_view(studio, name, 4).state.word == "not drawn"
    number = start_try(studio, choice_view(studio, name, typed(studio, run)))
    ((job, _),) = queue.jobs()
    folder = jobfiles.job_folder(queue.folder, job.id)
    assert (number, try_view(studio, name, number).follows) == (5, True)
    jobfiles.write_began(folder, job.start)
    jobfiles.write_exit(folder, job.start, 71)
    (folder / jobfiles.OUTPUT_FILE).write_text("loading\nout of memory\n")
    view = try_view(studio, name, number)
    assert (view.state.kind, view.follows, view.lines) == ("bad", False, ("loading", "out of memory"))
    (drawn / tries.RECORD).write_text("{}")
    assert [row.number for row in tries_of(studio, name)] == [5], "a damaged one is left out"


def test_what_cannot_be_tried_is_said(client: TestClient, studio: Studio) -> None:
    assert "No LoRA yet" in client.get("/try").text
    folder = made.make_run(studio.runs / "cats")
    page = client.get(f"/try?run={identifier(studio.runs, folder)}").text
    assert "family" in page and "/start" not in page, "its configuration is of no family that is known"
    assert client.post(f"{page_of(studio, folder)}/start", data={"prompts": "a"}).status_code == 422
    assert client.get("/try?run=none").status_code == 404


def test_where_runs_start_elsewhere_nothing_is_drawn(studio: Studio, run: Path, open_client) -> None:
    client = open_client(create_app(dataclasses.replace(studio, starts_runs=False)))
    page = client.get("/try").text
    assert "trainer sample" in page and "/start" not in page
    assert client.post(f"{page_of(studio, run)}/start").status_code in (404, 405)


def test_a_runs_page_leads_here_where_it_has_a_lora(client: TestClient, studio: Studio, run: Path) -> None:
    other = made.make_run(studio.runs / "cats")
    for folder, is_there in ((run, True), (other, False)):
        name = identifier(studio.runs, folder)
        assert (f'href="/try?run={name}"' in client.get(f"/runs/{name}").text) is is_there
