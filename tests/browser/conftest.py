"""The real studio in a process of its own, and Chromium before it: no test may break its pages' policy."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from PIL import Image
from playwright.sync_api import Browser, BrowserContext, Error, Page, expect, sync_playwright

from tests.unit.ui import made
from trainer.errors import Problem
from trainer.queue.clusters import records
from trainer.queue.launcher import CPU, Request
from trainer.queue.local import Local
from trainer.telemetry.run_folder.tries import Try
from trainer.ui.studio import identifier

# what a page comes to is judged, not how soon: a disk may be busy for seconds
_WAIT_MS = 120_000
expect.set_options(timeout=_WAIT_MS)
CHROMIUM = Path("/usr/bin/chromium")
ROOT = Path(__file__).resolve().parents[2]
FACTS = ROOT / "tests/golden/machines/rtx-4090.json"
"""Recorded machine that studios of these tests show: pictures of pages do not tell of this one."""
TWO_GPUS = """
from trainer.cli import main
from trainer.machine.occupancy import GpuUse
from trainer.queue import local
from trainer.queue.clusters import records
from trainer.queue.launcher import Seen, State
from trainer.ui.views.queueing import clusters
waits = Seen(state=State.WAITING, words="Slurm: Resources")
clusters.overview = lambda queue: [(one, waits) for one in records.kept(queue)]
one, two = (GpuUse(uuid=f"GPU-{k}", index=k, name="Fake", pids=(4711,) * k) for k in (0, 1))
local.usable_gpus = lambda: (one, two)
main()
"""
"""The command on a machine whose queue has two GPUs; another program computes on the second. In its cluster
all jobs wait.
"""


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

    def begin(folder: Path, *arguments: str, facts: Path = FACTS, code: str = "") -> Running:
        words = [sys.executable, *(("-c", code) if code else ("-m", "trainer")), "ui", "--no-queue"]
        words += () if "--port" in arguments else ("--port", "0")
        for name in ("runs", "data", "models"):
            (folder / name).mkdir(exist_ok=True, parents=True)
            words += [f"--{name}", str(folder / name)]
        folders = {
            f"TRAINER_{name}_DIR": str(folder / name.lower()) for name in ("RUNTIME", "QUEUE", "CACHE")
        }
        environ = {**os.environ, **folders, "TRAINER_FACTS": str(facts), "PYTHONPATH": str(ROOT)}
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
    killed = [process for process in started if process.poll() == -signal.SIGKILL]  # by tests
    for process in started:
        process.terminate()
    ends = [process.wait(timeout=60) for process in started]
    assert [end for process, end in zip(started, ends, strict=True) if end and process not in killed] == []


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Debian's Chromium without a window."""
    if not CHROMIUM.exists():
        # root can install it, as `make test-browser` does: there a test that does not run is a failure
        tell = pytest.fail if os.geteuid() == 0 else pytest.skip
        tell(f"{CHROMIUM} is not installed")
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
        context.set_default_timeout(_WAIT_MS)
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
    told = "${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}"
    page.add_init_script(
        f"document.addEventListener('securitypolicyviolation', (event) => policyBroken(`{told}`))"
    )


@dataclass(frozen=True, kw_only=True)
class Full:
    """A studio with a run in every state."""

    studio: Running
    folders: dict[str, Path]
    runtime: Path
    """Runtime folder of the run `portraits`, which trains."""

    def page_of(self, name: str) -> str:
        """Path of a run's page."""
        return f"/runs/{identifier(self.studio.runs, self.folders[name])}"


LORA_OF_STEP = "checkpoints/step-000100/lora/cyanotype-step-000100.safetensors"
PROMPTS = (
    "owl, cyanotype style",
    "tulip, cyanotype style",
    "anchor, cyanotype style",
    "teapot, cyanotype style",
)


def drawn(share: float) -> list[Image.Image]:
    """Pictures that come out of white paper: `share` 1.0 is the whole picture."""
    paths = sorted((ROOT / "examples/style").glob("*.png"))[: len(PROMPTS)]
    pictures = [Image.open(path).convert("RGB").resize((192, 192)) for path in paths]
    return [Image.blend(Image.new("RGB", one.size, "white"), one, share) for one in pictures]


