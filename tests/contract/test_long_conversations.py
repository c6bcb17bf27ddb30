"""Conversations that are longer than a row: refused, left out or cut, told, and no other run's entries."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.contract.runs import Case, Job, Workshop
from trainer.engine.caching.entries import data_fingerprint, list_entries
from trainer.engine.caching.lengths import fit_lengths
from trainer.engine.run import cache_only
from trainer.errors import DataError

WRITER = Case(family="llama", method="lora")
LIMIT = 112


def chat(*answers: str) -> dict[str, Any]:
    """A conversation with these answers, each to the same question."""
    texts = [(("user", "Why?"), ("assistant", answer)) for answer in answers]
    return {"messages": [{"role": role, "content": text} for pair in texts for role, text in pair]}


WORDS = "one and two and three and four and five and six and seven and eight "
SHORT, OTHER = chat("Because."), chat("So.", "No.")
CUT, HOPELESS = chat("Yes.", WORDS * 6, "No."), chat(WORDS * 8)


def job(
    workshop: Workshop, folder: Path, rows: Sequence[object], *options: str, on_long: str = "error"
) -> Job:
    """A run of these conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = f"data.sets=[{{chat_file: {file}}}]"
    usual = ("train.max_train_steps=1", "validation.prompts=[]", "validation.held_out=0", sets)
    return workshop.job(WRITER, folder, *usual, f"data.on_long={on_long}", *options)


def test_long_conversations_are_refused_by_default(workshop: Workshop, tmp_path: Path) -> None:
    """All of them are told at once, each with its place."""
    made = job(workshop, tmp_path, [SHORT, CUT, OTHER, HOPELESS])
    assert fit_lengths(made.context, made.samples) is made.samples
    with pytest.raises(DataError, match=rf"more than data.max_sequence_length \({LIMIT}\)") as caught:
        cache_only(made.context, made.samples, made.spec)
    assert [one.where for one in caught.value.problems] == [
        f"{tmp_path / 'chats.jsonl'}:{row}" for row in (2, 4)
    ]
    assert {one.remedy for one in caught.value.problems} == {
        "raise data.max_sequence_length, or write data.on_long: skip, or cut"
    }


@pytest.mark.parametrize("on_long", ["error", "skip", "cut"])
def test_conversations_that_the_template_refuses_are_told_with_their_places(
    on_long: str, workshop: Workshop, tmp_path: Path
) -> None:
    """Some want questions and answers in turn: one that has not must be found in a file of thousands."""
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{% if m.content == 'Twice?' %}{{ raise_exception('roles must alternate') }}"
        "{% endif %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    )
    twice = {"role": "user", "content": "Twice?"}
    rows = [SHORT, *({"messages": [twice, *one["messages"]]} for one in (SHORT, OTHER)), OTHER]
    made = job(workshop, tmp_path, rows, f"data.chat_template={template}", on_long=on_long)
    samples = fit_lengths(made.context, made.samples)
    with pytest.raises(DataError, match=r"refuses the conversation with 'Twice\?': roles") as caught:
        cache_only(made.context, samples, made.spec)
    assert [one.where for one in caught.value.problems] == [
        f"{tmp_path / 'chats.jsonl'}:{row}" for row in (2, 3)
    ]


