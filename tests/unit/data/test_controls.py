"""Control images find their targets, and everything without a partner is told before anything loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.data.pictures import encoded, picture, write_pair, write_rows
from trainer.config.schema import DataSet
from trainer.data.records import ImageRecord
from trainer.data.sets.scan import scan_images
from trainer.engine.caching.entries import control_views
from trainer.errors import DataError


@pytest.fixture
def targets(tmp_path: Path) -> Path:
    """Two captioned images, `a.png` and `b.png`."""
    folder = tmp_path / "after"
    folder.mkdir()
    for number, name in enumerate(("a.png", "b.png")):
        write_pair(folder, name, f"make it {name}", seed=number)
    return folder


def controls(folder: Path, *names: str, width: int = 40) -> Path:
    """A folder of images without captions."""
    folder.mkdir(exist_ok=True)
    for number, name in enumerate(names):
        kind = "JPEG" if name.endswith(".jpg") else "PNG"
        (folder / name).write_bytes(encoded(picture(width, 30, seed=50 + number), kind))
    return folder


def scan(one: DataSet, counts: tuple[int, int] = (1, 1)) -> tuple[ImageRecord, ...]:
    found = scan_images((one,), resolution=64, multiple=16, trigger_word=None, controls=counts)
    return tuple(record for record in found.records if isinstance(record, ImageRecord))


def told(one: DataSet, counts: tuple[int, int] = (1, 1)) -> list[str]:
    with pytest.raises(DataError) as caught:
        scan(one, counts)
    return [str(problem) for problem in caught.value.problems]


def names(record: ImageRecord) -> list[str]:
    return [f"{one.path.parent.name}/{one.path.name}" for one in record.controls]


def test_stems_match_whatever_the_format(targets: Path, tmp_path: Path) -> None:
    before = controls(tmp_path / "before", "a.jpg", "b.png")
    found = scan(DataSet(img_dir=targets, control_dir=before))
    assert [names(record) for record in found] == [["before/a.jpg"], ["before/b.png"]]


def test_several_folders_give_several_controls_in_their_order(targets: Path, tmp_path: Path) -> None:
    first, second = (controls(tmp_path / name, "a.png", "b.png") for name in ("one", "two"))
    found = scan(DataSet(img_dir=targets, control_dir=(second, first)), (1, 3))
    assert names(found[0]) == ["two/a.png", "one/a.png"]


def test_controls_that_become_larger_than_what_is_trained_are_told(
    targets: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scan(DataSet(img_dir=targets, control_dir=controls(tmp_path / "alike", "a.png", "b.png")))
    assert "control images" not in caplog.text
    scan(DataSet(img_dir=targets, control_dir=controls(tmp_path / "larger", "a.png", "b.png", width=41)))
    assert "2 of 2 control images have another size than their picture" in caplog.text
    assert "a.png with 41x30" in caplog.text


def test_all_that_lack_a_partner_are_listed(targets: Path, tmp_path: Path) -> None:
    before = controls(tmp_path / "before", "b.png", "c.png")
    problems = told(DataSet(img_dir=targets, control_dir=before))
    assert len(problems) == 2
    assert any(str(targets / "a.png") in one and "no control image a.*" in one for one in problems)
    assert any(
        str(before / "c.png") in one and "without an image of the same stem" in one for one in problems
    )


def test_a_damaged_control_is_told_with_a_bad_target(targets: Path, tmp_path: Path) -> None:
    before = controls(tmp_path / "before", "a.png", "b.png")
    (before / "a.png").write_bytes(b"no picture")
    (targets / "b.png").write_bytes(b"")
    problems = told(DataSet(img_dir=targets, control_dir=before))
    assert sorted(str(path) in one for one in problems for path in (before / "a.png", targets / "b.png")) == [
        False, False, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "words"),
    [((1, 1), "has 2 control images, the family takes 1"), ((0, 0), "the family takes 0")],
)
def test_too_many_are_refused(counts: tuple[int, int], words: str, targets: Path, tmp_path: Path) -> None:
    folders = tuple(controls(tmp_path / name, "a.png", "b.png") for name in ("one", "two"))
    assert all(words in one for one in told(DataSet(img_dir=targets, control_dir=folders), counts))


def test_none_at_all_is_told_with_what_to_do(targets: Path) -> None:
    problems = told(DataSet(img_dir=targets))
    assert len(problems) == 2
    assert all("data.sets.control_dir" in one and "control_file_name" in one for one in problems)


ROWS: list[dict[str, Any]] = [
    {"file_name": "a.png", "text": "one", "control_file_name": "x.png"},
    {"file_name": "b.png", "text": "two", "control_file_name": ["x.png", "y.png"]},
]


@pytest.mark.parametrize("beside", [True, False])
def test_metadata_names_controls(beside: bool, tmp_path: Path) -> None:
    """Controls lie in the control folder, or beside the images, where they are not samples themselves."""
    folder = controls(tmp_path / "set", "a.png", "b.png")
    home = controls(folder if beside else tmp_path / "before", "x.png", "y.png")
    write_rows(folder, ROWS)
    found = scan(DataSet(img_dir=folder, control_dir=None if beside else home), (1, 3))
    assert [record.path.name for record in found] == ["a.png", "b.png"]
    assert [names(record) for record in found] == [
        [f"{home.name}/x.png"],
        [f"{home.name}/x.png", f"{home.name}/y.png"],
    ]


@pytest.mark.parametrize("beside", [True, False])
def test_controls_that_metadata_names_may_have_the_stem_of_another_image(
    beside: bool, tmp_path: Path
) -> None:
    """The drawing of a.png is a.webp beside it, or two controls of one stem lie in their folder."""
    folder = controls(tmp_path / "set", "a.png")
    home = controls(folder if beside else tmp_path / "before", *([] if beside else ["a.png"]), "a.webp")
    named = ["a.webp"] if beside else ["a.webp", "a.png"]
    write_rows(folder, [{"file_name": "a.png", "text": "one", "control_file_name": named}])
    (record,) = scan(DataSet(img_dir=folder, control_dir=None if beside else home), (1, 2))
    assert names(record) == [f"{home.name}/{name}" for name in named]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("../x.png", "points out of the folder"),
        (["x.png", 7], "is not a name: 7"),
        ([], "is an empty list"),
        ("nowhere.png", "the control image nowhere.png is not there"),
    ],
)
def test_bad_names_are_told_with_their_line(value: object, words: str, tmp_path: Path) -> None:
    folder = controls(tmp_path / "set", "a.png")
    controls(tmp_path / "before", "x.png")
    path = write_rows(folder, [{"file_name": "a.png", "text": "one", "control_file_name": value}])
    problems = told(DataSet(img_dir=folder, control_dir=tmp_path / "before"))
    assert any(words in one and f"{path}:1" in one for one in problems)


def test_a_null_names_no_control(tmp_path: Path) -> None:
    folder = controls(tmp_path / "set", "a.png", "b.png")
    home = controls(tmp_path / "before", "x.png")
    write_rows(folder, [{**ROWS[0]}, {"file_name": "b.png", "text": "two", "control_file_name": None}])
    found = scan(DataSet(img_dir=folder, control_dir=home), (0, 1))
    assert [names(record) for record in found] == [["before/x.png"], []]


def test_controls_of_the_targets_size_are_cut_as_it_is(targets: Path, tmp_path: Path) -> None:
    same = controls(tmp_path / "same", "a.png", "b.png")
    other = controls(tmp_path / "other", "a.png", "b.png", width=60)
    record = scan(DataSet(img_dir=targets, control_dir=(same, other)), (1, 2))[0]
    first, second = control_views(record)
    assert first.crop == (record.bucket_width, record.bucket_height)
    assert second.crop is None
    assert first.key != second.key


def test_a_target_that_is_its_own_control_is_told(targets: Path) -> None:
    problems = told(DataSet(img_dir=targets, control_dir=targets))
    assert sum("is its own control" in one for one in problems) == 2


def test_several_folders_and_names_in_metadata_contradict_each_other(tmp_path: Path) -> None:
    folder = controls(tmp_path / "set", "a.png")
    homes = tuple(controls(tmp_path / name, "x.png") for name in ("one", "two"))
    write_rows(folder, [{"file_name": "a.png", "text": "one", "control_file_name": "x.png"}])
    problems = told(DataSet(img_dir=folder, control_dir=homes), (1, 3))
    assert any("there are 2 folders of them" in one and "metadata.jsonl" in one for one in problems)


def of_sets(*sets: DataSet, beside: tuple[DataSet, ...] = (), skip: bool = False) -> list[str]:
    """The samples of sets with the folders of their controls and masks."""
    found = scan_images(
        sets,
        beside=beside,
        resolution=64,
        multiple=16,
        trigger_word=None,
        controls=(0, 1),
        on_bad_file="skip" if skip else "error",
    )
    records = [one for one in found.records if isinstance(one, ImageRecord)]
    partners = [[*(one.path for one in record.controls)] for record in records]
    partners = [
        [*paths, *([one.mask.path] if one.mask else [])] for paths, one in zip(partners, records, strict=True)
    ]
    return [
        " ".join([record.path.name, *(f"{path.parent.name}/{path.name}" for path in paths)])
        for record, paths in zip(records, partners, strict=True)
    ]


@pytest.mark.parametrize("key", ["control_dir", "mask_dir"])
@pytest.mark.parametrize("skip", [False, True])
def test_sets_may_share_a_folder_of_partners(key: str, skip: bool, targets: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write_pair(tmp_path / "more", "c.png", seed=7)
    shared = controls(tmp_path / "shared", "a.png", "b.png", "c.png")
    one, other = (
        DataSet.model_validate({"img_dir": path, key: shared}) for path in (targets, tmp_path / "more")
    )
    samples = ["a.png shared/a.png", "b.png shared/b.png", "c.png shared/c.png"]
    assert of_sets(one, other, skip=skip) == samples
    assert of_sets(one, beside=(other,), skip=skip) == samples[:2]
    assert of_sets(other, beside=(one,), skip=skip) == samples[2:]


def test_a_partner_that_no_set_uses_is_told_once(targets: Path, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    write_pair(tmp_path / "more", "c.png", seed=7)
    shared = controls(tmp_path / "shared", "a.png", "b.png", "c.png", "d.png")
    one, other = (DataSet(img_dir=path, control_dir=shared) for path in (targets, tmp_path / "more"))
    for sets, beside in (((one, other), ()), ((one,), (other,))):
        with pytest.raises(DataError) as caught:
            of_sets(*sets, beside=beside)
        (problem,) = caught.value.problems
        assert problem.where == str(shared / "d.png")
        assert problem.what == "a control image without an image of the same stem"


def test_a_partner_of_another_sets_image_that_cannot_be_used_is_no_second_mistake(
    targets: Path, tmp_path: Path
) -> None:
    (tmp_path / "more").mkdir()
    write_pair(tmp_path / "more", "c.png", seed=7).rename(tmp_path / "more" / "c.gif")
    write_pair(tmp_path / "more", "d.png", seed=8)
    shared = controls(tmp_path / "shared", "a.png", "b.png", "c.png", "d.png")
    with pytest.raises(DataError) as caught:
        of_sets(*(DataSet(img_dir=path, control_dir=shared) for path in (targets, tmp_path / "more")))
    assert [one.where for one in caught.value.problems] == [str(tmp_path / "more" / "c.gif")]


def test_controls_of_a_set_below_another_lie_below_its_controls(targets: Path, tmp_path: Path) -> None:
    """A tree of images and one of controls, of which the same sub-folder is held out, or a set of its own."""
    (targets / "val").mkdir()
    write_pair(targets / "val", "c.png", seed=7)
    before = controls(tmp_path / "before", "a.png", "b.png")
    controls(before / "val", "c.png")
    one = DataSet(img_dir=targets, control_dir=before)
    below = DataSet(img_dir=targets / "val", control_dir=before / "val")
    samples = ["a.png before/a.png", "b.png before/b.png", "c.png val/c.png"]
    assert of_sets(one, below) == samples
    assert of_sets(one, beside=(below,)) == samples[:2]
    assert of_sets(below, beside=(one,)) == samples[2:]
    assert of_sets(one) == samples  # as one set


def test_two_sets_may_take_a_sub_folder_of_controls(targets: Path, tmp_path: Path) -> None:
    """One whose images lie in a folder of that name, and one whose controls these are alone."""
    for folder in (targets / "val", tmp_path / "more"):
        folder.mkdir()
        write_pair(folder, "c.png", seed=len(folder.name))
    before = controls(tmp_path / "before", "a.png", "b.png")
    controls(before / "val", "c.png")
    sets = (
        DataSet(img_dir=targets, control_dir=before),
        DataSet(img_dir=tmp_path / "more", control_dir=before / "val"),
    )
    assert of_sets(*sets)[2:] == ["c.png val/c.png", "c.png val/c.png"]


def test_images_and_masks_may_lie_below_the_controls(tmp_path: Path) -> None:
    root = controls(tmp_path / "root", "a.png")
    (root / "out").mkdir()
    write_pair(root / "out", "a.png", seed=3)
    controls(root / "m", "a.png")
    one = DataSet(img_dir=root / "out", control_dir=root, mask_dir=root / "m")
    assert of_sets(one) == ["a.png root/a.png m/a.png"]
