"""The real studio in a process of its own, and Chromium before it: no test may break the policy of its pages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

CHROMIUM = Path("/usr/bin/chromium")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(kw_only=True)
class Running:
    """A studio that answers at `url`."""

    url: str
    link: str
    """With the token; empty where the folder had one."""
    process: subprocess.Popen[str]
    runs: Path


@dataclass
class Watched:
    """Everything that a page must not do, in words."""

    faults: list[str] = field(default_factory=list)
    allowed: list[str] = field(default_factory=list)
    """Patterns of faults that the test asks for, such as the console's line about a 401."""

    @property
    def left(self) -> list[str]:
        """Faults that no pattern allows."""
        return [one for one in self.faults if not any(re.search(pattern, one) for pattern in self.allowed)]


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Running]]:
    """Start a studio over folders of a test; all are ended at the end."""
    started: list[subprocess.Popen[str]] = []

    def begin(folder: Path, *arguments: str) -> Running:
        words = [sys.executable, "-m", "trainer", "ui", "--port", "0"]
        for name in ("runs", "data", "models"):
            (folder / name).mkdir(exist_ok=True, parents=True)
            words += [f"--{name}", str(folder / name)]
        environ = {**os.environ, "TRAINER_RUNTIME_DIR": str(folder / "runtime"), "TRAINER_FACTS": str(FACTS)}
        process = subprocess.Popen(
            [*words, *arguments], cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        assert process.stdout is not None
        first = process.stdout.readline()
        found = re.search(r"http://\S+", first)
        assert found, f"the studio did not start: {first}{process.stdout.read()}"
        url = found[0].partition("/login")[0]
        link = found[0] if "#token=" in found[0] else ""
        return Running(url=url, link=link, process=process, runs=folder / "runs")

    yield begin
    for process in started:
        process.terminate()
        assert process.wait(timeout=60) is not None


FACTS = ROOT / "tests/golden/machines/rtx-4090.json"
"""The recorded machine that every studio of these tests shows: pictures of pages do not tell of this one."""


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window."""
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    with sync_playwright() as playwright:
        # as root, which containers are, Chromium has no sandbox
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A21: in every test nothing breaks the policy, asks another address or complains in the console."""
    found = Watched()
    yield found
    assert not found.left


@pytest.fixture
def new_context(browser: Browser, watched: Watched) -> Iterator[Callable[..., BrowserContext]]:
    """Make contexts, each with cookies of its own, whose pages are watched."""
    made: list[BrowserContext] = []

    def make(**options: object) -> BrowserContext:
        context = browser.new_context(**options)  # type: ignore[arg-type]
        made.append(context)
        context.on("page", lambda page: watch(page, watched))
        return context

    yield make
    for context in made:
        context.close()


def watch(page: Page, watched: Watched) -> None:
    """Write down what the page must not do."""
    page.on(
        "console",
        lambda line: line.type in ("error", "warning") and watched.faults.append(f"console: {line.text}"),
    )
    page.on("pageerror", lambda error: watched.faults.append(f"error: {error}"))

    def asked(url: str) -> None:
        own = re.match(r"http://127\.0\.0\.1:\d+/", url)
        if not own:
            watched.faults.append(f"request: {url}")

    page.on("request", lambda request: asked(request.url))
    page.expose_function("policyBroken", lambda text: watched.faults.append(f"policy: {text}"))
    page.add_init_script(
        "document.addEventListener('securitypolicyviolation', (event) =>"
        " policyBroken(`${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`))"
    )


def logged_in(context: BrowserContext, studio: Running) -> Page:
    """A page of a new session."""
    page = context.new_page()
    token = (studio.runs / ".studio/token").read_text().strip()
    page.goto(f"{studio.url}/login#token={token}")
    page.wait_for_url(lambda url: "/login" not in url)
    page.goto(f"{studio.url}/")
    return page