@pytest.mark.parametrize(
    ("on_long", "kept"), [("skip", [SHORT, OTHER]), ("cut", [SHORT, chat("Yes."), OTHER])]
)
def test_runs_train_on_what_fits(
    on_long: str,
    kept: Sequence[object],
    workshop: Workshop,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [SHORT, CUT, HOPELESS, OTHER]
    made, file = job(workshop, tmp_path, rows, on_long=on_long), tmp_path / "chats.jsonl"
    count = made.context.family.conversation_tokens
    assert count is not None
    lengths = [count(made.context.source)(record.caption) for record in made.samples.training]
    with caplog.at_level(logging.WARNING, logger="trainer"):
        made.train()
    shown = capsys.readouterr().err
    assert shown.count("percent 100/100") == 1  # of the model, whose last bytes are told twice
    assert "measuring conversations 4/4" in shown
    listed = [json.loads(line) for line in (made.folder / "left_out.jsonl").read_text().splitlines()]
    left_out = {2: f"{LIMIT} are possible", 3: f"{LIMIT} are possible"}
    if on_long == "cut":
        left_out = {3: "also up to its first answer"}
        assert f"data.on_long is cut: of 4 conversations 1 is cut, for rows of {LIMIT} tokens" in caplog.text
        assert f"{file}:2: {lengths[1]} tokens, 2 of 6 messages are kept" in caplog.text
    assert [(row["file"], row["reason"]) for row in listed] == [
        (f"{file}:{line}", f"longer than data.max_sequence_length: {lengths[line - 1]} tokens, {why}")
        for line, why in left_out.items()
    ]
    number = f"{len(left_out)} {'is' if len(left_out) == 1 else 'are'} left out"
    assert f"data.on_long is {on_long}: of 4 conversations {number}" in caplog.text
    # entries and content are those of a file that was written so short
    other = job(workshop, tmp_path / "other", kept)
    fitted = fit_lengths(made.context, made.samples)
    written, ours = (
        [entry.key for entry in list_entries(one.context, samples).texts]
        for one, samples in ((other, other.samples.training), (made, fitted.training))
    )
    assert ours == written
    assert [one.content_sha256 for one in fitted.training] == [
        one.content_sha256 for one in other.samples.training
    ]
    assert data_fingerprint(fitted.training) != data_fingerprint(made.samples.training)


def test_conversations_that_fit_are_the_same_run(workshop: Workshop, tmp_path: Path) -> None:
    prints = set()
    for on_long in ("error", "skip", "cut"):
        made = job(workshop, tmp_path / on_long, [SHORT, OTHER], on_long=on_long)
        fitted = fit_lengths(made.context, made.samples)
        assert fitted == made.samples
        prints.add(data_fingerprint(fitted.training))
    assert len(prints) == 1


@pytest.mark.parametrize("on_long", ["skip", "cut"])
def test_a_run_of_nothing_is_refused(on_long: str, workshop: Workshop, tmp_path: Path) -> None:
    made = job(workshop, tmp_path, [HOPELESS, HOPELESS], on_long=on_long)
    with pytest.raises(DataError) as caught:
        fit_lengths(made.context, made.samples)
    first, *others = caught.value.problems
    assert first.what == "none of the 2 conversations that are to be trained on is left"
    assert first.remedy == f"raise data.max_sequence_length, which is {LIMIT}"
    assert [problem.where for problem in others] == [f"{tmp_path / 'chats.jsonl'}:{line}" for line in (1, 2)]


def test_held_out_conversations_are_cut_too_and_stay_apart(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that is cut to the same beginning as a held-out one is not trained on."""
    file = tmp_path / "held-out.jsonl"
    file.write_text(json.dumps(CUT) + "\n" + json.dumps(HOPELESS) + "\n")
    same = chat("Yes.", WORDS * 7)
    held_out = f"validation.chat_file={file}"
    made = job(workshop, tmp_path, [SHORT, same, OTHER], held_out, on_long="cut")
    fitted = fit_lengths(made.context, made.samples)
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("measuring")]
    assert shown == ["measuring held-out conversations 2/2", "measuring conversations 3/3"]
    assert [json.loads(one.caption) for one in fitted.held_out] == [chat("Yes.")["messages"]]
    assert [one.identifier for one in fitted.training] == ["0/1", "0/3"]
    told = dict(fitted.left_out)
    assert told[f"{tmp_path / 'chats.jsonl'}:2"] == "cut, it is one that is held out"
    assert told[f"{file}:2"].endswith("also up to its first answer")
    file.write_text(json.dumps(HOPELESS) + "\n")
    made = job(workshop, tmp_path, [SHORT], held_out, on_long="skip")
    with pytest.raises(DataError, match="none of the 1 conversation that is to be held out is left"):
        fit_lengths(made.context, made.samples)
