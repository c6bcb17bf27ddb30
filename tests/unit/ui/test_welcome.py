"""The first-run page: once, then from the settings; it says what is wrong here, and queues a first run."""

from __future__ import annotations

import errno
import html
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.testclient import TestClient

from trainer.queue.launcher import State
from trainer.queue.local import Local
from trainer.ui.studio import Studio
from trainer.ui.views.welcome import _shipped, add_quickstart, welcome_view

ROOT = Path(__file__).resolve().parents[3]
MACHINES = ROOT / "tests/golden/machines"


@pytest.fixture(autouse=True)
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "cpu.json"))
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("TRAINER_PROFILE", "UNIFIED_MEMORY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("way", ["leave", "quickstart"])
def test_the_first_login_leads_there_until_it_was_left(
    client: TestClient, stranger: TestClient, app: Starlette, way: str
) -> None:
    def log_in() -> str:
        return stranger.post("/login", data={"token": app.state.access.token}).headers["location"]

    assert log_in() == "/welcome"
    assert "Welcome" in client.get("/welcome").text and log_in() == "/welcome", "a look does not end it"
    answer = client.post(f"/welcome/{way}")
    assert (answer.status_code, answer.headers["location"]) == (303, "/")
    assert log_in() == "/"
    assert 'href="/welcome"' in client.get("/settings").text


def test_the_quickstart_waits_in_the_queue_with_its_files(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the studio was started in another folder; a second one gets a folder of its own."""
    monkeypatch.chdir(tmp_path)
    assert [add_quickstart(studio) for _ in range(2)] == ["1", "2"]
    found = Local(folder=tmp_path / "queue").jobs()
    assert [job.run for job, _ in found] == [studio.runs / "quickstart", studio.runs / "quickstart-2"]
    assert all(seen.state is State.WAITING for _, seen in found)
    configs = [yaml.safe_load(path.read_text()) for path in sorted((tmp_path / "queue").rglob("*.yaml"))]
    assert len(configs) == 2
    shipped = yaml.safe_load((ROOT / "train_configs/quickstart.yaml").read_text())
    for config in configs:
        assert Path(config["model"]["pretrained_model_name_or_path"]) == ROOT / "assets/tiny-flux"
        assert Path(config["data"]["sets"][0]["img_dir"]) == ROOT / "examples/style"
        assert Path(config["validation"]["img_dir"]) == ROOT / "examples/style-held-out"
        assert config["validation"]["prompts"] == shipped["validation"]["prompts"]
        assert config["train"]["max_train_steps"] == shipped["train"]["max_train_steps"]


def test_a_quickstart_that_cannot_be_is_told_and_the_page_stays(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_FACTS", str(MACHINES / "too-old-gpu.json"))
    answer = client.post("/welcome/quickstart")
    assert answer.status_code == 422 and "was not added" in answer.text
    assert client.get("/").status_code == 200 and "Welcome" in client.get("/welcome").text


@pytest.mark.parametrize("name", ["too-old-gpu", "driver-550-cuda-13-torch", "cpu", "rtx-4090"])
def test_what_keeps_runs_from_starting_is_said_with_its_remedy(
    client: TestClient, studio: Studio, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = MACHINES / f"{name}.json"
    monkeypatch.setenv("TRAINER_FACTS", str(path))
    view, page = welcome_view(studio), client.get("/welcome").text
    assert bool(view.problems) == (name not in ("cpu", "rtx-4090"))
    assert ("No run can start here" in page) == bool(view.problems)
    assert all(problem.remedy and html.escape(problem.remedy) in page for problem in view.problems)
    for gpu in json.loads(path.read_text())["gpus"]:
        assert gpu["name"] in page
    if name == "cpu":
        assert "there is no NVIDIA driver" in page and "trains on the CPU" in page


def test_bases_are_those_on_this_disk(
    studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    commit = "0123456789" * 4
    snapshot = tmp_path / f"hf/hub/models--Qwen--Qwen3-8B/snapshots/{commit}"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text(commit)
    for name in ("flux", "notes"):
        (studio.models / name).mkdir()
    (studio.models / "flux/model_index.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text("{}")
    (studio.models / "link").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    view = welcome_view(studio)
    states = {one.name: one.state for one in view.bases}
    assert states.pop("Qwen/Qwen3-8B") == "partial", "its weights are not there"
    assert set(states.values()) == {"absent"} and "black-forest-labs/FLUX.1-dev" in states
    assert view.folders == ("flux",)


def test_closed_folders_and_variables_of_runs_keep_nobody_out(
    client: TestClient, studio: Studio, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk's lost+found and another's home, by the kernel's answer, which root does not get."""
    closed, stat = {studio.models / "lost+found", tmp_path / "home"}, os.stat
    for folder in closed:
        folder.mkdir()

    def refused(path: str | Path | int, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and not closed.isdisjoint(Path(path).parents):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    _shipped.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home/x"))
    monkeypatch.setenv("TRAINER__MODEL__PRETRAINED_MODEL_NAME_OR_PATH", str(tmp_path / "absent"))
    monkeypatch.setattr(os, "stat", refused)
    for page in ("/welcome", "/settings", "/new"):
        assert client.get(page).status_code == 200, page
    _shipped.cache_clear()


def test_a_page_without_a_scheduler_says_how_one_starts(client: TestClient) -> None:
    assert "trainer queue run" in client.get("/welcome").text
