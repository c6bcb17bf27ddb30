"""Full fine-tunes in FP8 over several ranks, whose bytes are gathered: they learn what one process learns.

A CPU emulates the products: they are computed in fp32 from the same quantised values.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract.runs import Case, Workshop, files
from tests.contract.test_full_in_rows import (
    FLUX,
    LLAMA,
    SEPARATE,
    SHORT,
    STEPS,
    Trained,
    interrupted,
    job_of_rank,
    traced_alone,
)
from tests.emulated_fp8 import emulated
from tests.ranks import Workers
from trainer.engine import run
from trainer.engine.building import fp8
from trainer.engine.ranks import Ranks

IN_BF16 = (*SHORT[:-1], "model.dtype=bf16")
Runs = Callable[..., Trained]


def train(
    ranks: Ranks, config_file: Path, folder: Path, cache: Path, options: tuple[str, ...], compiles: bool
) -> list[str]:
    """One rank of a run with the plan that GPUs with FP8 units have; gives what it said."""
    kinds = {"compute": "fp8", "weight_copies": 1, "weight_gradient": "fp8", "compile": compiles}
    job = job_of_rank(ranks, config_file, folder, cache, options, **kinds)
    with pytest.MonkeyPatch.context() as patch, traced_alone():
        patch.setattr(fp8, "_Products", emulated)
        run.train(job.context, job.samples, job.spec)
    return job.said


@pytest.fixture
def runs(workshop: Workshop, pool: Workers, tmp_path: Path) -> Runs:
    """`runs(case, count, *options)`: the run of so many ranks, a new one or the folder's rest."""

    def trained(case: Case, count: int, *options: str, folder: str = "", compiles: bool = False) -> Trained:
        place = tmp_path / (folder or f"of {count}")
        config_file = workshop.write_config(case, place)
        values = (*IN_BF16, f"parallel.gpus={count}", *options)
        said = pool.call(train, count, config_file, place, workshop.cache, values, compiles)
        return Trained(folder=place / "run", said=said[0])

    return trained


def require_alike(ours: Trained, theirs: Trained) -> None:
    """AssertionError where runs differ by more than gradients that are added in bf16 in another order, and
    products that are one for linears of one input and several in rows.
    """
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=2e-2, atol=0.0)
    assert (ours.losses / theirs.losses - 1.0).abs().mean() < 4e-3
    one, other = ours.exported, theirs.exported
    assert one.keys() == other.keys()
    assert all(one[name].dtype == other[name].dtype != torch.float8_e4m3fn for name in one)
    apart = sum((one[name].double() - other[name].double()).square().sum() for name in one)
    whole = sum(other[name].double().square().sum() for name in one)
    assert (apart / whole).sqrt() < 2e-3


CASES = [
    pytest.param(case, marks=() if case is LLAMA else pytest.mark.slow, id=str(case)) for case in SEPARATE
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_bytes_that_are_gathered_learn_what_one_process_learns(case: Case, runs: Runs) -> None:
    one, two = runs(case, 1), runs(case, 2)
    assert any("products of one micro-batch ran in FP8" in line for line in two.said)
    require_alike(two, one)
    # held-out losses before the first step are bf16's, of the same weights
    assert two.losses[0] == pytest.approx(one.losses[0].item(), rel=1e-5)
    assert set(files(two.folder, "**/*")) == set(files(one.folder, "**/*"))


@pytest.mark.slow
def test_a_run_of_four_goes_on_with_two_and_with_one(runs: Runs, tmp_path: Path) -> None:
    four = runs(LLAMA, 4)
    for count in (2, 1):
        interrupted(four, tmp_path / f"rest by {count}" / "run")
        rest = runs(LLAMA, count, folder=f"rest by {count}")
        assert "resumed from step-000003" in rest.said
        require_alike(rest, four)
        before = rest.masters(STEPS // 2), four.masters(STEPS // 2)
        assert all(torch.equal(before[0][name], before[1][name]) for name in before[0])


@pytest.mark.slow
def test_compiled_blocks_take_gathered_bytes(runs: Runs) -> None:
    require_alike(runs(FLUX, 2, compiles=True), runs(FLUX, 2, folder="eager"))
