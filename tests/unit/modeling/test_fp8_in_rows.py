"""A linear layer in FP8 whose weight lies in rows over two ranks, beside one that has it whole."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.ranks import Workers
from trainer.engine.ranks import Ranks
from trainer.modeling.storage.fp8_trained import Fp8TrainedLinear
from trainer.modeling.storage.trained_rows import Fp8RowsLinear, OwnRows, Root, in_rows, own_rows

IN, OUT, TOKENS = 32, 48, 5


def linear(seed: int = 0) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(IN, OUT, dtype=torch.bfloat16)


def inputs() -> torch.Tensor:
    return torch.randn(TOKENS, IN, generator=torch.Generator().manual_seed(1)).bfloat16()


def whole(layer: torch.nn.Module) -> list[torch.Tensor]:
    """(output, gradients of the inputs, the weight and the bias, output in eval) of a layer."""
    given = inputs().requires_grad_()
    output = layer(given)
    output.float().square().sum().backward()
    found = [output.detach(), given.grad]
    for parameter in layer.parameters():
        gradient = parameter.grad
        found.append(gradient.full_tensor() if isinstance(gradient, DTensor) else gradient)
    with torch.no_grad():
        found.append(layer.eval()(inputs()))
    return found


def in_two(ranks: Ranks, kind: str) -> tuple[list[torch.Tensor], list[int], list[str]]:
    """`whole` of a layer in rows; bytes of what it was gathered into, after; types of its rows."""
    layer = Fp8RowsLinear(linear(), weight_gradient="fp8" if kind == "fp8" else "bf16")
    root = in_rows(torch.nn.Sequential(layer), {"0": layer}, device="cpu", size=ranks.size)
    assert isinstance(root, Root)
    layer.refresh()
    found = whole(layer)
    assert layer.values is not None and layer.scale is not None
    assert isinstance(layer.weight, DTensor)
    left = [one.untyped_storage().nbytes() for one in (layer.values, layer.scale)]
    rows = own_rows(layer.weight)
    return found, left, [type(rows).__name__, str(layer.values.dtype), str(tuple(rows.shape))]


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
def test_a_layer_in_rows_computes_what_a_whole_one_does(pool: Workers, kind: str) -> None:
    alone = Fp8TrainedLinear(linear(), copies=1, weight_gradient="fp8" if kind == "fp8" else "bf16")
    alone.refresh()
    wanted = whole(alone)
    for found, left, types in pool.call(in_two, 2, kind):
        output, of_inputs, of_weight, of_bias, judged = found
        assert torch.equal(output, wanted[0]) and torch.equal(of_inputs, wanted[1])
        # gradients are sums over both ranks, which were given the same
        assert torch.equal(of_weight, 2 * wanted[2]) and torch.equal(of_bias, 2 * wanted[3])
        assert torch.equal(judged, wanted[4])
        assert torch.equal(judged, torch.nn.functional.linear(inputs(), linear().weight, linear().bias))
        assert left == [0, 0], "what was gathered is let go"
        assert types == ["Tensor", "torch.float8_e4m3fn", str((OUT // 2, IN))]


def stepped(ranks: Ranks) -> list[torch.Tensor]:
    """Outputs before a step of the rows, after it, and after their bytes were made anew."""
    layer = Fp8RowsLinear(linear())
    in_rows(torch.nn.Sequential(layer), {"0": layer}, device="cpu", size=ranks.size)
    layer.refresh()
    found = []
    for change in (0.0, 1.0, 0.0):
        assert isinstance(layer.weight, DTensor)
        own_rows(layer.weight).add_(change)
        if len(found) == 2:
            layer.refresh()
        with torch.no_grad():
            found.append(layer(inputs()))
    return found


def test_bytes_follow_the_rows_when_they_are_made_anew(pool: Workers) -> None:
    for before, stale, after in pool.call(stepped, 2):
        assert torch.equal(before, stale) and not torch.equal(before, after)


def test_rows_compute_as_the_tensor_that_they_stand_for() -> None:
    held = torch.arange(6.0).view(3, 2)
    rows = OwnRows(held)
    assert rows.shape == (3, 2) and isinstance(rows.detach(), OwnRows)
    rows.add_(1.0)
    assert torch.equal(held, torch.arange(6.0).view(3, 2) + 1.0)
    assert torch.equal((rows[1:] * 2).rows, held[1:] * 2)
    assert "OwnRows(tensor" in repr(rows)
