"""A4 to A8: the form of a new run and its plan, in Chromium."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.conftest import FACTS, ROOT, Full, Running, Watched, logged_in, until
from tests.unit.ui import made
from trainer.queue.local import Local

pytestmark = pytest.mark.browser
NewContext = Callable[..., BrowserContext]


@pytest.fixture(scope="module")
def studio(start: Callable[..., Running], tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("studio")
    (folder / "data" / "cats").mkdir(parents=True)
    return start(folder)


def opened(new_context: NewContext, studio: Running, begin: str = "flux1_dev_lora") -> Page:
    page = logged_in(new_context(viewport={"width": 1440, "height": 1000}), studio)
    page.goto(f"{studio.url}/new?start={begin}")
    page.check("input[name=depth][value=all]")
    return page


def test_every_key_is_on_the_page_with_label_and_help(studio: Running, new_context: NewContext) -> None:
    page = opened(new_context, studio)
    schema = json.loads((ROOT / "train_configs/schema.json").read_text())
    for name, node in schema["properties"].items():
        inner = next((one["$ref"] for one in node.get("anyOf", ()) if "$ref" in one), None)
        below = schema["definitions"][inner.rpartition("/")[2]]["properties"] if inner else {}
        for key in [f"{name}.{one}" for one in below] or [name]:
            found = page.locator(f"[data-field='{key}'], [data-field^='{key}.']").first
            expect(found).to_be_visible()
            assert found.locator("label, legend").first.inner_text().strip(), key
            assert found.locator(".help").inner_text().strip(), key


def test_keys_are_found_by_words_with_the_keyboard_alone(studio: Running, new_context: NewContext) -> None:
    page = opened(new_context, studio)
    page.check("input[name=depth][value=needed]")
    expect(page.locator("[data-field='checkpoint.checkpoints_total_limit']")).to_be_hidden()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("h1").click()
    page.keyboard.press("/")
    page.keyboard.type("KEPT checkpoints")
    page.keyboard.press("Enter")  # sends no form
    expect(page.locator("[data-field='checkpoint.checkpoints_total_limit']")).to_be_visible()
    expect(page.locator("[data-field='lora.rank']")).to_be_hidden()
    expect(page.locator("#section-lora")).to_be_hidden()
    count = page.locator("[data-field]:visible").count()
    expect(page.locator(".find output")).to_contain_text(f"{count} of ")
    expect(page.get_by_role("radio", name="every key")).to_be_checked()
    page.fill("#find", "data.sets.1.img_dir")
    expect(page.locator("[data-field='data.sets.1.img_dir'] input")).to_be_visible()
    page.fill("#find", "nothing has these words")
    expect(page.locator(".find output")).to_contain_text("0 of")
    assert not page.locator(".section:visible").count() and not asked
    page.fill("#find", "")
    expect(page.locator("[data-field='lora.rank']")).to_be_visible()


def test_a_wrong_value_marks_its_field_and_is_announced(studio: Running, new_context: NewContext) -> None:
    page = opened(new_context, studio)
    rank = page.locator("[name='lora.rank']")
    rank.fill("0")
    expect(rank).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#live")).to_contain_text("at most 1024")
    expect(page.locator("[data-field='lora.rank'] .wrong-text")).to_contain_text("at most 1024")
    rank.fill("8")
    expect(rank).not_to_have_attribute("aria-invalid", "true")
    expect(page.locator("#live")).to_contain_text("GiB")
    expect(page.locator("[data-field='lora.rank'] .origin")).to_have_text("you")


def test_a_broken_number_is_told_at_its_field_and_neither_planned_nor_sent(
    studio: Running, new_context: NewContext
) -> None:
    page = opened(new_context, studio)
    steps, field = (
        page.locator("[name='train.max_train_steps']"),
        page.locator("[data-field='train.max_train_steps']"),
    )
    steps.fill("77")
    expect(page.locator("#plan .figures")).to_contain_text("77 steps")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    steps.press("End")
    steps.press_sequentially("e")
    expect(field.locator(".wrong-text")).to_contain_text("no number")
    expect(steps).to_have_attribute("aria-invalid", "true")
    expect(page.locator("#live")).to_contain_text("no number")
    page.locator("[name='lora.rank']").fill("8")
    for name in ("Download the YAML", "Plan it again", "to the queue"):
        page.get_by_role("button", name=name).click()
        expect(steps).to_be_focused()
    page.locator("#start").select_option("qwen3_lora")
    page.wait_for_timeout(300)
    assert not asked and "/new?start=flux1_dev_lora" in page.url
    expect(page.locator("#new")).to_have_class("failed")
    steps.press("End")
    steps.press("Backspace")
    expect(field.locator(".wrong-text")).to_have_text("")
    expect(steps).not_to_have_attribute("aria-invalid", "true")
    expect(page.locator("#plan .figures")).to_contain_text("77 steps")
    expect(page.locator(".tab.yaml pre")).to_contain_text("rank: 8")
    expect(page.locator("#new")).to_have_class("")


LUMINANCE = """(one) => {
  const box = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  box.fillStyle = getComputedStyle(one).fill;
  box.fillRect(0, 0, 1, 1);
  const linear = (share) => share <= .04045 ? share / 12.92 : ((share + .055) / 1.055) ** 2.4;
  const [red, green, blue] = [...box.getImageData(0, 0, 1, 1).data].map((value) => linear(value / 255));
  return .2126 * red + .7152 * green + .0722 * blue;
}"""
"""Relative luminance of an element's fill, as WCAG defines it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_parts_of_the_memory_bar_are_told_apart_without_their_hue(
    studio: Running, new_context: NewContext, scheme: str
) -> None:
    page = logged_in(new_context(color_scheme=scheme), studio)
    page.goto(f"{studio.url}/new?start=flux1_dev_lora")
    bar = page.locator(".memory").first
    parts = bar.locator(".bar-of-parts .part")
    shown = [part.evaluate(LUMINANCE) for part in parts.all()]
    assert len(shown) > 5
    for one, other in itertools.pairwise(shown):
        assert (max(one, other) + 0.05) / (min(one, other) + 0.05) > 3
    looks = bar.locator(".swatch").evaluate_all("(all) => all.map((one) => one.innerHTML.trim())")
    assert len(looks) == len(set(looks)) == len(shown)
    urls = bar.locator(".texture").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('fill').slice(5, -1))"
    )
    assert urls and all(page.locator(f"pattern[id='{one}']").count() == 1 for one in urls)


