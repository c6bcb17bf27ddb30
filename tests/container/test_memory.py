"""The memory that GPU and CPU share runs out while a real container trains beside it.

The container gets a /proc/meminfo that the test writes, and facts of a machine whose GPU shares its memory;
it trains on the CPU. The supervisor is that of the image, with the floors that are shipped.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.conftest import SOMEBODY, Start, mounts
from tests.container.images import ROOT
from tests.container.quickstart import require_proved, steps_saved, words
from tests.unit.telemetry.memory_host import Timeline
from trainer.errors import ExitCode
from trainer.telemetry.supervising.cause_of_death import available_bytes
from trainer.telemetry.supervising.memory_floor import Floors
from trainer.words.sizes import GIB

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

MACHINES = ROOT / "tests" / "golden" / "machines"
FLOORS = Floors()
PLENTY = 60.0
MANY_STEPS = 100_000


def collapsing(at: float) -> float:
    """GiB: gone to 9.5 within four seconds, then a GiB every 10 s: the hard floor comes 35 s later."""
    return max(PLENTY - 12.625 * at, 9.5 - 0.1 * max(0.0, at - 4))


HOST = Timeline(kind="collapse", left=collapsing, trained_at=0, end=60, save_seconds=0, save_size=0)


class Meminfo:
    """A file for /proc/meminfo of containers; every text has the same length."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_text(HOST.meminfo(0))
        self._file = os.open(path, os.O_WRONLY)

    def write(self, seconds: float) -> None:
        """Put the host's meminfo `seconds` after the start in place: a mounted file cannot be replaced."""
        text = HOST.meminfo(seconds).encode()
        assert len(text) == self.path.stat().st_size
        os.pwrite(self._file, text, 0)

    def close(self) -> None:
        os.close(self._file)


@pytest.fixture
def meminfo(tmp_path: Path) -> Iterator[Meminfo]:
    """The meminfo of a healthy host."""
    found = Meminfo(tmp_path / "meminfo")
    yield found
    found.close()


@pytest.fixture
def facts(tmp_path: Path) -> Path:
    """A folder with a machine.json: what this image can train on, beside a GPU that shares its memory."""
    here, spark = (json.loads((MACHINES / f"{name}.json").read_text()) for name in ("cpu", "dgx-spark"))
    assert [gpu["integrated"] for gpu in spark["gpus"]] == [True]
    folder = tmp_path / "facts"
    folder.mkdir()
    (folder / "machine.json").write_text(json.dumps({**here, "gpus": spark["gpus"]}))
    return folder


def test_a_collapse_of_unified_memory_ends_in_a_checkpoint_in_time(
    start: Start, output: Path, samples_cache: Path, facts: Path, meminfo: Meminfo
) -> None:
    shared = ("-v", f"{meminfo.path}:/proc/meminfo:ro", "-e", "TRAINER_FACTS=/facts/machine.json")
    options = (*mounts(output=output, cache=samples_cache, facts=facts), *shared)
    box = start(*words(MANY_STEPS, f"checkpoint.checkpointing_steps={MANY_STEPS}"), options=options)
    box.wait_for(lambda: box.step() >= 2)
    began = time.monotonic()
    while box.running():
        since = time.monotonic() - began
        assert since < HOST.end, f"nobody saw that memory ran out:\n{box.log()[-4000:]}"
        meminfo.write(since)
        time.sleep(0.1)
    left = available_bytes(meminfo.path)
    assert box.exit_code() == ExitCode.OUT_OF_MEMORY, box.log()
    assert "the soft floor is 10.0 GiB: the run saves and ends" in box.log()
    assert left is not None
    assert FLOORS.hard_floor_bytes < left < FLOORS.soft_floor_bytes, f"{left / GIB:.1f} GiB were left"
    (saved,) = steps_saved(output)
    assert not list((output / "quickstart" / "lora").glob("*")), "it was not at its end"

    meminfo.write(0)
    more = int(saved.removeprefix("step-")) + 5
    resumed = start(*words(more), options=options)
    require_proved(resumed, output, owner=SOMEBODY)
    assert f"resumed from {saved}" in resumed.log()
    assert "floor" not in resumed.log()
