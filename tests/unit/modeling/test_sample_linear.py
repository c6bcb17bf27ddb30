"""Linear layers of one row a sample against torch's own layer, and which layers of a model they are."""

from __future__ import annotations

import re

import pytest
import torch

from tests.unit.modeling.small_models import case
from trainer import families
from trainer.modeling.blocks.recompute import repeated_blocks
from trainer.modeling.blocks.sample_linear import SampleLinear, multiply_few_rows
from trainer.modeling.storage.layers import any_of


def layers(dtype: torch.dtype, *, bias: bool = True) -> tuple[torch.nn.Linear, torch.nn.Linear]:
    torch.manual_seed(0)
    wanted = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    found = torch.nn.Linear(48, 80, bias=bias, dtype=dtype)
    found.load_state_dict(wanted.state_dict())
    assert multiply_few_rows(torch.nn.ModuleDict({"one": found}), re.compile("one")) == 1
    return wanted, found


def gradients(layer: torch.nn.Linear, inputs: torch.Tensor) -> list[torch.Tensor]:
    """Of inputs, weight and bias; the upstream gradient is seeded."""
    inputs = inputs.clone().requires_grad_()
    output = layer(inputs)
    torch.manual_seed(1)
    output.backward(torch.randn_like(output))
    return [output, *(one.grad for one in (inputs, *layer.parameters()) if one.grad is not None)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (2, 48), (8, 48), (9, 48), (2, 3, 48)])
def test_it_learns_what_torch_s_layer_learns(shape: tuple[int, ...], bias: bool) -> None:
    wanted, found = layers(torch.float32, bias=bias)
    inputs = torch.randn(shape)
    for one, other in zip(gradients(found, inputs), gradients(wanted, inputs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_gradient_in_bf16_is_the_exact_one_rounded_once() -> None:
    """True of two samples too: no product is rounded before it is added."""
    _, found = layers(torch.bfloat16)
    inputs = torch.randn(2, 48, dtype=torch.bfloat16)
    _, _, weight, bias = gradients(found, inputs)
    torch.manual_seed(1)
    upstream = torch.randn(2, 80, dtype=torch.bfloat16)
    assert torch.equal(weight, (upstream.double().T @ inputs.double()).to(torch.bfloat16))
    assert torch.equal(bias, upstream.double().sum(0).to(torch.bfloat16))


@pytest.mark.parametrize("family", ["flux1_dev", "qwen_image"])
def test_a_family_s_modulation_has_one_row_a_sample(family: str) -> None:
    """Found by the names that the family gives; each is in a block, and each is given rows of a sample."""
    made = case(family)
    model, named = made.model, families.get(family)
    count = multiply_few_rows(model, any_of(named.modulation))
    blocks = repeated_blocks(model, named.blocks)
    inside = [one for block in blocks.values() for one in block.modules() if isinstance(one, SampleLinear)]
    assert count == len(inside) > 0
    seen = []
    for layer in inside:
        layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dim()))
    made.predict()
    assert seen == [2] * count
