"""Parts of adapters that peft writes: read as peft computes them, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoKrConfig, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from trainer.engine.results.file_check import check_file
from trainer.errors import ConfigError, DataError
from trainer.modeling.adapter.adapter_file import merged_weight, read_adapter
from trainer.modeling.adapter.comfyui import write_comfyui
from trainer.modeling.adapter.start_from import saved_start

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LORA = {"a.lora_A.weight": torch.ones(2, 4), "a.lora_B.weight": torch.ones(4, 2)}


class Small(torch.nn.Module):
    """An embedding and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(12, 48)
        self.layer = torch.nn.Linear(48, 96)


def save_pretrained(folder: Path, config: Any) -> tuple[Path, Any]:
    """A peft adapter with random values, as peft writes it, and its model."""
    torch.manual_seed(0)
    model = get_peft_model(Small(), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_" in name or ".lokr_" in name:
                parameter.normal_()
    model.save_pretrained(folder)
    return folder / "adapter_model.safetensors", model


def bare(path: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any] | None) -> Path:
    """A file in diffusers' layout, with peft's configuration in it or without one."""
    said = {f"transformer.{key}": value for key, value in (config or {}).items()}
    metadata = {"lora_adapter_metadata": json.dumps(said)} if config is not None else None
    save_file({f"transformer.{name}": tensor for name, tensor in tensors.items()}, path, metadata)
    return path


@pytest.mark.parametrize("both", [False, True])
def test_a_lokr_of_two_low_ranks_is_merged_as_peft_does(both: bool, tmp_path: Path) -> None:
    config = LoKrConfig(r=2, alpha=3, target_modules=["layer"], decompose_both=both, decompose_factor=8)
    path, model = save_pretrained(tmp_path, config)
    layer = model.base_model.model.layer
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    adapter = read_adapter(path)
    assert ("lokr_w1_a" in adapter.layers["layer"]) == both
    base = layer.base_layer.weight.detach()
    torch.testing.assert_close(
        merged_weight(base, adapter.layers["layer"], adapter.config, "layer"), expected.detach()
    )
    write_comfyui(
        adapter.state,
        tmp_path / "twin.safetensors",
        {},
        config=adapter.config,
        key_of="transformer.{}".format,
        weight_of=torch.zeros,
    )
    theirs = load_file(tmp_path / "twin.safetensors")
    assert theirs.keys() == {f"transformer.layer.{part}" for part in ("lokr_w1", "lokr_w2_a", "lokr_w2_b")}
    # ComfyUI's comfy/weight_adapter/lokr.py: without an alpha the scale is one
    right = theirs["transformer.layer.lokr_w2_a"] @ theirs["transformer.layer.lokr_w2_b"]
    torch.testing.assert_close(
        base + torch.kron(theirs["transformer.layer.lokr_w1"], right), expected.detach()
    )


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (LoraConfig(r=2, target_modules=["layer"], lora_bias=True), "layer.lora_B.bias"),
        (LoraConfig(r=2, target_modules=["layer", "embedding"]), "embedding.lora_embedding_A"),
    ],
)
def test_what_peft_writes_and_is_not_read_is_named(config: LoraConfig, part: str, tmp_path: Path) -> None:
    path, _ = save_pretrained(tmp_path, config)
    with pytest.raises(DataError, match=f"{part} is a part of an adapter that is not read") as caught:
        read_adapter(path)
    (problem,) = caught.value.problems
    assert problem.where == str(path) and problem.remedy


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"a.lora_A.default.weight": torch.ones(2, 4)}, "a.lora_A.default.weight is a part of an adapter"),
        ({**LORA, "a.lokr_t2": torch.ones(2)}, "a.lokr_t2 is a part"),
        ({**LORA, "a.dora_scale": torch.ones(4, 1)}, "a.dora_scale is a part"),
        ({**LORA, "b.lora_magnitude_vector": torch.ones(2)}, "b has nothing but lora_magnitude_vector"),
        ({**LORA, "b.lokr_w1": torch.ones(2, 2)}, "b has nothing but lokr_w1"),
    ],
)
def test_half_a_layer_s_adapter_is_named(
    tensors: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=words):
        read_adapter(bare(tmp_path / "x.safetensors", tensors, {"r": 2, "lora_alpha": 4}))


