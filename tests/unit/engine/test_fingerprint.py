"""Values that a resume refuses to change, and values whose change it reports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.config.schema import RunConfig, Section
from trainer.engine.records import fingerprint
from trainer.engine.records.fingerprint import FREE, REFUSED, TOLD, Change, changes

ROOT = Path(__file__).resolve().parents[3]


def schema_keys(section: type[Section] = RunConfig, above: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from schema_keys(kind, f"{above}{name}.")
        else:
            yield above + name


def test_every_key_of_the_configuration_is_refused_told_or_free() -> None:
    listed = [key for row in (*REFUSED, *TOLD) for key in row.keys]
    listed += FREE
    assert sorted(listed) == sorted(schema_keys())


def test_names_are_used_once() -> None:
    names = [row.name for row in (*REFUSED, *TOLD)]
    assert len(set(names)) == len(names)


def test_the_document_has_the_tables() -> None:
    page = (ROOT / "docs" / "training.md").read_text()
    for heading, rows in (("refused", REFUSED), ("told", TOLD)):
        (line,) = re.findall(rf"^\| {heading} \|.*$", page, re.MULTILINE)
        documented = set(re.findall(r"`([a-z0-9_.]+)`", line))
        assert documented == {key for row in rows for key in row.keys}


@pytest.mark.parametrize(
    ("saved", "current", "found", "unrecorded"),
    [
        ({"seed": "0"}, {"seed": "0"}, [], []),
        ({"seed": "0"}, {"seed": "1"}, [Change(name="seed", old="0", new="1")], []),
        # 0.1.0 left these out where nobody wrote them
        ({}, {"lora.type": "lora", "lora.dropout": "0.0", "train.ema_decay": "None"}, [], []),
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
    assert changes(REFUSED, saved, current) == (found, unrecorded)


def test_values_that_do_not_apply_are_left_out() -> None:
    rows = [fingerprint.Row(name="a", keys=(), value=lambda context, records: None)]
    assert fingerprint.values(rows, None, ()) == {}  # type: ignore[arg-type]
