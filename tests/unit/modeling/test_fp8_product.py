"""FP8 products as a CPU emulates them, against float32: rows, forward, gradient, and what they keep."""

from __future__ import annotations

import types
import weakref

import pytest
import torch

from tests.numerics.saved import kept_bytes
from tests.unit.modeling.small_models import relative
from trainer.modeling.storage import fp8_product
from trainer.modeling.storage.fp8_product import MOST, fp8_linear, multiply, quantize_rows, transpose_bytes

# e4m3 has three bits behind the point: half of one of eight steps between powers of two
HALF_STEP = 1 / 16
# below this share of a row's largest value steps no longer shrink: 2 ** -6 of 448
SMALLEST_NORMAL = 2**-6 / MOST


def values(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Rows whose sizes differ by six orders."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-3, 3, rows)[:, None]
    return torch.randn(rows, columns, generator=generator) * sizes


def weight(out: int, inner: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight in fp32, and its quantised values with their scale."""
    plain = torch.randn(out, inner, generator=torch.Generator().manual_seed(7)) / inner**0.5
    return plain, *quantize_rows(plain)


# rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_value_is_within_half_a_step(dtype: torch.dtype) -> None:
    wide = values(24, 320).to(dtype)
    quantized, scale = quantize_rows(wide)
    assert (quantized.dtype, scale.dtype, scale.shape) == (torch.float8_e4m3fn, torch.float32, (24, 1))
    largest = wide.float().abs().amax(1, keepdim=True)
    allowed = HALF_STEP * torch.maximum(wide.float().abs(), SMALLEST_NORMAL * largest)
    assert ((quantized.float() * scale - wide.float()).abs() <= allowed * (1 + 1e-5)).all()


def test_the_largest_value_of_a_row_is_the_type_s_largest() -> None:
    wide = values(8, 64)
    quantized, scale = quantize_rows(wide)
    assert torch.equal(quantized.float().abs().amax(1), torch.full((8,), MOST))
    assert torch.allclose(scale[:, 0] * MOST, wide.abs().amax(1))


@pytest.mark.parametrize("size", [1e-10, 1e-13, 1e-16, 1e-20])
def test_small_gradients_are_quantised_as_well_as_large_ones(size: float) -> None:
    """Gradients of a mean over all pixels are small; a weight's scale makes them smaller by four orders."""
    wide, columns = values(8, 256), torch.full((256,), 1.5e-4)
    errors = []
    for exact in (wide, wide * size):
        quantized, scale = quantize_rows(exact, columns)
        # in fp64: the squares of such values are zeros in fp32
        difference = quantized.double() * scale.double() - exact.double() * 1.5e-4
        errors.append((difference.norm() / (exact.double() * 1.5e-4).norm()).item())
    assert errors[1] == pytest.approx(errors[0], rel=0.01) and errors[0] < 0.03


def test_the_gradient_of_a_layer_is_as_right_where_it_is_small() -> None:
    plain, quantized, scale = weight(96, 256)
    given = torch.randn(20, 96) * 1e-14
    x = torch.randn(20, 256, requires_grad=True)
    fp8_linear(x, quantized, scale, None, None).backward(given)
    assert x.grad is not None
    assert relative(x.grad, given @ plain) < 0.05


def test_rows_do_not_meet() -> None:
    wide = values(8, 64)
    alone = [quantize_rows(row[None]) for row in wide]
    quantized, scale = quantize_rows(wide)
    assert torch.equal(scale, torch.cat([one for _, one in alone]))
    assert torch.equal(quantized.view(torch.uint8), torch.cat([q.view(torch.uint8) for q, _ in alone]))


def test_a_column_scale_is_multiplied_before() -> None:
    wide, columns = values(8, 64), torch.logspace(-2, 2, 64)
    found, wanted = quantize_rows(wide, columns), quantize_rows(wide * columns)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1])


def test_rows_of_zeros_stay_zeros() -> None:
    wide = values(3, 32)
    wide[1] = 0
    quantized, scale = quantize_rows(wide)
    assert torch.equal(quantized[1].float(), torch.zeros(32)) and scale[1].isfinite().all()
    assert quantized[[0, 2]].float().abs().max() == MOST


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_makes_its_row_nan(bad: float) -> None:
    wide = values(3, 32)
    clean = quantize_rows(wide)
    wide[1, 5] = bad
    quantized, scale = quantize_rows(wide)
    assert (quantized.float() * scale)[1].isnan().all()
    for row in (0, 2):
        assert torch.equal(quantized[row].view(torch.uint8), clean[0][row].view(torch.uint8))
        assert torch.equal(scale[row], clean[1][row])