def test_decisions_are_stacked_on_a_phone(full: Full, new_context: NewContext) -> None:
    page = logged_in(new_context(viewport={"width": 390, "height": 844}), full.studio)
    for path, table in (
        ("/new?start=flux1_dev_lora", "#decisions"),
        (full.page_of("cyanotype"), ".decisions"),
    ):
        page.goto(full.studio.url + path)
        page.locator(table).evaluate("(one) => one.closest('details')?.setAttribute('open', '')")
        row = page.locator(f"{table} tbody tr").first
        boxes = [one.bounding_box() for one in row.locator("th, td").all()]
        assert len(boxes) == 4
        for above, below in itertools.pairwise(boxes):
            assert above and below and below["y"] >= above["y"] + above["height"] - 1
            assert below["x"] == above["x"] and below["x"] + below["width"] <= 390


DELAYED = """
const real = window.fetch;
let begun = 0, ended = 0;
const tell = () => Object.assign(document.documentElement.dataset, {begun, ended});
window.fetch = async (...given) => {
  const signal = (given[1] || {}).signal;
  begun += 1;
  const is_last = begun === 6;
  tell();
  try {
    const answer = await real(...given);
    await new Promise((done, fail) => {
      if (is_last) done();
      signal?.addEventListener("abort", () => fail(signal.reason));
    });
    return answer;
  } finally { ended += 1; tell(); }
};
"""
"""Answers that never come unless they are to the sixth question; giving up on them is counted as an end."""


def test_the_last_answer_wins_whatever_each_takes(studio: Running, new_context: NewContext) -> None:
    context = new_context()
    page = logged_in(context, studio)
    context.add_init_script(DELAYED)
    page.goto(f"{studio.url}/new?start=flux1_dev_lora")
    for number in range(1, 7):
        page.locator("[name='train.max_train_steps']").fill(str(1000 + number))
        expect(page.locator("html")).to_have_attribute("data-begun", str(number))
        if number < 6:  # the plan is older than the form
            expect(page.locator("#new")).to_have_class("htmx-request")
    expect(page.locator("html")).to_have_attribute("data-ended", "6")
    expect(page.locator("#plan .figures")).to_contain_text("1006 steps")
    expect(page.locator("#new")).to_have_class("")


