"""Epochs and steps in the plan: of pictures as the sampler takes them, of conversations about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.unit.planning.conftest import machine
from tests.unit.planning.test_keeping import pictures, with_sets
from tests.unit.planning.test_resolve import Config, plan, row
from trainer.config.reading.load import Loaded
from trainer.config.schema import DataSet, RunConfig, changed
from trainer.data.pictures.variants import with_variants
from trainer.data.sampler import Sampler
from trainer.data.sets.scan import scan_images
from trainer.planning.data_rows import with_data
from trainer.planning.epochs import count, with_epochs
from trainer.planning.shapes.geometry import Geometry


def of_epochs(asked: RunConfig, epochs: float) -> RunConfig:
    """The configuration with the steps that the plan finds for so many epochs."""
    asked = changed(asked, {"train.num_train_epochs": epochs})
    return with_epochs(Loaded(config=asked, sources={})).config


@pytest.mark.parametrize("epochs", [0.3, 1, 2.5, 7])
@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 3), (1, 50)])
def test_pictures_take_the_steps_of_the_sampler(
    config: Config, tmp_path: Path, epochs: float, batch: int, accumulation: int
) -> None:
    asked = config(train__train_batch_size=batch, train__gradient_accumulation_steps=accumulation)
    one = DataSet(img_dir=pictures(tmp_path / "a", 7), repeats=2)
    other = DataSet(img_dir=pictures(tmp_path / "b", 3), flip=True)
    found = of_epochs(with_sets(asked, one, other), epochs)
    # views make the epoch longer: two of each of the three, and the share of the others kept
    repeats = [4] * 7 + [1] * 6
    sampler = Sampler(
        keys=[()] * 13,
        dropped_keys=[()] * 13,
        repeats=repeats,
        contents=[*range(13)],
        sizes=[1] * 13,
        row_size=1,
        rows=batch * accumulation,
        rows_at_once=batch,
        caption_dropout_rate=0.0,
        seed=0,
    )
    seen = steps = 0
    while seen < epochs * sum(repeats) - 1e-9:
        seen += sum(map(len, sampler.step(steps)))
        steps += 1
    assert found.train.max_train_steps == steps


def test_the_plan_prints_steps_of_epochs_and_epochs_of_steps(
    config: Config, geometry: Geometry, tmp_path: Path
) -> None:
    asked = config(train__gradient_accumulation_steps=4, train__max_train_steps=30, validation__held_out=2)
    asked = with_sets(asked, DataSet(img_dir=pictures(tmp_path / "a", 22)))
    found = plan(asked, machine("h200"), geometry)
    assert (
        "30 steps see 120 samples: 6.0 epochs of 20, 2 held out"
        in row(with_data(found, asked), "data").reason
    )
    epochs = of_epochs(asked, 3)
    assert "3 epochs of 20 are 15 steps, 2 held out" in row(with_data(found, epochs), "data").reason
    unknown = of_epochs(with_sets(asked, DataSet(img_dir=tmp_path / "none")), 3)
    decision = row(with_data(found, unknown), "data")
    assert (decision.value, unknown.train.max_train_steps) == ("not counted", 30)
    assert "the run counts the steps of 3 epochs; this plan is for 30 steps" in decision.reason


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 1), (2, 3), (4, 1)])
def test_epochs_are_the_samples_of_all_steps_over_those_of_one(
    config: Config, tmp_path: Path, batch: int, accumulation: int
) -> None:
    asked = config(train__train_batch_size=batch, train__gradient_accumulation_steps=accumulation)
    asked = with_sets(asked, DataSet(img_dir=pictures(tmp_path / "a", 5), repeats=2))
    found = count(asked)
    assert found is not None
    assert found.epochs(asked, 30) == 30 * batch * accumulation / 10


def test_held_out_pictures_leave_an_epoch_as_often_as_they_are_repeated(
    config: Config, geometry: Geometry, tmp_path: Path
) -> None:
    asked = with_sets(
        config(validation__held_out=2), DataSet(img_dir=pictures(tmp_path / "a", 20), repeats=10)
    )
    # 18 pictures are trained on, 10 times each
    assert of_epochs(asked, 2).train.max_train_steps == 360


@pytest.mark.parametrize("sizes", [[(64, 64)] * 3, [(64, 64), (64, 64), (90, 64)], [(90, 64)] * 2])
def test_a_picture_of_its_buckets_shape_has_one_view_as_in_the_run(
    config: Config, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    """Four random cuts of a square that fills a square bucket are one and the same."""
    (tmp_path / "a").mkdir()
    for number, size in enumerate(sizes):
        Image.new("RGB", size).save(tmp_path / "a" / f"{number}.png")
        (tmp_path / "a" / f"{number}.txt").write_text("x")
    sets = (DataSet(img_dir=tmp_path / "a", random_crop=4, flip=True),)
    scan = scan_images(sets, resolution=64, multiple=16, trigger_word=None, controls=(0, 0))
    trained = sum(one.repeats for one in with_variants(scan.records, sets))
    asked = with_sets(config(data__resolution=64), *sets)
    found = count(asked)
    assert found is not None and (found.in_epoch, found.exact) == (trained, True)
    assert of_epochs(asked, 1).train.max_train_steps == trained


def test_views_of_pictures_that_nobody_has_looked_at_are_told_about(config: Config, tmp_path: Path) -> None:
    asked = with_sets(config(), DataSet(img_dir=pictures(tmp_path / "a", 3), random_crop=4))
    found = count(asked)
    assert found is not None and (found.in_epoch, found.exact) == (12, False)
    large = DataSet(img_dir=tmp_path / "b", random_crop=2)
    (tmp_path / "b").mkdir()
    for number in range(201):
        Image.new("L", (16, 16)).save(tmp_path / "b" / f"{number}.png")
    found = count(with_sets(asked, large))
    assert found is not None and (found.in_epoch, found.exact) == (402, False)
    whole = large.model_copy(update={"random_crop": 1})
    square = DataSet(img_dir=tmp_path / "c", random_crop=4)
    (tmp_path / "c").mkdir()
    Image.new("L", (64, 64)).save(tmp_path / "c" / "0.png")
    found = count(with_sets(asked, whole, square))
    assert found is not None and (found.in_epoch, found.exact) == (202, True)


def test_conversations_are_counted_about(config: Config, geometry: Geometry, tmp_path: Path) -> None:
    file, table = tmp_path / "c.jsonl", tmp_path / "d.json"
    file.write_text("".join(json.dumps({"text": "x" * 390}) + "\n" for _ in range(11)))
    table.write_text(json.dumps([{"text": "y" * 390}] * 5))
    asked = config(
        data__max_sequence_length=500, train__gradient_accumulation_steps=2, train__max_train_steps=30,
        validation__held_out=1,
    )  # fmt: skip
    asked = with_sets(asked, DataSet(chat_file=file), DataSet(chat_file=table, repeats=2))
    found = plan(asked, machine("h200"), geometry)
    # 402 bytes a row are 100 tokens: 20 rows of 21 an epoch, 2 tokens more or less; 1000 tokens a step
    decision = row(with_data(found, asked), "data")
    assert decision.value == "16 conversations"
    assert "30 steps are about 14.9 epochs of 20, 1 held out" in decision.reason
    epochs = of_epochs(asked, 10)
    assert epochs.train.max_train_steps == 21
    assert "10 epochs of 20 are about 21 steps" in row(with_data(found, epochs), "data").reason
    listed = tmp_path / "dataset_info.json"
    columns = {"messages": "text"}
    entry = {"file_name": table.name, "formatting": "sharegpt", "columns": columns}
    listed.write_text(json.dumps({"d": entry}))
    named = with_sets(asked, DataSet(chat_file=file), DataSet(dataset_info=listed, name="d", repeats=2))
    assert count(named) == count(asked) is not None


@pytest.mark.parametrize(
    ("on_long", "samples", "tokens"), [("error", 12, 8250), ("cut", 12, 750), ("skip", 10, 500)]
)
def test_what_is_too_long_is_counted_as_it_is_learned(
    on_long: str, samples: int, tokens: int, config: Config, tmp_path: Path
) -> None:
    """Ten conversations of 50 tokens, and two of about 4,000 of which 125 are possible."""
    file = tmp_path / "c.jsonl"
    rows = [json.dumps({"text": "x" * 188})] * 10 + [json.dumps({"text": "y" * 15_500})] * 2
    file.write_text("\n".join(rows))
    asked = config(data__max_sequence_length=125, data__on_long=on_long, validation__held_out=0)
    found = count(with_sets(asked, DataSet(chat_file=file)))
    assert found is not None and found.samples == found.in_epoch == samples
    assert found.tokens == pytest.approx(tokens, rel=0.01)


@pytest.mark.parametrize("listed", [False, True])
def test_conversations_of_a_table_with_other_names_are_counted(
    listed: bool, config: Config, tmp_path: Path
) -> None:
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"question": "x" * 390, "answer": "y", "picture": "z" * 9000}] * 5
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = {"prompt": "question", "response": "answer"}
    written: dict[str, object] = {"chat_file": tmp_path / "a.parquet", "columns": columns}
    if listed:
        info = tmp_path / "dataset_info.json"
        info.write_text(json.dumps({"d": {"file_name": "a.parquet", "columns": columns}}))
        written = {"dataset_info": info, "name": "d"}
    found = count(with_sets(config(), DataSet.model_validate(written)))
    assert found is not None and found.samples == 5
    assert 400 < found.tokens * 4 / 5 < 450
