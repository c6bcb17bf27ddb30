"""The Data set page in Chromium: uploads, captions, conflicts, keys, and a set of ten thousand pictures."""

from __future__ import annotations

import base64
import fcntl
import io
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import BrowserContext, Page, Route, expect

from tests.browser.conftest import ROOT, Running, Watched, logged_in, require_picture
from tests.browser.test_pages import findings
from tests.unit.data.pictures import bomb, encoded, picture, write_pair

pytestmark = pytest.mark.browser
Start = Callable[..., Running]
Contexts = Callable[..., BrowserContext]


PNG = {"mimeType": "image/png"}


def data_set(studio: Running, *captions: str) -> Path:
    """A folder `cats` with a picture for each caption: 0.png, 1.png ..."""
    folder = studio.runs.parent / "data" / "cats"
    folder.mkdir()
    for number, caption in enumerate(captions):
        write_pair(folder, f"{number}.png", caption, seed=number)
    return folder


def shown(page: Page, studio: Running) -> None:
    """Open the data set by its link; the first visit asks for a look and shows what it found."""
    page.goto(f"{studio.url}/data")
    page.get_by_role("link", name="cats", exact=True).click()
    page.wait_for_url("**/data/cats*")  # with its scripts


def looked(page: Page, pictures: int) -> None:
    """Wait for the page that shows so many pictures, all of them opened."""
    expect(page.get_by_role("link", name=f"All {pictures}", exact=True)).to_be_visible(timeout=90_000)
    expect(page.locator("#look")).not_to_contain_text("not looked at")
    expect(page.locator("#look")).not_to_contain_text("Looking")
    # the page that is loaded again shows what was found; its scripts follow
    expect(page.locator("[data-reload]")).to_have_count(0)
    page.wait_for_load_state()


def written(page: Page, path: Path, text: str) -> None:
    """Wait for a file's text."""
    for _ in range(600):
        if path.read_text() == text:
            break
        page.wait_for_timeout(100)
    assert path.read_text() == text


def drop(page: Page, files: dict[str, bytes]) -> None:
    """Drop files onto the form."""
    carried = page.evaluate_handle(
        """(files) => {
            const all = new DataTransfer();
            for (const [name, bytes] of files)
                all.items.add(new File([Uint8Array.from(atob(bytes), (one) => one.charCodeAt(0))], name));
            return all;
        }""",
        [(name, base64.b64encode(data).decode()) for name, data in files.items()],
    )
    page.dispatch_event("#upload", "drop", {"dataTransfer": carried})


