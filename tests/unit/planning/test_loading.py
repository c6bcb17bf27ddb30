"""The loader that reads the base: the rates measured on its disk decide; without them nothing changes."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import situated
from trainer.config.schema import RunConfig
from trainer.machine import verdicts
from trainer.machine.facts import Facts, ReadVerdict
from trainer.machine.profiles import PROFILES
from trainer.planning.choose import loading
from trainer.planning.plan import Decision
from trainer.planning.shapes.geometry import Geometry

DISK, OTHER = "ext4 /models", "nfs4 /mnt"
OURS, THEIRS = "parallel", "fastsafetensors"


def readings(*rates: tuple[str, str, float], disk: str = DISK) -> tuple[ReadVerdict, ...]:
    return tuple(
        ReadVerdict(disk=disk, loader=loader, state=state, gib_per_second=rate)
        for loader, state, rate in rates
    )


def h200(*rates: tuple[str, str, float]) -> Facts:
    facts = machine("h200")
    packages = {**facts.packages, THEIRS: "0.5.0"}
    return dataclasses.replace(facts, packages=packages, readings=readings(*rates))


def unsized(config: RunConfig, dtype: str) -> Geometry:
    raise AssertionError("which loader reads does not depend on sizes")


def decided(facts: Facts, config: RunConfig, *, disk: str = DISK, ranks: int = 1) -> Decision:
    profile = PROFILES["dgx-spark" if facts.gpus[0].integrated else "hopper-fp8"]
    situation = situated(config, facts, profile, unsized)
    return loading.loader(dataclasses.replace(situation, disk=disk, ranks=ranks))


BOTH = ((OURS, "cold", 2.0), (OURS, "cached", 7.0))


@pytest.mark.parametrize(
    ("rates", "value"),
    [
        ((*BOTH, (THEIRS, "cold", 3.0), (THEIRS, "cached", 4.0)), "fastsafetensors-cold"),
        ((*BOTH, (THEIRS, "cold", 1.0), (THEIRS, "cached", 9.0)), "fastsafetensors-cached"),
        ((*BOTH, (THEIRS, "cold", 3.0), (THEIRS, "cached", 9.0)), "fastsafetensors"),
        ((*BOTH, (THEIRS, "cold", 2.1), (THEIRS, "cached", 7.5)), "auto"),
        (BOTH, "auto"),
        (((OURS, "cached", 7.0), (THEIRS, "cached", 9.0)), "fastsafetensors-cached"),
    ],
)
def test_the_faster_one_is_taken_in_each_state(
    config: type[RunConfig], rates: tuple[tuple[str, str, float], ...], value: str
) -> None:
    found = decided(h200(*rates), config())
    assert (found.value, found.source) == (value, "auto (measured)")
    assert found.reason.startswith(f"GiB/s measured on {DISK}, ")
    assert all(f"{rate:.2f}" in found.reason for _, _, rate in rates)


def test_our_reader_stays_without_a_measurement_of_this_disk(config: type[RunConfig]) -> None:
    rates = (*BOTH, (THEIRS, "cold", 9.0), (THEIRS, "cached", 9.0))
    plain = ("auto", "auto", "parallel reads, past the page cache for files that are not in it")
    for facts, disk in (
        (h200(), DISK),
        (h200(*rates), OTHER),
        (h200(*rates), ""),
        (dataclasses.replace(h200(*rates), packages={}), DISK),
    ):
        found = decided(facts, config(), disk=disk)
        assert (found.value, found.source, found.reason) == plain


def test_unified_memory_keeps_to_the_reader_that_gives_it_back(config: type[RunConfig]) -> None:
    fast = h200(*BOTH, (THEIRS, "cold", 9.0))
    spark = dataclasses.replace(machine("dgx-spark"), packages=fast.packages, readings=fast.readings)
    assert decided(spark, config()).value == "auto"
    assert "share one memory" in loading.unmeasured(spark, DISK)


def test_what_was_asked_for_stays(config: type[RunConfig]) -> None:
    rates = (*BOTH, (THEIRS, "cold", 9.0), (THEIRS, "cached", 9.0))
    assert decided(h200(*rates), config(features__loader="safetensors")).value == "safetensors"
    assert decided(h200(*BOTH), config(features__loader=THEIRS)).value == THEIRS


def test_several_processes_read_their_shares(config: type[RunConfig]) -> None:
    """fastsafetensors reads whole files: each process would read all of them."""
    rates = (*BOTH, (THEIRS, "cold", 9.0), (THEIRS, "cached", 9.0))
    found = decided(h200(*rates), config(), ranks=2)
    assert found.value == "auto"
    assert found.reason == "parallel reads: each of 2 processes reads its share, fastsafetensors whole files"
    assert decided(h200(*rates), config(features__loader=THEIRS), ranks=2).value == THEIRS


def test_where_nothing_is_measured() -> None:
    facts = h200()
    assert loading.unmeasured(facts, DISK) == ""
    assert "not on this disk" in loading.unmeasured(facts, "")
    assert "not installed" in loading.unmeasured(dataclasses.replace(facts, packages={}), DISK)
    memory = dataclasses.replace(facts.memory, available_bytes=3 * GIB)
    tight = dataclasses.replace(facts, memory=memory)
    assert loading.unmeasured(tight, DISK) == "less than 4 GiB of host memory are available"


def test_a_disk_is_its_kind_and_where_it_is_mounted(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    lines = [
        "22 1 259:1 / / rw - overlay overlay rw",
        f"30 22 259:2 / {tmp_path}/models rw - ext4 /dev/nvme0n1 rw",
    ]
    mounts.write_text("\n".join(lines))
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "models")
    assert loading.disk_of(tmp_path / "models" / "flux", mounts) == f"ext4 {tmp_path}/models"
    assert loading.disk_of(tmp_path / "link", mounts) == f"ext4 {tmp_path}/models"
    assert loading.disk_of(tmp_path, mounts) == "overlay /"
    assert loading.disk_of(None, mounts) == ""
    assert loading.disk_of(tmp_path, tmp_path / "missing") == ""


def test_a_mount_whose_path_is_no_utf_8_hides_no_other(tmp_path: Path) -> None:
    mounts, folder = tmp_path / "mountinfo", Path(os.fsdecode(bytes(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    mounts.write_bytes(
        b"22 1 259:1 / / rw - overlay o rw\n30 22 259:2 / " + bytes(folder) + b" rw - ext4 e rw\n"
    )
    assert loading.disk_of(folder, mounts) == f"ext4 {folder}"
    assert loading.disk_of(tmp_path, mounts) == "overlay /"


def test_rates_are_kept_by_disk_beside_verdicts(tmp_path: Path) -> None:
    path, facts = tmp_path / "verdicts.json", machine("h200")
    old = readings((OURS, "cold", 1.0), (THEIRS, "cold", 1.0))
    elsewhere = readings((OURS, "cold", 5.0), disk=OTHER)
    assert verdicts.keep(path, facts, readings=old)
    assert verdicts.keep(path, facts, verdicts=facts.verdicts)
    assert verdicts.keep(path, facts, readings=elsewhere)
    assert verdicts.keep(path, facts, readings=readings((OURS, "cached", 2.0)))
    assert verdicts.read_kept(path, facts).readings == (*elsewhere, *readings((OURS, "cached", 2.0)))
    assert set(verdicts.read_kept(path, facts).verdicts) == set(facts.verdicts)
    assert verdicts.read_kept(path, machine("rtx-4090")).readings == ()
