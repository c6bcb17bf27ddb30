"""A setting that the family does not take is an error that names where it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer import families
from trainer.config.reading.load import Loaded, load, with_settings
from trainer.engine.caching.samples import prompt_controls
from trainer.errors import ConfigError
from trainer.planning.rules import judge, require_shift, without_effect

DRAWS = next(name for name in families.names() if families.get(name).sample_kind == "image")
EDITS = next(name for name in families.names() if families.get(name).control_counts[1] > 0)
WRITES = next(name for name in families.names() if families.get(name).sample_kind == "conversation")


def loaded(
    family: str, folder: Path, data: dict[str, Any], validation: dict[str, Any] | None = None
) -> Loaded:
    content = {
        "family": family,
        "model": {"pretrained_model_name_or_path": "-"},
        "data": data,
        "validation": validation or {},
        "output_dir": "out",
    }
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(content))
    known = {name: families.get(name).defaults for name in families.names()}
    return load([path], family_defaults=known, environ={})


WIDE = next(name for name in families.names() if families.get(name).most_side == 2048)
IMAGES, CHATS = {"sets": [{"img_dir": "images"}]}, {"sets": [{"chat_file": "chats.jsonl"}]}


@pytest.mark.parametrize(
    ("family", "data", "validation", "key", "words"),
    [
        (DRAWS, CHATS, {}, "data.sets.0.chat_file", "trains on images"),
        (
            DRAWS,
            {"sets": [{"dataset_info": "d.json", "name": "x"}]},
            {},
            "data.sets.0.dataset_info",
            "trains on images",
        ),
        (WRITES, IMAGES, {}, "data.sets.0.img_dir", "trains on conversations"),
        (DRAWS, IMAGES, {"chat_file": "x.jsonl"}, "validation.chat_file", "trains on images"),
        (
            DRAWS,
            {"sets": [{"img_dir": "images", "control_dir": "before"}]},
            {},
            "data.sets.0.control_dir",
            "takes no control images",
        ),
        (DRAWS, IMAGES, {"control_images": ["a.png"]}, "validation.control_images", "takes no control"),
        (DRAWS, {**IMAGES, "max_sequence_length": 4096}, {}, "data.max_sequence_length", "tokens at most"),
        (DRAWS, {**IMAGES, "on_long": "cut"}, {}, "data.on_long", "its text encoder cuts"),
        (DRAWS, {**IMAGES, "learn": "all"}, {}, "data.learn", "captions are not learned"),
        (
            WIDE,
            {**IMAGES, "resolution": 1536},
            {},
            "data.resolution",
            "2048 pixels; those of 1536 have up to 2112",
        ),
        (WIDE, {**IMAGES, "resolution": 1472}, {"resolution": 2064}, "validation.resolution", "2048 pixels"),
        (WRITES, {**CHATS, "caption_dropout_rate": 0.1}, {}, "data.caption_dropout_rate", "no caption"),
        (WRITES, {**CHATS, "trigger_word": "zwx"}, {}, "data.trigger_word", "no caption"),
        *(
            (WRITES, {"sets": [{"chat_file": "chats.jsonl", key: value}]}, {}, f"data.sets.0.{key}", words)
            for key, value, words in (
                ("mask_dir", "masks", "learns from the assistant's words"),
                ("loss_weight", 0.5, "a mean over tokens"),
                ("flip", True, "cannot be mirrored"),
                ("random_crop", 2, "nothing to crop"),
            )
        ),
    ],
)
def test_place_and_reason(
    family: str, data: dict[str, Any], validation: dict[str, Any], key: str, words: str, tmp_path: Path
) -> None:
    given = loaded(family, tmp_path, data, validation)
    with pytest.raises(ConfigError) as caught:
        judge(families.get(family), given)
    (problem,) = caught.value.problems
    assert f"`{key}`" in problem.what
    assert words in problem.what
    assert str(tmp_path / "c.yaml") in problem.where
    assert problem.remedy


@pytest.mark.parametrize(
    ("family", "data", "validation", "keys"),
    [
        (DRAWS, IMAGES, {"max_new_tokens": 7}, ["validation.max_new_tokens"]),
        (
            WRITES,
            {**CHATS, "resolution": 512},
            {"guidance_scale": 2.0, "num_inference_steps": 4, "resolution": 64},
            [
                "data.resolution",
                "validation.guidance_scale",
                "validation.num_inference_steps",
                "validation.resolution",
            ],
        ),
        (
            WRITES,
            {**CHATS, "resolution": 1024, "caption_dropout_rate": 0},
            {"max_new_tokens": 7},
            [],
        ),  # as config.resolved.yaml has it
    ],
)
def test_keys_of_another_kind_of_family_are_told(
    family: str, data: dict[str, Any], validation: dict[str, Any], keys: list[str], tmp_path: Path
) -> None:
    given = loaded(family, tmp_path, data, validation)
    told = list(without_effect(families.get(family), given, tmp_path))
    assert [text.split("`")[1] for text in told] == keys
    assert all(str(tmp_path / "c.yaml") in text and "has no effect" in text for text in told)


@pytest.mark.parametrize(
    ("family", "says", "is_told"),
    [
        ("flux1_dev", None, False),
        ("flux1_dev", False, True),
        ("qwen_image", None, True),
        ("kandinsky5", None, True),
    ],
)
def test_a_guidance_that_the_base_is_not_told_has_no_effect(
    family: str, says: bool | None, is_told: bool, tmp_path: Path
) -> None:
    (tmp_path / "transformer").mkdir()
    config = {} if says is None else {"guidance_embeds": says}
    (tmp_path / "transformer" / "config.json").write_text(json.dumps(config))
    given = with_settings(loaded(family, tmp_path, IMAGES), {"flow.guidance_scale": 3.5})
    told = list(without_effect(families.get(family), given, tmp_path))
    assert [text.split("`")[1] for text in told] == ["flow.guidance_scale"] * is_told


def test_a_language_model_has_no_vae_to_tile(tmp_path: Path) -> None:
    """Told, not refused: a preset asks for it whatever the family."""
    given = with_settings(loaded(WRITES, tmp_path, CHATS), {"features.vae_tiling": True})
    judge(families.get(WRITES), given)
    told = list(without_effect(families.get(WRITES), given, tmp_path))
    assert [text.split("`")[1] for text in told] == ["features.vae_tiling"]


@pytest.mark.parametrize(("dynamic", "shift"), [(False, "resolution"), (True, "resolution"), (False, 3.0)])
def test_a_shift_that_the_base_has_not_is_refused_by_the_plan(
    dynamic: bool, shift: object, tmp_path: Path
) -> None:
    folder = tmp_path / "base" / "scheduler"
    folder.mkdir(parents=True)
    (folder / "scheduler_config.json").write_text(json.dumps({"use_dynamic_shifting": dynamic}))
    given = with_settings(loaded(DRAWS, tmp_path, IMAGES), {"flow.shift": shift})
    if dynamic or shift != "resolution":
        require_shift(families.get(DRAWS), given, folder.parent)
        return
    with pytest.raises(ConfigError, match="no shift that depends on the resolution") as caught:
        require_shift(families.get(DRAWS), given, folder.parent)
    assert "flow.shift" in caught.value.problems[0].remedy


@pytest.mark.parametrize(("family", "data"), [(DRAWS, IMAGES), (EDITS, IMAGES), (WRITES, CHATS)])
def test_what_a_family_takes_passes(family: str, data: dict[str, Any], tmp_path: Path) -> None:
    judge(families.get(family), loaded(family, tmp_path, data))


@pytest.mark.parametrize(
    ("validation", "words"),
    [
        ({"prompts": ["one"]}, "edits 1 image at least"),
        ({"prompts": ["one"], "control_images": ["a.png", "b.png"]}, "2 control images for 1 prompt"),
    ],
)
def test_previews_of_edits_need_something_to_edit(
    validation: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = loaded(EDITS, tmp_path, IMAGES, validation)
    with pytest.raises(ConfigError, match=words):
        prompt_controls(families.get(EDITS), given.config, ())


def test_no_prompts_need_nothing(tmp_path: Path) -> None:
    assert prompt_controls(families.get(EDITS), loaded(EDITS, tmp_path, IMAGES).config, ()) == ()