def test_200_pictures_with_four_bad_ones_are_told_one_by_one(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """A9, by the file field for the good ones, dropped onto the page for the bad."""
    studio = start(tmp_path)
    page = logged_in(new_context(), studio)
    page.goto(f"{studio.url}/data")
    page.get_by_label("Name").fill("cats")
    page.get_by_role("button", name="Make it").click()
    page.wait_for_url("**/data/cats*")  # with its scripts
    files = []
    for number in range(200):
        files.append({"name": f"{number:03}.png", "buffer": encoded(picture(40, 30, number)), **PNG})
        files.append(
            {"name": f"{number:03}.txt", "mimeType": "text/plain", "buffer": f"cat {number}".encode()}
        )
    page.get_by_label("Pictures and captions").set_input_files(files)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#upload-state")).to_contain_text("400 stored, 0 not")
    huge = io.BytesIO()
    Image.new("1", (20_000, 15_000)).save(huge, "PNG")
    bad = {
        "broken.png": encoded(picture(300, 300))[:9000],
        "huge.png": huge.getvalue(),
        "drawing.png": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "../x.png": encoded(picture(seed=999)),
    }
    drop(page, bad)
    expect(page.locator("#upload-state")).to_contain_text("1 stored, 3 not")
    told = {row.split(" ")[0]: row for row in page.locator("#told li").all_inner_texts()}
    assert len(told) == 4
    assert "damaged" in told["broken.png"] and "178 million" in told["huge.png"]
    assert "an SVG drawing" in told["drawing.png"]
    assert page.locator("#told li.bad").count() == 3
    page.get_by_role("link", name="Show them").click()
    looked(page, 201)
    stored = {path.name for path in (tmp_path / "data").rglob("*.png")}
    assert {f"{number:03}.png" for number in range(200)} < stored and len(stored) == 201
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    assert not list(tmp_path.glob("**/huge*")) and not list(tmp_path.glob("**/.upload*"))


def test_what_is_dropped_meanwhile_comes_after_it_and_leaving_is_asked_about(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    studio = start(tmp_path)
    folder = data_set(studio, "a cat")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 1)
    held: list[Route] = []
    page.route("**/upload", lambda route: held.append(route), times=1)
    page.get_by_text("Add pictures").click()
    drop(page, {"a.png": encoded(picture(seed=1)), "broken.png": encoded(picture(300, 300))[:9000]})
    state = page.locator("#upload-state")
    expect(state).to_have_text("0 of 2")
    drop(page, {"b.png": encoded(picture(seed=2))})
    asked: list[str] = []
    page.once("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    with page.expect_event("dialog"):
        page.evaluate("setTimeout(() => location.reload())")
    assert asked == ["beforeunload"] and len(held) == 1  # the person stayed, and one part is on its way
    held[0].continue_()
    expect(state).to_contain_text("2 stored, 1 not")
    expect(page.locator("#told li")).to_have_count(3)
    assert sorted(path.name for path in folder.glob("*.png")) == ["0.png", "a.png", "b.png"]
    page.reload()  # and nothing is asked


def test_a_folder_is_dropped_as_the_files_in_it(start: Start, new_context: Contexts, tmp_path: Path) -> None:
    """By the browser's own drag and drop, sub-folders too; a drop beside the field is none."""
    studio = start(tmp_path)
    folder = data_set(studio)
    dropped = tmp_path / "dropped"
    (dropped / "inner").mkdir(parents=True)
    write_pair(dropped, "a.png", "a cat", seed=1)
    write_pair(dropped / "inner", "b.png", "a bee", seed=2)
    page = logged_in(new_context(), studio)
    shown(page, studio)
    expect(page.locator("#upload")).to_be_visible()
    protocol = page.context.new_cdp_session(page)

    def drop(target: str) -> None:
        box = page.locator(target).bounding_box()
        assert box
        place = {"x": box["x"] + 20, "y": box["y"] + 10}
        data = {"items": [], "files": [str(dropped)], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            protocol.send("Input.dispatchDragEvent", {"type": kind, **place, "data": data})

    drop("h1")
    assert page.url.startswith(f"{studio.url}/data/") and not list(folder.iterdir())
    drop("#upload")
    expect(page.locator("#upload-state")).to_contain_text("4 stored, 0 not")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        path.name: path.read_bytes() for path in dropped.rglob("*.*")
    }


def test_a_caption_is_edited_in_place_undone_and_kept_from_others(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """A10, by keys: Ctrl-S saves, leaving the field saves, an edit on the disk meanwhile is shown."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat", "a bee")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 2)
    field, tile = page.get_by_label("Caption of 0.png"), page.locator(".tile").first
    field.fill("a grey <b>cat</b>")
    field.press("Control+s")
    expect(tile.get_by_role("status")).to_have_text("Saved")
    assert (folder / "0.txt").read_text() == "a grey <b>cat</b>\n"
    expect(field).to_be_focused()
    # another program writes meanwhile
    (folder / "0.txt").write_text("a dog")
    field.fill("a white cat")
    field.press("Tab")
    expect(tile.get_by_role("alert")).to_contain_text("a dog")
    assert (folder / "0.txt").read_text() == "a dog" and field.input_value() == "a white cat"
    # whoever saves again has seen it
    tile.get_by_role("button", name="Save").click()
    expect(tile.get_by_role("status")).to_have_text("Saved")
    assert (folder / "0.txt").read_text() == "a white cat\n"
    page.reload()
    page.get_by_role("button", name="Undo: caption of 0.png").click()
    expect(page.get_by_label("Caption of 0.png")).to_have_value("a dog")
    assert (folder / "0.txt").read_text() == "a dog" and (folder / "1.txt").read_text() == "a bee"


def test_selected_pictures_go_to_the_trash_and_back(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """The boxes stand in the page before the form that they belong to."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat", "a bee", "a cow")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 3)
    for name in ("0.png", "2.png"):
        page.get_by_label(f"Select {name}").check()
    page.get_by_role("button", name="Move the selected ones to the trash").click()
    looked(page, 1)
    assert {path.name for path in folder.iterdir()} == {"1.png", "1.txt"}
    page.get_by_role("button", name="Undo: 2 deleted").click()
    looked(page, 3)
    assert len(list(folder.iterdir())) == 6


def test_a_page_shows_what_became_of_a_change(start: Start, new_context: Contexts, tmp_path: Path) -> None:
    """M7: no fault stays beside a saved caption, or above files that were stored, and nothing typed goes."""
    studio = start(tmp_path)
    folder = data_set(studio)
    page = logged_in(new_context(), studio)
    shown(page, studio)
    word = page.get_by_text("No picture is here yet")
    expect(word).to_be_visible()
    assert page.locator(".problems").count() == 0
    files = [{"name": f"{number}.png", "buffer": encoded(picture(seed=number)), **PNG} for number in (0, 1)]
    page.get_by_label("Pictures and captions").set_input_files(files)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator("#upload-state")).to_contain_text("2 stored, 0 not")
    expect(word).to_have_count(0)
    expect(page.get_by_role("button", name="New run with this set")).to_be_visible()
    page.get_by_role("link", name="Show them").click()
    looked(page, 2)
    tile, other = page.locator(".tile").first, page.locator(".tile").nth(1)
    expect(tile).to_contain_text("the image has no caption")
    expect(page.get_by_role("link", name="No caption 2", exact=True)).to_be_visible()
    page.get_by_label("Caption of 0.png").fill("a cat")
    page.get_by_label("Caption of 1.png").fill("half of a")  # leaving the other saves it
    expect(tile.get_by_role("status")).to_have_text("Saved")
    expect(tile).not_to_contain_text("Cannot be used")
    expect(tile).not_to_contain_text("the image has no caption")
    expect(other).to_contain_text("the image has no caption")
    expect(page.get_by_role("link", name="No caption 1", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Undo: caption of 0.png")).to_be_visible()
    expect(page.get_by_label("Caption of 1.png")).to_have_value("half of a")
    assert (folder / "0.txt").read_text() == "a cat\n" and not (folder / "1.txt").exists()
    # the filter of pictures without one shows it no longer
    page.get_by_label("Caption of 1.png").fill("")
    page.get_by_role("link", name="No caption").click()
    expect(page.locator(".tile")).to_have_count(1)  # of the page that is loaded now
    page.get_by_label("Caption of 1.png").fill("a bee")
    page.get_by_label("Caption of 1.png").press("Control+s")
    expect(page.locator(".tile .state")).to_have_count(0)
    expect(page.get_by_role("link", name="No caption 0", exact=True)).to_be_visible()


def test_a_save_waits_for_the_one_before_it(start: Start, new_context: Contexts, tmp_path: Path) -> None:
    """Two quick ones are no conflict with each other; one with the disk is shown before anything is sent."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 1)
    field, tile = page.get_by_label("Caption of 0.png"), page.locator(".tile").first

    def save_two(meanwhile: str = "") -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # the studio writes when it is given back
        for text in ("one", "two"):
            field.fill(text)
            field.press("Control+s")
        if meanwhile:
            (folder / "0.txt").write_text(meanwhile)
        os.close(descriptor)

    save_two()
    expect(tile.get_by_role("status")).to_have_text("Saved")
    written(page, folder / "0.txt", "two\n")
    expect(tile.get_by_role("alert")).to_have_count(0)
    assert field.input_value() == "two"
    save_two("a dog")
    expect(tile.get_by_role("alert")).to_contain_text("a dog")
    page.wait_for_timeout(500)
    assert (folder / "0.txt").read_text() == "a dog" and field.input_value() == "two"


def test_a_caption_that_was_not_saved_stays_and_is_told(
    start: Start, new_context: Contexts, watched: Watched, tmp_path: Path
) -> None:
    """Without a network, and without a session: no page takes the place of what was typed."""
    watched.allowed += ["ERR_INTERNET_DISCONNECTED", "Failed to fetch", "status of 401"]
    studio = start(tmp_path)
    folder = data_set(studio, "a cat")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 1)
    field, tile = page.get_by_label("Caption of 0.png"), page.locator(".tile").first
    page.context.set_offline(True)
    field.fill("a grey cat")
    field.press("Control+s")
    expect(tile.get_by_role("alert")).to_contain_text("does not answer")
    page.context.set_offline(False)
    field.press("Tab")
    expect(tile.get_by_role("status")).to_have_text("Saved")
    expect(tile.get_by_role("alert")).to_have_count(0)
    assert (folder / "0.txt").read_text() == "a grey cat\n"
    page.context.clear_cookies()
    field.fill("a white cat")
    field.press("Control+s")
    expect(tile.get_by_role("alert")).to_contain_text("answered 401")
    assert field.input_value() == "a white cat" and (folder / "0.txt").read_text() == "a grey cat\n"


def test_a_field_never_shows_a_text_that_the_disk_has_not(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """Nor does a browser fill in what it remembers of a page: nobody would save it or see what is newer."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat", "a bee")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 2)
    asked: list[str] = []
    field = page.get_by_label("Caption of 0.png")
    field.click()
    page.keyboard.type("a black ")
    page.once("dialog", lambda dialog: (asked.append(dialog.type), dialog.dismiss()))
    with page.expect_event("dialog"):
        page.evaluate("setTimeout(() => location.reload())")
    assert asked == ["beforeunload"] and "a black " in field.input_value()  # the person stayed
    page.once("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
    page.reload()
    assert asked == ["beforeunload"] * 2
    expect(field).to_have_value("a cat")
    field.fill("a grey cat")
    page.get_by_role("link", name="Runs").click()  # leaving the field saves it, on the way out too
    expect(page).to_have_title(re.compile("Runs"))
    written(page, folder / "0.txt", "a grey cat\n")
    assert len(asked) == 2
    page.go_back()
    expect(field).to_have_value("a grey cat")
    field.fill("a cat " * 12_000)  # more than a browser sends on after its page has gone
    field.press("Control+s")
    expect(page.locator(".tile").first.get_by_role("alert")).to_contain_text("more than 16384 bytes")
    page.once("dialog", lambda dialog: (asked.append(dialog.type), dialog.accept()))
    page.get_by_role("link", name="Runs").click()
    expect(page).to_have_title(re.compile("Runs"))
    assert len(asked) == 3
    (folder / "0.txt").write_text("a white cat")
    page.go_back()
    expect(field).to_have_value("a white cat")


def test_the_crop_is_drawn_where_it_is_cut(start: Start, new_context: Contexts, tmp_path: Path) -> None:
    """A11: the frame lies on the screen over the middle of the picture, as long as the bucket is."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat")
    picture(400, 150).save(folder / "0.png")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 1)
    page.get_by_role("link", name="0.png").click()
    frame, whole = page.locator("rect.crop"), page.locator("svg.frame image")
    inner, outer = frame.bounding_box(), whole.bounding_box()
    assert inner and outer
    width, height = map(int, page.locator("dd a[href*=bucket]").inner_text().split("\u00d7"))
    assert inner["width"] / inner["height"] == pytest.approx(width / height, rel=0.02)
    assert inner["x"] - outer["x"] == pytest.approx(
        outer["x"] + outer["width"] - inner["x"] - inner["width"], abs=1.5
    )
    assert inner["height"] == pytest.approx(outer["height"], abs=3) and inner["width"] < outer["width"] - 10
    assert page.evaluate("document.querySelector('svg.frame image').getBBox().width") == 400


def test_without_scripts_a_set_is_looked_at_and_edited(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """A22 of this page: forms post, links link."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat")
    logged = new_context()
    logged_in(logged, studio)
    page = new_context(java_script_enabled=False, storage_state=logged.storage_state()).new_page()
    shown(page, studio)
    page.get_by_role("button", name="Look again").click()
    for _ in range(100):
        if page.get_by_label("Caption of 0.png").count():
            break
        page.wait_for_timeout(200)
        page.reload()
    page.get_by_label("Caption of 0.png").fill("a dog")
    page.get_by_role("button", name="Save").click()
    written(page, folder / "0.txt", "a dog\n")
    page.goto(page.url.partition("/pictures")[0])
    page.get_by_text("Add pictures").click()
    file = {"name": "1.png", "buffer": encoded(picture(seed=9)), **PNG}
    page.get_by_label("Pictures and captions").set_input_files(file)
    page.get_by_role("button", name="Upload").click()
    expect(page.locator(".told li")).to_have_text(re.compile(r"1\.png\s+stored"))
    assert (folder / "1.png").exists()


