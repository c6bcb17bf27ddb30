"""The fast path on a GPU: Triton kernels against float32, FP8 products, CUDA graphs, and short trainings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.gpu.fast_models import DEVICE, PACKED, SETTINGS, Computed, build, inputs, trainable
from tests.unit.modeling.small_models import relative
from trainer.config.schema import TrainSection
from trainer.engine.optimizing.updater import Updater
from trainer.engine.training.graphs import WARM_UP, Graphs
from trainer.families import diffusion
from trainer.families.flux1_dev import FLUX1_DEV
from trainer.families.values import Batch, Draw
from trainer.modeling.adapter.low_rank import add_low_rank
from trainer.modeling.blocks.compiled import eager
from trainer.modeling.fused.norms import head_norm
from trainer.modeling.storage.fp8_product import fp8_linear, quantize_rows, transpose_bytes
from trainer.modeling.storage.row_scaled import RowScaledLinear

pytestmark = pytest.mark.gpu

STEPS = 30
# of results in bf16: half a unit of its last place, and as much again for the inputs of a product
BF16 = 4e-3


# kernels


@pytest.mark.parametrize("columns", [64, 3072, 9216, 15360, 21504])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_are_quantised_as_on_the_cpu(columns: int, scaled: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = (torch.randn(37, columns) * torch.logspace(-4, 4, 37)[:, None]).to(dtype)
    wide[3] = 0
    column_scale = torch.rand(columns) + 0.5 if scaled else None
    wanted, wanted_scale = quantize_rows(wide, column_scale)
    found, scale = quantize_rows(wide.cuda(), None if column_scale is None else column_scale.cuda())
    # the kernel divides within two units of the last place
    assert torch.allclose(scale.cpu(), wanted_scale, rtol=2.5e-7, atol=0)
    equal = found.cpu().view(torch.uint8) == wanted.view(torch.uint8)
    # values of bf16 often lie halfway between two of FP8
    assert equal.float().mean() > (0.99 if dtype == torch.bfloat16 else 0.9999)
    # and where they differ, by one step
    step = 0.13 * wanted.float().abs() + 2**-9
    assert ((found.cpu().float() - wanted.float()).abs() <= step).all()


@pytest.mark.parametrize("columns", [64, 3072, 21504])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, -1])
def test_a_value_that_is_not_finite_makes_its_row_nan(columns: int, bad: float, place: int) -> None:
    wide = torch.randn(5, columns, device=DEVICE, dtype=torch.bfloat16)
    wide[2, place] = bad
    quantized, scale = quantize_rows(wide)
    whole = quantized.float() * scale
    assert whole[2].isnan().all()
    assert whole[[0, 1, 3, 4]].isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1), (16, 48), (129, 257), (1000, 3), (3, 1000), (9216, 3072)])
def test_bytes_are_transposed_exactly(shape: tuple[int, int]) -> None:
    matrix = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        turned = transpose_bytes(matrix.view(dtype))
        assert turned.dtype == dtype and turned.is_contiguous()
        assert torch.equal(turned.view(torch.uint8), matrix.t())


@pytest.mark.parametrize("width", [16, 64, 128, 256])
@pytest.mark.parametrize("layout", ["packed", "turned", "contiguous"])
def test_head_norms_agree_with_fp32(width: int, layout: str) -> None:
    """Heads are views of a wide product, like joined queries, keys and values."""
    torch.manual_seed(0)
    wide = torch.randn(2, 77, 3 * 5 * width, device=DEVICE, dtype=torch.bfloat16)
    if layout == "packed":
        values = wide.unflatten(-1, (3, 5, width))[:, :, 1]
    elif layout == "turned":
        values = wide.unflatten(-1, (15, width)).transpose(1, 2)
    else:
        values = wide.unflatten(-1, (15, width))
    weight = (torch.rand(width, device=DEVICE) + 0.5).bfloat16()
    given = torch.randn(values.shape, device=DEVICE, dtype=torch.bfloat16)
    given = given.transpose(1, 2).contiguous().transpose(1, 2)
    leaf = values.detach().requires_grad_(True)
    exact = values.detach().float().requires_grad_(True)
    output = head_norm(leaf, weight, 1e-6)
    wanted = torch.nn.functional.rms_norm(exact, (width,), weight.float(), 1e-6)
    output.backward(given)
    wanted.backward(given.float())
    assert output.dtype == torch.bfloat16
    assert relative(output, wanted) < BF16
    assert relative(leaf.grad, exact.grad) < BF16


@pytest.mark.parametrize("rank", [1, 4, 16, 48, 128, 200])
@pytest.mark.parametrize("shape", [(77, 515), (640, 3072)])
def test_low_rank_sums_agree_with_fp32(rank: int, shape: tuple[int, int]) -> None:
    """A rank of 200 is beyond the kernel."""
    torch.manual_seed(0)
    rows, columns = shape
    sizes = ((rows, columns), (rows, rank), (columns, rank))
    inputs = [torch.randn(size, device=DEVICE).bfloat16().requires_grad_(True) for size in sizes]
    exact = [one.detach().float().requires_grad_(True) for one in inputs]
    given = torch.randn(shape, device=DEVICE).bfloat16()
    output = add_low_rank(*inputs)
    wanted = exact[0] + exact[1] @ exact[2].t()
    output.backward(given)
    wanted.backward(given.float())
    assert relative(output, wanted) < BF16
    for ours, theirs in zip(inputs, exact, strict=True):
        assert relative(ours.grad, theirs.grad) < 0.01  # cuBLAS may add up parts of a sum in bf16


# FP8 products


def product(device: str, shape: tuple[int, int, int], *, biased: bool, copies: int) -> list[torch.Tensor]:
    """Output and gradient of the input, on the CPU."""
    rows, inner, out = shape
    generator = torch.Generator().manual_seed(0)
    x, given = (torch.randn(rows, n, generator=generator).bfloat16().to(device) for n in (inner, out))
    weight, scale = quantize_rows(torch.randn(out, inner, generator=generator) / inner**0.5)
    bias = torch.randn(out, generator=generator).bfloat16().to(device) if biased else None
    weight, scale = weight.to(device), scale.to(device)
    x.requires_grad_(True)
    output = fp8_linear(x, weight, scale, bias, transpose_bytes(weight) if copies == 2 else None)
    output.backward(given)
    assert output.dtype == x.grad.dtype == torch.bfloat16
    return [output.detach().cpu(), x.grad.cpu()]


@pytest.mark.parametrize("shape", [(70, 256, 192), (1, 64, 16), (640, 3072, 1024)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_fp8_products_are_those_of_the_cpu(shape: tuple[int, int, int], biased: bool, copies: int) -> None:
    found = product(DEVICE, shape, biased=biased, copies=copies)
    wanted = product("cpu", shape, biased=biased, copies=copies)
    for ours, theirs in zip(found, wanted, strict=True):
        assert relative(ours, theirs) < 0.01


def test_one_copy_and_two_give_the_same_bits() -> None:
    found = [product(DEVICE, (70, 256, 192), biased=True, copies=copies) for copies in (1, 2)]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_a_part_of_a_wide_copy_serves_as_a_copy() -> None:
    """A slice of a joined layer's transposed copy gives the gradients of a copy of its own."""
    x = torch.randn(40, 256, device=DEVICE, dtype=torch.bfloat16)
    wide, scale = quantize_rows(torch.randn(320, 256, device=DEVICE))
    whole, part = transpose_bytes(wide), slice(64, 192)
    gradients = []
    for copy in (whole[:, part], whole[:, part].contiguous()):
        leaf = x.clone().requires_grad_(True)
        fp8_linear(leaf, wide[part], scale[part], None, copy).float().sin().sum().backward()
        gradients.append(leaf.grad)
    assert relative(gradients[0], gradients[1]) < 1e-3


