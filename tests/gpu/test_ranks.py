"""Several GPUs of one machine train the run of one: by the command line, a tiny base, exchanged by NCCL."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.runs import STEPS, Case, Workshop, numbers, small_samples
from tests.gpu.command_line import train
from trainer.engine.optimizing.exchange import Exchange, agree
from trainer.engine.optimizing.fp32_masters import FlatGradients
from trainer.engine.ranks import joined
from trainer.engine.records import checkpoint

COUNT = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(COUNT < 2, reason="needs two CUDA devices")]
CASE, FULL = (Case(family="flux1_dev", method=method) for method in ("lora", "full"))
QUICK = ("validation.held_out=1", "validation.every_steps=4")
MOST = 0.05
VALUES, MICRO_BATCHES = 1_000_003, 7


def gradients(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Values over twenty binary orders: sums of them depend on the order of the additions."""
    generator = torch.Generator().manual_seed(number)
    scale = torch.exp2(torch.randint(-12, 8, (VALUES,), generator=generator).float())
    return (torch.randn(VALUES, generator=generator) * scale).to(dtype)


def summed(rank: int, size: int, folder: Path, dtype: torch.dtype) -> None:
    """Save the sum over micro-batches by rank, and the loss and answers that all agreed on."""
    device = f"cuda:{rank}"
    torch.cuda.set_device(device)
    with joined(rank, size, folder / "meet", device=device) as ranks:
        ranks.connect(device)
        parameter = torch.nn.Parameter(torch.zeros(VALUES, dtype=dtype, device=device))
        exchange = Exchange(ranks, FlatGradients({"all": parameter}))
        total, losses = torch.empty(VALUES, device=device), []
        for start in range(0, MICRO_BATCHES, size):
            count = min(size, MICRO_BATCHES - start)
            if rank < count:
                parameter.grad = gradients(start + rank, dtype).to(device)
                exchange.collect()
                losses.append(torch.tensor(0.1 * (start + rank), device=device))
            exchange.add_round(count)
        digest = torch.zeros((), dtype=torch.float64, device=device)
        words = {"asked": 75 * rank, "orders": 2 * ranks.first, "computed": 3.0 + rank, "seconds": 1.0 + rank}
        loss, said = agree(ranks, losses, MICRO_BATCHES, **words, digest=digest)
        exchange.take(total)
        torch.save((total.cpu(), float(loss), said.tolist(), ranks.gathered(rank)), folder / f"{rank}.pt")
        ranks.meet()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sums_over_nccl_are_those_of_one_process(dtype: torch.dtype, tmp_path: Path) -> None:
    wanted, loss = torch.zeros(VALUES, device="cuda"), torch.zeros((), dtype=torch.float64)
    for number in range(MICRO_BATCHES):
        wanted += gradients(number, dtype).cuda()
        loss += torch.tensor(0.1 * number)
    torch.multiprocessing.spawn(summed, (COUNT, tmp_path, dtype), nprocs=COUNT)  # type: ignore[no-untyped-call]
    for rank in range(COUNT):
        total, agreed, said, gathered = torch.load(tmp_path / f"{rank}.pt")
        assert torch.equal(total, wanted.cpu())
        assert agreed == float(loss)
        assert said == [75.0 * (COUNT - 1), 0.0, 2.0, 2.0 + COUNT, *(1.0 + rank for rank in range(COUNT))]
        assert gathered == list(range(COUNT))


@pytest.fixture(scope="module")
def workshop(tiny_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("workshop")
    return Workshop(base=tiny_base, samples=small_samples(folder / "samples"), cache=folder / "cache")


def trained(workshop: Workshop, folder: Path, gpus: int | str, *overrides: str, case: Case = CASE) -> Path:
    """A run by the command line on this machine; the folder of what it made."""
    train(workshop, case, folder, gpus, *QUICK, *overrides)
    plan = json.loads((folder / "run" / "plan.json").read_text())
    assert plan["ranks"] == (2 if gpus == "auto" else gpus)
    return folder / "run"


def learned(run_dir: Path) -> torch.Tensor:
    """All that training grew from zero, fp32."""
    weights = checkpoint.read_group(run_dir / "checkpoints" / f"step-{STEPS:06d}", "weights", "cpu")
    return torch.cat([weights[name].flatten() for name in sorted(weights) if ".lora_B." in name]).float()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("compiled", [(), ("features.compile=true",)], ids=["eager", "compiled"])
def test_two_gpus_train_as_one_does_within_what_two_equal_runs_differ(
    compiled: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    one = trained(workshop, tmp_path / "one", 1, *compiled)
    again = trained(workshop, tmp_path / "again", 1, *compiled)
    two = trained(workshop, tmp_path / "two", "auto", *compiled)
    noise = relative(learned(again), learned(one))
    assert noise < MOST
    assert relative(learned(two), learned(one)) <= max(1e-3, 3 * noise)
    for ours, theirs in zip(numbers(two), numbers(one), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=MOST)


def masters(run_dir: Path) -> torch.Tensor:
    """All weights of a full fine-tune, fp32."""
    weights = checkpoint.read_group(run_dir / "checkpoints" / f"step-{STEPS:06d}", "weights", "cpu")
    return torch.cat([weights[name].flatten().float() for name in sorted(weights)])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [("fp32", ()), ("bf16", ("features.compile=true",))],
    ids=["fp32, eager", "bf16, compiled"],
)
def test_rows_over_two_gpus_learn_what_one_learns(
    compiled: tuple[str, ...], dtype: str, workshop: Workshop, tmp_path: Path
) -> None:
    """A full fine-tune, gathered by NCCL, and its rest by one GPU."""
    options = (*compiled, f"model.dtype={dtype}", "train.adam_epsilon=1e-4")
    one, again, two = (
        trained(workshop, tmp_path / name, gpus, *options, case=FULL)
        for name, gpus in (("one", 1), ("again", 1), ("two", 2))
    )
    noise = relative(masters(again), masters(one))
    assert noise < MOST
    assert relative(masters(two), masters(one)) <= max(1e-3, 3 * noise)
    for ours, theirs in zip(numbers(two), numbers(one), strict=True):
        assert ours.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=MOST)
    shutil.rmtree(two / "checkpoints" / f"step-{STEPS:06d}")
    rest = trained(workshop, tmp_path / "two", 1, *options, case=FULL)
    assert relative(masters(rest), masters(one)) <= max(1e-3, 3 * noise)