def test_a_plan_that_does_not_come_is_greyed(
    studio: Running, new_context: NewContext, watched: Watched
) -> None:
    watched.allowed.append("console: Failed to load resource|console: .*htmx")
    page = opened(new_context, studio)
    page.route("**/new/plan", lambda route: route.abort())
    page.locator("[name='train.seed']").fill("5")
    expect(page.locator("#new")).to_have_class("failed")
    page.unroute("**/new/plan")
    page.locator("[name='train.seed']").fill("6")
    expect(page.locator(".tab.yaml pre")).to_contain_text("seed: 6")
    expect(page.locator("#new")).to_have_class("")


def test_another_start_brings_its_own_values(studio: Running, new_context: NewContext) -> None:
    page = opened(new_context, studio)
    page.locator("[name='train.seed']").fill("5")
    page.locator("#start").select_option("qwen3_lora")
    expect(page.locator("#plan")).to_contain_text("qwen3-lora")
    expect(page.locator("[name='train.seed']")).to_have_value("5")
    page.locator("input[name=preset][value=style]").check()
    expect(page.locator("[data-field='lora.rank'] .origin")).to_have_text("preset style")


def test_the_plan_shown_is_the_commands_row_by_row(
    studio: Running, new_context: NewContext, tmp_path: Path
) -> None:
    page = opened(new_context, studio)
    page.locator("[name='lora.rank']").fill("32")
    page.locator("[name='data.sets.0.img_dir']").fill("cats")
    page.locator("[name='train.train_batch_size']").fill("2")
    expect(page.locator(".tab.yaml pre")).to_contain_text("train_batch_size: 2")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download the YAML").click()
    file = tmp_path / "run.yaml"
    download.value.save_as(file)
    command = [sys.executable, "-m", "trainer", "plan", str(file), "--facts", str(FACTS), "--json"]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, check=True, capture_output=True, text=True)
    wanted = json.loads(ended.stdout)
    rows = page.locator("#decisions tbody tr").evaluate_all(
        "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert [(row[0], row[1], row[3]) for row in rows] == [
        (row["feature"], row["value"], row["reason"]) for row in wanted["decisions"]
    ]
    for shown, row in zip(rows, wanted["decisions"], strict=True):
        assert shown[2] == row["source"] or row["source"].startswith(str(file))


def test_a_button_leads_out_of_a_run_that_does_not_fit(
    studio: Running, new_context: NewContext, watched: Watched
) -> None:
    page = opened(new_context, studio)
    page.locator("[name='features.memory_budget']").fill("8GiB")
    page.locator("[name='data.resolution']").fill("1536")
    expect(page.locator("#plan .state")).to_contain_text("69")
    expect(page.locator("#plan figure.full")).to_be_visible()
    page.locator(".ways button", has_text="data.resolution: 512").click()
    expect(page.locator("[name='data.resolution']")).to_have_value("512")
    expect(page.locator("#decisions")).to_be_visible()
    expect(page.locator("#plan figure.full")).to_have_count(0)


def test_a_dropped_file_of_another_trainer_is_translated(studio: Running, new_context: NewContext) -> None:
    page = opened(new_context, studio)
    page.locator("summary", has_text="another trainer").click()
    file = page.evaluate_handle(
        "text => { const all = new DataTransfer(); all.items.add(new File([text], 'a.yaml')); return all; }",
        "network_dim: 24\nnetwork_alpha: 12\nnoise_offset: 0.1\n",
    )
    page.dispatch_event("#foreign", "drop", {"dataTransfer": file})
    expect(page.locator("#foreign")).to_have_value("network_dim: 24\nnetwork_alpha: 12\nnoise_offset: 0.1\n")
    page.get_by_role("button", name="Translate it").click()
    expect(page.locator("#translated")).to_contain_text("lora.rank")
    expect(page.locator("[name='lora.rank']")).to_have_value("24")
    expect(page.locator("tr", has_text="noise_offset")).to_contain_text("left out")