def test_factors_that_do_not_fit_each_other_are_named() -> None:
    tensors = {"lora_A.weight": torch.ones(3, 4), "lora_B.weight": torch.ones(4, 2)}
    config = {"r": 2, "lora_alpha": 4, "rank_pattern": {}, "alpha_pattern": {}}
    with pytest.raises(DataError, match=r"the factors of a do not fit each other: lora_A.weight \(3, 4\), "):
        merged_weight(torch.zeros(4, 4), tensors, config, "a")


@pytest.mark.parametrize("begun", ["pissa", "pissa_niter_4", "olora"])
def test_an_adapter_of_a_changed_base_is_refused_and_peft_makes_it_a_plain_one(
    begun: Any, tmp_path: Path
) -> None:
    base = Small()
    before = base.layer.weight.detach().clone()
    model = get_peft_model(base, LoraConfig(r=2, target_modules=["layer"], init_lora_weights=begun))
    assert not torch.equal(base.layer.base_layer.weight, before)
    model.save_pretrained(tmp_path / "start")
    with torch.no_grad():
        base.layer.lora_B["default"].weight.add_(0.1)
    trained = base.layer.base_layer.weight + base.layer.get_delta_weight("default")
    model.save_pretrained(tmp_path / "residual")
    with pytest.raises(DataError, match=f"init_lora_weights: {begun}`, which changes the base") as caught:
        read_adapter(tmp_path / "residual" / "adapter_model.safetensors")
    assert "path_initial_model_for_weight_conversion" in caught.value.problems[0].remedy
    # the remedy is one
    model.peft_config["default"].init_lora_weights = True
    start = str(tmp_path / "start")
    model.save_pretrained(tmp_path / "plain", path_initial_model_for_weight_conversion=start)
    adapter = read_adapter(tmp_path / "plain" / "adapter_model.safetensors")
    merged = merged_weight(before, adapter.layers["layer"], adapter.config, "layer")
    torch.testing.assert_close(merged, trained.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("begun", ["gaussian", "eva", "orthogonal", True, False])
def test_an_adapter_over_the_base_as_it_is_is_read(begun: Any, tmp_path: Path) -> None:
    config = {"r": 2, "lora_alpha": 4, "init_lora_weights": begun}
    assert read_adapter(bare(tmp_path / "x.safetensors", LORA, config)).kind == "lora"


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_file_in_float8_is_checked_and_merged(dtype: torch.dtype, tmp_path: Path) -> None:
    small = {name: tensor.to(dtype) for name, tensor in LORA.items()}
    path = bare(tmp_path / "x.safetensors", small, {"r": 2, "lora_alpha": 4})
    assert check_file(path) == 1
    adapter = read_adapter(path)
    merged = merged_weight(torch.zeros(4, 4), adapter.layers["a"], adapter.config, "a")
    assert torch.equal(merged, torch.full((4, 4), 4.0))
    spoilt = {**LORA, "a.lora_A.weight": torch.full((2, 4), float("nan")).to(dtype)}
    with pytest.raises(DataError, match=r"a.lora_A.weight is not finite"):
        check_file(bare(tmp_path / "y.safetensors", spoilt, {"r": 2, "lora_alpha": 4}))


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_a_run_may_start_from_a_file_in_float8(dtype: torch.dtype, tmp_path: Path) -> None:
    model = get_peft_model(Small(), LoraConfig(r=2, lora_alpha=4, target_modules=["layer"])).base_model.model
    model.peft_config = {"default": LoraConfig(r=2, lora_alpha=4, target_modules=["layer"])}
    values = {"layer.lora_A.weight": torch.ones(2, 48), "layer.lora_B.weight": torch.ones(96, 2)}
    small = {name: tensor.to(dtype) for name, tensor in values.items()}
    path = bare(tmp_path / "x.safetensors", small, {"r": 2, "lora_alpha": 4})
    assert saved_start(model, path).keys() == values.keys()
    spoilt = {**values, "layer.lora_A.weight": torch.full((2, 48), float("nan")).to(dtype)}
    with pytest.raises(ConfigError, match="is not finite"):
        saved_start(model, bare(tmp_path / "y.safetensors", spoilt, {"r": 2, "lora_alpha": 4}))
