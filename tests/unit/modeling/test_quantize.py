"""Quantised linears: what is replaced, how they compute, and a LoRA on top of them."""

from __future__ import annotations

import pytest
import torch

from trainer.errors import ConfigError
from trainer.modeling import lora
from trainer.modeling.quantize import count_quantized, replacer

CONFIG = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "guidance_embeds": False,
    "axes_dims_rope": (4, 6, 6),
}


def linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(256, 192, bias=bias, dtype=dtype).requires_grad_(False)


def quantize(weights: str, layer: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    replace = replacer(weights, (), dtype)
    assert replace is not None
    found = replace("layer", layer)
    assert found is not None
    return found


def test_full_precision_has_no_replacer() -> None:
    assert replacer("bf16", (), torch.bfloat16) is None
    assert replacer("fp32", (), torch.float32) is None


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_names_of_high_precision_are_kept(weights: str) -> None:
    replace = replacer(weights, (r"proj_out", r"norm\..*"), torch.float32)
    assert replace is not None
    assert replace("proj_out", linear()) is None
    assert replace("norm.linear", linear()) is None
    assert isinstance(replace("block.proj_out", linear()), torch.nn.Linear)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_layers_are_counted_by_their_kind(weights: str) -> None:
    model = torch.nn.Sequential(quantize(weights, linear(), torch.float32), linear())
    assert count_quantized(model, weights)[0] == 1
    other = {"int8": "nf4", "nf4": "int8"}[weights]
    with pytest.raises(ConfigError, match=f"a base in {other}"):
        count_quantized(model, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_nf4_computes_with_the_unpacked_weight(dtype: torch.dtype, bias: bool) -> None:
    from bitsandbytes.functional import dequantize_4bit

    plain = linear(dtype, bias=bias)
    original = plain.weight.clone()
    layer = quantize("nf4", plain, dtype)
    unpacked = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    assert unpacked.dtype == dtype
    # the 16 levels lie at most 0.304 of a block's largest value apart: half of that, and a rounded scale
    assert (unpacked - original).abs().max() < (0.152 + 0.01) * original.abs().max()
    x = torch.randn(3, 5, 256, dtype=dtype, requires_grad=True)
    output = layer(x)
    assert torch.equal(output, torch.nn.functional.linear(x, unpacked, plain.bias))
    output.float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(output) @ unpacked)


def test_nf4_has_double_quantised_scales() -> None:
    state = quantize("nf4", linear(), torch.float32).weight.quant_state
    assert (state.nested, state.quant_type, state.blocksize, state.state2.blocksize) == (True, "nf4", 64, 256)


def test_training_goes_on_after_a_call_without_gradients() -> None:
    """Some CPUs have a kernel without backward, which bitsandbytes would switch to for good."""
    layer = quantize("nf4", linear(torch.bfloat16), torch.bfloat16).eval()
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
    layer.train()
    x.requires_grad_(True)
    after = layer(x)
    after.float().sum().backward()
    assert torch.equal(before, after) and x.grad is not None and x.grad.abs().sum() > 0


def test_nothing_is_kept_for_backward() -> None:
    layer, kept = quantize("nf4", linear(), torch.float32), []
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda tensor: tensor):
        layer(x)
    assert kept == []


def test_a_lora_on_nf4_has_the_names_of_any_other() -> None:
    from diffusers import FluxTransformer2DModel

    def adapted(weights: str) -> FluxTransformer2DModel:
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**CONFIG)
        replace = replacer(weights, (r"proj_out",), torch.float32)
        for name in lora.linear_names(model) if replace else ():
            parent, _, attribute = name.rpartition(".")
            found = replace(name, model.get_submodule(name)) if replace else None
            if found is not None:
                model.get_submodule(parent).register_module(attribute, found)
        lora.add_lora(model, rank=2, alpha=2, pattern=r".*attn\.to_[qkv]", seed=0, device="cpu")
        return model

    plain, packed = adapted("fp32"), adapted("nf4")
    assert count_quantized(packed, "nf4")[0] > 10
    expected, found = lora.adapter_state(plain), lora.adapter_state(packed)
    assert "transformer_blocks.0.attn.to_q.lora_A.weight" in found
    assert {name: tensor.shape for name, tensor in found.items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }
    assert all(torch.equal(found[name], expected[name]) for name in found)
    trainable = [name for name, value in packed.named_parameters() if value.requires_grad]
    assert all(name.endswith((".lora_A.default.weight", ".lora_B.default.weight")) for name in trainable)
    assert packed.dtype == torch.float32