def test_a_bad_row_spoils_its_own_outputs_and_gradients_only() -> None:
    weight, scale = quantize_rows(torch.randn(64, 128, device=DEVICE))
    x = torch.randn(20, 128, device=DEVICE, dtype=torch.bfloat16)
    x[7, 5] = float("inf")
    x.requires_grad_(True)
    output = fp8_linear(x, weight, scale, None, None)
    given = torch.ones_like(output)
    given[3, 0] = float("nan")
    output.backward(given)
    assert output.isnan().all(1).nonzero().flatten().tolist() == [7]
    assert output.isfinite().all(1).sum() == 19
    assert x.grad.isnan().all(1).nonzero().flatten().tolist() == [3]
    assert x.grad.isfinite().all(1).sum() == 19


# models


def agree(computed: Computed, graphs: Graphs, plan: list[tuple[int, int]]) -> None:
    """With graphs as without: as near as a second run, whose attention adds up in another order."""
    wanted = computed.run(None, plan)
    again = computed.run(None, plan)
    found = computed.run(graphs, plan)
    for ours, theirs, repeated in zip(found, wanted, again, strict=True):
        assert theirs.norm() > 0
        assert relative(ours, theirs) <= max(1e-3, 3 * relative(repeated, theirs))


@pytest.mark.parametrize("recomputed", [0, 2, 99])
@pytest.mark.parametrize("storage", ["bf16", "fp8", PACKED, "int8", "nf4"])
def test_graphs_compute_what_plain_calls_do(storage: str, recomputed: int) -> None:
    computed = Computed(build(storage, fast=True, recomputed=recomputed))
    graphs = Graphs(computed, computed.predict, print)
    plan = [(number, 512) for number in range(6)]
    agree(computed, graphs, plan)
    assert len(graphs.captured) == 1
    calls = computed.calls
    losses, _ = computed.run(graphs, plan)
    assert computed.calls == calls  # replayed alone
    assert len(set(losses.tolist())) == len(plan)  # and with each batch's own data


