"""Runs that learn answers, the last answer or all tokens: entries, held-out losses and checkpoints of each
are no other's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from tests.contract.runs import Job, Workshop
from tests.contract.test_long_conversations import OTHER, SHORT, chat, job
from trainer.engine.caching.entries import _parts as parts_of
from trainer.engine.caching.entries import list_entries, text_entry
from trainer.engine.training.held_out import held_out_entries
from trainer.errors import ConfigError
from trainer.families.values import Learn

LEARNS: tuple[Learn, ...] = get_args(Learn)
ROWS = [SHORT, OTHER, chat("One.", "Two.", "Three.")]


def made(workshop: Workshop, folder: Path, learn: str, *options: str) -> Job:
    prompts = "validation.prompts=[Why]"
    return job(workshop, folder, ROWS, prompts, f"data.learn={learn}", *options)


def test_entries_are_of_what_is_learned(workshop: Workshop, tmp_path: Path) -> None:
    keys: dict[str, list[str]] = {}
    prompts, measured = set(), set()
    for learn in LEARNS:
        one = made(workshop, tmp_path / learn, learn)
        entries = list_entries(one.context, one.samples.training, one.samples.prompt_controls)
        keys[learn] = [entry.key for entry in entries.texts]
        prompts |= {prompt.entry.key for prompt in entries.prompts}
        held_out = held_out_entries(one.context, one.samples.training)
        assert held_out is not None
        measured.add(held_out.data)
        if learn == "answers":  # as without the option
            plain: Any = parts_of(one.context, "text")
            assert keys[learn] == [text_entry(record.caption, plain).key for record in one.samples.training]
    assert len({key for listed in keys.values() for key in listed}) == len(LEARNS) * len(ROWS)
    assert len(prompts) == 1
    assert len(measured) == len(LEARNS)


def test_runs_learn_what_is_asked_for(workshop: Workshop, tmp_path: Path) -> None:
    learned: dict[str, list[int]] = {}
    for learn in LEARNS:
        one = made(workshop, tmp_path / learn, learn)
        one.train()
        entries = list_entries(one.context, one.samples.training)
        rows = [entries.cache.read("text", entry.key) for entry in entries.texts]
        learned[learn] = [int(row["loss_weight"].sum()) for row in rows]
        if learn == "all":
            assert learned[learn] == [len(row["input_ids"]) - 1 for row in rows]
    for answers, last, every in zip(*(learned[learn] for learn in LEARNS), strict=True):
        assert last <= answers < every
    assert learned["last_answer"][0] == learned["answers"][0]  # it has one answer
    assert learned["last_answer"][2] < learned["answers"][2]


def test_a_resume_learns_the_same_tokens(workshop: Workshop, tmp_path: Path) -> None:
    made(workshop, tmp_path, "answers", "checkpoint.checkpointing_steps=1").train()
    steps = "train.max_train_steps=2"
    with pytest.raises(ConfigError, match=r"data.learn.*answers.*all"):
        made(workshop, tmp_path, "all", steps).train()
    made(workshop, tmp_path, "answers", steps).train()
