"""An adapter that is loaded onto weights stored as bytes computes as the one that was trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.modeling.small_models import Storage, case
from trainer.modeling.adapter import lora


@pytest.mark.parametrize("family", ["flux1_dev", "llama"])
@pytest.mark.parametrize("storage", ["plain", "int8", "fp8"])
def test_a_loaded_adapter_has_the_trained_one_s_type(family: str, storage: Storage, tmp_path: Path) -> None:
    one = case(family, storage=storage, adapted=False)
    model: Any = one.model.to(torch.bfloat16)
    pattern = one.family.lora_targets["attention"]
    lora.add_lora(model, rank=4, alpha=4.0, pattern=pattern, seed=0, device="cpu")
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if ".lora_" in name}
    path = one.family.save_adapter(
        lora.adapter_state(model), lora.adapter_config(model), tmp_path, "one.safetensors"
    )
    lora.remove_lora(model)
    one.family.load_adapter(model, path)
    lora.to_model_type(model)
    loaded = {name: p for name, p in model.named_parameters() if ".lora_" in name}
    assert loaded.keys() == trained.keys()
    for name, value in loaded.items():
        assert value.dtype == torch.bfloat16, name
        assert torch.equal(value, trained[name]), name


def test_the_model_is_asked_for_its_type_once() -> None:
    """diffusers walks all modules for it: asked for every tensor, that took 20 s for 60 blocks."""

    class Model(torch.nn.Module):
        asked = 0

        def __init__(self) -> None:
            super().__init__()
            for number in range(3):
                layer = torch.nn.Linear(2, 2)
                layer.lora_A = torch.nn.Linear(2, 1, bias=False)
                self.add_module(f"layer_{number}", layer)

        @property
        def dtype(self) -> torch.dtype:
            self.asked += 1
            return torch.bfloat16

    model = Model()
    lora.to_model_type(model)
    adapters = {name: p.dtype for name, p in model.named_parameters() if lora.is_adapter(name)}
    assert len(adapters) == 3 and set(adapters.values()) == {torch.bfloat16}
    assert model.layer_0.weight.dtype == torch.float32
    assert model.asked == 1