@pytest.mark.slow
def test_ten_thousand_pictures_are_a_grid_of_pages(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """A23: all are counted, found and reached, and few are in the page at a time."""
    studio = start(tmp_path)
    folder = data_set(studio)
    for number in range(10_000):
        Image.new("RGB", (16, 16), (number % 97, 50, 7)).save(folder / f"{number:05}.png")
        (folder / f"{number:05}.txt").write_text(f"thing {number}")
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 10_000)
    assert page.locator(".tile").count() == 60
    expect(page.get_by_text("Page 1 of 167").first).to_be_visible()
    page.get_by_role("link", name="Next").first.click()
    expect(page.locator(".tile .name").first).to_have_text("00060.png")
    page.get_by_role("searchbox").fill("thing 9999")
    page.get_by_role("searchbox").press("Enter")
    expect(page.locator(".tile .name")).to_have_text(["09999.png"])
    expect(page.locator(".tile img")).to_have_js_property("naturalWidth", 16)


def test_every_page_fits_its_screen_and_axe_finds_nothing(
    start: Start, new_context: Contexts, tmp_path: Path
) -> None:
    """A19 and A20 of this page, full, empty and with faults, light and dark."""
    studio = start(tmp_path)
    folder = data_set(studio, "a cat " * 90, "a_very_long_word" * 30)
    (folder / "broken.png").write_bytes(bomb())
    (folder / f"{'long' * 40}.png").write_bytes(encoded(picture(seed=5)))
    (tmp_path / "data/empty").mkdir()
    page = logged_in(new_context(), studio)
    shown(page, studio)
    looked(page, 4)
    grid = page.url.partition("?")[0]
    links = [link.get_attribute("href") for link in page.locator("a.look").all()]
    page.goto(f"{studio.url}/data")
    links.append(page.get_by_role("link", name="empty").get_attribute("href"))
    addresses = [f"{studio.url}/data", grid, f"{grid}/replace?find=cat&replace=dog"]
    addresses += [f"{studio.url}{link}" for link in links]
    assert len(addresses) == 8
    for address in addresses:
        page.goto(address)
        page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        for width, height in ((360, 740), (768, 1024), (1440, 900)):
            page.set_viewport_size({"width": width, "height": height})
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (address, width)
            small = page.evaluate(SMALL_TARGETS)
            assert not small, (address, width, small)
            assert not page.evaluate(CUT_HINTS), (address, width)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert not findings(page), (address, scheme)


