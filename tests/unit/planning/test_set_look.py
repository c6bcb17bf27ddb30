"""Sample shapes that a plan reads from a data set at a glance, against the run's own scan."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_resolve import row
from trainer import families
from trainer.config.reading import load
from trainer.config.schema import DataSet, RunConfig
from trainer.data.pictures import images
from trainer.data.pictures.buckets import buckets, nearest_bucket
from trainer.data.sets.scan import scan_images
from trainer.planning import epochs
from trainer.planning.planning import plan_run
from trainer.planning.shapes import set_look
from trainer.planning.shapes.set_look import samples, seen, shapes_of, stamp

REPOSITORY = Path(__file__).parents[3]
DEFAULTS = {name: families.get(name).defaults for name in families.names()}
REAL_SHAPED = REPOSITORY / "tests" / "data" / "real_shaped"


def counts(family: str, *sets: DataSet, resolution: int = 512) -> list[tuple[int, int]]:
    """Number of samples of each shape, and how often they come in an epoch."""
    return sorted(one[1:] for one in shapes_of(seen(sets, families.get(family)), resolution, 16))


def scanned(family: str, *sets: DataSet) -> list[tuple[int, int]]:
    """The counts from the files that a run reads."""
    controls = families.get(family).control_counts
    scan = scan_images(sets, resolution=512, multiple=16, trigger_word=None, controls=controls)
    found: Counter[tuple[object, int]] = Counter()
    sizes = buckets(512, 16)
    for one in scan.records:
        befores = tuple(nearest_bucket(before.width, before.height, sizes) for before in one.controls)
        found[(one.bucket_width, one.bucket_height, befores), one.repeats] += 1
    return sorted((count, repeats) for (_, repeats), count in found.items())


@pytest.mark.parametrize("family", ["flux1_dev", "flux1_kontext", "qwen_image_edit"])
def test_shapes_are_those_of_what_the_run_reads(family: str) -> None:
    edits = DataSet(img_dir=REAL_SHAPED / "edits", control_dir=REAL_SHAPED / "controls")
    pictures = DataSet(img_dir=REAL_SHAPED / "pictures", repeats=2)
    sets = (pictures,) if family == "flux1_dev" else (edits,)
    assert counts(family, *sets) == scanned(family, *sets)
    unknown = DataSet(chat_file=REAL_SHAPED / "chats.jsonl")
    assert seen((*sets, unknown), families.get(family)) == () == shapes_of((), 512, 16)
    assert counts(family, *sets, resolution=8) == []


def test_held_out_pictures_below_a_set_are_not_counted(tmp_path: Path) -> None:
    (tmp_path / "val").mkdir()
    for name in ("a.png", "b.png", "val/c.png"):
        Image.new("RGB", (64, 64)).save(tmp_path / name)
        (tmp_path / name).with_suffix(".txt").write_text("a square")
    data = {"sets": [{"img_dir": tmp_path}], "resolution": 64}
    config = {
        **{"family": "flux1_dev", "model": {"pretrained_model_name_or_path": "-"}, "output_dir": "-"},
        **{"data": data, "validation": {"img_dir": tmp_path / "val"}},
    }
    counted = epochs.count(RunConfig.model_validate(config))
    assert counted is not None and (counted.samples, counted.in_epoch) == (2, 2)
    one, held_out = DataSet(img_dir=tmp_path), DataSet(img_dir=tmp_path / "val")
    family = families.get("flux1_dev")
    assert [weight for _, weight, _ in seen((one,), family, beside=(held_out,))] == [1, 1]
    assert len(seen((one,), family)) == 3


def test_controls_that_metadata_names_are_no_samples(tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        Image.new("RGB", (64, 64)).save(tmp_path / f"{number}.png")
        Image.new("RGB", (128, 64)).save(tmp_path / f"before{number}.png")
        row = {"file_name": f"{number}.png", "text": "x", "control_file_name": f"before{number}.png"}
        rows.append(json.dumps(row))
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    one = DataSet(img_dir=tmp_path)
    assert counts("flux1_kontext", one) == scanned("flux1_kontext", one) == [(6, 1)]


def test_some_pictures_stand_for_all(tmp_path: Path) -> None:
    for number in range(400):
        Image.new("L", (16, 8) if number % 2 else (8, 16)).save(tmp_path / f"{number:03}.png")
    found = seen((DataSet(img_dir=tmp_path, repeats=3),), families.get("flux1_dev"))
    assert len(found) == 200 and sum(weight for _, weight, _ in found) == pytest.approx(400)
    (_, some, often), (_, others, _) = shapes_of(found, 512, 16)
    assert (some, others) == pytest.approx((200, 200), rel=0.15) and often == 3


def test_a_set_of_which_nothing_is_seen_is_not_left_out(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "a" / "a.png")
    (tmp_path / "b" / "b.png").write_bytes(b"no picture")
    sets = (DataSet(img_dir=tmp_path / "a"), DataSet(img_dir=tmp_path / "b"))
    assert seen(sets, families.get("flux1_dev")) == ()


def test_pictures_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes(b"no picture")
    opened: list[Path] = []
    look = images.claimed_size
    monkeypatch.setattr(images, "claimed_size", lambda path: opened.append(path) or look(path))
    sets, family = (DataSet(img_dir=tmp_path),), families.get("flux1_dev")
    assert seen(sets, family) == seen(sets, family) and len(opened) == 2
    assert [weight for _, weight, _ in seen(sets, family)] == [2]
    Image.new("L", (8, 8)).save(tmp_path / "c.png")
    os.utime(tmp_path, (1, 1))
    assert sum(weight for _, weight, _ in seen(sets, family)) == 3


def test_files_below_a_folder_and_metadata_are_looked_at_anew(tmp_path: Path) -> None:
    """A studio runs for days: what changes in a folder below leaves the time of those above."""
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    Image.new("L", (8, 8)).save(inside / "1.png")
    sets, family = (DataSet(img_dir=tmp_path),), families.get("flux1_kontext")
    assert [len(one) for one in samples(sets, family) or ()] == [1]
    os.utime(inside, (1, 1))
    Image.new("L", (8, 8)).save(inside / "2.png")
    assert [len(one) for one in samples(sets, family) or ()] == [2]
    metadata = tmp_path / "metadata.jsonl"
    metadata.touch()
    before, times = stamp(sets), tmp_path.stat()
    metadata.write_text(json.dumps({"file_name": "a/b/1.png", "text": "x", "control_file_name": "a/b/2.png"}))
    os.utime(tmp_path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert stamp(sets) != before
    assert [len(one) for one in samples(sets, family) or ()] == [1]


def test_a_large_set_is_not_walked_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        (tmp_path / str(number) / "below").mkdir(parents=True)
    monkeypatch.setattr(set_look, "_MOST_COUNTED", 10)
    assert 1 < len(stamp((DataSet(img_dir=tmp_path),))) <= 11


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
