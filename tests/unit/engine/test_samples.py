"""Images for training and held-out images; the problems of all folders are told at once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.pictures import write_pair
from trainer import families
from trainer.config.schema import RunConfig
from trainer.engine.caching import samples
from trainer.engine.caching.samples import Samples, scan_samples
from trainer.errors import DataError


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Three pictures to train on, and two others."""
    train, other = tmp_path / "train", tmp_path / "other"
    train.mkdir()
    other.mkdir()
    for number, name in enumerate(("a.png", "b.png", "c.png")):
        write_pair(train, name, f"thing {name}", seed=number)
    write_pair(other, "a.png", "another thing", seed=10)
    write_pair(other, "z.png", "a last thing", seed=11)
    return train, other


def scan(train: Path, seen: list[tuple[str, int, int]] | None = None, **validation: Any) -> Samples:
    family = families.get(families.names()[0])
    config = RunConfig.model_validate(
        {
            "family": family.name,
            "model": {"pretrained_model_name_or_path": "-"},
            "data": {"sets": [{"img_dir": train}], "resolution": 64, "trigger_word": "zwx"},
            "validation": validation,
            "output_dir": "-",
        }
    )
    return scan_samples(family, config, None if seen is None else lambda *news: seen.append(news))


def test_a_held_out_folder_is_read_as_a_set_is_and_not_trained_on(folders: tuple[Path, Path]) -> None:
    train, other = folders
    seen: list[tuple[str, int, int]] = []
    found = scan(train, seen, img_dir=other)
    assert [record.path for record in found.training] == [
        train / name for name in ("a.png", "b.png", "c.png")
    ]
    assert [record.path for record in found.held_out] == [other / "a.png", other / "z.png"]
    assert [record.caption for record in found.held_out] == ["zwx, another thing", "zwx, a last thing"]
    assert found.all == found.training + found.held_out
    assert seen[2:4] == [("checking images", 3, 3), ("checking held-out images", 1, 2)]


@pytest.mark.parametrize("inner", ["held-out", "training"])
def test_one_of_the_folders_may_lie_below_the_other(folders: tuple[Path, Path], inner: str) -> None:
    train, other = folders
    if inner == "held-out":
        other = other.rename(train / "val")
    else:
        train = train.rename(other / "train")
    found = scan(train, img_dir=other)
    assert [record.path.relative_to(train).as_posix() for record in found.training] == [
        "a.png",
        "b.png",
        "c.png",
    ]
    assert [record.path.relative_to(other).as_posix() for record in found.held_out] == ["a.png", "z.png"]


def test_a_count_is_taken_from_the_sets(folders: tuple[Path, Path]) -> None:
    found = scan(folders[0], held_out=1)
    assert (len(found.training), len(found.held_out)) == (2, 1)
    assert scan(folders[0]).held_out == ()


def test_problems_of_both_folders_come_together(folders: tuple[Path, Path]) -> None:
    train, other = folders
    (train / "b.txt").unlink()
    (other / "z.png").write_bytes(b"no picture")
    with pytest.raises(DataError) as caught:
        scan(train, img_dir=other)
    assert {problem.where for problem in caught.value.problems} == {
        str(train / "b.png"),
        str(other / "z.png"),
    }


def test_pictures_in_both_folders_are_listed(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, other = folders
    for number, name in enumerate(("b.png", "c.png")):
        shutil.copy(train / name, other / f"copy-{number}.png")
        (other / f"copy-{number}.txt").write_text("another caption")
    with pytest.raises(DataError) as caught:
        scan(train, img_dir=other)
    assert [(problem.where, problem.what.split(": ")[1]) for problem in caught.value.problems] == [
        (str(other / "copy-0.png"), str(train / "b.png")),
        (str(other / "copy-1.png"), str(train / "c.png")),
    ]
    monkeypatch.setattr(samples, "MAX_PROBLEMS_SHOWN", 1)
    with pytest.raises(DataError, match=r"\.\.\. and 1 more"):
        scan(train, img_dir=other)


def test_regularisation_sets_are_never_held_out_and_the_held_out_loss_has_no_weights(
    folders: tuple[Path, Path],
) -> None:
    train, other = folders
    family = families.get(families.names()[0])
    sets = [{"img_dir": train, "loss_weight": 2.0, "flip": True}, {"img_dir": other, "is_reg": True}]
    config = RunConfig.model_validate(
        {
            "family": family.name,
            "model": {"pretrained_model_name_or_path": "-"},
            "data": {"sets": sets, "resolution": 64},
            "validation": {"held_out": 2},
            "output_dir": "-",
        }
    )
    found = scan_samples(family, config)
    assert {record.path.parent for record in found.held_out} == {train}
    assert [(record.loss_weight, record.view.key) for record in found.held_out] == [(1.0, "")] * 2
    trained = [(record.path.parent, record.loss_weight, record.view.flip) for record in found.training]
    assert trained == [(train, 2.0, False), (train, 2.0, True), (other, 1.0, False), (other, 1.0, False)]
    too_many = config.validation.model_copy(update={"held_out": 3})
    with pytest.raises(DataError, match="3 samples cannot be held out"):
        scan_samples(family, config.model_copy(update={"validation": too_many}))


def test_what_is_left_out_of_every_folder_is_handed_on(folders: tuple[Path, Path]) -> None:
    train, other = folders
    (train / "a.txt").write_text("")
    (other / "z.png").write_bytes(b"")
    family = families.get(families.names()[0])
    config = RunConfig.model_validate(
        {
            "family": family.name,
            "model": {"pretrained_model_name_or_path": "-"},
            "data": {"sets": [{"img_dir": train}], "resolution": 64, "on_bad_file": "skip"},
            "validation": {"img_dir": other},
            "output_dir": "-",
        }
    )
    found = scan_samples(family, config)
    assert [file for file, _ in found.left_out] == [str(train / "a.png"), str(other / "z.png")]
    assert len(found.training) == 2 and len(found.held_out) == 1
