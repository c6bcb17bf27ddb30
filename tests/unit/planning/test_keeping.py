"""Encoded samples in memory: the plan decides, counts and says it; and the disk row counts what is saved."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.unit.planning.conftest import GIB, machine
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.config.schema import DataSet, RunConfig
from trainer.errors import DataError
from trainer.machine.facts import Facts
from trainer.machine.profiles import select
from trainer.planning.cost import memory
from trainer.planning.data_rows import require_dataset, with_data
from trainer.planning.shapes.geometry import Geometry


def available(name: str, gib: int) -> Facts:
    facts = machine(name)
    return dataclasses.replace(facts, memory=dataclasses.replace(facts.memory, available_bytes=gib * GIB))


def test_a_part_of_what_the_run_leaves_of_the_host(config: Config, geometry: Geometry) -> None:
    found = plan(config(), available("rtx-4090", 44), geometry)
    assert found.keep_bytes == 5 * GIB  # of 44 the process takes 4
    assert {one.name: one.bytes for one in found.host_memory}["data"] == 5 * GIB
    assert row(found, "cache_in_memory").value == "5.0 GiB at most"
    assert not any("host memory" in text for text in found.warnings)


def test_shared_memory_keeps_nothing_by_itself(config: Config, geometry: Geometry) -> None:
    found = plan(config(), machine("dgx-spark"), geometry)
    decision = row(found, "cache_in_memory")
    assert (found.keep_bytes, decision.value, decision.source) == (0, "off", "profile dgx-spark")


@pytest.mark.parametrize("name", ["dgx-spark", "rtx-4090", "cpu"])
@pytest.mark.parametrize("asked", [True, False])
def test_what_is_written_counts(config: Config, geometry: Geometry, name: str, asked: bool) -> None:
    found = plan(config(data__cache_in_memory=asked), machine(name), geometry)
    assert row(found, "cache_in_memory").value == ("on" if asked else "off")
    assert (found.keep_bytes > 0) == asked
    assert ("data" in {one.name for one in found.host_memory}) == (asked and name != "cpu")
    if name == "rtx-4090":
        assert memory.total(found.host_memory) <= machine(name).memory.available_bytes
    else:
        # the device's memory is the host's
        assert found.peak_bytes + found.keep_bytes <= found.budget_bytes


def test_no_profile_has_a_note_that_nothing_reads() -> None:
    """Notes are rows of the plan: each is of something that the plan decides."""
    for name in ("dgx-spark", "rtx-4090", "h200", "cpu"):
        assert {feature for feature, _ in select(machine(name))[0].notes} <= {"pin_memory", "offload"}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize(
    ("steps", "every"), [(40, 250), (700, 500), (5, 3), (6, 3), (1000, 250), (1001, 250)]
)
def test_the_disk_row_counts_every_checkpoint_that_is_there_at_once(
    config: Config, geometry: Geometry, method: str, limit: int, steps: int, every: int
) -> None:
    """Step by step: a newer one is complete before the oldest goes."""
    asked = config(
        method=method,
        train__max_train_steps=steps,
        checkpoint__checkpointing_steps=every,
        checkpoint__checkpoints_total_limit=limit,
    )
    kept: list[int] = []
    most = 0
    for step in range(1, steps + 1):
        # as trainer/engine/training/loop.py saves
        last = step == steps and (method == "lora" or every <= steps)
        if step % every == 0 or last:
            kept.append(step)
            most = max(most, len(kept))
            kept = kept[-limit:]
    said = row(plan(asked, machine("h200"), geometry), "disk").reason
    assert said.startswith(f"{most} checkpoint{'' if most == 1 else 's'} in output_dir")


def pictures(folder: Path, count: int) -> Path:
    folder.mkdir(parents=True)
    for number in range(count):
        (folder / f"{number}.png").touch()
        (folder / f"{number}.txt").touch()
    return folder


def with_sets(asked: RunConfig, *sets: DataSet) -> RunConfig:
    return asked.model_copy(update={"data": asked.data.model_copy(update={"sets": sets})})


def test_a_plan_says_how_often_the_run_sees_its_images(
    config: Config, geometry: Geometry, tmp_path: Path
) -> None:
    asked = config(train__max_train_steps=100, train__gradient_accumulation_steps=4, validation__held_out=2)
    one = DataSet(img_dir=pictures(tmp_path / "a", 12), mask_dir=pictures(tmp_path / "a" / "masks", 12))
    other = DataSet(img_dir=pictures(tmp_path / "b", 10), repeats=3)
    found = plan(asked, machine("h200"), geometry)
    decision = row(with_data(found, with_sets(asked, one, other)), "data")
    assert decision.value == "22 images"
    assert "100 steps see 400 samples: about 10.5 epochs of 38, 2 held out" in decision.reason
    for unknown in (DataSet(img_dir=tmp_path / "none"), DataSet(chat_file=tmp_path / "c.jsonl")):
        assert with_data(found, with_sets(asked, one, unknown)) == found


def test_one_of_anything_is_told_in_the_singular(config: Config, geometry: Geometry, tmp_path: Path) -> None:
    asked = config(train__max_train_steps=1, train__gradient_accumulation_steps=1)
    one = DataSet(img_dir=pictures(tmp_path / "a", 1), repeats=2)
    found = plan(asked, machine("h200"), geometry)
    decision = row(with_data(found, with_sets(asked, one)), "data")
    assert decision.value == "1 image" and "1 step sees 1 sample: 0.5 epochs of 2" in decision.reason
    epoch = config(train__num_train_epochs=1.0, train__max_train_steps=1)
    decision = row(with_data(found, with_sets(epoch, one)), "data")
    assert "1 epoch of 2 is 1 step" in decision.reason


def test_a_data_set_that_was_named_and_is_not_there_is_an_error(tmp_path: Path) -> None:
    require_dataset(None)
    require_dataset(tmp_path)
    with pytest.raises(DataError, match=r"--dataset: .*none does not exist"):
        require_dataset(tmp_path / "none")
