"""Requests that fail in the middle, as all that a browser has open do when an interface of the network comes
or goes: a page tells it, and is right again by itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.conftest import Full, Running, Watched, logged_in
from tests.browser.test_dataset import data_set, shown
from tests.browser.test_pages import pages
from tests.unit.data.pictures import encoded, picture

pytestmark = pytest.mark.browser
NewContext = Callable[..., BrowserContext]
_CONSOLE = "Failed to load resource|Failed to fetch|htmx|ERR_"


@pytest.fixture(autouse=True)
def lost(watched: Watched) -> None:
    """The console names requests that failed."""
    watched.allowed.append(_CONSOLE)


def broken(page: Page, address: str, times: int, *, arrives: bool = False) -> list[str]:
    """Lose the first requests to an address, or with `arrives` their answers; gives the methods of all that
    came.
    """
    came: list[str] = []

    def answer(route: Route) -> None:
        came.append(route.request.method)
        if len(came) > times:
            route.continue_()
            return
        if arrives:
            route.fetch()
        route.abort("connectionreset")

    page.route(address, answer)
    return came


def test_a_plan_that_was_lost_comes_by_itself(full: Full, new_context: NewContext) -> None:
    page = logged_in(new_context(), full.studio)
    page.goto(f"{full.studio.url}/new?start=flux1_dev_lora")
    away, form = page.locator("#away"), page.locator("#new")
    came = broken(page, "**/new/plan", 4)
    page.locator("[name='train.max_train_steps']").fill("77")
    expect(form).to_have_class("failed")
    expect(away).to_have_text("The studio does not answer: this page shows what was. Runs go on without it.")
    expect(away).to_be_in_viewport()
    expect(page.locator("#live")).to_contain_text("does not answer")
    expect(page.locator("#plan .figures")).to_contain_text("77 steps")
    expect(form).to_have_class("")
    expect(away).to_be_hidden()
    assert came == ["POST"] * 5


def test_one_request_that_was_lost_is_not_worth_a_word(full: Full, new_context: NewContext) -> None:
    page = logged_in(new_context(), full.studio)
    page.goto(f"{full.studio.url}/new?start=flux1_dev_lora")
    said: list[str] = []
    page.expose_function("said", lambda text: said.append(text))
    page.evaluate(
        "new MutationObserver(() => away.hidden || said(away.textContent)).observe(away, {attributes: true})"
    )
    came = broken(page, "**/new/plan", 1)
    page.locator("[name='train.max_train_steps']").fill("77")
    expect(page.locator("#plan .figures")).to_contain_text("77 steps")
    assert came == ["POST"] * 2 and not said


def test_a_session_that_ended_is_told_and_asked_for_nothing_more(full: Full, new_context: NewContext) -> None:
    page = logged_in(new_context(), full.studio)
    page.goto(f"{full.studio.url}/new?start=flux1_dev_lora")
    page.context.clear_cookies()
    came = broken(page, "**/new/plan", 0)
    for steps in ("77", "78"):
        page.locator("[name='train.max_train_steps']").fill(steps)
        page.wait_for_timeout(1500)
    expect(page.locator("#away")).to_have_text(
        "The studio answered 401: this page shows what was. Load it again."
    )
    assert came == ["POST"] * 2


@pytest.mark.parametrize("name", ["try-waiting", "run-training", "runs"])
def test_a_page_that_follows_tells_a_silence_and_its_end(
    full: Full, new_context: NewContext, name: str
) -> None:
    page = logged_in(new_context(), full.studio)
    page.route("**/stream*", lambda route: route.abort())
    page.goto(full.studio.url + pages(full)[name])
    page.context.set_offline(True)
    away = page.locator("#away")
    expect(away).to_be_visible()
    expect(away).to_contain_text("does not answer")
    page.unroute("**/stream*")
    page.context.set_offline(False)
    expect(away).to_be_hidden()


def test_a_look_that_was_lost_is_asked_for_again(
    start: Callable[..., Running], new_context: NewContext, tmp_path_factory: pytest.TempPathFactory
) -> None:
    studio = start(tmp_path_factory.mktemp("lost"))
    data_set(studio, "a cat")
    page = logged_in(new_context(), studio)
    asked, news = broken(page, "**/look?wait=1", 2), broken(page, "**/progress?wait=1", 2)
    shown(page, studio)
    expect(page.locator("#away")).to_be_visible()
    expect(page.get_by_role("link", name="All 1", exact=True)).to_be_visible()
    expect(page.locator("#away")).to_be_hidden()
    assert asked == ["POST"] * 3 and (not news or len(news) > 2)


def test_curves_and_pictures_that_were_lost_are_asked_for_again(full: Full, new_context: NewContext) -> None:
    page = logged_in(new_context(), full.studio)
    curves, thumbnails = broken(page, "**/compare/curves?*", 1), broken(page, "**/previews/200/*", 3)
    page.goto(full.studio.url + pages(full)["compare"])
    expect(page.locator("#compared canvas")).to_have_count(1)
    image = page.locator(".strip img").first
    image.scroll_into_view_if_needed()
    whole = "() => [...document.querySelectorAll('.strip img')].every((one) => one.naturalWidth > 0)"
    for _ in range(100):
        for one in page.locator(".strip img").all():
            one.scroll_into_view_if_needed()
        if page.evaluate(whole):
            break
        page.wait_for_timeout(100)
    assert page.evaluate(whole) and len(curves) == 2 and len(thumbnails) > 3


def test_an_upload_goes_on_with_what_was_lost_and_stores_nothing_twice(
    start: Callable[..., Running], new_context: NewContext, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second part arrives and its answer does not; the third one is refused, and goes on by a button."""
    studio = start(tmp_path_factory.mktemp("upload"))
    folder = data_set(studio)
    files = [
        {"name": f"{number:03}.png", "mimeType": "image/png", "buffer": encoded(picture(64, 64, seed=number))}
        for number in range(100)
    ]
    page = logged_in(new_context(), studio)
    shown(page, studio)
    came: list[str] = []

    def answer(route: Route) -> None:
        came.append(route.request.method)
        if len(came) == 2:
            route.fetch()
            route.abort("connectionreset")
        elif len(came) == 4:
            route.fulfill(status=507, content_type="text/html", body="<main>the disk is full</main>")
        else:
            route.continue_()

    page.route("**/upload", answer)
    page.set_input_files("#files", files)
    page.get_by_role("button", name="Upload").click()
    state = page.locator("#upload-state")
    expect(state).to_contain_text("Stopped after 80 of 100: the disk is full")
    page.get_by_role("button", name="Go on").click()
    expect(state).to_contain_text("100 stored, 0 not")
    assert len(came) == 5 and page.locator("#told li").count() == 100
    assert sorted(path.name for path in folder.iterdir()) == [one["name"] for one in files]
