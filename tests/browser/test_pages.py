"""A1, A12, A19, A20, A22 and A25 of the pages, in Chromium; A21 is in the fixtures of each."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, expect

from tests.browser.conftest import (
    PROMPTS,
    ROOT,
    Full,
    Running,
    Watched,
    drawn,
    logged_in,
    require_picture,
    until,
)
from tests.unit.ui import made
from trainer.queue.local import Local
from trainer.telemetry import control
from trainer.telemetry.control import Order
from trainer.telemetry.sinks.records import MetricsLog, read_metrics
from trainer.ui.access import FREE_TRIES
from trainer.ui.studio import identifier

pytestmark = pytest.mark.browser

NewContext = Callable[..., BrowserContext]
AXE = (Path(__file__).parent / "vendor/axe.min.js").read_text()
SIZES = {"phone": (360, 740), "tablet": (768, 1024), "desktop": (1440, 900)}
SCHEMES = ("light", "dark")


def pages(full: Full) -> dict[str, str]:
    """Path of every page, in each of its states, by name. A new page is a row here."""
    return {
        "runs": "/",
        "runs-none-found": "/?words=nothing+is+called+that",
        "run-training": full.page_of("portraits"),
        "run-finished": full.page_of("cyanotype"),
        "run-stopped": full.page_of("watercolour"),
        "run-failed": full.page_of("line-art"),
        "run-lost": full.page_of("cats-rank-32"),
        "not-found": "/runs/none",
        "compare-choice": "/compare",
        "compare": f"/compare?{'&'.join(f'run={full.page_of(name)[6:]}' for name in full.folders)}&step=200",
        "try-choice": f"/try?run={full.page_of('cyanotype')[6:]}",
        "try": f"/try/{full.page_of('cyanotype')[6:]}/1",
        "try-waiting": f"/try/{full.page_of('cyanotype')[6:]}/2",
        "try-none": f"/try?run={full.page_of('portraits')[6:]}",
        "new": "/new?start=flux1_dev_lora",
        "data-sets": "/data",
        "settings": "/settings",
        "welcome": "/welcome",
    }


RESTS = """
from trainer.cli import main
from trainer.ui import looking
looking._STILL = ((0.0, 1e9),)
main()
"""
"""The command with streams that look once and then rest for years."""
SHOWN = ("runs", "run-training", "run-failed", "compare", "new", "try", "settings", "welcome")
"""Pages whose pictures are in the documents; the first two are there as a phone has them too. A data set's is
taken where its tests are.
"""


def opened(page: Page, url: str) -> None:
    """Load a page, and wait until its stream has filled it where it has one, and its curves and its plan are
    there.
    """
    page.goto(url)
    if page.locator("#plan").count():
        page.wait_for_selector("#decisions tbody tr", state="attached")
    if page.locator(".charts").count():
        until(page, "studio.points.length > 0")
        page.wait_for_selector(".charts canvas")
    if page.locator("#compared").count():
        page.wait_for_selector("#compared canvas")


def test_a_link_opens_a_session_and_leaves_no_token(new_context: NewContext, full: Full) -> None:
    """A1."""
    studio = full.studio
    page = new_context().new_page()
    page.goto(
        studio.link or f"{studio.url}/login#token={(studio.runs / '.studio/token').read_text().strip()}"
    )
    page.wait_for_url(f"{studio.url}/welcome")
    assert page.get_by_role("heading", name="Welcome: this machine", exact=True).is_visible()
    left = page.evaluate("location.href + document.cookie + document.documentElement.outerHTML")
    assert "token=" not in left and (studio.runs / ".studio/token").read_text().strip() not in left
    page.go_back()
    assert "token=" not in page.url


def test_without_a_session_there_is_a_login_and_wrong_tokens_wait(
    new_context: NewContext, empty: Running, watched: Watched
) -> None:
    """A1."""
    watched.allowed += ["status of 401", "status of 429"]
    page = new_context().new_page()
    answer = page.goto(f"{empty.url}/runs/some")
    assert answer is not None and answer.status == 401
    for _ in range(FREE_TRIES):
        page.get_by_label("Token").fill("wrong")
        with page.expect_navigation():  # a click does not wait for it
            page.get_by_role("button", name="Open the studio").click()
        assert page.get_by_role("alert").inner_text() == "That is not the token of this studio."
    page.get_by_label("Token").fill((empty.runs / ".studio/token").read_text())
    page.get_by_role("button", name="Open the studio").click()
    page.get_by_text("Too many wrong tokens: wait").wait_for()


def test_a_tab_that_rests_is_current_once_somebody_turns_to_it(
    new_context: NewContext, start: Callable[..., Running], tmp_path: Path
) -> None:
    """By the focus, which the window of another program had, and by its being shown again."""
    studio = start(tmp_path, code=RESTS)
    made.make_run(studio.runs / "cats", done=100)
    page = logged_in(new_context(), studio)
    row = page.locator("[data-row]")
    expect(row).to_have_text(["cats"])
    until(page, "!!document.getElementById('home')._htmx?.sse?.reader")
    page.wait_for_timeout(2500)  # its first look is over; a stream that did not rest would have another
    made.make_run(studio.runs / "dogs", done=100)
    page.wait_for_timeout(2500)
    expect(row).to_have_text(["cats"])
    page.evaluate("dispatchEvent(new Event('focus'))")
    expect(row).to_have_text(["dogs", "cats"])
    for hidden in ("true", "false"):
        page.evaluate(
            f"Object.defineProperty(document, 'hidden', {{configurable: true, value: {hidden}}});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        if hidden == "true":
            until(page, "!document.getElementById('home')._htmx.sse.reader")
            made.make_run(studio.runs / "owls", done=100)
    expect(row).to_have_text(["owls", "dogs", "cats"])


def test_every_line_is_seen_once_over_reconnects_and_a_resume(
    new_context: NewContext, start: Callable[..., Running], tmp_path: Path
) -> None:
    """A12: a tab that is hidden closes its stream, and asks for the rest when it is seen again."""
    studio = start(tmp_path)
    folder = made.make_run(studio.runs / "cats", done=100)
    with made.running(folder, tmp_path / "rt", step=100, steps=300) as status:
        page = logged_in(new_context(), studio)
        opened(page, f"{studio.url}/runs/{identifier(studio.runs, folder)}")

        def steps() -> list[int]:
            return [row["step"] for row in read_metrics(folder / "metrics.jsonl")]

        def seen() -> list[int]:
            until(page, f"studio.points.length >= {len(steps())}")
            return page.evaluate("studio.points.map((row) => row[0])")

        assert seen() == steps()
        for time in range(3):
            first = 110 + 30 * time
            page.evaluate(
                "Object.defineProperty(document, 'hidden', {configurable: true, value: true});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            until(page, "!document.getElementById('job')._htmx.sse.reader")
            made.write_metrics(folder, range(first, first + 30, 10))
            page.evaluate(
                "Object.defineProperty(document, 'hidden', {configurable: true, value: false});"
                "document.dispatchEvent(new Event('visibilitychange'))"
            )
            assert seen() == steps()
        log = MetricsLog(folder / "metrics.jsonl")
        log.truncate_after(100)
        log.close()
        made.write_metrics(folder, range(105, 205, 5))
        until(page, "studio.points.some((row) => row[0] === 200)")
        until(page, f"studio.points.length === {len(steps())}")
        assert page.evaluate("studio.points.map((row) => row[0])") == steps()
        status.beat(made.Phase.SAVE, step=200, total=300)
        page.wait_for_selector(".state:has-text('saving')")


def test_curves_of_a_very_long_run_are_drawn(new_context: NewContext, full: Full) -> None:
    """More values than a function takes arguments; the stream's event brings them. A dot a value would take
    one to two minutes.
    """
    page = logged_in(new_context(), full.studio)
    opened(page, f"{full.studio.url}{full.page_of('cyanotype')}")
    assert page.locator(".chart[data-line]:visible").count() == 2
    began = time.monotonic()
    page.evaluate(
        "(job) => {"
        " const rows = Array.from({ length: 1.3e5 }, (_, step) => [1e6 + step, 0.1, null, 1, 1, 1, 1]);"
        " job.dispatchEvent(new CustomEvent('points', { detail: { data: JSON.stringify(rows) } })); }",
        page.query_selector("#job"),
    )
    until(page, "document.querySelector('.chart.wide .u-over') !== null")
    assert time.monotonic() - began < 60
    page.wait_for_timeout(2000)  # a fault of drawing is one of the page


@pytest.mark.parametrize("size", SIZES)
def test_pages_fit_and_their_targets_are_large_enough(new_context: NewContext, full: Full, size: str) -> None:
    """A19: nothing scrolls sideways but what has a bar of its own; targets are 24 by 24 pixels at least, but
    links inside of a line.
    """
    width, height = SIZES[size]
    page = logged_in(new_context(viewport={"width": width, "height": height}), full.studio)
    for name, path in pages(full).items():
        if name == "not-found":
            continue  # a 404 is an error in the console
        opened(page, full.studio.url + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        small = page.evaluate(
            """() => [...document.querySelectorAll("a, button, input, select, summary")]
                .filter((one) => one.checkVisibility() && !one.closest(".hidden, .skip"))
                .filter((one) => getComputedStyle(one).display !== "inline")
                .map((one) => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
                .filter(([, box]) => box.width && (box.width < 24 || box.height < 24))
                .map(([text, box]) => `${text} ${box.width}x${box.height}`)"""
        )
        assert not small, name


def findings(page: Page) -> list[str]:
    """Rules that axe finds broken (WCAG 2.2 AA), and where."""
    page.evaluate(AXE)
    tags = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
    found = page.evaluate("(tags) => axe.run(document, {runOnly: tags}).then((all) => all.violations)", tags)
    return [
        f"{one['id']}: {node['html'][:120]} {node['failureSummary'][:300]}"
        for one in found
        for node in one["nodes"]
    ]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_nothing(
    new_context: NewContext, full: Full, empty: Running, watched: Watched, scheme: str
) -> None:
    """A20: every page, full, empty and with errors, and the login."""
    watched.allowed += ["status of 404"]
    context = new_context(color_scheme=scheme, viewport={"width": 1440, "height": 900})
    page = context.new_page()
    page.goto(f"{full.studio.url}/login")
    assert not findings(page)
    page = logged_in(context, full.studio)
    for name, path in pages(full).items():
        opened(page, full.studio.url + path)
        closed = page.locator("details:not([open]) > summary")
        while closed.count():
            closed.first.click()
        assert not findings(page), name
    assert not findings(logged_in(new_context(color_scheme=scheme), empty))


def test_a_slider_leads_through_the_steps_of_a_prompt(new_context: NewContext, full: Full) -> None:
    """By keys; a preview that comes meanwhile is its next step."""
    page = logged_in(new_context(), full.studio)
    folder, address = full.folders["portraits"], full.page_of("portraits")
    opened(page, full.studio.url + address)
    slider, picture, told = (
        page.get_by_label("Step", exact=True),
        page.locator(".slide img"),
        page.locator(".slide output"),
    )

    def shown(prompt: int, step: int) -> None:
        until(
            page, f"document.querySelector('.slide output').textContent === '{PROMPTS[prompt]}, step {step}'"
        )
        assert (
            picture.get_attribute("src") == f"{full.studio.url}{address}/previews/{step}/{prompt}?size=large"
        )
        assert picture.get_attribute("alt") == slider.get_attribute("aria-valuetext") == told.inner_text()
        until(page, "document.querySelector('.slide img').naturalWidth > 0")

    slider.scroll_into_view_if_needed()
    shown(0, 100)
    slider.press("Home")
    shown(0, 0)
    page.get_by_label("Prompt", exact=True).select_option(PROMPTS[2])
    shown(2, 0)
    slider.press("ArrowRight")
    shown(2, 100)
    made.samples(folder, 150, drawn(0.8), PROMPTS)
    page.get_by_role("columnheader", name="Step 150").wait_for()
    shown(2, 150)  # the newest one was shown, and is
    slider.press("Home")
    made.samples(folder, 160, drawn(0.9), PROMPTS)
    page.get_by_role("columnheader", name="Step 160").wait_for()
    shown(2, 0)
    shutil.rmtree(folder / "samples/step-000150")
    (folder / "samples/step-000150.png").unlink()
    shutil.rmtree(folder / "samples/step-000160")
    (folder / "samples/step-000160.png").unlink()


def test_without_scripts_one_can_look_and_stop(new_context: NewContext, full: Full) -> None:
    """A22; the start is on the page of a new run."""
    page = new_context(java_script_enabled=False).new_page()
    page.goto(full.studio.url + "/login")
    page.get_by_label("Token").fill((full.studio.runs / ".studio/token").read_text().strip())
    page.get_by_role("button", name="Open the studio").click()
    page.get_by_role("link", name="Runs", exact=True).click()
    page.get_by_role("link", name="portraits").first.click()
    page.get_by_text("Show numbers").click()
    rows = page.locator("table:has(caption) tbody tr")
    last = read_metrics(full.folders["portraits"] / "metrics.jsonl")[-1]
    assert rows.first.locator("th").inner_text() == str(last["step"])
    page.get_by_text("step 180/300").wait_for()
    assert page.locator(".strip img").count() == 2 * len(PROMPTS) and not page.locator(".slide").is_visible()
    page.get_by_role("link", name="Warnings").click()
    page.get_by_text("No line of this level.").wait_for()
    page.get_by_role("button", name="Stop and save").click()
    page.get_by_text("Asked to stop").wait_for()
    assert control.take(full.runtime, [Order.STOP]) == (Order.STOP,)
    control.forget(full.runtime)
    page.goto(full.studio.url)
    page.get_by_role("button", name="Dark").click()
    page.locator("html[data-theme=dark]").wait_for()


def test_a_slider_wipes_between_without_and_with(
    new_context: NewContext, full: Full, watched: Watched
) -> None:
    """And without scripts both pictures are there, and a form that is wrong is told."""
    watched.allowed += ["status of 422"]
    paths = pages(full)
    page = logged_in(new_context(), full.studio)
    page.goto(full.studio.url + paths["try"])
    page.get_by_role("link", name=f"{PROMPTS[1]}, step 100: show it large").click()
    page.get_by_role("heading", name=PROMPTS[1], exact=True).wait_for()
    page.get_by_role("slider").fill("30")
    shown = "getComputedStyle(document.querySelector('.over img')).clipPath"
    assert page.evaluate(shown) == "inset(0px 0px 0px 30%)"
    page = new_context(java_script_enabled=False).new_page()
    page.goto(full.studio.url + "/login")
    page.get_by_label("Token").fill((full.studio.runs / ".studio/token").read_text().strip())
    page.get_by_role("button", name="Open the studio").click()
    page.goto(full.studio.url + paths["try"])
    assert page.locator(".viewer figure:visible").count() == 2 and not page.get_by_role("slider").count()
    page.goto(full.studio.url + paths["try-choice"])
    page.get_by_label("Prompts").fill("my own owl")
    page.get_by_role("button", name="Draw").click()
    page.get_by_text("cannot be read as safetensors").wait_for()
    assert page.get_by_label("Prompts").input_value() == "my own owl"


def test_a_try_that_is_drawn_leaves_the_slider_as_it_is(new_context: NewContext, full: Full) -> None:
    place = full.folders["cyanotype"] / "tries/2"
    page = logged_in(new_context(), full.studio)
    page.goto(full.studio.url + pages(full)["try-waiting"])
    try:
        made.drawn(place, 0, 0, Image.new("RGB", (192, 192), "white"))
        made.drawn(place, 1, 0, Image.new("RGB", (192, 192), "navy"))
        page.get_by_role("slider").wait_for()
        page.get_by_role("slider").fill("30")
        page.get_by_role("slider").focus()
        page.evaluate("window.before = document.activeElement")
        made.drawn(place, 2, 0, Image.new("RGB", (192, 192), "blue"))
        page.get_by_role("link", name=f"{PROMPTS[0]}, step 100: show it large").wait_for()
        assert page.evaluate("document.activeElement === before && before.matches('.wiper')")
        shown = "getComputedStyle(document.querySelector('.over img')).clipPath"
        assert (page.get_by_role("slider").input_value(), page.evaluate(shown)) == (
            "30",
            "inset(0px 0px 0px 30%)",
        )
    finally:
        for column in range(3):
            shutil.rmtree(place / str(column), ignore_errors=True)


def test_keys_lead_through_the_runs(new_context: NewContext, full: Full) -> None:
    page = logged_in(new_context(), full.studio)
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("k")
    page.keyboard.press("Enter")
    page.wait_for_url(f"{full.studio.url}/runs/**")
    page.keyboard.press("g")
    page.keyboard.press("r")
    page.wait_for_url(f"{full.studio.url}/")
    page.keyboard.press("/")
    page.keyboard.type("water")
    page.keyboard.press("Enter")
    page.wait_for_url("**/?words=water**")
    until(page, "[...document.querySelectorAll('[data-row]')].map((row) => row.textContent) == 'watercolour'")
    page.keyboard.press("Escape")
    page.locator("h1").click()
    page.keyboard.press("?")
    assert page.get_by_role("dialog").is_visible()


def test_the_list_follows_the_queue(new_context: NewContext, full: Full) -> None:
    page = logged_in(new_context(), full.studio)
    jobs = ["cats-rank-8", "cats-rank-16", "cats-rank-64"]
    assert page.locator(".queue .what b").all_text_contents() == jobs, "the last one is a cluster's"
    group = page.locator(".group > details > summary")
    expect(group).to_have_text("cats 2 jobs: 1 waiting, 1 held")
    group.click()
    page.get_by_role("button", name="Down: cats-rank-8").click()
    until(page, "document.querySelector('.queue .what b')?.textContent === 'cats-rank-16'")
    # the page was loaded anew, and what was open is open
    page.get_by_role("button", name="Up: cats-rank-8").click()
    until(page, "document.querySelector('.queue .what b')?.textContent === 'cats-rank-8'")


def test_a_wait_goes_on_in_the_page_that_comes(new_context: NewContext, empty: Running) -> None:
    """A form's answer that loads the page anew while it is looked at is no fault."""
    page = logged_in(new_context(), empty)
    page.evaluate("setTimeout(() => location.assign('/settings'), 50)")
    until(page, "new Promise((told) => setTimeout(() => told(location.pathname === '/settings'), 500))")


def test_a_job_is_given_another_gpu_and_the_lanes_follow(new_context: NewContext, full: Full) -> None:
    page = logged_in(new_context(), full.studio)
    lanes = page.locator(".lanes tr")
    assert lanes.all_inner_texts() == [
        "GPU 0\t\ncats-rank-8, next; free in about 40 min",
        "GPU 1\t\nin use by PID 4711; nobody knows when it is free",
    ]
    page.locator(".group > details > summary").click()
    page.get_by_text("Choose GPUs").first.click()
    page.get_by_label("GPU 1").first.check()
    Local(folder=full.studio.runs.parent / "queue").hold("3")
    until(page, "document.querySelectorAll('.queue .state.paused').length === 2")
    assert page.get_by_label("GPU 1").first.is_checked(), "what is chosen and open stays so"
    page.get_by_role("button", name="Wait for these GPUs: cats-rank-8").click()
    expect(page.locator(".how").first).to_contain_text("waits for GPU 1, in use by PID 4711")
    assert not lanes.count(), "nobody knows when"
    local = Local(folder=full.studio.runs.parent / "queue")
    local.assign("1", ())
    local.release("3")


def contrast(*colours: str) -> float:
    """Ratio of two opaque colours as WCAG 2.2 counts it."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in re.findall(r"\d+", colour)]
        assert len(parts) == 3, colour
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    low, high = sorted(map(luminance, colours))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("name", "field"), [("runs", "run"), ("new", "depth"), ("new", "preset")])
def test_a_box_is_seen_whether_it_is_ticked_or_not(
    new_context: NewContext, full: Full, scheme: str, name: str, field: str
) -> None:
    """By what axe does not look at: the edge of an empty one, and the face of a ticked one and its mark."""
    page = logged_in(new_context(color_scheme=scheme), full.studio)
    opened(page, full.studio.url + pages(full)[name])
    box = page.locator(f"main input[name={field}]").last
    look = """(box) => { const is = getComputedStyle(box), mark = getComputedStyle(box, "::before");
      const behind = [...document.querySelectorAll(".card"), document.body].find((one) => one.contains(box));
      return [is.borderTopColor, is.backgroundColor, mark.backgroundColor, mark.visibility,
        getComputedStyle(behind).backgroundColor]; }"""
    assert not box.is_checked()
    edge, face, _, mark, behind = box.evaluate(look)
    assert contrast(edge, behind) >= 3 and contrast(edge, face) >= 3 and mark == "hidden"
    box.check()
    _, face, mark, shown, behind = box.evaluate(look)
    assert contrast(face, behind) >= 3 and contrast(face, mark) >= 3 and shown == "visible"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_pictures_of_the_documents_are_of_these_pages(
    new_context: NewContext, full: Full, scheme: str
) -> None:
    """A25, as `require_picture`."""
    for size in ("desktop", "phone"):
        width, height = SIZES[size]
        page = logged_in(
            new_context(viewport={"width": width, "height": height}, color_scheme=scheme), full.studio
        )
        for name in SHOWN if size == "desktop" else SHOWN[:2]:
            opened(page, full.studio.url + pages(full)[name])
            require_picture(page, f"studio-{name}-{size}-{scheme}.png", full.studio.runs.parent)


TRAINS = """
import sys, time
from pathlib import Path
from tests.unit.ui import made
folder, runtime = map(Path, sys.argv[1:])
with made.running(folder, runtime, step=100, steps=300):
    print("trains", flush=True)
    time.sleep(3600)
"""


def test_what_was_killed_is_told_and_runs_outlive_the_studio(
    new_context: NewContext, start: Callable[..., Running], tmp_path: Path, watched: Watched
) -> None:
    """A14: kill -9 of the studio, of a run, and a start of the machine; each is a word on the open page."""
    watched.allowed += ["ERR_CONNECTION", "ERR_INCOMPLETE_CHUNKED_ENCODING", "htmx:(sse:)?error"]
    studio = start(tmp_path)
    folder = made.make_run(studio.runs / "cats", done=100)
    made.checkpoint(folder, 100)
    words = [sys.executable, "-c", TRAINS, str(folder), str(tmp_path / "rt")]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None and run.stdout.readline() == "trains\n"
        page = logged_in(new_context(), studio)
        path = f"/runs/{identifier(studio.runs, folder)}"
        page.goto(studio.url + path)
        page.wait_for_selector("#live-part .state:has-text('training')")
        away = page.locator("#away", has_text="The studio does not answer")
        expect(page.locator("#away")).to_be_hidden()
        studio.process.kill()
        studio.process.wait()
        assert run.poll() is None, "the run goes on"
        expect(away).to_be_visible()
        again = start(tmp_path, "--port", studio.url.rpartition(":")[2])
        assert not again.link, "the token is the old one, and so is the session"
        expect(away).to_be_hidden()
        page.wait_for_selector("#live-part .state:has-text('training')")
        run.kill()
        page.wait_for_selector("#live-part .state:has-text('lost')")
        assert page.get_by_role("button", name="Resume").is_visible()
    # a run of another boot: its locks are gone, and its process's number may be somebody else's
    record = json.loads((folder / "process.json").read_text())
    (folder / "process.json").write_text(json.dumps({**record, "boot": "another", "supervisor": os.getpid()}))
    page.reload()
    assert page.locator("#live-part .state").inner_text() == "lost"
