"""PEFT's configuration beside an adapter: written whole or not at all, and what is damaged is named."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.modeling.small_models import case
from trainer.engine.results.file_check import check_file
from trainer.errors import AccessError, DataError, NoSpaceError
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.adapter_file import read_adapter
from trainer.modeling.adapter.peft_config import CONFIG_BESIDE

Edit = Callable[[dict[str, Any]], str]


def saved(folder: Path, family: str = "llama") -> Path:
    """A small adapter that changes something, as a run saves it."""
    one = case(family)
    for name, parameter in one.model.named_parameters():
        if ".lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    state, config = lora.adapter_state(one.model), lora.adapter_config(one.model)
    return one.family.save_adapter(state, config, folder, "one.safetensors")


def changed(**values: Any) -> Edit:
    """A configuration with other values; None is written as null."""
    return lambda config: json.dumps({**config, **values})


def without(key: str) -> Edit:
    """A configuration that lacks a key."""
    return lambda config: json.dumps({name: value for name, value in config.items() if name != key})


DAMAGED: dict[str, Edit] = {
    "empty": lambda _: "",
    "cut off": lambda config: json.dumps(config)[:100],
    "a list": lambda _: "[]",
    "a rank alone": lambda _: '{"r": 4}',
    "another kind": changed(peft_type="PREFIX_TUNING"),
    "an odd kind": changed(peft_type=["LORA"]),
    "no kind": without("peft_type"),
    "no rank": without("r"),
    "no alpha": changed(lora_alpha=None),
    "a word for a rank": changed(r="x"),
    "patterns of nothing": changed(rank_pattern=[]),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_configuration_is_named_before_a_base_is_loaded(tmp_path: Path, what: str) -> None:
    path, beside = saved(tmp_path), tmp_path / CONFIG_BESIDE
    assert check_file(path) > 0
    beside.write_text(DAMAGED[what](json.loads(beside.read_text())))
    with pytest.raises(DataError) as caught:
        check_file(path)
    (problem,) = caught.value.problems
    assert problem.where == str(beside) and problem.remedy
    one = case("llama", adapted=False)
    for read in (read_adapter, lambda path: one.family.load_adapter(one.model, path)):
        with pytest.raises(DataError):
            read(path)


def test_a_configuration_that_is_not_there_is_told_before_a_base_is_loaded(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (tmp_path / CONFIG_BESIDE).unlink()
    with pytest.raises(AccessError, match="is not beside the adapter"):
        check_file(path)


@pytest.mark.parametrize(
    "edit",
    [changed(r=8), changed(target_modules="nothing"), changed(target_modules="("), changed(lora_dropout="x")],
)
def test_a_configuration_of_other_layers_or_ranks_is_refused(tmp_path: Path, edit: Edit) -> None:
    path, beside = saved(tmp_path), tmp_path / CONFIG_BESIDE
    beside.write_text(edit(json.loads(beside.read_text())))
    one = case("llama", adapted=False)
    with pytest.raises(DataError, match=CONFIG_BESIDE):
        one.family.load_adapter(one.model, path)


def test_keys_that_are_null_say_nothing(tmp_path: Path) -> None:
    path, beside = saved(tmp_path), tmp_path / CONFIG_BESIDE
    config = json.loads(beside.read_text())
    beside.write_text(json.dumps({**config, "rank_pattern": None, "alpha_pattern": None, "use_rslora": None}))
    assert read_adapter(path).config["rank_pattern"] == {}
    one = case("llama", adapted=False)
    one.family.load_adapter(one.model, path)
    assert lora.adapter_state(one.model).keys() == {
        name.removeprefix("base_model.model.") for name in load_file(path)
    }


def test_patterns_inside_a_file_that_are_null_say_nothing(tmp_path: Path) -> None:
    config = {"r": 2, "lora_alpha": 4, "rank_pattern": None, "alpha_pattern": None}
    inside = {f"transformer.{key}": value for key, value in config.items()}
    path = tmp_path / "one.safetensors"
    tensors = {
        "transformer.a.lora_A.weight": torch.ones(2, 4),
        "transformer.a.lora_B.weight": torch.ones(4, 2),
    }
    save_file(tensors, path, {"lora_adapter_metadata": json.dumps(inside)})
    assert read_adapter(path).config == {**config, "rank_pattern": {}, "alpha_pattern": {}}


def test_a_disk_that_is_full_leaves_no_empty_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def full(descriptor: int) -> None:
        if CONFIG_BESIDE in Path(f"/proc/self/fd/{descriptor}").readlink().name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError, match=CONFIG_BESIDE):
        saved(tmp_path)
    assert not (tmp_path / CONFIG_BESIDE).exists()
