"""Options of a set: masks, weights, regularisation, views, folders of folders, tables of captions."""

from __future__ import annotations

import json
import logging
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from tests.unit.data.pictures import encoded, picture, record, write_pair, write_rows
from trainer.config.schema import DataSet
from trainer.data.pictures import images
from trainer.data.pictures.images import fit, read_image
from trainer.data.pictures.variants import names_a_side, with_variants
from trainer.data.records import ImageRecord, View
from trainer.data.sets.masks import mask_pixels
from trainer.data.sets.scan import scan_images
from trainer.engine.caching.entries import control_views, latents_entry
from trainer.errors import DataError

PARTS = {"vae": "tiny"}


def scan(*sets: DataSet, trigger_word: str | None = None, **options: Any) -> list[ImageRecord]:
    found = scan_images(sets, resolution=64, multiple=16, trigger_word=trigger_word, **options)
    return [one for one in found.records if isinstance(one, ImageRecord)]


def test_folders_of_folders_are_one_set(tmp_path: Path) -> None:
    for number, name in enumerate(("b.png", "pets/b.png", "pets/cats/b.png", "a.png")):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write_pair(tmp_path / Path(name).parent, Path(name).name, name, seed=number)
    (tmp_path / "empty").mkdir()
    found = scan(DataSet(img_dir=tmp_path))
    assert [one.identifier for one in found] == ["0/a.png", "0/b.png", "0/pets/b.png", "0/pets/cats/b.png"]
    assert [f"0/{one.caption}" for one in found] == [one.identifier for one in found]


def test_repeats_in_a_folders_name_are_told_and_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "10_cats").mkdir()
    write_pair(tmp_path / "10_cats", "a.png")
    assert scan(DataSet(img_dir=tmp_path))[0].repeats == 1
    assert caplog.text.count("10_cats: other trainers read 10 repeats") == 1
    caplog.clear()
    scan(DataSet(img_dir=tmp_path / "10_cats"))
    assert caplog.text.count("10_cats: other trainers read 10 repeats") == 1
    caplog.clear()
    scan(DataSet(img_dir=tmp_path / "10_cats", repeats=10))
    assert "other trainers" not in caplog.text


def test_a_folder_below_that_is_a_set_of_its_own_is_in_no_other(tmp_path: Path) -> None:
    """Otherwise its images would be trained twice, those of a regularisation set with the trigger word."""
    (tmp_path / "reg").mkdir()
    write_pair(tmp_path, "a.png", "a cat", seed=1)
    write_pair(tmp_path / "reg", "b.png", "a cat", seed=2)
    (tmp_path / "masks").mkdir()
    (tmp_path / "masks" / "b.png").write_bytes(encoded(Image.new("L", (40, 30), 255)))
    outer = DataSet(img_dir=tmp_path)
    inner = DataSet(img_dir=tmp_path / "reg", mask_dir=tmp_path / "masks", is_reg=True)
    for sets in ((outer, inner), (inner, outer)):
        found = {one.path: one.caption for one in scan(*sets, trigger_word="zwx")}
        assert found == {tmp_path / "a.png": "zwx, a cat", tmp_path / "reg" / "b.png": "a cat"}
        assert len(scan(*sets)) == 2


