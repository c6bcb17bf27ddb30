"""Values that a resume refuses to change, and values whose change it reports."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import families
from trainer.config.schema import DataSection, FlowSection, LoraSection, RunConfig, Section, TrainSection
from trainer.engine.caching.entries import text_key
from trainer.engine.records import fingerprint
from trainer.engine.records.fingerprint import FREE, REFUSED, TOLD, UNRECORDED, Change, changes
from trainer.planning.plan import Plan
from trainer.ways import chat_templates

ROOT = Path(__file__).resolve().parents[3]


def schema_keys(section: type[Section] = RunConfig, above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from schema_keys(kind, f"{above}{name}.")
        else:
            yield above + name


def test_every_key_of_the_configuration_is_refused_told_or_free() -> None:
    listed = [key for keys in (*REFUSED.values(), *TOLD.values()) for key in keys]
    listed += FREE
    assert sorted(listed) == sorted(schema_keys())


def test_names_are_used_once() -> None:
    assert not REFUSED.keys() & TOLD.keys()
    assert REFUSED.keys() >= UNRECORDED.keys()


def test_the_document_has_the_tables() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    for heading, rows in (("refused", REFUSED), ("told", TOLD)):
        (line,) = re.findall(rf"^\| {heading} \|.*$", page, re.MULTILINE)
        documented = set(re.findall(r"`([a-z0-9_.]+)`", line))
        assert documented == {key for keys in rows.values() for key in keys}


@pytest.mark.parametrize(
    ("saved", "current", "found", "unrecorded"),
    [
        ({"seed": "0"}, {"seed": "0"}, [], []),
        ({"seed": "0"}, {"seed": "1"}, [Change(name="seed", old="0", new="1")], []),
        # 0.1.0 left these out where nobody wrote them
        ({}, {"lora.type": "lora", "lora.dropout": "0.0", "train.ema_decay": "None"}, [], []),
        ({}, {"data.learn": "answers"}, [], []),
        ({}, {"data.learn": "all"}, [Change(name="data.learn", old="answers", new="all")], []),
        ({}, {"data.chat_template": "auto"}, [], []),
        ({}, {"data.chat_template": "ab"}, [Change(name="data.chat_template", old="auto", new="ab")], []),
        ({}, {"lora.type": "dora"}, [Change(name="lora.type", old="lora", new="dora")], []),
        ({}, {"lora.init_from": "ab"}, [Change(name="lora.init_from", old="nothing", new="ab")], []),
        ({"lora.init_from": "ab"}, {}, [Change(name="lora.init_from", old="ab", new="nothing")], []),
        # and these always
        ({}, {"compute": "fp8", "flow.shift": "3.0"}, [], ["compute", "flow.shift"]),
        # of a trainer that knows more
        ({"data.order": "7"}, {}, [Change(name="data.order", old="7", new="nothing")], []),
    ],
)
def test_older_checkpoints_stand_for_what_there_was(
    saved: dict[str, str], current: dict[str, str], found: list[Change], unrecorded: list[str]
) -> None:
    assert changes(saved, current) == (found, unrecorded)


@pytest.mark.parametrize(
    ("family", "method", "absent"),
    [
        ("llama", "lora", {"lora.init_from", *(key for key in REFUSED if key.startswith("flow."))}),
        (
            "qwen_image",
            "full",
            {"data.learn", "data.chat_template", *(key for key in REFUSED if key.startswith("lora."))},
        ),
    ],
)
def test_values_that_do_not_apply_are_left_out(family: str, method: str, absent: set[str]) -> None:
    sections = {"train": TrainSection(), "lora": LoraSection(), "data": DataSection.model_construct()}
    flow = FlowSection(weighting_scheme="mode")
    plan: dict[str, Any] = dict.fromkeys((field.name for field in dataclasses.fields(Plan)), "as planned")
    source = SimpleNamespace(
        identity="x", revision=None, weights="", chat_template=None, component_config=lambda name: {}
    )
    config = SimpleNamespace(family=family, method=method, flow=flow, **sections)
    context: Any = SimpleNamespace(
        config=config, family=families.get(family), plan=SimpleNamespace(**plan), source=source
    )
    refused, told = fingerprint.values(context, ())
    if family == "qwen_image":  # of the other schemes, and what only a distilled base is told
        absent = absent | {"flow.logit_mean", "flow.logit_std", "flow.guidance_scale"}
    assert refused.keys() == REFUSED.keys() - absent
    assert told.keys() == TOLD.keys()
    assert (refused["dtype"], refused["revision"], told["train.adam_beta2"]) == ("as planned", "", "0.999")


@pytest.mark.parametrize(
    ("name", "old", "new", "words"),
    [
        ("seed", "0", "1", "it began with '0', this start has '1'"),
        ("data.chat_template", "chatml", "auto", "it began with chatml, this start has auto"),
        ("data.chat_template", "ab", "chatml", "it began with a template of a file, this start has chatml"),
        (
            "data.chat_template", "ab", "cd",
            "it began with a template of a file, this start has a template of a file with another content",
        ),
        ("lora.init_from", "nothing", "ab", "it began with nothing, this start has an adapter's file"),
    ],
)  # fmt: skip
def test_a_change_of_a_file_is_told_in_words(name: str, old: str, new: str, words: str) -> None:
    """No hash says anything to a reader."""
    keys = {one: text_key(str(chat_templates.text_of(one))) for one in chat_templates.names()}
    assert Change(name=name, old=keys.get(old, old), new=keys.get(new, new)).words == words
