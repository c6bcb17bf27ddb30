"""What a plan reads of a data set's pictures: their shapes, against the run's own scan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.hardware.conftest import machine
from tests.unit.hardware.test_keeping import with_sets
from tests.unit.hardware.test_resolve import row
from trainer import families
from trainer.config import load
from trainer.config.schema import DataSet, RunConfig
from trainer.data.scan import scan_images
from trainer.engine.data_rows import picture_shares, picture_sizes
from trainer.engine.planning import plan_run

REPOSITORY = Path(__file__).parents[3]
DEFAULTS = {name: families.get(name).defaults for name in families.names()}
REAL_SHAPED = REPOSITORY / "tests" / "data" / "real_shaped"


def test_shapes_are_those_of_the_pictures_that_the_run_reads(config: Callable[..., RunConfig]) -> None:
    folder = DataSet(img_dir=REAL_SHAPED / "pictures", repeats=2)
    edits = DataSet(img_dir=REAL_SHAPED / "edits", control_dir=REAL_SHAPED / "controls")
    for sets in ((folder,), (folder, edits)):
        scan = scan_images(sets, resolution=512, multiple=16, trigger_word=None, controls=(0, 1))
        buckets: Counter[tuple[int, int]] = Counter()
        for one in scan.records:
            buckets[one.bucket_width, one.bucket_height] += one.repeats
        found = picture_shares(picture_sizes(with_sets(config(), *sets)), 512, 16)
        assert found == pytest.approx(sorted(count / buckets.total() for count in buckets.values()))
    unknown = with_sets(config(), folder, DataSet(chat_file=REAL_SHAPED / "chats.jsonl"))
    assert picture_sizes(unknown) == () == picture_shares((), 512, 16)


def test_some_pictures_stand_for_all(config: Callable[..., RunConfig], tmp_path: Path) -> None:
    for number in range(500):
        Image.new("L", (8, 8) if number % 5 else (16, 8)).save(tmp_path / f"{number:03}.png")
    sizes = picture_sizes(with_sets(config(), DataSet(img_dir=tmp_path)))
    assert len(sizes) <= 200 and sum(one.weight for one in sizes) == pytest.approx(500)
    assert picture_shares(sizes, 512, 16) == pytest.approx((0.2, 0.8), abs=0.05)


def test_a_plan_counts_on_the_shapes_of_its_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures of one shape make whole micro-batches, and a short run of a tiny model is not compiled."""
    monkeypatch.chdir(REPOSITORY)
    quickstart = load.load([Path("train_configs/quickstart.yaml")], environ={}, family_defaults=DEFAULTS)
    known = plan_run(quickstart, machine("h200"))
    assert "measured: one micro-batch;" in row(known, "step_time").reason
    assert not known.compile
    mixed = load.with_settings(quickstart, {"data.sets": (DataSet(img_dir=REAL_SHAPED / "pictures"),)})
    found = plan_run(mixed, machine("h200"))
    said = "8 samples, 3.5 micro-batches where pictures are of the shapes of this set"
    assert said in row(found, "step_time").reason