def test_a_bad_row_spoils_its_own_outputs_and_gradients_only() -> None:
    _, quantized, scale = weight(48, 32)
    x = torch.randn(4, 32)
    x[2, 3] = float("inf")
    x.requires_grad_(True)
    output = fp8_linear(x, quantized, scale, None, None)
    assert output[2].isnan().all() and output[[0, 1, 3]].isfinite().all()
    gradient = torch.ones_like(output)
    gradient[1, 0] = float("nan")
    output.backward(gradient)
    assert x.grad is not None
    assert x.grad[1].isnan().all() and x.grad[[0, 2, 3]].isfinite().all()


# products


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
def test_output_and_gradient_are_nearly_those_of_float32(
    dtype: torch.dtype, biased: bool, copies: int
) -> None:
    plain, quantized, scale = weight(96, 256)
    bias = torch.randn(96).to(dtype) if biased else None
    x = torch.randn(40, 256).to(dtype)
    given = torch.randn(40, 96).to(dtype)
    inputs = [x.clone().requires_grad_(True), x.float().requires_grad_(True)]
    transposed = transpose_bytes(quantized) if copies == 2 else None
    output = fp8_linear(inputs[0], quantized, scale, bias, transposed)
    wanted = torch.nn.functional.linear(inputs[1], plain, None if bias is None else bias.float())
    output.backward(given)
    wanted.backward(given.float())
    assert output.dtype == dtype and inputs[0].grad.dtype == dtype
    assert 0.001 < relative(output, wanted) < 0.05
    assert 0.001 < relative(inputs[0].grad, inputs[1].grad) < 0.05


def test_one_copy_and_two_give_the_same_bits() -> None:
    _, quantized, scale = weight(64, 128)
    found = []
    for transposed in (None, transpose_bytes(quantized)):
        x = torch.randn(12, 128, generator=torch.Generator().manual_seed(3)).requires_grad_(True)
        output = fp8_linear(x, quantized, scale, torch.ones(64), transposed)
        output.sin().sum().backward()
        found.append((output.detach(), x.grad))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_row_of_the_weight_that_is_larger_weighs_as_much_in_the_gradient() -> None:
    """The scales of the weight's rows lie along what backward sums: they must be in the gradient."""
    plain = torch.randn(64, 128) * torch.logspace(-3, 3, 64)[:, None]
    quantized, scale = quantize_rows(plain)
    x = torch.randn(12, 128, requires_grad=True)
    given = torch.randn(12, 64) / torch.logspace(-3, 3, 64)
    fp8_linear(x, quantized, scale, None, None).backward(given)
    assert relative(x.grad, given @ plain) < 0.05


