"""Runs that several tests look at are made once a session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.contract.runs import (
    ALIKE,
    COUSINS,
    SHORT_RUN,
    Case,
    Job,
    Step,
    Workshop,
    keep_edits_small,
    keep_kontexts_small,
    record_samples,
    small_samples,
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """An uninterrupted run."""

    job: Job
    samples: list[Step]
    """Samples by step and micro-batch."""

    @property
    def folder(self) -> Path:
        return self.job.folder


WHOLE_RUNS = ("test_training.py", "test_options.py", "test_full_in_fp8.py", "test_divergence.py")
"""Files of tests that train from start to end, mostly several times."""
ALWAYS = (
    "test_a_cached_batch_gives_finite_losses_and_gradients_where_they_belong",
    "test_a_run_leaves_what_it_promises",
)

OF_LORAS = (
    "test_previews_and_validation_change_nothing_and_bytes_repeat",
    "test_a_batch_of_four_equals_four_batches_of_one",
)
"""Tests of what does not ask which weights learn: their full fine-tunes are slow tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases of `ALIKE` and whole runs of `COUSINS` as slow."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(Path(__file__).parent):
            given = item.callspec.params.values() if "callspec" in vars(item) else ()
            whole = item.path.name in WHOLE_RUNS and item.originalname not in ALWAYS
            others = (*ALIKE, *COUSINS) if whole else ALIKE
            if any((one.family if isinstance(one, Case) else one) in others for one in given):
                item.add_marker(pytest.mark.slow)
            if item.originalname in OF_LORAS and item.callspec.params["case"].method == "full":
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_edits(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_edits_small(monkeypatch.setattr)


@pytest.fixture(scope="session")
def workshop(tiny_base: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Bases, pictures and cache of all small runs."""
    from trainer.modeling.quiet import quiet_libraries

    quiet_libraries()
    # tiny tensors gain nothing from more, and idle threads of two test processes spin against each other
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("workshop")
    return Workshop(
        base=tiny_base,
        samples=small_samples(folder / "samples"),
        cache=folder / "cache",
        run=SHORT_RUN,
    )


@pytest.fixture(scope="session")
def finished(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Finished]:
    """The small run of a case from start to end. Read only."""
    made: dict[Case, Finished] = {}

    def run(case: Case) -> Finished:
        if case not in made:
            with pytest.MonkeyPatch.context() as monkeypatch:
                samples = record_samples(monkeypatch)
                job = workshop.job(case, tmp_path_factory.mktemp("finished"))
                job.train()
            made[case] = Finished(job=job, samples=samples)
        return made[case]

    return run


@pytest.fixture
def small_kontexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a pipeline that scales a picture before the edit to a megapixel scale it to a few pixels."""
    keep_kontexts_small(monkeypatch.setattr)


@pytest.fixture
def flipped_bit(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Have the first LoRA file that is read back differ by a bit; gives the files that are read."""
    from trainer.engine.results import proof

    real, files = proof.load_file, list[Path]()

    def read(path: Path) -> dict[str, torch.Tensor]:
        files.append(path)
        found = real(path)
        if len(files) == 1:
            next(iter(found.values())).view(torch.int32).view(-1)[0] ^= 1
        return found

    monkeypatch.setattr(proof, "load_file", read)
    return files
