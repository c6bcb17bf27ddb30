"""Full fine-tunes over several ranks, each with its rows of all weights: they learn what one learns."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contract.runs import (
    ALIKE,
    COUSINS,
    FULL_CASES,
    Case,
    Job,
    Workshop,
    different,
    files,
    job_of,
    keep_edits_small,
    numbers,
    require_near,
    steps_saved,
    without,
)
from tests.ranks import Workers
from trainer.engine import run
from trainer.engine.caching.entries import Entries
from trainer.engine.context import Context
from trainer.engine.optimizing.split_adamw import joined
from trainer.engine.ranks import Ranks
from trainer.engine.records import checkpoint
from trainer.engine.training import preview
from trainer.errors import DataError, EndedTogether
from trainer.families.values import PreviewPrompt

RATE, STEPS = 1e-3, 6
SHORT = (
    "train.gradient_accumulation_steps=4",
    f"train.max_train_steps={STEPS}",
    # AdamW moves a weight whose gradient is all but zero by its sign, which sums in another order may turn
    "train.adam_epsilon=1e-4",
    "train.log_every_steps=1",
    "checkpoint.checkpointing_steps=3",
    "model.dtype=fp32",
)


def job_of_rank(
    ranks: Ranks, config_file: Path, folder: Path, cache: Path, options: tuple[str, ...], **planned: Any
) -> Job:
    """One rank's job in a process that has run others, with these values in its plan."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    # as `trainer train` starts the ranks of a run; accelerate looks for them
    os.environ |= {"RANK": str(ranks.rank), "LOCAL_RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    if ranks.size == 1:
        del os.environ["LOCAL_RANK"]
    keep_edits_small(setattr)
    job = job_of(config_file, folder / f"rank-{ranks.rank}", *options, cache=cache)
    plan = dataclasses.replace(job.context.plan, **planned)
    return dataclasses.replace(job, context=dataclasses.replace(job.context, plan=plan, ranks=ranks))


def train(ranks: Ranks, config_file: Path, folder: Path, cache: Path, options: tuple[str, ...]) -> list[str]:
    """One rank of a run; gives what it said."""
    job = job_of_rank(ranks, config_file, folder, cache, options)
    # C++ of pictures' two kinds of blocks would take longer than all else
    with traced_alone() if job.context.family.sample_kind == "image" else contextlib.nullcontext():
        run.train(job.context, job.samples, job.spec)
    return job.said


@contextlib.contextmanager
def traced_alone() -> Iterator[None]:
    """The real tracer and autograd, without the code generator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that ended."""

    folder: Path
    said: list[str]
    """By rank 0."""

    @property
    def losses(self) -> torch.Tensor:
        names = ("loss", "grad_norm", "validation_loss")
        rows = numbers(self.folder)
        return torch.tensor([row[name] for row in rows for name in names if name in row])

    def masters(self, step: int) -> dict[str, torch.Tensor]:
        return checkpoint.read_group(self.folder / "checkpoints" / f"step-{step:06d}", "weights", "cpu")

    def state(self, step: int) -> dict[str, torch.Tensor]:
        return checkpoint.read_group(self.folder / "checkpoints" / f"step-{step:06d}", "optimizer", "cpu")

    @property
    def exported(self) -> dict[str, torch.Tensor]:
        found = sorted((self.folder / "model").rglob("*.safetensors"))
        files = [path for path in found if not path.is_symlink()]
        return {name: one for path in files for name, one in load_file(path).items()}


Runs = Callable[..., Trained]


@pytest.fixture
def runs(workshop: Workshop, pool: Workers, tmp_path: Path) -> Runs:
    """`runs(case, count, *options, folder=...)`: the run of so many ranks, a new one or the folder's rest."""

    def trained(case: Case, count: int, *options: str, folder: str = "") -> Trained:
        place = tmp_path / (folder or f"of {count}")
        config_file = workshop.write_config(case, place)
        values = (*SHORT, f"parallel.gpus={count}", *options)
        said = pool.call(train, count, config_file, place, workshop.cache, values)
        return Trained(folder=place / "run", said=said[0])

    return trained


def apart(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of a value of equally named tensors."""
    assert ours.keys() == theirs.keys()
    assert all(ours[name].shape == theirs[name].shape for name in ours)
    return max((ours[name].float() - theirs[name].float()).abs().max().item() for name in ours)


def require_equal(ours: Trained, theirs: Trained, most: float = 1e-6) -> None:
    """AssertionError where runs of equal steps differ by more than sums in another order make them."""
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-5, atol=0.0)
    assert apart(ours.state(STEPS), theirs.state(STEPS)) < 1e-6
    for one, other in ((ours.masters(STEPS), theirs.masters(STEPS)), (ours.exported, theirs.exported)):
        assert apart(one, other) < most
        mean = max((one[name] - other[name]).square().mean().sqrt().item() for name in one)
        assert mean < 1e-6


MOST = {"kandinsky5": 2e-5}
"""Largest difference of a weight, where it is not 1e-6: one process, with two threads in place of one, makes
6e-6 of it, in queries and keys, whose gradients cancel.
"""


def interrupted(whole: Trained, folder: Path) -> None:
    """Copy a run as it was when its process was killed, after the checkpoint of step 3."""
    shutil.copytree(whole.folder, folder)
    shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:06d}")
    shutil.rmtree(folder / "model")


LLAMA = next(case for case in FULL_CASES if case.family == "llama")
FLUX = FULL_CASES[0]
SEPARATE = without(FULL_CASES, ALIKE, COUSINS)


@pytest.mark.slow
@pytest.mark.parametrize("case", SEPARATE, ids=str)
def test_rows_over_any_number_of_ranks_learn_what_one_process_learns(
    case: Case, runs: Runs, tmp_path: Path
) -> None:
    """With two prompts and one held-out sample some of four ranks have none to draw or measure.

    That one process goes on with what four saved asks about no model: it is tried for one family a kind.
    """
    most = MOST.get(case.family, 1e-6)
    one, two, four = (runs(case, count) for count in (1, 2, 4))
    require_equal(two, one, most)
    require_equal(four, one, most)
    drawn = "samples/step-000000/*"
    assert files(one.folder, drawn)
    assert not different(files(four.folder, drawn), files(one.folder, drawn))
    names = [set(files(run.folder, "**/*")) for run in (one, two, four)]
    assert names[1] == names[2] == names[0]
    for count in (2, 1) if case in (FLUX, LLAMA) else (2,):
        interrupted(four, tmp_path / f"rest by {count}" / "run")
        rest = runs(case, count, folder=f"rest by {count}")
        assert "resumed from step-000003" in rest.said
        require_equal(rest, one, most)


@pytest.mark.slow
def test_three_ranks_share_sizes_that_three_does_not_divide(runs: Runs) -> None:
    three = "train.gradient_accumulation_steps=3"
    require_equal(runs(LLAMA, 3, three), runs(LLAMA, 1, three))


@pytest.mark.slow
def test_a_rank_without_a_micro_batch_of_its_own_passes_through_the_model_all_the_same(runs: Runs) -> None:
    """Batches of two pictures, one of which has another size: some steps have three micro-batches."""
    options = ("train.train_batch_size=2", "train.gradient_accumulation_steps=2", "validation.prompts=[]")
    one, two = runs(FLUX, 1, *options), runs(FLUX, 2, *options)
    assert any("2.7 micro-batches a step" in line for line in one.said), one.said
    require_equal(two, one)


def train_to_a_lost_preview(
    ranks: Ranks, broken: int, config_file: Path, folder: Path, cache: Path, options: tuple[str, ...]
) -> str:
    """The error that ends a run in which one rank cannot read what its second preview needs."""
    read, asked = preview._prompt, list[int]()

    def prompt(context: Context, entries: Entries, number: int) -> PreviewPrompt:
        asked.append(number)
        if ranks.rank == broken and len(asked) > 1:
            raise DataError("not to be read")
        return read(context, entries, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preview, "_prompt", prompt)
        try:
            train(ranks, config_file, folder, cache, options)
        except (DataError, EndedTogether) as error:
            if ranks.first:
                ranks.meet()  # others wait for its process to be gone, which this one is not
            return f"{type(error).__name__} {error} {error.__cause__}"
    return ""


@pytest.mark.parametrize("broken", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_preview_that_one_rank_cannot_draw_loses_no_step(
    broken: int, workshop: Workshop, pool: Workers, tmp_path: Path
) -> None:
    """All are told before any of them waits for another inside of the model."""
    config_file = workshop.write_config(FLUX, tmp_path)
    often = ("parallel.gpus=2", "validation.every_steps=2", "checkpoint.checkpointing_steps=1000")
    said = pool.call(
        train_to_a_lost_preview, 2, broken, config_file, tmp_path, workshop.cache, (*SHORT, *often)
    )
    assert all("not to be read" in one for one in said), said
    assert steps_saved(tmp_path / "run") == ["step-000002"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [FLUX, LLAMA], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        ("features.activation_checkpointing=true",),
        ("features.compile=true",),
        ("features.compile=true", "features.activation_checkpointing=1"),
        ("train.ema_decay=0.9",),
        ("model.weights=random",),
    ],
    ids=str,
)
def test_every_way_to_compute_goes_with_rows(case: Case, options: tuple[str, ...], runs: Runs) -> None:
    require_equal(runs(case, 2, *options), runs(case, 1, *options))


@pytest.mark.slow
@pytest.mark.parametrize("case", SEPARATE, ids=str)
def test_rows_in_bf16_have_split_masters(case: Case, runs: Runs) -> None:
    """Gradients are rounded to bf16 in another order; what chance rounds is the same."""
    bf16 = "model.dtype=bf16"
    one, two = runs(case, 1, bf16), runs(case, 2, bf16)
    torch.testing.assert_close(two.losses, one.losses, rtol=5e-3, atol=0.0)
    masters = [whole_masters(run) for run in (two, one)]
    require_near(*masters, rate=30 * RATE)


def whole_masters(run: Trained) -> dict[str, torch.Tensor]:
    weights, state = run.masters(STEPS), run.state(STEPS)
    return {
        name: one.float() if (low := state.get(f"{name}/low")) is None else joined(one, low)
        for name, one in weights.items()
    }