@pytest.fixture(scope="session")
def full(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Running]) -> Iterator[Full]:
    """Runs that train, finished, were stopped, failed and were lost, and a queue that nothing starts."""
    root = tmp_path_factory.mktemp("full")
    runs, runtime = root / "runs", root / "portraits-runtime"
    done = {"portraits": 180, "cyanotype": 300, "watercolour": 140, "line-art": 90, "cats-rank-32": 60}
    folders = {
        name: made.make_run(runs / name, done=count, family="flux1_dev") for name, count in done.items()
    }
    for name in ("portraits", "cyanotype"):
        for step, share in ((0, 0.1), (100, 0.6), (200, 0.9), (300, 1.0)):
            if step <= done[name]:
                made.samples(folders[name], step, drawn(share), PROMPTS)
    for name in ("cyanotype", "watercolour"):
        made.checkpoint(folders[name], 100)
    made.result(folders["cyanotype"])
    files, labels = ("lora/cyanotype.safetensors", LORA_OF_STEP), ("final", "step 100")
    one = Try(prompts=PROMPTS, loras=files, labels=labels, resolution=192, seed=1)
    made.tried(folders["cyanotype"], 1, one, [*drawn(0.2), *drawn(1.0), *drawn(0.6)])
    wait = made.tried(folders["cyanotype"], 2, one)
    made.ended(folders["cyanotype"], 0)
    made.ended(folders["watercolour"], 75)
    made.log(folders["line-art"], "error", "CUDA out of memory: 23.1 GiB are needed, 22.3 GiB are there")
    advice = "write features.activation_checkpointing: on (14.2 GiB), or features.weights: int8 (16.0 GiB)"
    made.ended(
        folders["line-art"],
        71,
        problems=[Problem(what="device memory ran out", where="step 91", remedy=advice)],
    )
    made.process.begin(folders["cats-rank-32"], supervisor=2**22, runtime_dir=root / "gone")
    local = Local(folder=root / "queue")
    for name in ("cats-rank-8", "cats-rank-16"):
        one_of = Request(
            config="{}", name=name, group="cats", run=runs / name, working_folder=root, seconds=2400.0
        )
        local.submit([one_of])
    name, rest = "cyanotype-try-2", {"working_folder": root, "gpus": (CPU,), "pictures": one.pictures}
    local.submit([Request(config="{}", name=name, run=wait, **rest)])
    local.hold("2")
    wide = {"job": "4127", "name": "cats-rank-64", "group": "cats", "run": str(runs / "cats-rank-64")}
    records.keep(root / "queue", records.Submitted(launcher="slurm", **wide))
    with made.running(folders["portraits"], runtime, step=182, steps=300):
        yield Full(studio=start(root, code=TWO_GPUS), folders=folders, runtime=runtime)


@pytest.fixture(scope="session")
def empty(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Running]) -> Running:
    """A studio without anything."""
    return start(tmp_path_factory.mktemp("empty"))


def logged_in(context: BrowserContext, studio: Running) -> Page:
    """A page of a new session."""
    page = context.new_page()
    token = (studio.runs / ".studio/token").read_text().strip()
    page.goto(f"{studio.url}/login#token={token}")
    page.wait_for_url(lambda url: "/login" not in url)
    page.goto(f"{studio.url}/")
    return page


def until(page: Page, expression: str) -> None:
    """Wait until a JavaScript expression is true in the page, or in the one that the page goes to meanwhile.
    Playwright's own way evaluates a text inside of the page, which the policy forbids.
    """
    for _ in range(1200):
        try:
            if page.evaluate(expression):
                return
        except Error as error:
            if "Execution context was destroyed" not in error.message:
                raise
        page.wait_for_timeout(50)
    raise AssertionError(f"it did not become true: {expression}")


ELSEWHERE = """(roots) => {
  const said = (text) => roots.reduce((now, one) => now.replaceAll(one, "/home/you"), text);
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) texts.currentNode.data = said(texts.currentNode.data);
  for (const one of document.querySelectorAll("input")) {
    one.placeholder = said(one.placeholder);
    one.value = said(one.value);
  }
}"""


def require_picture(page: Page, name: str, root: Path) -> None:
    """The documents' picture of this page is there and has its size; `make test-browser PICTURES=docs/images`
    takes it anew. Paths below `root`, and this user's home, are somebody's home in it.
    """
    page.evaluate(ELSEWHERE, [str(root), str(Path.home())])
    with Image.open(io.BytesIO(page.screenshot())) as picture:
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20, f"{name} is empty"
        if folder := os.environ.get("PICTURES"):
            few = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
            few.save(ROOT / folder / name, optimize=True)
        with Image.open(ROOT / "docs/images" / name) as shown:
            assert shown.size == picture.size, name
