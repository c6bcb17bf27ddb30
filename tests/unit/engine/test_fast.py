"""Preparation of a model before its blocks are compiled."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from trainer.engine.building import fp8
from trainer.engine.building.fast import move_plain_tensors
from trainer.engine.building.fp8 import prove_fp8
from trainer.engine.context import Context
from trainer.errors import HardwareError
from trainer.modeling.storage.row_scaled import RowScaledLinear


class Table(torch.nn.Module):
    """Keeps a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.frequencies = torch.arange(4.0)
        self.name = "table"


class Product(torch.autograd.Function):
    """One FP8 product, called as those of frozen layers are."""

    @staticmethod
    def forward(ctx: object, inputs: torch.Tensor) -> torch.Tensor:
        values, one = inputs.to(torch.float8_e4m3fn), torch.ones(())
        return torch._scaled_mm(values, values.t(), one, one, out_dtype=torch.bfloat16)


def test_the_proof_of_fp8_counts_products_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def run() -> None:
        with torch.no_grad():
            for _ in range(3):
                Product.apply(torch.ones(16, 16))  # type: ignore[no-untyped-call]

    monkeypatch.setattr(fp8, "keep_ones", lambda device: None)
    monkeypatch.setattr(fp8, "small_forward", lambda context, model: run)
    context = cast(Context, SimpleNamespace(device="cpu"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = prove_fp8(context, torch.nn.Linear(2, 2))
    assert said == "3 products of one forward pass ran in FP8, as counted"
    assert capfd.readouterr() == ("", ""), "torch 2.13's profiler prints USDT lines past Python"


def test_layers_whose_product_did_not_run_in_fp8_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = RowScaledLinear.__new__(RowScaledLinear)
    torch.nn.Module.__init__(layer)
    layer.fp8_compute = True
    monkeypatch.setattr(fp8, "keep_ones", lambda device: None)
    monkeypatch.setattr(fp8, "small_forward", lambda context, model: lambda: None)
    with pytest.raises(HardwareError, match="1 layer is to multiply in FP8, but only 0 FP8 products ran"):
        prove_fp8(cast(Context, SimpleNamespace(device="cpu")), torch.nn.Sequential(layer))


def test_tensors_that_are_plain_attributes_move_too() -> None:
    model = torch.nn.Sequential(Table())
    model.to("meta")
    table = model[0]
    assert isinstance(table, Table)
    assert table.frequencies.device.type == "cpu"  # torch leaves it
    move_plain_tensors(model, "meta")
    assert table.frequencies.device.type == "meta"
    assert table.name == "table"
