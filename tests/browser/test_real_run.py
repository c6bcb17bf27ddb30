"""A13 and A18: a run on a tiny base, asked by buttons, stops with 75, goes on by the queue, and is tried."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page

from tests.browser.conftest import ROOT, Running, logged_in
from tests.contract.runs import CASES, CPU_FACTS, Workshop, small_samples
from tests.e2e.conftest import PATIENCE_SECONDS, environment
from trainer.telemetry.runs import State, read_run
from trainer.ui.studio import identifier

pytestmark = pytest.mark.browser
_WAIT_MS = 1000 * PATIENCE_SECONDS


def pressed(page: Page, button: str, done: str) -> None:
    """Press a button, and wait until the page says that it is done."""
    page.get_by_role("button", name=button).click()
    page.locator(f".note:has-text('{done}'):has-text('done at step')").wait_for(timeout=_WAIT_MS)


def asked_to_draw(page: Page, studio: Running, run: str) -> str:
    """Ask for a try of the run's newest LoRA, as the form has it but small; the address of its page."""
    page.goto(f"{studio.url}/try?run={run}")
    page.get_by_label("Prompts").fill("an owl")
    for label, value in (("Seed", "7"), ("Size", "64"), ("Steps", "2")):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_role("button", name="Draw").click()
    page.wait_for_url("**/try/*/*")
    return page.url


def test_save_sample_stop_resume_and_try(
    new_context: Callable[..., BrowserContext],
    start: Callable[..., Running],
    tiny_base: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    studio = start(tmp_path, facts=CPU_FACTS)
    yard = Workshop(base=tiny_base, samples=small_samples(tmp_path / "samples"), cache=tmp_path / "cache")
    config = yard.write_config(CASES[0], studio.runs)
    environ = environment(tmp_path, 0, yard.cache) | {"TRAINER_QUEUE_DIR": str(tmp_path / "queue")}
    trainer = [sys.executable, "-m", "trainer"]
    words = [
        "train",
        str(config),
        "--no-probe",
        "--set",
        "train.max_train_steps=100000",
        "--set",
        "checkpoint.lora_files=true",
    ]
    run = subprocess.Popen([*trainer, *words], cwd=ROOT, env=environ, stderr=subprocess.PIPE, text=True)
    folder = studio.runs / "run"
    try:
        page = logged_in(new_context(), studio)
        page.get_by_role("link", name="run", exact=True).click(timeout=_WAIT_MS)
        page.locator("#live-part .state:has-text('training')").wait_for(timeout=_WAIT_MS)
        pressed(page, "Save now", "save")
        assert read_run(folder).checkpoints
        pressed(page, "Sample now", "previews")
        assert read_run(folder).samples
        page.get_by_role("button", name="Stop and save").click()
        page.locator("#live-part .state:has-text('stopped')").wait_for(timeout=_WAIT_MS)
        assert run.wait(PATIENCE_SECONDS) == 75
        stopped = read_run(folder).step
        page.get_by_role("button", name="Resume").click()
        page.locator(".queue .state:has-text('waiting')").wait_for(timeout=_WAIT_MS)
        queue = subprocess.Popen([*trainer, "queue", "run", "--drain"], cwd=ROOT, env=environ)
        page.goto(f"{studio.url}/runs/{identifier(studio.runs, folder)}")
        page.locator("#live-part .state:has-text('training')").wait_for(timeout=_WAIT_MS)
        page.goto(studio.url)
        page.get_by_role("button", name="Stop and save: run").click()
        assert queue.wait(PATIENCE_SECONDS) == 0
        assert (read_run(folder).state, read_run(folder).step >= stopped) == (State.RESUMABLE, True)
        steps = [step for step, _ in read_run(folder).losses]
        assert steps == sorted(set(steps)), "no step is there twice"
        tried = [asked_to_draw(page, studio, identifier(studio.runs, folder)) for _ in range(2)]
        queue = subprocess.Popen([*trainer, "queue", "run", "--drain"], cwd=ROOT, env=environ)
        page.locator("a > img").wait_for(timeout=_WAIT_MS)
        assert queue.wait(PATIENCE_SECONDS) == 0
        first, again = ([page.request.get(f"{one}/{column}/0").body() for column in (0, 1)] for one in tried)
        assert first == again and first[0] != first[1], (
            "equal seeds, equal bytes; the LoRA changes the picture"
        )
    finally:
        run.kill()
