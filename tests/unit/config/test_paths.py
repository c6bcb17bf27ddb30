"""Relative paths of a configuration taken from another folder, and all paths that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer import families
from trainer.config.reading import layers
from trainer.config.reading.load import load
from trainer.config.reading.paths import differences, paths_of, place_of, taken_from

SCHEMA = json.loads((Path(__file__).parents[3] / "train_configs/schema.json").read_text())
DEFAULTS = {name: families.get(name).defaults for name in families.names()}
TEXT = """\
family: flux1_kontext
output_dir: runs/cats
data:
  cache_dir: ~/cache
  sets:
  - {img_dir: pictures, control_dir: [before, /else/where, mask], trigger_word: pictures}
  - {img_dir: /data, mask_dir: ./masks}
model: {pretrained_model_name_or_path: a/base}
validation:
  control_images: [one.png, [two.png, /three.png]]
  clip_model: openai/clip
  metrics: [clip_t]
  prompts: [pictures, b]
  img_dir: null
checkpoint: {resume_from_checkpoint: auto}
lora: {init_from: }
"""


def paths_in(node: Any, key: str) -> Iterator[str]:
    """Dotted keys of the JSON schema below which a value may be a path, lists of objects left out."""
    for option in node.get("anyOf", [node]):
        if "$ref" in option:
            inner = SCHEMA["definitions"][option["$ref"].rpartition("/")[2]]
            for name, one in inner["properties"].items():
                yield from paths_in(one, f"{key}.{name}")
        elif option.get("format") == "path":
            yield key


def test_relative_paths_and_nothing_else_begin_at_the_folder(tmp_path: Path) -> None:
    for name in ("a/base", "pictures", "auto"):
        (tmp_path / name).mkdir(parents=True)
    tree, problems = taken_from(layers.from_text(TEXT, "x.yaml"), tmp_path)
    assert tree is not None and not problems
    begin = f"{tmp_path}/"
    assert tree.plain() == {
        "family": "flux1_kontext",
        "output_dir": f"{begin}runs/cats",
        "data": {
            "cache_dir": "~/cache",
            "sets": [
                {
                    "img_dir": f"{begin}pictures",
                    "control_dir": [f"{begin}before", "/else/where", f"{begin}mask"],
                    "trigger_word": "pictures",
                },
                {"img_dir": "/data", "mask_dir": f"{begin}masks"},
            ],
        },
        "model": {"pretrained_model_name_or_path": f"{begin}a/base"},
        "validation": {
            "control_images": [f"{begin}one.png", [f"{begin}two.png", "/three.png"]],
            "clip_model": "openai/clip",
            "metrics": ["clip_t"],
            "prompts": ["pictures", "b"],
            "img_dir": None,
        },
        "checkpoint": {"resume_from_checkpoint": "auto"},
        "lora": {"init_from": None},
    }
    assert tree.source_of(("data", "sets", "0", "img_dir")) == "x.yaml:6", "its place is told as before"
    assert taken_from(layers.from_text(TEXT, "x.yaml"), None) == layers.from_text(TEXT, "x.yaml")


def test_every_path_of_the_schema_is_taken(tmp_path: Path) -> None:
    """The oracle is the JSON schema: its values of the format `path`."""
    keys = [key for name, node in SCHEMA["properties"].items() for key in paths_in(node, name)]
    assert {"output_dir", "data.cache_dir", "lora.init_from", "validation.img_dir"} <= set(keys)
    for key in keys:
        plain: Any = "here/it/is"
        for part in reversed(key.split(".")):
            plain = {part: plain}
        tree, _ = taken_from(layers.from_text(json.dumps(plain), "x.yaml"), tmp_path)
        assert tree is not None
        assert tree.get(tuple(key.split("."))).value == f"{tmp_path}/here/it/is", key  # type: ignore[union-attr]


@pytest.mark.parametrize("folder", [False, True])
def test_paths_are_found_with_the_keys_that_name_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    if folder:
        (tmp_path / "a/base").mkdir(parents=True)
    (tmp_path / "x.yaml").write_text(TEXT.replace("trigger_word: pictures", "repeats: 2"))
    config = load([tmp_path / "x.yaml"], family_defaults=DEFAULTS, environ={}).config
    found = sorted((key, str(path)) for key, path in paths_of(config))
    assert found == sorted([
        ("output_dir", "runs/cats"), ("data.cache_dir", str(Path("~/cache").expanduser())),
        ("data.sets.0.img_dir", "pictures"), ("data.sets.0.control_dir", "before"),
        ("data.sets.0.control_dir", "/else/where"), ("data.sets.0.control_dir", "mask"),
        ("data.sets.1.img_dir", "/data"), ("data.sets.1.mask_dir", "masks"),
        ("validation.control_images", "one.png"), ("validation.control_images", "two.png"),
        ("validation.control_images", "/three.png"),
        *([("model.pretrained_model_name_or_path", "a/base")] if folder else []),
    ])  # fmt: skip


def test_a_path_that_leads_nowhere_here_is_compared_as_it_is_written() -> None:
    """Another machine's runs name home folders of people who are not known here."""
    one, other = ({"output_dir": f"~nobodyxyz/{name}"} for name in "ab")
    assert place_of("output_dir", "~nobodyxyz/a", Path("/")) is None
    assert differences([one, one], [None, None]) == {}
    assert differences([one, other], [None, None]) == {"output_dir": ["~nobodyxyz/a", "~nobodyxyz/b"]}