@pytest.mark.parametrize("recomputed", [2, 99])
@pytest.mark.parametrize("storage", ["bf16", "fp8", PACKED, "int8", "nf4"])
def test_blocks_recomputed_in_their_graph_have_the_gradients_of_kept_ones(
    storage: str, recomputed: int
) -> None:
    """The gradients are equal, except for roundings that another graph makes elsewhere."""
    plan = [(number, 512) for number in range(3)]
    kept = Computed(build(storage, fast=True)).run(None, plan)
    again = Computed(build(storage, fast=True, recomputed=recomputed)).run(None, plan)
    for ours, theirs in zip(again, kept, strict=True):
        assert theirs.norm() > 0
        assert relative(ours, theirs) < 0.05


def test_each_shape_has_a_graph_of_its_own() -> None:
    computed = Computed(build(fast=True))
    graphs = Graphs(computed, computed.predict, print)
    # in turns: what one graph leaves in the memory that they share must not matter to the other
    plan = [(number, side) for number in range(WARM_UP + 3) for side in (512, 384)]
    agree(computed, graphs, plan)
    assert len(graphs.captured) == 2
    agree(computed, graphs, plan)
    assert len(graphs.captured) == 2


def test_what_a_model_keeps_for_a_new_size_is_no_graph_s_scratch() -> None:
    """Position ids of the second size are made when the first one's graph is there already."""
    diffusion.kept_on_device.cache_clear()
    computed = Computed(build(fast=True))
    graphs = Graphs(computed, computed.predict, print)
    first = [(number, 512) for number in range(WARM_UP + 2)]
    computed.run(graphs, first)
    assert len(graphs.captured) == 1
    plan = [(number, side) for number in range(WARM_UP + 3) for side in (384, 512)]
    found = computed.run(graphs, plan)
    assert len(graphs.captured) == 2
    again = computed.run(graphs, plan)
    diffusion.kept_on_device.cache_clear()
    wanted = computed.run(None, plan)
    for ours, repeated, theirs in zip(found, again, wanted, strict=True):
        assert relative(ours, theirs) < 5e-3
        assert relative(repeated, theirs) < 5e-3


def test_dropped_graphs_free_their_memory_and_are_captured_again() -> None:
    computed = Computed(build(fast=True))
    graphs = Graphs(computed, computed.predict, print)
    plan = [(number, 512) for number in range(WARM_UP + 2)]
    wanted = computed.run(graphs, plan)
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    graphs.drop()
    assert not graphs.captured
    # the activations of three blocks, at the least five times the tokens' values each
    assert held - torch.cuda.memory_reserved() > 3 * 5 * (1024 + 128) * 1024 * 2
    calls = computed.calls
    found = computed.run(graphs, plan)
    assert len(graphs.captured) == 1
    assert computed.calls == calls + 1  # captured at once: everything is compiled
    assert relative(found[0], wanted[0]) < 1e-3
    assert relative(found[1], wanted[1]) < 5e-3


