"""Hand-over of a job to the training process: nothing of a configuration is lost or read another way."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.cli.options import Layers
from trainer.config.schema import RunConfig
from trainer.engine.spec import Spec, read_spec, write_spec

CONFIGS = sorted(Path("train_configs").glob("*.yaml"))
ODD = {
    "several folders of controls": {"data.sets": [{"img_dir": "/a", "control_dir": ["/b", "/c d"]}]},
    "a folder whose name begins with ~": {"data.sets": [{"img_dir": "./~odd/x", "control_dir": ["./~"]}]},
    "ranks by layer": {"lora.rank_pattern": {"to_q": 8, "to_k": 4}, "lora.alpha_pattern": {"to_q": 0.5}},
    "a number that would be 1.0 elsewhere": {"train.learning_rate": 1e-05, "features.memory_budget": "24GiB"},
    "a word that YAML takes for false": {"data.trigger_word": "off"},
    "lines": {"validation.prompts": ["one\ntwo", "\u2028 \U0001f600"]},
}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_arrives(path: Path, tmp_path: Path) -> None:
    config = Layers([path], [], None, None).load().config
    assert _handed_over(config, tmp_path) == config


@pytest.mark.parametrize("values", ODD.values(), ids=ODD)
def test_odd_values_arrive(values: dict[str, object], tmp_path: Path) -> None:
    quickstart = Layers([Path("train_configs/quickstart.yaml")], [], None, None).load().config
    tree = quickstart.model_dump()
    for key, value in values.items():
        section, _, name = key.partition(".")
        tree[section][name] = value
    config = RunConfig.model_validate(tree)
    assert _handed_over(config, tmp_path) == config


def _handed_over(config: RunConfig, folder: Path) -> RunConfig:
    spec = Spec(
        mode="train", config=config.model_dump(), plan_text="", runtime_dir="", cache_dir="", meeting_place=""
    )
    write_spec(spec, folder / "spec.json")
    return RunConfig.model_validate(read_spec(folder / "spec.json").config)