def test_without_scripts_the_form_is_planned_and_added_to_the_queue(
    start: Callable[..., Running],
    new_context: NewContext,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")  # the queue asks this machine for its GPUs
    studio = start(tmp_path)
    cookies = logged_in(new_context(), studio).context.cookies()
    context = new_context(java_script_enabled=False)
    context.add_cookies(cookies)
    page = context.new_page()
    page.goto(f"{studio.url}/new")
    page.locator("[name='output_dir']").fill("by-hand")
    page.get_by_role("button", name="Plan it again").click()
    expect(page.locator("#plan")).to_contain_text("by-hand")
    page.get_by_role("button", name="Add by-hand to the queue").click()
    expect(page.get_by_role("status")).to_contain_text("by-hand is in the queue")


def test_what_is_typed_before_the_scripts_are_there_is_planned(
    studio: Running, new_context: NewContext
) -> None:
    page, held = logged_in(new_context(), studio), list[Route]()
    page.route("**/static/*.js", lambda route: held.append(route))
    for key, value in (("train.max_train_steps", "77"), ("train.optimizer", "prodigy")):
        page.goto(f"{studio.url}/new?start=flux1_dev_lora", wait_until="commit")
        page.locator("label", has=page.locator("input[name=depth][value=all]")).click()
        if value.isdecimal():
            page.locator(f"[name='{key}']").fill(value)
        else:
            page.locator(f"[name='{key}'][value='{value}']").check()
        until(page, "document.readyState === 'interactive'")
        while held:
            held.pop().continue_()
        expect(page.locator("#plan")).to_contain_text(f"{value} steps" if value.isdecimal() else value)


def test_a_double_click_adds_one_run(
    start: Callable[..., Running], new_context: NewContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second press came before the answer to the first, and trained the same once more."""
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")  # the queue asks this machine for its GPUs
    page = opened(new_context, start(tmp_path), "quickstart")
    sent: list[str] = []
    page.on("request", lambda one: sent.append(one.url) if one.url.endswith("/new/start") else None)
    # the answer takes a while, as the plan of a large base does
    page.route("**/new/start", lambda route: (time.sleep(1.0), route.continue_()))
    add = page.get_by_role("button", name="Add quickstart to the queue")
    expect(add).to_be_visible()
    page.wait_for_load_state()  # a press before the scripts are there is sent as often as it comes
    # the first is on its way by then; of two at once the browser sends the second alone
    add.evaluate("(button) => { button.click(); setTimeout(() => button.click(), 300); }")
    expect(page.get_by_text("quickstart is in the queue")).to_be_visible()
    assert len(sent) == 1
    assert [job.name for job, _ in Local(folder=tmp_path / "queue").jobs()] == ["quickstart"]


def test_a_form_that_is_left_is_asked_about(studio: Running, new_context: NewContext) -> None:
    """Theme, links and keys led away from all that was typed; what is sent asks nothing."""
    page = opened(new_context, studio)
    asked: list[str] = []
    page.on("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    prompts = page.locator("[name='validation.prompts']")

    def stays(selector: str) -> None:
        with page.expect_event("dialog"):
            page.locator(selector).first.evaluate("(one) => { setTimeout(() => one.click()); }")
        expect(prompts).to_have_value("a heron at dawn")

    page.goto(f"{studio.url}/new?start=flux1_dev_lora")
    page.check("input[name=depth][value=all]")
    assert not asked, "nothing was typed"
    prompts.fill("a heron at dawn")
    stays("form[action='/theme'] button")
    with page.expect_download():
        page.get_by_role("button", name="Download the YAML").click()
    page.get_by_role("button", name="Plan it again").click()
    expect(page.locator("#new[data-typed]")).to_have_count(1)
    assert asked == ["beforeunload"]
    page.locator("h1").click()  # a browser asks nobody who has done nothing in the page
    stays("a[href='/data']")  # the server has brought the texts back
    assert asked == ["beforeunload"] * 2


def test_a_tick_to_go_on_with_a_run_stays_while_the_form_is_typed(
    start: Callable[..., Running],
    new_context: NewContext,
    watched: Watched,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRAINER_QUEUE_DIR", str(tmp_path / "queue"))
    monkeypatch.setenv("TRAINER_PROFILE", "cpu")  # the queue asks this machine for its GPUs
    watched.allowed.append("status of 422")
    run = made.make_run(tmp_path / "runs/mine", done=120)
    made.checkpoint(run, 120)
    made.ended(run, 75)
    page = opened(new_context, start(tmp_path), "quickstart")
    page.locator("[name='output_dir']").fill("mine")
    tick = page.get_by_label("Go on with the run in this folder")
    expect(tick).not_to_be_checked()
    add = page.get_by_role("button", name="Add mine to the queue")
    add.click()
    expect(page.locator("body")).to_contain_text("name another folder, or tick")
    tick.check()
    page.locator("[name='train.max_train_steps']").fill("2000")
    expect(page.locator("#occupied")).to_contain_text("from step 120 to step 2000")
    expect(tick).to_be_checked()
    page.locator("[name='output_dir']").fill("other")
    expect(tick).to_have_count(0)
    page.locator("[name='output_dir']").fill("mine")
    expect(tick).not_to_be_checked()
    tick.check()
    add.click()
    told = page.get_by_role("status").filter(has_text="is in the queue")
    expect(told).to_contain_text("it goes on with the run in")