def test_a_capture_alone_changes_no_sums() -> None:
    computed = Computed(build(fast=True))
    graphs = Graphs(computed, computed.predict, print)
    computed.run(graphs, [(number, 512) for number in range(WARM_UP)])
    (batch, draw), weight = inputs(0), torch.tensor(1.0, device=DEVICE)
    before = computed.masters.gradient.clone()
    graphs._capture(batch, draw, weight)
    torch.cuda.synchronize()
    assert torch.equal(computed.masters.gradient, before)


SECOND_START = """
from trainer.modeling.vision import make_torchvision_importable

make_torchvision_importable()
from tests.gpu.fast_models import Computed, build
from trainer.engine.training.graphs import Graphs

for storage in ("bf16", "fp8"):
    computed = Computed(build(storage, fast=True))
    graphs = Graphs(computed, computed.predict, print)
    losses, _ = computed.run(graphs, [(number, 512) for number in range(5)])
    print(storage, losses.tolist())
"""


def test_a_second_start_takes_what_the_first_compiled(tmp_path: Path) -> None:
    cache = {name: str(tmp_path / name) for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")}
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", SECOND_START],
            env={**os.environ, **cache},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(done.stdout)
    assert said[0] == said[1]


DROPPED = """
import torch
from trainer.engine.training.graphs import WARM_UP, Graphs
from trainer.families.values import Batch

weight = torch.randn(4096, 4096, device="cuda") / 64

def compute(batch, draw, one):
    values = batch.latents["x"]
    for _ in range(100):
        values = (values @ weight).clamp(-1.0, 1.0)
    return values.sum() / one

batch = Batch(latents={"x": torch.randn(4096, 4096, device="cuda")}, text={}, size=1, weight=1.0)
one = torch.ones((), device="cuda")
for _ in range(4):
    graphs = Graphs(compute, lambda *_: None, print)
    for _ in range(WARM_UP + 2):
        loss = graphs(batch, None, one)
    graphs.drop()
    assert torch.ones(1 << 28, device="cuda").sum().item() == 1 << 28
"""


def test_a_graph_is_captured_where_the_first_call_s_graph_of_autograd_is_not_gone() -> None:
    """Garbage that holds it, of the compiler for example, holds parameters' nodes with their stream too."""
    weight = torch.nn.Parameter(torch.randn(64, 64, device="cuda"))
    weight.grad = torch.zeros_like(weight)
    held: list[torch.Tensor] = []

    def compute(batch: Batch, draw: Draw | None, one: float | torch.Tensor) -> torch.Tensor:
        loss = (batch.latents["x"] @ weight).square().sum() / one
        loss.backward()
        held.append(loss)
        return loss.detach()

    batch = Batch(latents={"x": torch.randn(8, 64, device="cuda")}, text={}, size=1, weight=1.0)
    graphs = Graphs(compute, lambda *_: None, print)
    losses = [graphs(batch, None, torch.ones((), device="cuda")).item() for _ in range(WARM_UP + 2)]
    assert len(graphs.captured) == 1
    assert len(held) == WARM_UP + 1  # the last one was replayed
    assert losses == pytest.approx([losses[0]] * len(losses))
    wanted = (WARM_UP + 2) * 2 * batch.latents["x"].t() @ (batch.latents["x"] @ weight.detach())
    assert relative(weight.grad, wanted) < 1e-5


def test_graphs_are_dropped_when_the_last_one_has_ended() -> None:
    """Dropped while it ran, a graph read and wrote memory that was given back."""
    done = subprocess.run(
        [sys.executable, "-c", DROPPED],
        env={**os.environ, "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


# trainings


def train(model: Any, *, graphed: bool) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Losses, the trained LoRA, and the gradient of the first step; two batches in turns."""
    config = TrainSection(learning_rate=1e-3, weight_decay=0.0)
    updater = Updater(trainable(model), config, "adamw_fused_fp32")
    assert updater.flat is not None

    def compute(batch: Batch, draw: Draw | None, weight: torch.Tensor) -> torch.Tensor:
        loss = FLUX1_DEV.loss(model, batch, draw, SETTINGS).sum() / weight
        loss.backward()
        updater.accumulate()
        return loss.detach()

    def predict(batch: Batch, draw: Draw | None) -> None:
        assert draw is not None
        with torch.no_grad(), eager():
            FLUX1_DEV.predict(model, batch, draw, SETTINGS)

    run: Any = Graphs(compute, predict, print) if graphed else compute
    losses, gradient = [], torch.empty(0)
    for step in range(STEPS):
        loss = run(*inputs(step % 2), torch.tensor(1.0, device=DEVICE)).clone()
        if step == 0:
            gradient = updater.flat.gradient.clone()
        updater.step(config.learning_rate, loss)
        losses.append(float(loss.item()))
    return losses, {name: one.clone() for name, one in updater.weights().items()}, gradient


@pytest.fixture(scope="module")
def eager_run() -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """bf16, as diffusers wrote it."""
    return train(build(fast=False, trained=False), graphed=False)


def cosine(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], part: str) -> float:
    assert set(left) == set(right)
    names = [name for name in left if part in name]
    vectors = [torch.cat([one[name].flatten() for name in names]) for one in (left, right)]
    return float(torch.nn.functional.cosine_similarity(*vectors, dim=0).item())


def furthest(losses: list[float], wanted: list[float]) -> float:
    return max(abs(ours / theirs - 1) for ours, theirs in zip(losses, wanted, strict=True))


def test_the_fast_path_trains_as_the_plain_one(eager_run: Any) -> None:
    wanted, wanted_lora, wanted_gradient = eager_run
    assert wanted[-1] < 0.98 * wanted[1]  # it learns, so that the curve says something
    losses, found_lora, gradient = train(build(fast=True, trained=False), graphed=True)
    assert furthest(losses, wanted) < 0.01
    assert torch.nn.functional.cosine_similarity(gradient, wanted_gradient, dim=0) > 0.999
    assert cosine(found_lora, wanted_lora, ".lora_") > 0.99
    # all of which was learned: it starts at zero
    assert cosine(found_lora, wanted_lora, ".lora_B.") > 0.99


@pytest.mark.parametrize("storage", ["fp8", PACKED])
def test_fp8_trains_as_bf16(storage: str, eager_run: Any) -> None:
    wanted, wanted_lora, wanted_gradient = eager_run
    losses, found_lora, gradient = train(build(storage, fast=True, trained=False), graphed=True)
    assert furthest(losses, wanted) < 0.03
    assert torch.nn.functional.cosine_similarity(gradient, wanted_gradient, dim=0) > 0.98
    assert cosine(found_lora, wanted_lora, ".lora_") > 0.99
    assert cosine(found_lora, wanted_lora, ".lora_B.") > 0.95


@pytest.mark.parametrize(("storage", "loss", "gradient_cosine"), [("int8", 0.01, 0.99), ("nf4", 0.05, 0.9)])
def test_quantised_bases_train_near_bf16(
    storage: str, loss: float, gradient_cosine: float, eager_run: Any
) -> None:
    wanted, wanted_lora, wanted_gradient = eager_run
    losses, found_lora, gradient = train(build(storage, fast=True, trained=False), graphed=True)
    assert furthest(losses, wanted) < loss
    assert torch.nn.functional.cosine_similarity(gradient, wanted_gradient, dim=0) > gradient_cosine
    assert cosine(found_lora, wanted_lora, ".lora_") > 0.95


def fp8_kernels(model: Any) -> list[str]:
    """Names of the FP8 kernels that one forward and backward ran."""
    computed = Computed(model)
    computed.run(None, [(0, 512), (1, 512)])
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        computed.run(None, [(2, 512)])
        torch.cuda.synchronize()
    names = [event.name for event in recorded.events() if event.device_type == DeviceType.CUDA]
    assert names
    return [name for name in names if any(part in name for part in ("qqtst", "e4m3", "scaled_mm"))]


def test_an_fp8_model_runs_fp8_kernels() -> None:
    model = build("fp8", fast=True)
    layers = [module for module in model.modules() if isinstance(module, RowScaledLinear)]
    # twelve layers are four products; backward has at least those behind the first block's inputs
    assert len(fp8_kernels(model)) >= 1.5 * (len(layers) - 8)


def test_a_bf16_model_runs_none() -> None:
    assert fp8_kernels(build(fast=True)) == []