@pytest.mark.parametrize("scheme", ("light", "dark"))
def test_the_documents_picture_of_a_data_set_is_of_this_page(
    start: Start, new_context: Contexts, tmp_path: Path, scheme: str
) -> None:
    studio = start(tmp_path)
    folder = studio.runs.parent / "data" / "cyanotypes"
    shutil.copytree(ROOT / "examples/style", folder)
    (folder / "bicycle.txt").unlink()  # a problem is shown too
    page = logged_in(new_context(viewport={"width": 1440, "height": 900}, color_scheme=scheme), studio)
    page.goto(f"{studio.url}/data")
    page.get_by_role("link", name="cyanotypes", exact=True).click()
    looked(page, len(list(folder.glob("*.png"))))
    page.evaluate("Promise.all([...document.images].slice(0, 10).map((one) => one.decode()))")
    require_picture(page, f"studio-data-set-desktop-{scheme}.png", tmp_path)


SMALL_TARGETS = """() => [...document.querySelectorAll('main :is(a, button, input, select, summary)')]
    .filter((one) => one.offsetParent && !one.closest('p, dd, label'))
    .map((one) => [one.outerHTML.slice(0, 80), one.getBoundingClientRect()])
    .filter(([, box]) => box.width > 0 && (box.width < 24 || box.height < 24))
    .map(([text, box]) => `${text} ${box.width}x${box.height}`)"""
"""Targets under 24 pixels; links in running text may be (WCAG 2.5.8)."""
CUT_HINTS = """() => [...document.querySelectorAll('main input[placeholder]')].filter((one) => {
  const style = getComputedStyle(one), pen = document.createElement('canvas').getContext('2d');
  pen.font = style.font;
  const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
  return one.clientWidth && pen.measureText(one.placeholder).width > room;
}).map((one) => one.placeholder)"""
"""Hints in empty fields that are wider than their field."""
