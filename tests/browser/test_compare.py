"""A17, A2 and A3: runs beside each other, and from the first login to a finished quickstart."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import ROOT, Running, logged_in
from tests.unit.ui import made
from trainer.queue.launcher import State
from trainer.queue.local import Local
from trainer.queue.scheduler import is_scheduled

pytestmark = pytest.mark.browser
NewContext = Callable[..., BrowserContext]


@pytest.fixture(scope="module")
def studio(start: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("compared")
    for name, done, colour in (("a", 300, "red"), ("b", 200, "navy"), ("c", 120, "green")):
        run = made.make_run(folder / "runs" / name, done=done, family="flux1_dev")
        for step in range(100, done + 1, 100):
            made.samples(run, step, [Image.new("RGB", (192, 192), colour)], ["an owl"])
    return start(folder)


def marked(page: Page, studio: Running, *names: str) -> None:
    """Mark runs on the home page and compare them."""
    page.goto(f"{studio.url}/")
    for name in names:
        page.get_by_label(f"Compare {name}", exact=True).check()
    page.get_by_role("button", name="Compare the marked").click()
    page.wait_for_url(f"{studio.url}/compare?**")


def test_marked_runs_are_compared(studio: Running, new_context: NewContext) -> None:
    page = logged_in(new_context(viewport={"width": 1440, "height": 900}), studio)
    marked(page, studio, "a", "b", "c")
    expect(page.locator(".legend li")).to_have_count(3)
    expect(page.locator("#compared canvas")).to_have_count(1)
    expect(page.locator("#compared svg.curves")).to_have_count(0)
    letter = page.locator(".legend li", has=page.get_by_role("link", name="c", exact=True)).locator("b")
    lacking = letter.inner_text()
    pictures = page.locator(".strip img")
    expect(pictures).to_have_count(3)
    page.get_by_role("link", name="Later: 200").click()
    expect(pictures).to_have_count(2)
    expect(page.locator(".note.warn")).to_have_text(f"No previews at step 200: {lacking}.")
    page.get_by_role("link", name="Hours", exact=True).click()
    expect(page.get_by_role("link", name="Hours", exact=True)).to_have_attribute("aria-current", "true")
    expect(page.locator("h2", has_text="Previews at step 200")).to_be_visible()
    page.get_by_text("Show numbers").click()
    expect(page.get_by_role("table").filter(has_text="Held-out losses at")).to_be_visible()


def test_the_step_below_the_pointer_is_whole(
    start: Callable[..., Running], new_context: NewContext, tmp_path: Path
) -> None:
    studio = start(tmp_path)
    for name in "ab":
        made.make_run(studio.runs / name, steps=20_000, done=12_345, every=5)
    page = logged_in(new_context(), studio)
    marked(page, studio, *"ab")
    box = page.locator("#compared .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.9999, box["y"] + 50)
    expect(page.locator("#compared output")).to_contain_text("step 12345: A ")


def test_a_mark_stays_while_the_list_changes(studio: Running, new_context: NewContext) -> None:
    page = logged_in(new_context(), studio)
    page.get_by_label("Compare a", exact=True).check()
    row = page.locator(".runs li", has_text="b").filter(has=page.get_by_label("Compare b", exact=True))
    expect(row).to_contain_text("Step 200 of 300")
    made.write_metrics(studio.runs / "b", [210])
    expect(row).to_contain_text("Step 210 of 300")
    expect(page.get_by_label("Compare a", exact=True)).to_be_checked()
    expect(page.get_by_label("Compare b", exact=True)).not_to_be_checked()


def test_the_report_is_whole_without_network_and_scripts(
    studio: Running, new_context: NewContext, tmp_path: Path
) -> None:
    page = logged_in(new_context(), studio)
    marked(page, studio, "a", "b")
    with page.expect_download() as download:
        page.get_by_role("link", name="Report to keep").click()
    download.value.save_as(tmp_path / "report.html")
    alone = new_context(offline=True, java_script_enabled=False).new_page()
    asked = list[str]()
    alone.on("request", lambda request: asked.append(request.url))
    alone.set_content((tmp_path / "report.html").read_text())
    expect(alone.locator("polyline")).to_have_count(2)
    expect(alone.locator(".strip img")).to_have_count(2)
    for place in range(2):
        box = alone.locator(".strip img").nth(place).bounding_box()
        assert box is not None and box["height"] > 100
    assert all(one.startswith("data:") for one in asked)


def test_comparing_needs_no_scripts(studio: Running, new_context: NewContext) -> None:
    """A22: the form, the still drawing and the numbers."""
    context = new_context()
    logged_in(context, studio)
    plain = new_context(java_script_enabled=False, storage_state=context.storage_state()).new_page()
    plain.goto(f"{studio.url}/compare")
    for name in ("a", "b"):
        plain.get_by_label(name, exact=True).check()
    plain.get_by_role("button", name="Compare").click()
    expect(plain.locator("svg.curves polyline")).to_have_count(2)
    plain.get_by_label("Step", exact=True).select_option("200")
    plain.get_by_role("button", name="Show", exact=True).click()
    expect(plain.locator("h2", has_text="Previews at step 200")).to_be_visible()


def test_the_theme_is_kept_by_the_settings(studio: Running, new_context: NewContext) -> None:
    page = logged_in(new_context(color_scheme="light"), studio)
    page.goto(f"{studio.url}/settings")
    page.locator("main").get_by_role("button", name="Dark").click()
    page.goto(f"{studio.url}/compare")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


# ---- the first run

SHORT = {
    "TRAINER__TRAIN__MAX_TRAIN_STEPS": "3", "TRAINER__VALIDATION__NUM_INFERENCE_STEPS": "1",
    "TRAINER__VALIDATION__EVERY_STEPS": "3", "TRAINER__TRAIN__LR_WARMUP_STEPS": "1",
    "TRAINER__VALIDATION__PROMPTS": "[robot]", "TRAINER__TRAIN__TRAIN_BATCH_SIZE": "1",
    "TRAINER_FACTS": str(ROOT / "tests/golden/machines/cpu.json"), "TRAINER_METRICS_PORT": "0",
    "OMP_NUM_THREADS": "1",
}  # fmt: skip


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    """Start a studio that nobody opened yet, with or without the process that starts what waits."""
    folders = {f"TRAINER_{name}_DIR": str(tmp_path / name.lower()) for name in ("RUNTIME", "QUEUE", "CACHE")}
    environ = {**os.environ, **SHORT, **folders, "PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path / "hf")}
    words, started = [sys.executable, "-m", "trainer"], list[subprocess.Popen[str]]()

    def opened(*arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*words, *arguments], env=environ, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        started.append(process)
        return process

    def both(*, scheduled: bool) -> Running:
        paths = {name: tmp_path / name for name in ("runs", "data", "models")}
        options = [word for name, path in paths.items() for word in (f"--{name}", str(path))]
        for path in paths.values():
            path.mkdir()
        ui = opened("ui", "--queue" if scheduled else "--no-queue", "--port", "0", *options)
        assert ui.stdout is not None
        link = ui.stdout.readline().split()[-1]
        while scheduled and not is_scheduled(tmp_path / "queue"):
            assert ui.poll() is None
            time.sleep(0.05)
        return Running(url=link.partition("/login")[0], link=link, process=ui, runs=paths["runs"])

    yield both
    for process in started:
        process.terminate()
        process.communicate(timeout=60)


def test_the_first_login_leads_to_a_queued_quickstart_by_mouse(
    begin: Callable[..., Running], new_context: NewContext, tmp_path: Path
) -> None:
    """A2 up to the queue; the run itself is that of A3."""
    studio = begin(scheduled=False)
    page = new_context().new_page()
    page.goto(studio.link)
    page.wait_for_url(f"{studio.url}/welcome")
    expect(page.get_by_text("there is no NVIDIA driver")).to_be_visible()
    expect(page.get_by_text("Nothing starts what waits")).to_be_visible()
    page.get_by_role("button", name="Start the quickstart").click()
    page.wait_for_url(f"{studio.url}/")
    ((job, seen),) = Local(folder=tmp_path / "queue").jobs()
    assert job.run == studio.runs / "quickstart" and seen.state is State.WAITING


@pytest.mark.slow
def test_a_keyboard_leads_from_the_first_login_to_a_finished_quickstart(
    begin: Callable[..., Running], new_context: NewContext
) -> None:
    """A3, with a quickstart of three steps."""
    studio = begin(scheduled=True)
    page = new_context(viewport={"width": 1440, "height": 900}).new_page()
    page.goto(studio.link)
    page.wait_for_url(f"{studio.url}/welcome")
    expect(page.get_by_text("Nothing starts what waits")).to_have_count(0)
    tabbed_to(page, "Start the quickstart")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{studio.url}/")
    finished = page.locator(".runs li", has_text="quickstart").locator(".state", has_text="finished")
    expect(finished).to_be_visible(timeout=240_000)
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{studio.url}/runs/**")
    expect(page.get_by_role("link", name="safetensors").first).to_be_visible()
    assert list((studio.runs / "quickstart/lora").glob("*.safetensors"))


def tabbed_to(page: Page, name: str) -> None:
    """Press Tab until a control with that text has the focus, which must be seen."""
    for _ in range(60):
        page.keyboard.press("Tab")
        text = page.evaluate("document.activeElement.textContent.trim()")
        if text == name:
            assert page.evaluate("document.activeElement.matches(':focus-visible')")
            return
    raise AssertionError(f"no Tab leads to {name}")
