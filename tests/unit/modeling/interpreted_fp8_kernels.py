"""FP8 kernels in Triton's interpreter, beside plain torch: bits are equal, once the interpreter rounds well.

Triton reads its mode when it is imported: `test_fp8_kernels` runs this file in a process of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from trainer.modeling.storage.fp8_gradient import QuantizedGradient, quantize_gradient
from trainer.modeling.storage.fp8_product import LEAST, MOST, padded_rows, quantize_rows, unpack_rows


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Modules of kernels, with the interpreter's slow and rough parts replaced."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    import triton.language as tl

    converted = interpreter._convert_float

    def convert(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target != tl.float8e4nv:
            return converted(given, source, target, rounding)
        # its own drops the carry of rounding
        values = torch.from_numpy(given.copy()).to(torch.float8_e4m3fn)
        return values.view(torch.uint8).numpy()

    def reduced(self: Any, given: tuple[Any, ...]) -> list[Any]:
        # its own combines value by value; sides are powers of two
        data, dtype = given[0].handle.data, given[0].dtype
        while data.shape[self.axis] > 1:
            halves = [self.to_tensor(half, dtype) for half in np.split(data, 2, self.axis)]
            data = self.combine_fn.fn(*halves).handle.data
        return [self.to_tensor(data.squeeze(self.axis), dtype)]

    patched = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        # its own asks an array of one value for a number, which NumPy no longer gives
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_convert_float", convert)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduced)
    yield importlib.import_module("trainer.modeling.triton.fp8_gradient")


def given(rows: int, out: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A gradient, whose rows and columns differ in size, a scale a column, and one a row, with padding."""
    generator = torch.Generator().manual_seed(rows + out)
    sizes = torch.logspace(-3, 1, rows)[:, None] * torch.logspace(1, -2, out)
    gradient = (scale * sizes * torch.randn(rows, out, generator=generator)).bfloat16()
    row_scale = torch.ones(padded_rows(rows), 1)
    row_scale[:rows] = torch.rand(rows, 1, generator=generator) + 1e-3
    return gradient, torch.rand(out, generator=generator) + 1e-4, row_scale


def made(
    kernels: Any, gradient: torch.Tensor, across: torch.Tensor | None, down: torch.Tensor, sums: bool = True
) -> QuantizedGradient:
    padded = padded_rows(len(gradient))
    return QuantizedGradient(*kernels.quantize_gradient(gradient, across, down, MOST, LEAST, padded, sums))


def agree(found: QuantizedGradient, gradient: torch.Tensor, across: torch.Tensor, down: torch.Tensor) -> None:
    rows, wanted = len(gradient), quantize_gradient(gradient, across, down, with_sums=True)

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        same = (one.float() == other.float()) | (one.float().isnan() & other.float().isnan())
        return one.shape == other.shape and bool(same.all())

    assert equal(found.scale[:rows], wanted.scale)
    assert equal(found.values[:rows], wanted.values)
    assert equal(found.turned_scale, wanted.turned_scale)
    assert equal(found.turned[:, :rows], wanted.turned)
    assert len(found.values) == len(found.scale) == found.turned.shape[1] == padded_rows(rows)
    assert (found.scale[rows:] == 1.0).all()
    if gradient.isfinite().all():
        assert (found.values[rows:].view(torch.uint8) & 127 == 0).all()
        assert (found.turned[:, rows:].view(torch.uint8) & 127 == 0).all()
    torch.testing.assert_close(found.sums, wanted.sums, equal_nan=True, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "out"), [(1, 16), (64, 128), (77, 144), (65, 400), (300, 48), (33, 1040), (128, 256), (2, 28672)]
)
def test_a_gradient_is_quantised_as_plain_torch_does_it(kernels: Any, rows: int, out: int) -> None:
    inputs = given(rows, out)
    agree(made(kernels, *inputs), *inputs)


