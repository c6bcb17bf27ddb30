"""nf4 products on a GPU: weights that are unpacked in parts, in the kernels that whole ones run in."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.quantized_layers import nf4_linear
from trainer.modeling.storage import nf4

pytestmark = pytest.mark.gpu


def test_parts_of_a_weight_run_in_the_kernels_of_whole_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that begins between two 16-byte words runs in kernels of older GPUs, for twice as long."""
    linear = torch.nn.Linear(6144, 55296, bias=False, device="cuda", dtype=torch.bfloat16)
    layer = nf4_linear(linear)
    x = torch.randn(4608, 6144, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    parts, names = _run(layer, x)
    assert names and not [name for name in names if "align" in name and "align8" not in name]
    monkeypatch.setattr(nf4, "NF4_MOST_UNPACKED", 2**40)
    whole, _ = _run(layer, x)
    for found, wanted in zip(parts, whole, strict=True):
        assert torch.linalg.vector_norm(found - wanted) < 0.005 * torch.linalg.vector_norm(wanted)


def _run(layer: torch.nn.Module, x: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], list[str]]:
    """(the output and the input's gradient in fp32, the kernels that both ran)."""
    layer(x)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        output = layer(x)
        (gradient,) = torch.autograd.grad(output.float().sin().sum(), x)
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    return (output.detach().float(), gradient.float()), names
