"""Options of training on a GPU, in whole runs of a tiny base: five steps, a kill and a resume are as ten.

Kernels may add up in another order each time: a resumed run is to be as near as a second one is.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.contract import runs
from tests.contract.loaders import lora_file
from tests.contract.runs import (
    CHECKPOINT_STEP,
    STEPS,
    Case,
    Job,
    KilledError,
    Workshop,
    dying_after,
    losing,
    numbers,
    small_samples,
)
from trainer.engine.records import checkpoint
from trainer.engine.results.file_check import check_file
from trainer.engine.training import held_out
from trainer.machine.facts import Facts
from trainer.machine.reading import read_facts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASE = Case(family="flux1_dev", method="lora")
QUICK = ("validation.prompts=[]", "validation.held_out=1", "validation.every_steps=4")
# what two runs of the same may differ by, at most: beyond it they would prove nothing
MOST = 0.05
GROWN = (".lora_B.", ".lokr_w1.")
"""Parts of an adapter that start at zero: all that is in them was learned."""


@pytest.fixture(scope="module")
def workshop(tiny_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    folder = tmp_path_factory.mktemp("workshop")
    return Workshop(base=tiny_base, samples=small_samples(folder / "samples"), cache=folder / "cache")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    """The machine's; a process that imports torch is asked for some of them."""
    return read_facts(cache_dir=tmp_path_factory.mktemp("facts"))


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch, facts: Facts) -> None:
    """Plans are for the machine that the tests run on."""
    monkeypatch.setattr(runs, "read_recorded", lambda path: facts)


def learned(job: Job, step: int = STEPS) -> torch.Tensor:
    """All that training grew from zero, fp32, after a step."""
    folder = job.folder / "checkpoints" / f"step-{step:06d}"
    weights = checkpoint.read_group(folder, "weights", "cpu")
    grown = [weights[name].flatten() for name in sorted(weights) if any(part in name for part in GROWN)]
    return torch.cat(grown).float()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def agree(found: Job, wanted: Job, again: Job) -> None:
    """`found` is as near to `wanted` as `again`, a second run of it, is."""
    noise = relative(learned(again), learned(wanted))
    assert noise < MOST
    assert relative(learned(found), learned(wanted)) <= max(1e-3, 3 * noise)
    for ours, theirs in zip(numbers(found.folder), numbers(wanted.folder), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours.get("loss", 0.0) == pytest.approx(theirs.get("loss", 0.0), rel=MOST)


def trained(workshop: Workshop, folder: Path, overrides: tuple[str, ...], *, factor: float = 1.0) -> Job:
    job = losing(workshop.job(CASE, folder, *QUICK, *overrides), factor=factor)
    job.train()
    return job


def in_two_parts(workshop: Workshop, folder: Path, overrides: tuple[str, ...], *, factor: float = 1.0) -> Job:
    status = dying_after(folder, CHECKPOINT_STEP + 2)
    with pytest.raises(KilledError):
        losing(workshop.job(CASE, folder, *QUICK, *overrides, status=status), factor=factor).train()
    job = trained(workshop, folder, overrides, factor=factor)
    assert f"resumed from step-{CHECKPOINT_STEP:06d}" in job.said
    return job


@pytest.mark.parametrize(
    ("package", "overrides"),
    [
        pytest.param("bitsandbytes", ("train.optimizer=adamw_8bit", "lora.rank=64"), id="adamw_8bit"),
        pytest.param("prodigyopt", ("train.optimizer=prodigy", "train.learning_rate=1"), id="prodigy"),
        pytest.param("peft", ("lora.type=dora",), id="dora"),
        pytest.param("peft", ("lora.type=lokr",), id="lokr"),
        pytest.param("peft", ("model.dtype=fp16", "train.ema_decay=0.9"), id="fp16-ema"),
        pytest.param("peft", ("lora.dropout=0.3", "features.activation_checkpointing=true"), id="dropout"),
        pytest.param(
            "triton",
            ("features.compile=true", "lora.rank_pattern={to_q: 8}", "lora.alpha_pattern={to_q: 16}"),
            id="compiled-pattern",
        ),
    ],
)
def test_five_steps_a_kill_and_a_resume_are_as_ten(
    package: str, overrides: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    whole = trained(workshop, tmp_path / "whole", overrides)
    assert whole.context.device.startswith("cuda")
    parts = in_two_parts(workshop, tmp_path / "parts", overrides)
    agree(parts, whole, trained(workshop, tmp_path / "again", overrides))
    for job in (whole, parts):
        assert any("Proved: " in line for line in job.said)
        assert any(line.startswith("best: step ") for line in job.said)
        assert check_file(lora_file(job)) > 0
        assert held_out.read_best(job.folder) is not None


def test_steps_that_overflow_in_fp16_are_skipped_and_stay_so_over_a_resume(
    workshop: Workshop, tmp_path: Path
) -> None:
    """A loss that is a thousand times as large overflows at the first scales."""
    overrides = ("model.dtype=fp16", "train.ema_decay=0.9", "train.log_every_steps=1")
    whole = trained(workshop, tmp_path / "whole", overrides, factor=1e3)
    parts = in_two_parts(workshop, tmp_path / "parts", overrides, factor=1e3)
    agree(parts, whole, trained(workshop, tmp_path / "again", overrides, factor=1e3))
    for job in (whole, parts):
        folder = job.folder / "checkpoints" / f"step-{STEPS:06d}"
        state = checkpoint.read_group(folder, "optimizer", "cpu")
        skipped = STEPS - int(state["loss/applied"].item())
        assert 0 < skipped < STEPS
        assert state["loss/scale"].item() == 2.0 ** (16 - skipped)
        # those that were skipped have a norm that is not finite, which is left out
        known = [row for row in numbers(job.folder) if row.get("grad_norm") is not None]
        assert len(known) == STEPS - skipped


def test_dropout_is_the_same_where_blocks_are_recomputed(workshop: Workshop, tmp_path: Path) -> None:
    """Another mask in the backward pass would give other gradients, and so another adapter."""
    made = {
        name: trained(
            workshop, tmp_path / name, ("lora.dropout=0.5", f"features.activation_checkpointing={on}")
        )
        for name, on in (("kept", "false"), ("again", "false"), ("recomputed", "true"))
    }
    agree(made["recomputed"], made["kept"], made["again"])


def test_the_fast_path_computes_what_the_plain_one_does_and_keeps_the_best(
    workshop: Workshop, tmp_path: Path
) -> None:
    """Joined layers and graphs between validations in eval mode; the kept file is that of plain layers."""
    pytest.importorskip("triton")
    fast = trained(workshop, tmp_path / "fast", ("features.compile=true", "features.cuda_graphs=true"))
    plain = trained(workshop, tmp_path / "plain", ("features.compile=false",))
    assert fast.context.plan.compile and fast.context.plan.cuda_graphs
    # bf16 rounds elsewhere in kernels that compute together
    assert torch.nn.functional.cosine_similarity(learned(fast), learned(plain), dim=0) > 0.95
    kept = held_out.read_best(fast.folder)
    assert kept is not None
    assert any(line.startswith(f"best: step {kept['step']}, held-out loss") for line in fast.said)
    final = check_file(lora_file(fast))
    assert check_file(fast.folder / held_out.FOLDER / kept["file"]) == final > 0