@pytest.mark.parametrize("scale", [0.0, 1e-20, 1e-34, 1e30])
def test_sizes_that_are_extreme(kernels: Any, scale: float) -> None:
    inputs = given(70, 96, scale)
    agree(made(kernels, *inputs), *inputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    "where",
    [
        (slice(5, 6), slice(9, 10)),
        (slice(5, 6), slice(None)),
        (slice(None), slice(9, 10)),
        (slice(69, 70), slice(95, 96)),
    ],
    ids=["value", "row", "column", "last"],
)
def test_what_is_not_finite_is_seen(kernels: Any, bad: float, where: tuple[slice, slice]) -> None:
    gradient, across, down = given(70, 96)
    gradient[where] = bad
    found = made(kernels, gradient, across, down)
    agree(found, gradient, across, down)
    rows, columns = torch.zeros(70, dtype=torch.bool), torch.zeros(96, dtype=torch.bool)
    rows[where[0]], columns[where[1]] = True, True
    by_rows = (found.values.float() * found.scale)[:70].isnan()
    by_columns = (found.turned.float() * found.turned_scale)[:, :70].isnan()
    assert torch.equal(by_rows.all(1), rows) and torch.equal(by_rows.any(1), rows)
    assert torch.equal(by_columns.all(1), columns) and torch.equal(by_columns.any(1), columns)


def test_scales_that_are_not_finite_are_seen(kernels: Any) -> None:
    gradient, across, down = given(70, 96)
    across[3], down[4] = float("nan"), float("nan")
    found = made(kernels, gradient, across, down)
    assert (found.values.float() * found.scale)[:70].isnan().all()
    assert (found.turned.float() * found.turned_scale)[:, :70].isnan().all()


def test_parts_that_are_not_asked_for_are_empty(kernels: Any) -> None:
    gradient, across, down = given(70, 96)
    wanted = made(kernels, gradient, across, down)
    found = made(kernels, gradient, None, down, sums=False)
    assert found.values.shape == (0, 96) and found.scale.shape == (0, 1) and found.sums.shape == (0,)
    assert torch.equal(found.turned.view(torch.uint8), wanted.turned.view(torch.uint8))
    assert torch.equal(found.turned_scale, wanted.turned_scale)


def test_gradients_in_fp32(kernels: Any) -> None:
    gradient, across, down = given(70, 96)
    agree(made(kernels, gradient.float() * 1.001, across, down), gradient.float() * 1.001, across, down)


@pytest.mark.parametrize("columns", [16, 144, 6000, 20000])
def test_a_weight_is_quantised_in_its_place(kernels: Any, columns: int) -> None:
    weight = torch.randn(20, columns, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight[3], weight[4, 5] = 0.0, float("nan")
    quantized = torch.empty(20, columns, dtype=torch.float8_e4m3fn)
    scale, turned = torch.empty(20, 1), torch.empty(columns, 20, dtype=torch.float8_e4m3fn)
    rows = importlib.import_module("trainer.modeling.triton.fp8_rows")
    rows.quantize_rows_into(weight, quantized, scale, MOST, LEAST)
    wanted, wanted_scale = quantize_rows(weight)
    torch.testing.assert_close(scale, wanted_scale, equal_nan=True, rtol=0, atol=0)
    torch.testing.assert_close(quantized.float(), wanted.float(), equal_nan=True, rtol=0, atol=0)
    rows.transpose_bytes_into(quantized.view(torch.uint8), turned.view(torch.uint8))
    assert torch.equal(turned.view(torch.uint8), quantized.view(torch.uint8).t())


@pytest.mark.parametrize("shape", [(1, 1), (16, 48), (129, 257), (132, 3), (3, 300), (256, 144)])
def test_bytes_are_transposed(kernels: Any, shape: tuple[int, int]) -> None:
    matrix = torch.randint(0, 256, shape, dtype=torch.uint8)
    rows = importlib.import_module("trainer.modeling.triton.fp8_rows")
    assert torch.equal(rows.transpose_bytes(matrix), matrix.t())


def test_kept_inputs_are_unpacked(kernels: Any) -> None:
    stored = torch.arange(256, dtype=torch.uint8).repeat(3, 9)
    stored[stored & 127 == 127] = 0
    values, scale = stored.view(torch.float8_e4m3fn), torch.rand(3, 1)
    rows = importlib.import_module("trainer.modeling.triton.fp8_rows")
    found = rows.unpack_fp8_rows(values, scale, torch.float32)
    torch.testing.assert_close(found, unpack_rows(values, scale, torch.float32), rtol=0, atol=0)
