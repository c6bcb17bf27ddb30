"""The supervisor's reactions to low memory: rules, simulated runs, and the real supervisor on a timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.unit.telemetry.conftest import CHILD, PARENT, Run, write_meminfo
from tests.unit.telemetry.memory_host import WEDGE, Timeline, collapse, healthy, play
from trainer.errors import ExitCode
from trainer.machine import profiles
from trainer.telemetry.supervising import cause_of_death
from trainer.telemetry.supervising.memory_floor import Action, Floors, Sample, decide, remember
from trainer.words.sizes import GIB

FLOORS = Floors()
FLOORS_ONLY = Floors(trend_below_bytes=0)
SEEDS = range(20)
SEVERITY = {Action.KEEP: 0, Action.ASK: 1, Action.KILL: 2}


def looks(left: Iterable[float], *, every: float = 1.0, trained: bool = True) -> tuple[Sample, ...]:
    """Looks at so many GiB each."""
    return tuple(
        Sample(at=number * every, available=int(size * GIB), trained=trained)
        for number, size in enumerate(left)
    )


def leak(rate: float, *, begin: float, seconds: int = 90) -> list[float]:
    return [begin - rate * second for second in range(seconds)]


def first_action(samples: Sequence[Sample], floors: Floors = FLOORS) -> tuple[Action, float]:
    """The first thing that is done, and how many GiB are left by then."""
    known: tuple[Sample, ...] = ()
    for sample in samples:
        known = remember(known, sample, floors)
        action = decide(known, floors).action
        if action is not Action.KEEP:
            return action, sample.available / GIB
    return Action.KEEP, samples[-1].available / GIB


@pytest.mark.parametrize("seed", SEEDS)
def test_a_collapse_is_saved_in_time(seed: int) -> None:
    timeline = collapse(seed)
    outcome = play(timeline, FLOORS, seed)
    assert outcome.how == "saved", (timeline, outcome)
    assert outcome.left > WEDGE


@pytest.mark.parametrize("seed", SEEDS)
def test_a_healthy_run_is_never_stopped(seed: int) -> None:
    timeline = healthy(seed)
    outcome = play(timeline, FLOORS, seed)
    assert (outcome.how, outcome.why) == ("kept", ""), (timeline, outcome)


def test_what_is_simulated_is_hard_enough() -> None:
    kinds = {make(seed).kind for make in (collapse, healthy) for seed in SEEDS}
    assert len(kinds) == 12
    # floors alone lose some of the runs, no floors lose the machine
    lost = [seed for seed in SEEDS if play(collapse(seed), FLOORS_ONLY, seed).how == "killed"]
    assert len(lost) >= 5
    nothing = dataclasses.replace(FLOORS_ONLY, soft_floor_bytes=0, hard_floor_bytes=0)
    assert {play(collapse(seed), nothing, seed).how for seed in SEEDS} == {"wedged"}
    # page cache has filled what is free: who looks at that kills every healthy run
    assert {play(healthy(seed), FLOORS, seed, row="MemFree").how for seed in SEEDS} == {"killed"}


def test_the_simulated_file_is_read_as_it_is_meant(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text(healthy(3).meminfo(900.0))
    available = healthy(3).rows(900.0)["MemAvailable"] * 1024
    assert cause_of_death.available_bytes(tmp_path / "meminfo") == available
    assert available > FLOORS.soft_floor_bytes


def test_the_floors_are_those_that_are_known_to_work() -> None:
    assert FLOORS.soft_floor_bytes == 10 * GIB
    assert FLOORS.soft_samples == 5
    assert FLOORS.hard_floor_bytes == 6 * GIB
    assert profiles.PROFILES["dgx-spark"].headroom_bytes == FLOORS.trend_below_bytes


@pytest.mark.parametrize("trained", [False, True])
def test_floors_do_not_ask_what_the_run_does(trained: bool) -> None:
    def after(*left: float) -> Action:
        return decide(looks([30.0, *left], trained=trained), FLOORS).action

    assert after(9.9, 9.9, 9.9, 9.9) is Action.KEEP
    assert after(9.9, 9.9, 9.9, 9.9, 9.9) is Action.ASK
    assert after(9.9, 9.9, 9.9, 10.0, 9.9) is Action.KEEP
    assert after(9.9, 9.9, 9.9, 9.9, 10.0) is Action.KEEP
    assert after(6.0) is Action.KEEP
    assert after(5.9) is Action.KILL


@pytest.mark.parametrize("rate", [0.02, 0.05, 0.1, 0.15])
def test_a_steady_leak_leaves_a_minute_to_save(rate: float) -> None:
    action, left = first_action(looks([24.0] * 100 + leak(rate, begin=24, seconds=1000)))
    assert action is Action.ASK
    assert left - 60 * rate > FLOORS.hard_floor_bytes / GIB


@pytest.mark.parametrize("rate", [0.45, 0.6])
def test_a_fast_leak_leaves_seconds_to_save(rate: float) -> None:
    # training was steady before; a trend is seen after three windows of eight seconds
    samples = looks([26.0] * 100 + leak(rate, begin=26))
    action, left = first_action(samples)
    assert action is Action.ASK
    assert left - 8 * rate > FLOORS.hard_floor_bytes / GIB
    action, left = first_action(samples, FLOORS_ONLY)
    assert left - 8 * rate < FLOORS.hard_floor_bytes / GIB


def test_loading_is_no_leak() -> None:
    falling = leak(0.1, begin=19)
    assert first_action(looks(falling, trained=False))[0] is Action.KEEP
    assert first_action(looks(falling))[0] is Action.ASK
    # what was seen while it loaded does not count later
    steady = [dataclasses.replace(sample, at=sample.at + 90) for sample in looks([11.0] * 200)]
    assert first_action((*looks(falling, trained=False), *steady))[0] is Action.KEEP


def test_a_fall_within_the_first_minute_is_no_trend_yet() -> None:
    assert first_action(looks(leak(0.13, begin=19, seconds=59)))[0] is Action.KEEP
    assert first_action(looks(leak(0.13, begin=19, seconds=64)))[0] is Action.ASK


def test_far_from_the_floor_everything_may_fall() -> None:
    assert first_action(looks(leak(1.0, begin=110)))[0] is Action.KEEP


@pytest.mark.parametrize("below", [10.1, 12.0, 16.0])
def test_one_fall_is_no_trend(below: float) -> None:
    steady, ramp = [19.0] * 90, [19.0 + (below - 19.0) * part / 8 for part in range(9)]
    assert first_action(looks(steady + [below] * 300))[0] is Action.KEEP
    assert first_action(looks(steady + ramp + [below] * 300))[0] is Action.KEEP


def test_what_comes_back_is_no_trend_and_what_stays_away_is() -> None:
    teeth = [14 - 0.25 * (second % 15) for second in range(600)]  # down to 10.5
    assert first_action(looks(teeth))[0] is Action.KEEP
    leaking = [8 + size - 0.06 * second for second, size in enumerate(teeth)]
    action, left = first_action(looks(leaking))
    assert action is Action.ASK
    assert left > FLOORS.soft_floor_bytes / GIB


def test_steps_are_a_trend_when_they_repeat() -> None:
    stairs = looks(20.4 - 2.0 * (second // 45) for second in range(400))
    action, left = first_action(stairs)
    assert action is Action.ASK
    assert left > FLOORS.soft_floor_bytes / GIB
    assert first_action(stairs, FLOORS_ONLY)[1] < FLOORS.soft_floor_bytes / GIB


def test_a_short_dip_beside_a_tiny_trend_is_left_to_the_soft_floor() -> None:
    creeping = [12 - 0.002 * second for second in range(200)]
    assert first_action(looks([*creeping, 7.0, 7.0, 7.0, 7.0, *creeping[-50:]]))[0] is Action.KEEP
    assert first_action(looks([*creeping, 7.0, 7.0, 7.0, 7.0, 7.0]))[0] is Action.ASK


def test_a_pause_of_the_machine_is_no_trend() -> None:
    before, after = looks([16.0] * 100), looks([11.0] * 100)
    later = [dataclasses.replace(sample, at=sample.at + 5000) for sample in after]
    assert first_action((*before, *later))[0] is Action.KEEP


def random_looks(seed: int) -> tuple[Sample, ...]:
    chance = random.Random(seed)
    size, at, samples = chance.uniform(9, 24), 0.0, []
    drift = chance.uniform(-0.15, 0.05)
    for _ in range(chance.randrange(1, 200)):
        samples.append(Sample(at=at, available=int(max(size, 0) * GIB), trained=True))
        size += drift + chance.gauss(0, 0.05)
        at += chance.uniform(0.5, 1.5)
    return tuple(samples)


@pytest.mark.parametrize("seed", range(100))
def test_what_always_holds(seed: int) -> None:
    samples, floors = random_looks(seed), FLOORS
    decision, newest = decide(samples, floors), samples[-1]
    assert decide(samples, floors) == decision  # nothing is kept between calls
    assert (decision.action is Action.KILL) == (newest.available < floors.hard_floor_bytes)
    assert (decision.action is Action.KEEP) == (not decision.reason)
    if newest.available >= floors.trend_below_bytes:
        assert decision.action is Action.KEEP
    # only differences of times count
    shifted = [dataclasses.replace(sample, at=sample.at + 2.0**20) for sample in samples]
    assert decide(shifted, floors).action is decision.action
    # less left never is better
    less = dataclasses.replace(newest, available=newest.available * 3 // 4)
    worse = decide((*samples[:-1], less), floors).action
    assert SEVERITY[worse] >= SEVERITY[decision.action]
    # memory that only comes back is left alone
    rising = sorted(max(sample.available, floors.soft_floor_bytes) for sample in samples)
    better = [dataclasses.replace(old, available=left) for old, left in zip(samples, rising, strict=True)]
    assert decide(better, floors).action is Action.KEEP


def test_random_looks_meet_every_action() -> None:
    assert {decide(random_looks(seed), FLOORS).action for seed in range(100)} == set(Action)


def test_only_what_is_needed_is_remembered() -> None:
    known: tuple[Sample, ...] = ()
    for sample in looks([50.0] * 2000):
        known = remember(known, sample, FLOORS)
    assert [known[0].at, known[-1].at] == [1999 - FLOORS.trend_memory_seconds, 1999]
    # looks may be far apart: the soft floor's samples are kept at any age
    known = ()
    for sample in looks([9.0] * 7, every=3600.0):
        known = remember(known, sample, FLOORS)
    assert len(known) == FLOORS.soft_samples
    assert decide(known, FLOORS).action is Action.ASK


# seconds of the simulated host in one of ours
FASTER = 20.0
SAVE_SECONDS = 2.2
SAVING = CHILD.replace('(folder / "saved")', f'time.sleep({SAVE_SECONDS}); (folder / "saved")')
SHORTER = ("trend_after_seconds", "trend_memory_seconds", "save_seconds")


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Run]:
    """The real supervisor, that looks as much more often, over a child that takes a while to save."""
    meminfo, events = tmp_path / "meminfo", tmp_path / "memory.events"
    write_meminfo(meminfo, 64)
    events.write_text("oom_kill 0\n")
    normal = dataclasses.asdict(FLOORS)
    limits = {name: normal[name] / FASTER for name in SHORTER}
    limits["trend_seconds"] = [seconds / FASTER for seconds in FLOORS.trend_seconds]
    asked = {
        "child": SAVING,
        "runtime_dir": str(tmp_path / "runtime"),
        "meminfo_path": str(meminfo),
        "memory_events_path": str(events),
        "port": None,
        "unified_memory": True,
        "ranks": 1,
        "limits": {"interval_seconds": 1 / FASTER, **limits},
    }
    command = [sys.executable, "-c", PARENT, json.dumps(asked)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    yield Run(process=process, directory=tmp_path / "runtime", port=0, meminfo=meminfo, memory_events=events)
    process.kill()  # its child saves and ends
    process.communicate()


@contextlib.contextmanager
def host_of(meminfo: Path, timeline: Timeline, *, begin: float) -> Iterator[None]:
    """A thread rewrites `meminfo` as the timeline has it from `begin` on."""
    over, started = threading.Event(), time.monotonic()

    def rewrite() -> None:
        partial = meminfo.with_suffix(".new")
        while not over.wait(0.02):
            partial.write_text(timeline.meminfo(begin + FASTER * (time.monotonic() - started)))
            partial.replace(meminfo)

    thread = threading.Thread(target=rewrite)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@pytest.mark.slow
def test_the_real_supervisor_saves_a_leaking_run_in_time(real: Run) -> None:
    real.child()
    # 0.1 GiB a second after a minute and a half of training; the save takes 44 seconds of that host
    leaking = dataclasses.replace(collapse(0), left=lambda at: 18 - 0.1 * max(0.0, at - 150))
    with host_of(real.meminfo, leaking, begin=60):
        code, errors = real.end()
        left = cause_of_death.available_bytes(real.meminfo)
    assert code == ExitCode.OUT_OF_MEMORY, errors
    assert (real.directory / "saved").read_text() == "OUT_OF_MEMORY"
    assert "less every minute, the hard floor is 6.0 GiB: the run saves and ends" in errors
    assert left is not None
    assert left > FLOORS.hard_floor_bytes


@pytest.mark.slow
def test_the_real_supervisor_leaves_a_healthy_run_alone(real: Run) -> None:
    real.child()
    timeline = healthy(3)
    assert timeline.kind == "tooth"
    with host_of(real.meminfo, timeline, begin=60):
        time.sleep(120 / FASTER)
        assert timeline.rows(60)["MemFree"] < 1024**2  # page cache has the rest
        assert real.process.poll() is None
        real.process.terminate()
        code, errors = real.end()
    assert code == ExitCode.STOPPED, errors
    assert "floor" not in errors
