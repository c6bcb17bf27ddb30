"""The studio in a browser: its start, its memory, how soon a change of the form is painted, large folders,
and a tab that stays open.

python -m bench ui
python -m bench ui --record docs/benchmarks/NAME.json

Needs Chromium (CHROMIUM below) and the extra `ui`; no GPU: plans are for a recorded machine. 90 changes are
typed, 30 in each of three forms; each is timed from the end of the form's pause of 30 ms to the frame after
the new plan was swapped in. Pages of 200 runs and of 10,000 pictures are timed from the request until all of
their HTML is read and something is painted. A tab stays open on a run that writes a line every 20 seconds of
its time: its clock, and the looks and the heartbeats of the stream, go 400 times as fast. The exit code is 1
where a limit is not kept.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import CDPSession, Page, Playwright, sync_playwright
from playwright.sync_api import TimeoutError as WaitedInVain

from bench import arguments as types
from bench.processes import REPOSITORY
from bench.record import update_table
from tests.unit.ui import made
from trainer.config import environment
from trainer.errors import HardwareError
from trainer.machine import description
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import Phase
from trainer.ui.studio import identifier

CHROMIUM = Path("/usr/bin/chromium")
FACTS = REPOSITORY / "tests" / "golden" / "machines" / "rtx-4090.json"
PAUSE_MS = 30
"""Delay of the form before it asks for a plan."""
COLUMNS = ("what", "median", "95 of 100", "most", "at most", "kept")
STARTS = ("flux1_dev_lora", "qwen_image_lora", "qwen3_lora")
_CHANGES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("train.max_train_steps", ("9", "90", "900", "1200", "3500")),
    ("train.learning_rate", ("1e-4", "2e-4", "3e-4", "5e-5", "4e-4")),
    ("train.lr_warmup_steps", ("1", "10", "20", "200")),
    ("train.gradient_accumulation_steps", ("1", "2", "8", "4")),
    ("train.train_batch_size", ("2", "4", "3", "1")),
    ("train.seed", ("1", "12", "123", "7")),
    ("checkpoint.checkpointing_steps", ("1", "10", "100", "50")),
)
"""Fields and what is typed in them, one after another."""
_TYPED = """([key, text]) => new Promise((painted) => {
  const field = document.querySelector(`[name="${key}"]`);
  let begun = 0;
  document.addEventListener("htmx:after:swap", () => requestAnimationFrame(() => setTimeout(
    () => painted(performance.now() - begun))), {once: true});
  field.value = text;
  begun = performance.now();
  field.dispatchEvent(new Event("input", {bubbles: true}));
})"""
"""Milliseconds from a change to the frame behind the swap."""
RUNS, PICTURES = 200, 10_000
_LOADS = 10
_PAINTED = """() => Math.max(performance.getEntriesByName("first-contentful-paint")[0].startTime,
  performance.getEntriesByType("navigation")[0].domContentLoadedEventEnd)"""
"""Milliseconds from the request until all HTML is read, and something is painted."""
_HURRY, _LINE_SECONDS = 400, 20
"""How many times as fast a tab's hours go, and seconds of them between two lines of its run."""
_HURRIED = f"""
from trainer.cli import main
from trainer.ui import looking, stream
looking._LOOK_SECONDS /= {_HURRY}
stream._ALIVE_SECONDS /= {_HURRY}
stream._REST = 0
main()
"""
"""The command with streams that look, and say that they live, so much more often."""
_LONGEST_LOOK_SECONDS = 600
_LONGEST_WARMING_SECONDS = 120
_IDLE_AFTER_SECONDS = 130
"""Time without any change after which a tab rests: its stream looks every 15 s once two minutes are over."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Samples of one figure, and the limits that it has to keep."""

    what: str
    samples: Sequence[float]
    unit: str
    digits: int = 0
    median_limit: float
    high_limit: float | None = None
    """Limit of the 95th of 100 samples; None without one."""

    @property
    def kept(self) -> bool:
        """True where both limits are kept."""
        above = self.high_limit is not None and high(self.samples) > self.high_limit
        return statistics.median(self.samples) <= self.median_limit and not above

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of the record."""
        figures = (statistics.median(self.samples), high(self.samples), max(self.samples))
        limits = [self.median_limit, *([] if self.high_limit is None else [self.high_limit])]
        limit = " and ".join(f"{one:g}" for one in limits)
        cells = (f"{one:.{self.digits}f} {self.unit}" for one in figures)
        return (self.what, *cells, f"{limit} {self.unit}", "yes" if self.kept else "no")


def high(samples: Sequence[float]) -> float:
    """The sample below which 95 of 100 lie, or are it."""
    return sorted(samples)[max(0, -(-95 * len(samples) // 100) - 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a line a figure, and write the record."""
    parser = types.command_parser("ui", __doc__)
    parser.add_argument("--starts", type=types.positive, default=5, help="starts of the studio")
    parser.add_argument("--idle", type=types.positive, default=60, help="seconds with an idle tab")
    parser.add_argument("--hours", type=types.positive, default=8, help="hours of a tab that stays open")
    parser.add_argument("--record", type=Path, help="docs/benchmarks/NAME.json, whose other rows stay")
    types.add_common(parser, "--month")
    options = parser.parse_args(arguments)
    if not CHROMIUM.exists():
        raise HardwareError(f"there is no {CHROMIUM}", where="bench ui", remedy="apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        found = [_starts(Path(folder) / "a", options.starts), *_used(Path(folder) / "a", options.idle)]
        found += _filled(Path(folder) / "b")
        found += _kept_open(Path(folder) / "c", options.hours)
    for one in found:
        print("  ".join(one.row), flush=True)
    if options.record:
        update_table(
            options.record,
            [one.row for one in found],
            keys=1,
            title="The studio",
            where=description.describe(options.month),
            command="python -m bench ui --record FILE",
            columns=COLUMNS,
        )
    return int(not all(one.kept for one in found))


def _starts(folder: Path, count: int) -> Measured:
    """Seconds from the command to the first answer."""
    seconds = []
    for _ in range(count):
        begun = time.perf_counter()
        with _studio(folder) as (_, url):
            _answer(f"{url}/login")
            seconds.append(time.perf_counter() - begun)
    return Measured(what="start to first answer", samples=seconds, unit="s", digits=2, median_limit=1.5)


def _used(folder: Path, idle_seconds: int) -> Iterator[Measured]:
    """The form's changes, and then the memory and the processor time of the studio with an idle tab."""
    with _studio(folder) as (process, url), sync_playwright() as playwright:
        page = _page(playwright, folder, url)
        _wait_for_rest(process)
        times = [one for start in STARTS for one in _changes(page, f"{url}/new?start={start}")]
        what = f"a change of {len(times)}, painted"
        yield Measured(what=what, samples=times, unit="ms", median_limit=50, high_limit=100)
        mib = [_resident_bytes(process) / 1e6]
        yield Measured(what="memory after them", samples=mib, unit="MB", median_limit=120)
        page.goto(url)
        page.wait_for_timeout(1000 * _IDLE_AFTER_SECONDS)
        before = _busy_seconds(process)
        page.wait_for_timeout(1000 * idle_seconds)
        share = 100 * (_busy_seconds(process) - before) / idle_seconds
        yield Measured(what="a core, with an idle tab", samples=[share], unit="%", digits=2, median_limit=0.1)


def _page(playwright: Playwright, folder: Path, url: str) -> Page:
    """A page of a new session, in a browser that ends with Playwright."""
    browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
    page = browser.new_page()
    page.goto(f"{url}/login#token={(folder / 'runs/.studio/token').read_text().strip()}")
    page.wait_for_url(lambda now: "/login" not in now)
    return page


def _filled(folder: Path) -> Iterator[Measured]:
    """First paints of the list of many runs, and of a data set of many pictures that was looked at."""
    for number in range(RUNS):
        run = made.make_run(folder / f"runs/run-{number:03}", done=300)
        made.samples(run, 300, [Image.new("RGB", (64, 64), (number, 90, 140))], ["a cat"])
        made.ended(run, 0)
    pictures = folder / "data/many"
    pictures.mkdir(parents=True)
    for number in range(PICTURES):
        Image.new("RGB", (16, 16), (number >> 8, number & 255, 90)).save(pictures / f"{number:05}.png")
        (pictures / f"{number:05}.txt").write_text(f"picture {number}")
    with _studio(folder) as (process, url), sync_playwright() as playwright:
        page = _page(playwright, folder, url)
        page.goto(f"{url}/data")
        address = page.locator("a[href^='/data/']").first.get_attribute("href")
        page.goto(f"{url}{address}")
        try:
            # the page loads itself anew once its pictures were looked at
            page.locator(".tile img").first.wait_for(timeout=1000 * _LONGEST_LOOK_SECONDS)
        except WaitedInVain as error:
            remedy = "see what the studio printed"
            raise HardwareError("the pictures were not looked at", where="bench ui", remedy=remedy) from error
        page.wait_for_timeout(2000)
        _wait_for_rest(process)
        for what, path in ((f"{RUNS} runs, painted", "/"), (f"{PICTURES:,} pictures, painted", address)):
            times = [_painted(page, f"{url}{path}") for _ in range(_LOADS)]
            yield Measured(what=what, samples=times, unit="ms", median_limit=1000)


def _painted(page: Page, address: str) -> float:
    page.goto(address)
    page.wait_for_timeout(200)
    milliseconds: Any = page.evaluate(_PAINTED)
    return float(milliseconds)


def _kept_open(folder: Path, hours: int) -> Iterator[Measured]:
    """Memory that a tab and the studio take up over hours with a run that trains, from the first eighth of
    them on, and lines that the tab's stream left out.
    """
    count = hours * 3600 // _LINE_SECONDS
    run = made.make_run(folder / "runs/cats", steps=count, done=0)
    with (
        made.running(run, folder / "runtime", step=0, steps=count) as status,
        _studio(folder, "-c", _HURRIED) as (process, url),
        sync_playwright() as playwright,
    ):
        _wait_for_rest(process)  # before there is a tab, whose stream lets it never rest
        page = _page(playwright, folder, url)
        page.clock.install()
        page.goto(f"{url}/runs/{identifier(folder / 'runs', run)}")
        browser = page.context.new_cdp_session(page)
        browser.send("Performance.enable")
        before = (0.0, 0.0)
        for step in range(1, count + 1):
            made.write_metrics(run, [step], count)
            status.beat(Phase.TRAIN, step=step, total=count, median_step_seconds=_LINE_SECONDS)
            page.clock.fast_forward(1000 * _LINE_SECONDS)
            time.sleep(_LINE_SECONDS / _HURRY)
            if step == max(1, count // 8):
                before = _heap_bytes(browser), _resident_bytes(process)
        page.wait_for_timeout(5000)
        after = _heap_bytes(browser), _resident_bytes(process)
        lines: Any = page.evaluate("studio.points.map((one) => one[0])")
    for what, one, other in zip(("its memory", "the studio's memory"), before, after, strict=True):
        grown = [(other - one) / 1e6]
        yield Measured(
            what=f"a tab of {hours} h: {what} grew", samples=grown, unit="MB", digits=1, median_limit=5
        )
    wanted, seen = Counter(row["step"] for row in read_metrics(run / METRICS_LOG)), Counter(lines)
    missing = [float(((wanted - seen) + (seen - wanted)).total())]
    what = f"a tab of {hours} h: lines missing or twice"
    yield Measured(what=what, samples=missing, unit=f"of {wanted.total()}", median_limit=0)


def _heap_bytes(browser: CDPSession) -> float:
    """Memory of the page's JavaScript that is in use."""
    browser.send("HeapProfiler.collectGarbage")
    found = {one["name"]: one["value"] for one in browser.send("Performance.getMetrics")["metrics"]}
    return float(found["JSHeapUsedSize"])


def _wait_for_rest(process: subprocess.Popen[str]) -> None:
    """Wait until the studio has planned each family once, which it does by itself, and rests."""
    ends, before = time.monotonic() + _LONGEST_WARMING_SECONDS, -_TICKS
    while (now := _ticks(process)) - before > _TICKS // 20 and time.monotonic() < ends:
        before = now
        time.sleep(4)


def _changes(page: Page, address: str) -> Iterator[float]:
    """Milliseconds of each change of one form, without the pause."""
    page.goto(address)
    page.check("input[name=depth][value=all]")
    for key, texts in _CHANGES:
        for text in texts:
            milliseconds: Any = page.evaluate(_TYPED, [key, text])
            yield max(0.0, float(milliseconds) - PAUSE_MS)


@contextmanager
def _studio(folder: Path, *code: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A studio over folders below `folder`, and its address. `code`: what Python runs for the command."""
    words = [sys.executable, *(code or ("-m", "trainer")), "ui", "--no-queue", "--port", "0"]
    for name in ("runs", "data", "models"):
        words += [f"--{name}", str(folder / name)]
    environ = {
        **environment.snapshot(),
        "TRAINER_FACTS": str(FACTS),
        "TRAINER_RUNTIME_DIR": str(folder / "runtime"),
        "TRAINER_QUEUE_DIR": str(folder / "queue"),  # that of this user may have jobs
    }
    process = subprocess.Popen(words, cwd=REPOSITORY, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://[^/\s]+", line)
        if address is None:
            raise HardwareError(
                f"the studio did not start: {line}", where="bench ui", remedy="run `trainer ui`"
            )
        yield process, address[0]
    finally:
        process.terminate()
        process.wait()


def _answer(url: str) -> None:
    """Wait for any answer of the server."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            answer.read()
    except urllib.error.HTTPError:
        return


def _resident_bytes(process: subprocess.Popen[str]) -> int:
    """Memory of the process that is not on disk alone."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def _busy_seconds(process: subprocess.Popen[str]) -> float:
    """Processor time of all its threads so far, in seconds, by the scheduler's own count."""
    threads = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def _ticks(process: subprocess.Popen[str]) -> int:
    """Processor time so far, in clock ticks."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
