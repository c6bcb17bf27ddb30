"""Frozen linears of one byte a value: how near they are, what they are to libraries, and a LoRA on top."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.numerics.saved import kept_bytes
from tests.quantized_layers import from_linear
from tests.unit.modeling.small_models import Storage, case, relative
from trainer.modeling.adapter import lora
from trainer.modeling.storage import row_scaled
from trainer.modeling.storage.row_scaled import Kind, RowScaledLinear, takes_fp8

# relative errors of normal values: half a step of 1/127 of a row's largest, and half a step of three bits
LIMITS: dict[Kind, float] = {"int8": 0.015, "fp8": 0.04}


def linear(dtype: torch.dtype = torch.float32, *, bias: bool = True) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(256, 192, bias=bias).to(dtype).requires_grad_(False)


def stored(
    plain: torch.nn.Linear, kind: Kind, *, fp8_compute: bool = False, copies: int = 1
) -> RowScaledLinear:
    return from_linear(plain, kind, fp8_compute=fp8_compute, copies=copies)


def run(layer: torch.nn.Module, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of inputs with three axes."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3, 20, 256, generator=generator).to(dtype).requires_grad_(True)
    output = layer(x)
    output.backward(torch.randn(3, 20, 192, generator=generator).to(output.dtype))
    assert x.grad is not None
    return output.detach(), x.grad


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_output_and_gradient_are_near_the_full_layer_s(kind: Kind, dtype: torch.dtype, bias: bool) -> None:
    wanted = run(linear(bias=bias), torch.float32)
    found = run(stored(linear(dtype, bias=bias), kind), dtype)
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        assert 1e-4 < relative(ours, theirs) < LIMITS[kind]


@pytest.mark.parametrize("at_once", [2**24, 5 * 256])
def test_int8_of_bf16_weights_is_that_of_fp32_arithmetic(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values are the same with all rows quantised at once and with five at a time."""
    monkeypatch.setattr(row_scaled, "_AT_ONCE", at_once)
    plain = linear(torch.bfloat16)
    plain.weight.data.normal_()
    layer = stored(plain, "int8")
    exact = plain.weight.double()
    scale = exact.abs().amax(1, keepdim=True) / 127
    assert torch.allclose(layer.weight_scale.double(), scale, rtol=1e-6)
    values = layer.weight.view(torch.int8)
    # a quotient may lie half way between two integers
    wanted = (exact / scale).round()
    assert (values != wanted).float().mean() < 1e-3
    found = values.double() * layer.weight_scale.double()
    # 5 to 18 % more where quotients and scales are rounded to bf16
    assert relative(found, exact) < 1.001 * relative(wanted * scale, exact)


def test_a_weight_of_one_row_is_stored_in_int8_too() -> None:
    one = torch.nn.Linear(64, 1, bias=False).requires_grad_(False)
    assert relative(stored(one, "int8")(torch.eye(64)), one.weight.t()) < 0.01


@pytest.mark.parametrize("kind", LIMITS)
def test_a_row_s_size_does_not_matter_to_the_others(kind: Kind) -> None:
    plain = linear(bias=False)
    plain.weight.data *= torch.logspace(-4, 4, 192)[:, None]
    x = torch.randn(50, 256)
    found, wanted = stored(plain, kind)(x), plain(x)
    for row in (0, 96, 191):
        assert relative(found[:, row], wanted[:, row]) < LIMITS[kind] * 1.5


@pytest.mark.parametrize("copies", [1, 2])
def test_fp8_products_are_chosen_by_the_layer(copies: int) -> None:
    """Inputs are rounded too then: twice the error, and not the same values."""
    wanted = run(linear(), torch.float32)
    plain = run(stored(linear(), "fp8"), torch.float32)
    found = run(stored(linear(), "fp8", fp8_compute=True, copies=copies), torch.float32)
    for ours, stored_only, exact in zip(found, plain, wanted, strict=True):
        assert relative(stored_only, exact) < relative(ours, exact) < 0.05


@pytest.mark.parametrize("kind", LIMITS)
def test_a_weight_takes_one_byte_a_value(kind: Kind) -> None:
    layer = stored(linear(), kind)
    held = {name: tensor.numel() * tensor.element_size() for name, tensor in layer.state_dict().items()}
    assert held == {"weight": 192 * 256, "weight_scale": 192 * 4, "bias": 192 * 4}
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert not any(parameter.requires_grad for parameter in layer.parameters())


def test_the_second_copy_is_there_when_asked_for() -> None:
    assert stored(linear(), "fp8", fp8_compute=True, copies=1).transposed is None
    assert stored(linear(), "fp8", fp8_compute=False, copies=2).transposed is None
    layer = stored(linear(), "fp8", fp8_compute=True, copies=2)
    assert layer.transposed is not None and layer.transposed.is_contiguous()
    assert torch.equal(layer.transposed, layer.weight.t())
    assert "transposed" not in layer.state_dict()