def test_caches_of_other_trainers_may_lie_beside_the_images(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png")
    for suffix in (".npz", ".pt", ".safetensors"):
        (tmp_path / f"a{suffix}").write_bytes(b"x")
    assert len(scan(DataSet(img_dir=tmp_path))) == 1


def left_out(*sets: DataSet) -> dict[str, str]:
    found = scan_images(sets, resolution=64, multiple=16, trigger_word=None, on_bad_file="skip")
    assert all(isinstance(one, ImageRecord) and one.caption for one in found.records)
    return {Path(file).name: reason for file, reason in found.left_out}


def test_a_bad_caption_spoils_every_image_that_has_it(tmp_path: Path) -> None:
    for name in ("good.png", "x.jpg", "x.png"):
        write_pair(tmp_path, name)
    (tmp_path / "x.txt").write_text(" ")
    told = left_out(DataSet(img_dir=tmp_path))
    assert told["x.jpg"] == "x.txt: the caption is empty"
    assert told["x.png"].startswith("a second image") and told["x.png"].endswith(
        "; x.txt: the caption is empty"
    )
    assert told.keys() == {"x.jpg", "x.png"}


def test_an_image_that_metadata_captions_twice_is_left_out(tmp_path: Path) -> None:
    write_pair(tmp_path, "good.png")
    (tmp_path / "x.png").write_bytes(encoded(picture()))
    write_rows(tmp_path, [{"file_name": "x.png", "text": text} for text in ("a cat", "a dog")])
    assert left_out(DataSet(img_dir=tmp_path)) == {
        "x.png": "metadata.jsonl:2: x.png is named a second time, first on line 1"
    }


def test_a_bad_mask_of_the_images_name_is_told_by_its_folder(tmp_path: Path) -> None:
    folder, masks = tmp_path / "set", tmp_path / "masks"
    for one in (folder, masks):
        one.mkdir()
    for name in ("good.png", "x.png"):
        write_pair(folder, name)
        Image.new("L", (40, 30), 255).save(masks / name)
    (masks / "x.png").write_bytes(b"")
    assert left_out(DataSet(img_dir=folder, mask_dir=masks)) == {
        "x.png": f"{masks / 'x.png'}: the file is empty (0 bytes)"
    }


def test_a_profile_in_a_mask_says_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pair(tmp_path, "a.png")
    (tmp_path / "masks").mkdir()
    Image.new("L", (40, 30), 255).save(tmp_path / "masks" / "a.png", icc_profile=b"nonsense" * 30)
    scan(DataSet(img_dir=tmp_path, mask_dir=tmp_path / "masks"))
    assert "read as sRGB" not in caplog.text


def test_16_bits_take_no_wider_copies(tmp_path: Path) -> None:
    """A picture may have 178 million of them; numpy's memory is traced, PIL's is not."""
    values = np.random.default_rng(0).integers(0, 2**16, (1000, 1000), dtype=np.uint16)
    Image.fromarray(values).save(tmp_path / "a.tif")
    tracemalloc.start()
    read = np.asarray(read_image(tmp_path / "a.tif"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(read[..., 0], values >> 8)
    assert peak < 10 * values.size


def test_a_table_of_captions(tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    for number, name in enumerate(("a.png", "train/b.png")):
        (tmp_path / name).write_bytes(encoded(picture(seed=number)))
    text = '\ufefftext,file_name\r\n"one, ""two""\nthree",a.png\r\n\r\nfour,./train/b.png\r\n'
    (tmp_path / "metadata.csv").write_text(text, encoding="utf-8", newline="")
    assert [one.caption for one in scan(DataSet(img_dir=tmp_path))] == ['one, "two" three', "four"]


def test_folders_of_masks_and_controls_hold_no_samples(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png")
    for name in ("masks", "before"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(encoded(picture()))
    one = DataSet(img_dir=tmp_path, mask_dir=tmp_path / "masks", control_dir=tmp_path / "before")
    (found,) = scan(one, controls=(1, 1))
    assert found.mask is not None and found.mask.path == tmp_path / "masks" / "a.png"
    assert [control.path for control in found.controls] == [tmp_path / "before" / "a.png"]


def test_metadata_that_names_a_picture_of_another_set_is_told_so(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png")
    (tmp_path / "b").mkdir()
    write_pair(tmp_path / "b", "b.png", seed=1)
    rows = [{"file_name": f"b/{name}.png", "text": "a pear"} for name in ("b", "c")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sets = [DataSet(img_dir=tmp_path), DataSet(img_dir=tmp_path / "b", repeats=2)]
    with pytest.raises(DataError) as caught:
        scan_images(sets, resolution=64, multiple=16, trigger_word=None)
    other, missing = caught.value.problems
    assert other.what == "b/b.png is in a folder of another set, of masks or of controls"
    assert other.where.endswith("metadata.jsonl:1") and "the metadata of b," in other.remedy
    assert missing.what == "b/c.png is not in the folder" and "correct the name" in missing.remedy


@pytest.mark.parametrize("kind", ["control_dir", "mask_dir"])
def test_samples_below_their_controls_or_masks_are_none(tmp_path: Path, kind: str) -> None:
    """Pictures before the edit lie on top, those after it in a folder of their own."""
    (tmp_path / "target").mkdir()
    write_pair(tmp_path / "target", "a.png")
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    one = DataSet(img_dir=tmp_path / "target", **{kind: tmp_path})  # type: ignore[arg-type]
    (found,) = scan(one, controls=(0, 1))
    partner = found.mask if kind == "mask_dir" else found.controls[0]
    assert partner is not None and partner.path == tmp_path / "a.png"


def test_a_mask_is_cut_as_its_image_is(tmp_path: Path) -> None:
    masks = tmp_path / "masks"
    masks.mkdir()
    write_pair(tmp_path, "a.png")
    # the image is white where its mask is
    half = np.zeros((30, 40), np.uint8)
    half[:, 25:] = 255
    Image.fromarray(half).convert("RGB").save(tmp_path / "a.png")
    Image.fromarray(half).resize((80, 60), Image.Resampling.NEAREST).save(masks / "a.png")
    (found,) = scan(DataSet(img_dir=tmp_path, mask_dir=masks))
    for view in (View(), View(flip=True), View(place=(0.5, 1.0), flip=True)):
        seen = record_with(found, view)
        image = np.asarray(fit(read_image(seen.path), seen.bucket_width, seen.bucket_height, view))
        mask = mask_pixels(seen)[0].numpy() * 255
        assert np.abs(mask - image[..., 0]).mean() < 4
        assert mask[:, 0].mean() > 250 if view.flip else mask[:, -1].mean() > 250


def record_with(one: ImageRecord, view: View) -> ImageRecord:
    (seen,) = (
        found
        for found in with_variants([one], [DataSet(img_dir=one.path.parent, flip=True)])
        if isinstance(found, ImageRecord) and found.view.flip == view.flip
    )
    return seen


def test_a_regularisation_set_has_its_weight_and_no_trigger_word(tmp_path: Path) -> None:
    for number, name in enumerate(("cat", "reg")):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name, "a.png", "a cat", seed=number)
    sets = (
        DataSet(img_dir=tmp_path / "cat", repeats=3),
        DataSet(img_dir=tmp_path / "reg", is_reg=True, loss_weight=0.25),
    )
    subject, regular = scan(*sets, trigger_word="zwx")
    assert (subject.caption, subject.loss_weight, subject.is_reg, subject.repeats) == (
        "zwx, a cat",
        1,
        False,
        3,
    )
    assert (regular.caption, regular.loss_weight, regular.is_reg) == ("a cat", 0.25, True)


def test_views_are_samples_and_sets_keep_their_shares(tmp_path: Path) -> None:
    for number, name in enumerate(("plain", "flipped")):
        (tmp_path / name).mkdir()
        write_pair(tmp_path / name, "a.png", seed=number)
    plain = DataSet(img_dir=tmp_path / "plain", repeats=2)
    flipped = DataSet(img_dir=tmp_path / "flipped", flip=True, random_crop=3)
    records = scan(plain, flipped)
    views = with_variants(records, (plain, flipped))
    assert len(views) == 1 + 6
    assert len({one.identifier for one in views}) == 7
    shares = Counter[int]()
    for one in views:
        assert isinstance(one, ImageRecord)
        shares[one.set_index] += one.repeats
    assert shares == {0: 12, 1: 6}
    keys = {latents_entry(one, PARTS).key for one in views if isinstance(one, ImageRecord)}
    assert len(keys) == 7
    assert with_variants(records, (plain, flipped)) == views
    assert with_variants(records, (plain, DataSet(img_dir=tmp_path / "flipped"))) == tuple(records)


def test_a_view_is_that_part_of_the_picture() -> None:
    image = picture(100, 40)
    left, right = (fit(image, 40, 40, View(place=(x, 0.5))) for x in (0.0, 1.0))
    assert left.tobytes() == image.crop((0, 0, 40, 40)).tobytes()
    assert right.tobytes() == image.crop((60, 0, 100, 40)).tobytes()
    mirrored = fit(image, 40, 40, View(flip=True))
    assert mirrored.tobytes() == fit(image, 40, 40).transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()


def test_controls_follow_their_targets_view(tmp_path: Path) -> None:
    write_pair(tmp_path, "a.png")
    for name, width in (("same", 40), ("other", 60)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.png").write_bytes(encoded(picture(width, 30)))
    folders = (tmp_path / "same", tmp_path / "other")
    one = DataSet(img_dir=tmp_path, control_dir=folders, flip=True, random_crop=1)
    plain, flipped = with_variants(scan(one, controls=(2, 2)), (one,))
    same, other = control_views(flipped)
    assert isinstance(flipped, ImageRecord)
    assert same.view == flipped.view and other.view == View(flip=True)
    assert {view.key for view in control_views(plain)}.isdisjoint({same.key, other.key})


def test_keys_of_plain_records_are_those_of_before() -> None:
    """Written down when there were no views, masks and profiles: caches of that time stay valid."""
    key = latents_entry(record(0), PARTS).key
    assert key == "ccb3730bedb8c251acf61de381960c7b3ec3a58eb4c96bfcbd4219a0fe340fbf"


def test_flip_warns_where_captions_name_a_side(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pair(tmp_path, "a.png", "a cat on the Left", seed=1)
    write_pair(tmp_path, "b.png", "a leftover", seed=2)
    with caplog.at_level(logging.WARNING):
        scan(DataSet(img_dir=tmp_path))
        assert "`flip` is on" not in caplog.text
        scan(DataSet(img_dir=tmp_path, flip=True))
    assert "`flip` is on, and 1 caption says left or right" in caplog.text
    assert "a.png: a cat on the Left" in caplog.text and "b.png: " not in caplog.text
    assert names_a_side("turn right!") and not names_a_side("brightly")


def test_copies_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a.png", "b.png"):
        write_pair(tmp_path, name, seed=1)
    write_pair(tmp_path, "c.png", seed=2)
    assert len(scan(DataSet(img_dir=tmp_path))) == 3
    assert "1 of 3 images is a copy" in caplog.text
    assert f"{tmp_path / 'b.png'} = {tmp_path / 'a.png'}" in caplog.text


def test_a_profile_that_cannot_be_applied_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_pair(tmp_path, "a.png")
    picture().save(tmp_path / "a.png", icc_profile=b"nonsense" * 30)
    (found,) = scan(DataSet(img_dir=tmp_path))
    assert found.colour == ""
    assert "1 image is read as sRGB" in caplog.text and "cannot be read" in caplog.text
    assert read_image(tmp_path / "a.png").tobytes() == picture().tobytes()


def test_an_srgb_profile_changes_neither_pixels_nor_keys(tmp_path: Path) -> None:
    from PIL import ImageCms

    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    write_pair(tmp_path, "a.png")
    picture().save(tmp_path / "a.png", icc_profile=srgb)
    (found,) = scan(DataSet(img_dir=tmp_path))
    assert found.colour == ""
    assert read_image(tmp_path / "a.png").tobytes() == picture().tobytes()


def test_avif_without_support_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pair(tmp_path, "a.avif")
    assert features.check("avif"), "the tests' Pillow has it"
    scan(DataSet(img_dir=tmp_path))
    monkeypatch.setattr(images.features, "check", lambda name: name != "avif")
    with pytest.raises(DataError, match=r"Pillow cannot read\n.*install a Pillow with AVIF"):
        scan(DataSet(img_dir=tmp_path))