def test_inputs_of_any_number_of_axes_and_any_strides() -> None:
    _, quantized, scale = weight(48, 32)
    x = torch.randn(2, 32, 5, 3).permute(0, 2, 3, 1)
    flat = fp8_linear(x.reshape(-1, 32), quantized, scale, None, None)
    for inputs in (x, x[0], x[0, 0], x[0, 0, 0]):
        output = fp8_linear(inputs, quantized, scale, None, None)
        assert output.shape == (*inputs.shape[:-1], 48)
        assert torch.allclose(output.reshape(-1, 48), flat[: output.numel() // 48], atol=1e-5)
    leaf = torch.randn(2, 3, 32, requires_grad=True)
    fp8_linear(leaf, quantized, scale, None, None).transpose(0, 1).sum().backward()
    assert leaf.grad is not None and leaf.grad.shape == leaf.shape


@pytest.mark.parametrize("copies", [1, 2])
def test_nothing_but_one_weight_and_its_scale_is_kept_for_backward(copies: int) -> None:
    _, quantized, scale = weight(64, 128)
    holder = torch.nn.Module()
    transposed = transpose_bytes(quantized) if copies == 2 else None
    x = torch.randn(500, 128, requires_grad=True)
    kept = kept_bytes(holder, lambda: fp8_linear(x, quantized, scale, torch.ones(64), transposed))
    assert kept == quantized.numel() + scale.numel() * 4


def test_an_input_is_freed_before_backward() -> None:
    _, quantized, scale = weight(64, 128)
    hidden = torch.randn(5, 128, requires_grad=True) + 1
    alive = weakref.ref(hidden)
    output = fp8_linear(hidden, quantized, scale, None, None)
    del hidden
    assert alive() is None
    output.sum().backward()


def test_the_weight_has_no_gradient() -> None:
    _, quantized, scale = weight(64, 128)
    scale.requires_grad_(True)
    bias = torch.ones(64, requires_grad=True)
    x = torch.randn(5, 128, requires_grad=True)
    fp8_linear(x, quantized, scale, bias, None).sum().backward()
    assert x.grad is not None and scale.grad is None and bias.grad is None


def test_multiply_takes_the_scales_of_both_sides() -> None:
    left, right = values(6, 32), values(10, 32, seed=1)
    a, a_scale = quantize_rows(left)
    b, b_scale = quantize_rows(right)
    found = multiply(a, a_scale, b.t(), b_scale.t(), None, torch.float32, rows=6)
    assert torch.allclose(found, (a.float() * a_scale) @ (b.float() * b_scale).t())


def test_rows_that_pad_a_product_are_left_out_of_it() -> None:
    left, right = values(6, 32), values(10, 32, seed=1)
    a, a_scale = quantize_rows(left)
    b, b_scale = quantize_rows(right)
    wanted = multiply(a, a_scale, b.t(), b_scale.t(), torch.ones(10), torch.float32, rows=6)
    padded = torch.cat([a.view(torch.uint8), torch.zeros(10, 32, dtype=torch.uint8)]).view(a.dtype)
    padded_scale = torch.cat([a_scale, torch.ones(10, 1)])
    found = multiply(padded, padded_scale, b.t(), b_scale.t(), torch.ones(10), torch.float32, rows=6)
    assert torch.equal(found, wanted)


def test_rows_are_padded_to_the_next_multiple_and_no_further() -> None:
    assert [fp8_product.padded_rows(rows) for rows in (0, 1, 15, 16, 17, 1100)] == [0, 64, 64, 64, 64, 1152]


def test_a_gpu_multiplies_a_multiple_of_rows_and_gives_as_many_as_it_was_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Meta tensors show that matrices reach cuBLAS with padded rows, forward and backward."""
    multiplied: list[int] = []

    def quantize(rows: torch.Tensor, *_: object) -> tuple[torch.Tensor, torch.Tensor]:
        padded = _[-1]
        assert isinstance(padded, int)
        return torch.empty(padded, rows.shape[1], device="meta"), torch.empty(padded, 1, device="meta")

    def scaled_mm(left: torch.Tensor, right: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        multiplied.append(left.shape[0])
        return torch.empty(left.shape[0], right.shape[1], device="meta")

    kernels = types.SimpleNamespace(quantize_rows=quantize, transpose_bytes=lambda matrix: matrix.t())
    monkeypatch.setattr(fp8_product, "fp8_rows", kernels, raising=False)
    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    weight = torch.empty(48, 32, dtype=torch.float8_e4m3fn, device="meta")
    x = torch.empty(2, 11, 32, device="meta", requires_grad=True)
    output = fp8_linear(x, weight, torch.empty(48, 1, device="meta"), None, None)
    assert output.shape == (2, 11, 48)
    output.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert multiplied == [64, 64]


def test_transposed_bytes_are_contiguous() -> None:
    _, quantized, _ = weight(48, 32)
    turned = transpose_bytes(quantized)
    assert turned.is_contiguous() and turned.dtype == quantized.dtype
    assert torch.equal(turned.view(torch.uint8), quantized.view(torch.uint8).t())


def test_ones_are_kept_for_all_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8_product, "_kept_ones", {})
    rows = torch.empty(48, 16)
    made = fp8_product._ones(rows)
    fp8_product.keep_ones("cpu")
    kept = fp8_product._ones(rows)
    assert torch.equal(kept, made) and kept.shape == (1, 48)
    assert kept.data_ptr() == fp8_product._ones(rows[:32]).data_ptr()
    many = torch.empty(fp8_product._MOST_ONES + 1, 1)
    assert fp8_product._ones(many).shape == (1, fp8_product._MOST_ONES + 1)
