"""Contradictions among adapters, optimizers and precision, and the place that the message names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from trainer.config.reading.load import Loaded, load
from trainer.config.writing.dump import dump
from trainer.errors import ConfigError, ExitCode

BASE = {
    "family": "x",
    "model": {"pretrained_model_name_or_path": "base"},
    "data": {"sets": [{"img_dir": "images"}]},
    "output_dir": "out",
}


def loaded(folder: Path, *overrides: str) -> Loaded:
    path = folder / "c.yaml"
    path.write_text(yaml.safe_dump(BASE))
    return load([path], overrides=overrides, family_defaults={"x": {}}, environ={})


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["method=full", "model.dtype=fp16"], ("`model.dtype: fp16`", "write bf16 or fp32")),
        (["lora.type=dora", "features.weights=int8"], ("`features.weights: int8`", "could not be proved")),
        (["lora.type=lokr", "features.compute=fp8"], ("`features.compute: fp8`", "remove one")),
        (["lora.type=lokr", "lora.dropout=0.1"], ("`lora.dropout` has no effect", "write dora or lora")),
        (["lora.type=dora", "features.compile=true"], ("keeps to the plain path", "features.compile")),
        (["lora.dropout=0.1", "features.block_swap=3"], ("keeps to the plain path", "features.block_swap")),
        (["model.dtype=fp16", "features.cuda_graphs=true"], ("keeps to the plain path", "cuda_graphs")),
        (["model.dtype=fp16", "features.weights=bf16"], ("`features.weights: bf16` contradicts", "fp16")),
        (["train.optimizer=prodigy"], ("prodigy finds the rate itself", "write `train.learning_rate: 1`")),
        (
            ["train.optimizer=lion"],
            ("expected adamw, adamw_stochastic_bf16, adamw_8bit or prodigy", "leave it out"),
        ),
        (["train.lr_power=2"], ("no effect without `train.lr_scheduler: polynomial`", "remove it")),
        (["train.lr_num_cycles=2"], ("no effect without", "cosine_with_restarts")),
        (["train.tracker_project_name=a"], ("no effect without `train.report_to: wandb`", "remove")),
        (["method=full", "checkpoint.lora_files=true"], ("no effect with `method: full`", "method: lora")),
        (["checkpoint.keep_best=true"], ("no effect without held-out samples", "remove it")),
        (["method=full", "lora.rank_pattern={to_q: 2}"], ("`lora.rank_pattern` has no", "method: lora")),
        (["lora.rank_pattern={to_q: 0}"], ("`lora.rank_pattern.to_q`: expected a whole", "remove it")),
        (["lora.rank_pattern={'to_q[': 2}"], ("'to_q[' is no regular expression", "by a backslash")),
        (["lora.alpha_pattern={'(?i)to_q': 2}"], ("`lora.alpha_pattern`: '(?i)to_q' is no", "backslash")),
        (["lora.alpha_pattern=8"], ("expected a mapping of layers to numbers", 'got "8"')),
        (
            ["lora.init_from=nowhere.safetensors"],
            ("nowhere.safetensors is no file", "needs the one it began from"),
        ),
        (["train.ema_decay=1"], ("`train.ema_decay`", "above 0 and below 1 or null")),
        (["lora.use_dora=true"], ("unknown key `lora.use_dora`", "did you mean `lora.type`?")),
    ],
)
def test_a_contradiction_is_told_with_its_place(
    overrides: list[str], words: tuple[str, str], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *overrides)
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert len(caught.value.problems) == 1, str(caught.value)
    assert "--set " in caught.value.problems[0].where
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_patterns_are_written_as_mappings_or_by_one_key_and_load_again(tmp_path: Path) -> None:
    first = loaded(tmp_path, "lora.rank_pattern={to_q: 2, 'a.*\\.to_k': 6}", "lora.alpha_pattern.to_q=3.5")
    assert first.config.lora.rank_pattern == {"to_q": 2, "a.*\\.to_k": 6}
    assert first.config.lora.alpha_pattern == {"to_q": 3.5}
    assert first.sources["lora.rank_pattern"] == "--set lora.rank_pattern"
    path = tmp_path / "again.yaml"
    path.write_text(dump(first.config))
    again = load([path], family_defaults={"x": {}}, environ={})
    assert again.config == first.config


@pytest.mark.parametrize(
    "overrides",
    [
        ("flow.logit_std=0.5", "flow.mode_scale=2"),
        ("flow.weighting_scheme=mode", "flow.mode_scale=9"),
    ],
)
def test_noise_levels_of_a_language_model_are_told_by_the_plan_alone(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """No scheme of noise levels is the remedy: a language model has none."""
    given = loaded(tmp_path, "data.sets=[{chat_file: chats.jsonl}]", *overrides)
    assert given.config.flow.mode_scale > 1.5
    with pytest.raises(ConfigError, match=r"flow\.mode_scale"):
        loaded(tmp_path, *overrides)
