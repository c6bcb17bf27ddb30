"""The LoRA that a run's page offers: its step, whether the last start proved it, and the best one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.unit.ui import made
from trainer.telemetry.runs import State, read_run
from trainer.ui.studio import Studio, identifier
from trainer.ui.views.job import job_view
from trainer.ui.views.result import ResultView

PROVED = "LoRA: /runs/cats. Proved: reloaded from disk, outputs equal within 1.2e-07."


def result_of(studio: Studio, folder: Path) -> ResultView:
    found = job_view(studio, identifier(studio.runs, folder)).result
    assert found is not None
    return found


@pytest.fixture
def finished(studio: Studio) -> Path:
    """A run that finished at step 240, and was proved."""
    folder = made.make_run(studio.runs / "cats", steps=240, done=240)
    made.result(folder)
    (folder / "lora/cats.proof.json").write_text(json.dumps({"effect": 0.4, "step": 240}))
    made.log(folder, "info", PROVED)
    made.checkpoint(folder, 240)
    made.ended(folder, 0)
    return folder


def go_on(folder: Path, code: int | None, *, to: int = 1360) -> None:
    """More steps in the folder of a run, and an end: None where nobody recorded one."""
    config = folder / "config.resolved.yaml"
    config.write_text(config.read_text().replace("max_train_steps: 240", "max_train_steps: 2000"))
    made.log(folder, "info", f"run folder {folder}")
    made.write_metrics(folder, range(250, to + 1, 10), 2000)
    made.checkpoint(folder, to)
    if code is None:
        made.process.begin(folder, supervisor=2**22, runtime_dir=folder / "nowhere")
    else:
        made.ended(folder, code)


def test_a_finished_run_has_a_proved_lora(studio: Studio, finished: Path, client: TestClient) -> None:
    found = result_of(studio, finished)
    assert (found.proved, found.title, found.best) == (True, "The LoRA is proved", "")
    assert found.text == "Reloaded from disk, outputs equal within 1.2e-07."
    assert [programs for _, programs in found.files] == ["diffusers"]


@pytest.mark.parametrize(
    ("code", "word"), [(75, "stopped"), (None, "lost"), (70, "failed (70)"), (65, "failed (65)")]
)
def test_a_run_that_went_on_and_ended_badly_has_the_lora_of_its_older_step(
    studio: Studio, finished: Path, client: TestClient, code: int | None, word: str
) -> None:
    go_on(finished, code)
    run = read_run(finished)
    assert (run.state, run.figures["state"]) == (State.RESUMABLE, "resumable")
    view, found = job_view(studio, identifier(studio.runs, finished)), result_of(studio, finished)
    assert (view.state.word, view.can_resume) == (word, True)
    assert (found.proved, found.title) == (False, "The LoRA of step 240")
    assert found.text == "It was proved when it was written, before the run went on to step 1360."
    page = client.get(f"/runs/{view.id}").text
    assert "is proved" not in page and f"/files/{found.files[0][0].id}" in page


def test_a_full_model_of_before_is_no_end_of_a_run_that_was_lost(studio: Studio) -> None:
    folder = made.make_run(studio.runs / "full", steps=240, done=240)
    (folder / "model").mkdir()
    (folder / "model/model.safetensors").touch()
    made.process.begin(folder, supervisor=2**22, runtime_dir=folder / "nowhere")
    assert read_run(folder).state is State.FINISHED, "its last step is done, and its model is here"
    go_on(folder, None)
    assert read_run(folder).state is State.RESUMABLE


def test_an_end_that_was_bad_after_the_proof_is_no_proof_of_the_run(studio: Studio, finished: Path) -> None:
    go_on(finished, 65, to=2000)
    proof = finished / "lora/cats.proof.json"
    proof.write_text(json.dumps({"step": 2000}))
    found = result_of(studio, finished)
    assert (found.title, found.text) == ("The LoRA of step 2000", "It was proved when it was written.")
    proof.unlink()
    assert result_of(studio, finished).title == "The LoRA of an earlier start"


def test_a_run_that_went_on_and_finished_is_proved_by_its_last_start(studio: Studio, finished: Path) -> None:
    go_on(finished, 0, to=2000)
    assert not result_of(studio, finished).proved, "the line in its log is of the first start"
    made.log(finished, "info", PROVED.replace("1.2e-07", "3.4e-07"))
    found = result_of(studio, finished)
    assert (found.proved, found.text) == (True, "Reloaded from disk, outputs equal within 3.4e-07.")


def best(folder: Path, **values: Any) -> None:
    """A best LoRA as a run keeps it, for diffusers and ComfyUI."""
    place = folder / "best"
    place.mkdir(exist_ok=True)
    for name in ("cats.safetensors", "cats.comfyui.safetensors"):
        (place / name).write_bytes(b"best")
    row = {"file": "cats.safetensors", "step": 100, "validation_loss": 0.3987, "validation_data": "a"}
    (place / "best.json").write_text(json.dumps(row | values))


def test_the_best_lora_is_offered_where_it_is_not_the_last(
    studio: Studio, finished: Path, client: TestClient
) -> None:
    best(finished)
    found = result_of(studio, finished)
    last = read_run(finished).held_out[-1]
    assert last[0] == 200
    assert found.best == f"Best on held-out samples: step 100, 0.399; the last {last[1]:.3g}"
    assert [programs for _, programs in found.best_files] == ["ComfyUI", "diffusers"]
    page = client.get(f"/runs/{identifier(studio.runs, finished)}").text
    assert found.best in page
    for file, _ in found.best_files:
        assert client.get(f"/runs/{identifier(studio.runs, finished)}/files/{file.id}").content == b"best"
    best(finished, validation_data="b")
    assert result_of(studio, finished).best == "Best on other held-out samples: step 100, 0.399"
    best(finished, step=200)
    found = result_of(studio, finished)
    assert (found.best, found.best_files) == ("", ())
