"""Real containers train, read-only and without network; they are stopped, killed, frozen and resumed."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.container.boxes import Box
from tests.container.conftest import SOMEBODY, Start, mounts, somebodys
from tests.container.engine import Engine
from tests.container.images import ROOT
from tests.container.quickstart import require_proved, steps_saved, words
from trainer.container.appliance import GROUP, USER
from trainer.errors import ExitCode

pytestmark = [pytest.mark.container, pytest.mark.timeout(1500)]

KILLED = 137
TMPFS_CACHE = ("--tmpfs", "/cache:mode=1777")
OVERLAYS = ("presets", "hardware")


def folder_of(path: Path, user: str) -> Path:
    """A folder that this user may write: its own, or one of group 0."""
    uid, gid = (int(number) for number in user.split(":"))
    path.mkdir()
    return somebodys(path, uid=0, gid=0, mode=0o770) if gid == GROUP else somebodys(path, uid=uid, gid=gid)


@pytest.mark.parametrize(
    "user",
    [f"{USER}:{GROUP}", f"{SOMEBODY}:{SOMEBODY}", f"{random.Random().randrange(20_000, 2**31 - 2)}:{GROUP}"],
    ids=["default", "caller", "random"],
)
def test_the_quickstart_trains_a_proved_lora(start: Start, tmp_path: Path, user: str) -> None:
    output = folder_of(tmp_path / "output", user)
    data = tmp_path / "data"
    data.mkdir()
    for file in (ROOT / "examples" / "style").glob("c*"):
        (data / file.name).write_bytes(file.read_bytes())
    command = [*words(4), "--dataset", "/data", "--output", "/output/quickstart"]
    options = (*mounts(data=data, output=output), *TMPFS_CACHE)
    # None: what the image says
    box = start(*command, options=options, user=None if user == f"{USER}:{GROUP}" else user)
    require_proved(box, output, owner=int(user.partition(":")[0]))
    assert f"{len(list(data.glob('*.png')))}/{len(list(data.glob('*.png')))}" in box.log()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_the_same_command_goes_on_after_a_stop_and_after_a_kill(
    engine: Engine, start: Start, output: Path, samples_cache: Path, how: str
) -> None:
    # its own output_dir is runs/quickstart, which lies on the volume
    command = words(60, "checkpoint.checkpointing_steps=10")
    options = mounts(output=output, cache=samples_cache)
    box = start(*command, options=options)
    if how == "stop":
        box.wait_for(lambda: box.step() >= 2)
        engine.ask("stop", "-t", "120", box.name)
        assert box.exit_code() == ExitCode.STOPPED, box.log()
    else:
        box.wait_for(lambda: steps_saved(output))
        engine.ask("kill", "-s", "KILL", box.name)
        assert box.exit_code() == KILLED
    (saved,) = steps_saved(output)[-1:]
    assert int(saved.removeprefix("step-")) < 60
    resumed = start(*command, options=options)
    require_proved(resumed, output, owner=SOMEBODY)
    assert f"resumed from {saved}" in resumed.log()
    assert "step-000060" in steps_saved(output)


def test_a_frozen_run_turns_unhealthy_and_is_ended(
    start: Start, output: Path, samples_cache: Path, tmp_path: Path
) -> None:
    # the budgets of the image are minutes: in this container training may be silent for 6 s
    patch = tmp_path / "patch"
    patch.mkdir()
    shrink = "from trainer.telemetry.status import BUDGET_SECONDS, Phase\nBUDGET_SECONDS[Phase.TRAIN] = 6.0\n"
    (patch / "sitecustomize.py").write_text(shrink)
    checks = ("--health-interval", "1s", "--health-retries", "1", "--health-timeout", "5s")
    options = (*mounts(output=output, cache=samples_cache, patch=patch), "-e", "PYTHONPATH=/patch", *checks)
    box = start(*words(100_000, "checkpoint.checkpointing_steps=100000"), options=options)
    assert box.health() == "starting"
    box.wait_for(lambda: box.step() >= 1)
    box.wait_for(lambda: box.health() == "healthy")
    _in(box, f"kill -STOP {box.training_pid()}")
    box.wait_for(lambda: box.health() == "unhealthy")
    assert box.exit_code() == ExitCode.HUNG
    assert "unhealthy: no heartbeat for" in box.log()
    assert "killed as hung" in box.log()


def test_a_bad_configuration_is_named_in_the_log(start: Start, output: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.mkdir()
    text = (ROOT / "train_configs" / "quickstart.yaml").read_text()
    (config / "bad.yaml").write_text(text.replace("learning_rate:", "learning_rat:"))
    box = start("train", "/config/bad.yaml", options=(*mounts(config=config, output=output), *TMPFS_CACHE))
    assert box.exit_code() == ExitCode.BAD_CONFIG
    assert "learning_rat" in box.log()
    assert "did you mean" in box.log()
    assert "Traceback" not in box.log()


@pytest.fixture
def small_disk(engine: Engine) -> Iterator[str]:
    """A volume of 64 MiB in memory, which lasts as long as a container uses it."""
    name = f"trainer-test-{uuid.uuid4().hex}"
    tmpfs = ("type=tmpfs", "device=tmpfs", f"o=size=64m,uid={SOMEBODY}")
    engine.ask("volume", "create", *(word for option in tmpfs for word in ("--opt", option)), name)
    yield name
    engine.ask("volume", "rm", name)


# the disk before `start`: it is removed after the containers that use it
def test_a_full_disk_ends_the_run_and_spares_the_last_checkpoint(
    small_disk: str, start: Start, samples_cache: Path
) -> None:
    options = ("-v", f"{small_disk}:/output", *mounts(cache=samples_cache))
    holder = start("600", options=(*options, "--entrypoint", "sleep"))
    box = start(*words(400, "checkpoint.checkpointing_steps=20"), options=options)
    box.wait_for(lambda: "checkpoint step-000020 saved" in box.log())
    _in(holder, "head -c 100M /dev/zero > /output/filler || true")
    assert box.exit_code() == ExitCode.NO_SPACE, box.log()
    assert "Traceback" not in box.log()
    saved = [name for name in _in(holder, "ls /output/quickstart/checkpoints").split() if "." not in name]
    assert saved
    _in(holder, "rm /output/filler")
    newest = int(max(saved).removeprefix("step-"))
    resumed = start(*words(newest + 20, "checkpoint.checkpointing_steps=20"), options=options)
    assert resumed.exit_code() == ExitCode.OK, resumed.log()
    assert f"resumed from {max(saved)}" in resumed.log()
    assert "Proved: reloaded from disk" in resumed.log()


def _in(box: Box, script: str) -> str:
    return box.engine.ask("exec", box.name, "sh", "-c", script)


def test_every_shipped_configuration_plans(start: Start, output: Path, tmp_path: Path) -> None:
    names = sorted(file.name for file in (ROOT / "train_configs").glob("*.yaml"))
    # a machine on which everything fits
    facts = json.loads((ROOT / "tests" / "golden" / "machines" / "h200.json").read_text())
    facts["gpus"][0]["total_memory_bytes"] *= 8
    folder = tmp_path / "facts"
    folder.mkdir()
    (folder / "huge.json").write_text(json.dumps(facts))
    script = 'for f in train_configs/*.yaml; do trainer plan "$f" >/tmp/log 2>&1; code=$?; '
    script += 'echo "$(basename $f) $code"; [ $code = 0 ] || cat /tmp/log; done'
    huge = ("-e", "TRAINER_FACTS=/facts/huge.json", "-e", "TRAINER_PROFILE=auto")
    box = start("sh", "-c", script, options=(*mounts(facts=folder, output=output), *TMPFS_CACHE, *huge))
    assert box.exit_code() == 0
    assert box.log().splitlines() == [f"{name} 0" for name in names]


def test_every_shipped_overlay_is_found(start: Start) -> None:
    """Presets by their names, also from another folder, and files for hardware."""
    configs = ROOT / "train_configs"
    presets, hardware = (sorted(path.stem for path in (configs / name).glob("*.yaml")) for name in OVERLAYS)
    assert presets and hardware
    script = 'cd /tmp; c=/opt/trainer/train_configs; t="trainer config check $c/quickstart.yaml"; '
    script += f"for p in {' '.join(presets)}; do $t --preset $p >log 2>&1 || cat log; done; "
    script += f"for h in {' '.join(hardware)}; do $t $c/hardware/$h.yaml >log 2>&1 || cat log; done"
    box = start("sh", "-c", script)
    assert (box.exit_code(), box.log()) == (0, "")
