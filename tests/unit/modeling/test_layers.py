"""Quantised linears: what is replaced, how they compute, and a LoRA on top of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.quantized_layers import replaced
from tests.stored_nf4 import quant_state
from trainer.errors import ConfigError
from trainer.modeling.adapter import lora
from trainer.modeling.storage import nf4
from trainer.modeling.storage.layers import count_quantized, replacer
from trainer.modeling.storage.nf4 import Nf4Linear
from trainer.modeling.storage.row_scaled import RowScaledLinear
from trainer.ways.storages import find

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


def quantize(weights: str, layer: torch.nn.Module) -> torch.nn.Module:
    found = replaced(replacer(find(weights), ()), "layer", layer)
    assert isinstance(found, torch.nn.Module)
    return found


def test_full_precision_has_no_replacer() -> None:
    assert replacer(find("bf16"), ()) is None
    assert replacer(find("fp32"), ()) is None


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_names_of_high_precision_are_kept(weights: str) -> None:
    replace = replacer(find(weights), (r"proj_out", r"norm\..*"))
    assert replace is not None
    assert replace("proj_out", linear()) is None
    assert replace("norm.linear", linear()) is None
    assert isinstance(replace("block.proj_out", linear()), torch.nn.Linear)


@pytest.mark.parametrize(("weights", "taken"), [("int8", True), ("nf4", True), ("fp8", False)])
def test_modulation_is_quantised_where_size_is_all_that_counts(weights: str, taken: bool) -> None:
    replace = replacer(find(weights), (r".*norm\.linear", r"proj_out"), (r"blocks\..*norm\.linear",))
    assert replace is not None
    assert (replace("blocks.0.norm.linear", linear()) is not None) is taken
    assert replace("norm.linear", linear()) is None and replace("proj_out", linear()) is None


def test_modulation_lies_in_int8_beside_fp8_products() -> None:
    """Modulation stays out of FP8 products: int8 is nearer to its values, and becomes bf16 for a product."""
    names, modulation = (r".*norm\.linear", r"proj_out"), (r"blocks\..*norm\.linear",)
    replace = replacer(find("fp8", "fp8", 1, "int8"), names, modulation)
    assert replace is not None
    found = replaced(replace, "blocks.0.norm.linear", linear())
    assert isinstance(found, RowScaledLinear) and (found.kind, found.fp8_compute) == ("int8", False)
    other = replaced(replace, "blocks.0.proj", linear())
    assert isinstance(other, RowScaledLinear) and (other.kind, other.fp8_compute) == ("fp8", True)
    assert replace("norm.linear", linear()) is None and replace("proj_out", linear()) is None
    x = torch.randn(2, 256)
    wanted = linear()(x)
    assert (found(x) - wanted).norm() < 0.01 * wanted.norm() < (other(x) - wanted).norm()
    assert count_quantized(torch.nn.Sequential(found, other, linear()), "fp8") == (2, 1)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
def test_layers_are_counted_by_their_kind(weights: str) -> None:
    model = torch.nn.Sequential(quantize(weights, linear()), linear())
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
    layer = quantize("nf4", plain)
    assert isinstance(layer, Nf4Linear)
    unpacked = dequantize_4bit(layer.weight.data, quant_state(layer, dtype))
    assert unpacked.dtype == dtype
    # the 16 levels lie at most 0.304 of a block's largest value apart: half of that, and a rounded scale
    assert (unpacked - original).abs().max() < (0.152 + 0.01) * original.abs().max()
    x = torch.randn(3, 5, 256, dtype=dtype, requires_grad=True)
    output = layer(x)
    assert torch.equal(output, torch.nn.functional.linear(x, unpacked, plain.bias))
    output.float().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(output) @ unpacked)


def test_nf4_has_double_quantised_scales() -> None:
    layer = quantize("nf4", linear())
    assert isinstance(layer, Nf4Linear)
    assert (layer.blocksize, layer.nested_blocksize, layer.absmax.dtype) == (64, 256, torch.uint8)


def test_scales_that_are_not_quantised_are_read_too() -> None:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    plain, x = linear(), torch.randn(4, 256)
    packed, state = quantize_4bit(plain.weight.data, compress_statistics=False, quant_type="nf4")
    layer = Nf4Linear(plain, find("nf4"))
    layer.take(packed, state)
    assert layer.offset is None and layer.absmax.dtype == torch.float32
    assert torch.equal(layer(x), torch.nn.functional.linear(x, dequantize_4bit(packed, state), plain.bias))


def test_a_compiled_nf4_layer_is_one_graph_and_unpacks_once_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shapes = quantize("nf4", linear()), []
    original = nf4._unpacked
    monkeypatch.setattr(nf4, "_unpacked", lambda *all: shapes.append(all[4]) or original(*all))

    def run(x: torch.Tensor) -> torch.Tensor:
        return layer(x.tanh()).sin()

    torch.compiler.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    inputs = [torch.randn(3, 5, 256).requires_grad_(True)]
    inputs.append(inputs[0].detach().clone().requires_grad_(True))
    outputs = [function(x) for function, x in zip((compiled, run), inputs, strict=True)]
    for output in outputs:
        output.sum().backward()
    assert torch.equal(*outputs)
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    assert len(shapes) == 4


@pytest.mark.parametrize("bias", [True, False])
def test_large_nf4_weights_are_unpacked_in_parts(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = quantize("nf4", linear(bias=bias)), torch.randn(6, 256, requires_grad=True)
    wanted = layer(x)
    (expected,) = torch.autograd.grad(wanted.sin().sum(), x)
    monkeypatch.setattr(nf4, "NF4_MOST_UNPACKED", 70 * 256)
    monkeypatch.setattr(nf4, "_TILE", 16)
    sizes, original = [], nf4._unpacked
    monkeypatch.setattr(nf4, "_unpacked", lambda *all: sizes.append(all[4]) or original(*all))
    found = layer(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(found.sin().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert [(one.start, one.stop) for one in sizes] == 2 * [(0, 64), (64, 128), (128, 192)]


def test_a_gradient_in_parts_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six parts whose sum is rounded to bf16 each time differ twice as much from fp32 as the whole does."""
    layer = quantize("nf4", linear(bias=False).bfloat16())
    x, given = torch.randn(6, 256).bfloat16(), torch.randn(6, 192).bfloat16()
    found = []
    for most in (2**40, 32 * 256):
        monkeypatch.setattr(nf4, "NF4_MOST_UNPACKED", most)
        monkeypatch.setattr(nf4, "_TILE", 16)
        leaf = x.clone().requires_grad_(True)
        layer(leaf).backward(given)
        assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
        found.append(leaf.grad)
    whole, parts = found
    # a sum that lies half way may fall to the other side
    assert (whole != parts).float().mean() < 0.02


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((55296, 6144), 9216),  # FLUX.2's joined projections
        ((5120, 32768), 1792),  # a Mistral's last projection
        ((36865, 6144), 9344),  # no whole number of tiles
        ((21504, 3072), 21504),  # small enough in one
        ((128, 2**20), 128),  # a tile holds more than the most
        ((36864, 6112), 36864),  # blocks of 64 that cross its rows
    ],
)
def test_parts_are_alike_and_aligned(shape: tuple[int, int], rows: int) -> None:
    """A part that begins between two 16-byte words makes its products take more than twice as long."""
    parts = nf4._parts(shape, 64)
    assert [part.stop - part.start for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert parts[0].start == 0 and parts[-1].stop == shape[0]
    assert 0 < parts[-1].stop - parts[-1].start <= rows
    assert all(one.stop == two.start for one, two in itertools.pairwise(parts))


def test_the_operations_of_nf4_are_counted() -> None:
    """A partitioner that thinks them free recomputes them first."""
    layer = quantize("nf4", linear())
    with FlopCounterMode(display=False) as counted:
        layer(torch.randn(7, 256, requires_grad=True)).sum().backward()
    assert counted.get_total_flops() == 2 * (2 * 7 * 256 * 192)


def test_training_goes_on_after_a_call_without_gradients() -> None:
    """Some CPUs have a kernel without backward, which bitsandbytes would switch to for good."""
    layer = quantize("nf4", linear(torch.bfloat16)).eval()
    x = torch.randn(4, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        before = layer(x)
    layer.train()
    x.requires_grad_(True)
    after = layer(x)
    after.float().sum().backward()
    assert torch.equal(before, after) and x.grad is not None and x.grad.abs().sum() > 0


def test_nothing_is_kept_for_backward() -> None:
    layer, kept = quantize("nf4", linear()), []
    x = torch.randn(4, 256, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor), lambda tensor: tensor):
        layer(x)
    own = {tensor.data_ptr() for tensor in layer.state_dict().values()}
    assert all(tensor.data_ptr() in own for tensor in kept)


def test_a_lora_on_nf4_has_the_names_of_any_other() -> None:
    from diffusers import FluxTransformer2DModel

    def adapted(weights: str) -> FluxTransformer2DModel:
        torch.manual_seed(0)
        model = FluxTransformer2DModel(**CONFIG)
        replace = replacer(find(weights), (r"proj_out",))
        for name in lora.linear_names(model) if replace else ():
            parent, _, attribute = name.rpartition(".")
            found = replaced(replace, name, model.get_submodule(name))
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
