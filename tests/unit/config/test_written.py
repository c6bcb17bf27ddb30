"""A file of the keys that somebody decided loads to the configuration that it was written from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from trainer import families
from trainer.config.reading.load import Loaded, load
from trainer.config.writing.dump import dump, written

SHIPPED = sorted((Path(__file__).resolve().parents[3] / "train_configs").glob("*.yaml"))


def loaded(paths: Sequence[Path], presets: Sequence[str] = (), overrides: Sequence[str] = ()) -> Loaded:
    defaults = {name: families.get(name).defaults for name in families.names()}
    return load(paths, chosen_presets=presets, overrides=overrides, family_defaults=defaults, environ={})


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_written_file_loads_to_the_same(path: Path, tmp_path: Path) -> None:
    first = loaded([path], presets=["style"])
    target = tmp_path / "again.yaml"
    target.write_text(written(first.config, first.sources))
    again = loaded([target])
    assert dump(again.config) == dump(first.config)  # without keys that have no effect
    assert target.read_text() == written(again.config, again.sources)


@pytest.mark.parametrize(
    "override",
    [
        "lora.rank_pattern={to_q: 4}",
        "validation.early_stop.patience=2",
        "data.trigger_word='- : #x",
        "data.sets=[{img_dir: '/d: x', control_dir: [/a, /b]}, {img_dir: /e, repeats: 2, flip: true}]",
        "train.num_train_epochs=2.5",
        "validation.prompts=['\"a\": b', '#c', '[d']",
        "features.activation_checkpointing=12",
    ],
)
def test_awkward_values_survive(override: str, tmp_path: Path) -> None:
    path = next(one for one in SHIPPED if one.stem == "flux1_kontext_lora")
    first = loaded([path], overrides=[override, "validation.held_out=2"])
    target = tmp_path / "again.yaml"
    target.write_text(written(first.config, first.sources))
    assert loaded([target]).config == first.config


def test_defaults_and_values_of_the_family_are_left_out() -> None:
    path = next(one for one in SHIPPED if one.stem == "flux1_dev_lora")
    first = loaded([path])
    text = written(first.config, first.sources)
    assert "optimizer" not in text and "features" not in text and "learning_rate" in text