@pytest.mark.parametrize(("kind", "fp8_compute"), [("int8", False), ("fp8", False), ("fp8", True)])
def test_nothing_but_the_weight_is_kept_for_backward(kind: Kind, fp8_compute: bool) -> None:
    layer = stored(linear(), kind, fp8_compute=fp8_compute)
    x = torch.randn(500, 256, requires_grad=True)
    # the scales are no parameters, so they are counted
    assert kept_bytes(layer, lambda: layer(x)) == 192 * 4


@pytest.mark.parametrize("kind", LIMITS)
def test_it_is_a_linear_layer(kind: Kind) -> None:
    layer = stored(linear(), kind)
    assert isinstance(layer, torch.nn.Linear)
    assert (layer.in_features, layer.out_features) == (256, 192)
    assert repr(layer) == f"RowScaledLinear(in_features=256, out_features=192, bias=True, {kind})"
    assert repr(stored(linear(bias=False), "fp8", fp8_compute=True)).endswith(
        "bias=False, fp8 computed in fp8)"
    )


@pytest.mark.parametrize(
    ("columns", "rows", "taken"),
    [(16, 16, True), (3072, 64, True), (8, 16, False), (16, 24, False), (20, 36, False), (64, 1, False)],
)
def test_fp8_kernels_take_multiples_of_sixteen(columns: int, rows: int, taken: bool) -> None:
    assert takes_fp8(torch.nn.Linear(columns, rows)) == taken


# in a model


def replaced(model: Any) -> int:
    return sum(isinstance(module, RowScaledLinear) for module in model.modules())


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_model_s_dtype_stays(storage: Storage, dtype: torch.dtype) -> None:
    plain = case("flux1_dev", adapted=False).model.to(dtype)
    model = case("flux1_dev", adapted=False, storage=storage).model
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    assert replaced(model) > 10
    assert model.dtype == plain.dtype == dtype


@pytest.mark.parametrize("storage", ["int8", "fp8"])
def test_a_lora_wraps_it_in_the_model_s_dtype(storage: Storage) -> None:
    from peft.tuners.lora.layer import Linear as LoraLinear

    model, plain = (case("flux1_dev", storage=one).model for one in (storage, "plain"))
    layer = model.transformer_blocks[0].attn.to_q
    assert type(layer) is LoraLinear and isinstance(layer.base_layer, RowScaledLinear)
    found, wanted = lora.adapter_state(model), lora.adapter_state(plain)
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)
    assert {parameter.dtype for parameter in trainable.values()} == {model.dtype} == {torch.float32}


def test_a_bf16_lora_on_a_bf16_model() -> None:
    model = case("flux1_dev", adapted=False).model.bfloat16()
    attn = model.transformer_blocks[0].attn
    attn.to_q = from_linear(attn.to_q, "fp8", fp8_compute=True, copies=1)
    lora.add_lora(model, rank=2, alpha=2, pattern=r".*attn\.to_q", seed=0, device="cpu")
    x = torch.randn(1, 5, 64, dtype=torch.bfloat16, requires_grad=True)
    output = attn.to_q(x)
    output.sum().backward()
    assert output.dtype == torch.bfloat16 == attn.to_q.lora_A["default"].weight.dtype
    assert attn.to_q.lora_B["default"].weight.grad is not None


# an FP8 gradient passes three blocks here, an int8 base only changes the weights
@pytest.mark.parametrize(("storage", "limit"), [("int8", 0.03), ("fp8", 0.15), ("fp8_two_copies", 0.15)])
def test_a_whole_model_s_output_and_adapter_gradients_stay_near(storage: Storage, limit: float) -> None:
    from tests.unit.modeling.small_models import difference

    wanted_output, wanted = case("flux1_dev").gradients()
    output, found = case("flux1_dev", storage=storage).gradients()
    assert relative(output, wanted_output) < limit
    assert difference(found, wanted) < limit


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_compiler_keeps_no_unpacked_weight(kind: Kind) -> None:
    """Merged, the unpacking of forward and backward would be done once, and its result kept between them."""
    layer = from_linear(torch.nn.Linear(64, 48), kind, fp8_compute=False, copies=1)
    kept: list[torch.Tensor] = []
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        compiled(x).sum().backward()
    assert kept and all(one.dtype == torch.uint8 or one.numel() <= 48 for one in kept)
    expected = x.detach().clone().requires_grad_(True)
    layer(expected).sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_the_operations_of_unpacked_weights_are_counted() -> None:
    layer = from_linear(torch.nn.Linear(64, 48), "int8", fp8_compute=False, copies=1)
    with FlopCounterMode(display=False) as counted:
        layer(torch.randn(2, 5, 64, requires_grad=True)).sum().backward()
    assert counted.get_total_flops() == 2 * (2 * 10 * 64 * 48)
