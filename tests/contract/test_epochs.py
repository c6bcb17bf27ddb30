"""Runs whose length is written in epochs: every sample as often as that, in the steps that are told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import Case, Job, Workshop
from tests.contract.test_long_conversations import WRITER, chat
from trainer.engine.caching.entries import list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.engine.training import loop
from trainer.engine.training.epochs import with_steps
from trainer.engine.training.feed import make_sampler
from trainer.telemetry.runs import read_run

PICTURES = Case(family="flux1_dev", method="lora")
QUIET = ("validation.prompts=[]", "validation.held_out=0", "checkpoint.checkpointing_steps=1")


def rows(number: int) -> list[Any]:
    """Conversations of lengths that rows cannot be filled with evenly."""
    return [chat(" and ".join(["one"] * (3 + 5 * index % 23))) for index in range(number)]


def made(workshop: Workshop, folder: Path, sets: list[tuple[int, int]], epochs: float, *options: str) -> Job:
    """A run over sets of so many conversations with so many repeats."""
    folder.mkdir(parents=True, exist_ok=True)
    listed, begin = [], 0
    every = rows(sum(number for number, _ in sets))
    for index, (number, repeats) in enumerate(sets):
        file = folder / f"{index}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in every[begin : begin + number]))
        begin += number
        listed.append(f"{{chat_file: {file}, repeats: {repeats}}}")
    length = ("train.max_train_steps=1", f"train.num_train_epochs={epochs}")
    return workshop.job(WRITER, folder, *QUIET, f"data.sets=[{', '.join(listed)}]", *length, *options)


@pytest.mark.parametrize(
    ("epochs", "options"),
    [
        (1, ("train.gradient_accumulation_steps=1",)),
        (2.5, ("train.gradient_accumulation_steps=2",)),
        (3, ("train.train_batch_size=2", "train.gradient_accumulation_steps=2")),
    ],
)
def test_packed_rows_hold_what_the_epochs_hold(
    epochs: float, options: tuple[str, ...], workshop: Workshop, tmp_path: Path
) -> None:
    """Counted by the run's own steps from entries of the cache, which the count does without."""
    one = made(workshop, tmp_path, [(9, 1), (4, 3)], epochs, *options)
    found = with_steps(one.context, one.samples.training).config.train.max_train_steps
    entries = list_entries(one.context, one.samples.training)
    fill_cache(one.context, entries)
    sampler = make_sampler(one.context, entries)
    seen = [len([sample for part in sampler.step(n) for sample in part]) for n in range(found)]
    assert sum(seen[:-1]) < epochs * 21 <= sum(seen)
    verb = "are" if epochs > 1 else "is"
    assert one.said[0] == f"{epochs:g} epoch{'s' * (epochs > 1)} of 21 conversations {verb} {found} steps"
    counts = Counter(sample.record for n in range(found) for part in sampler.step(n) for sample in part)
    wanted = {index: record.repeats * epochs for index, record in enumerate(one.samples.training)}
    # a sample may wait for room while one of the next epoch takes it
    assert all(abs(counts[index] - times) <= 3 for index, times in wanted.items())


def steps_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of samples of each step that is trained."""
    taken: list[int] = []
    real = loop._micro_batches

    def counted(run: Any, state: Any, step: Any) -> Any:
        taken.append(sum(len(fed.micro_batch) for fed in step))
        return real(run, state, step)

    monkeypatch.setattr(loop, "_micro_batches", counted)
    return taken


def test_a_run_of_pictures_ends_with_its_epochs_and_resumes(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = steps_taken(monkeypatch)
    first = workshop.job(PICTURES, tmp_path, *QUIET, "train.num_train_epochs=1")
    first.train()
    assert taken == [2, 2, 2, 2]  # seven pictures
    text = (first.folder / "config.resolved.yaml").read_text()
    assert "num_train_epochs: 1" in text and "max_train_steps" not in text
    assert (read_run(first.folder).steps, read_run(first.folder).figures["step"]) == (4, "4/4")
    taken.clear()
    second = workshop.job(PICTURES, tmp_path, *QUIET, "train.num_train_epochs=2")
    second.train()
    assert taken == [2, 2, 2]  # 14 samples are seven steps, of which four were there
    assert read_run(first.folder).figures["step"] == "7/7"
    assert "train.num_train_epochs: 2.0 from here on, 1.0 before" in second.said


@pytest.mark.parametrize(("warm_up", "left"), [(3, 3), (4, 0), (50, 0)])
def test_a_warm_up_that_is_as_long_as_the_epochs_is_a_tenth_of_them(
    warm_up: int, left: int, workshop: Workshop, tmp_path: Path
) -> None:
    one = workshop.job(
        PICTURES, tmp_path, *QUIET, "train.num_train_epochs=1", f"train.lr_warmup_steps={warm_up}"
    )
    train = with_steps(one.context, one.samples.training).config.train
    assert (train.max_train_steps, train.lr_warmup_steps) == (4, left)
    told = f", of which the learning rate rises for {left} in place of {warm_up}" if warm_up > left else ""
    assert one.said[0] == f"1 epoch of 7 images is 4 steps{told}"


@pytest.mark.parametrize(("epochs", "steps"), [(1e-9, 1), (0.1, 1), (0.3, 3), (2 / 7, 2), (1, 7)])
def test_parts_of_an_epoch_are_rounded_up(
    epochs: float, steps: int, workshop: Workshop, tmp_path: Path
) -> None:
    one_at_a_time = ("train.train_batch_size=1", "train.gradient_accumulation_steps=1")
    one = workshop.job(PICTURES, tmp_path, *QUIET, *one_at_a_time, f"train.num_train_epochs={epochs}")
    assert with_steps(one.context, one.samples.training).config.train.max_train_steps == steps
