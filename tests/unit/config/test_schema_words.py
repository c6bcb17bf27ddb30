"""Messages are built from the schema: every key must have words, and every alias must lead somewhere."""

from __future__ import annotations

import pytest

from trainer.config import fields
from trainer.config.reading import validate
from trainer.config.schema import RunConfig


@pytest.mark.parametrize("key", fields.dotted_keys())
def test_every_key_says_what_it_takes(key: str) -> None:
    words = fields.expected(tuple(key.split(".")))
    assert words
    assert "Annotated" not in words and "class" not in words


def test_hints_belong_to_keys() -> None:
    assert set(validate._HINTS) <= set(fields.dotted_keys())


def test_every_required_key_can_be_stood_in_for() -> None:
    stack, required = [RunConfig], set()
    while stack:
        for name, field in stack.pop().model_fields.items():
            section = fields.section_of(field.annotation)
            stack += [section] if section is not None else []
            required |= {name} if field.is_required() else set()
    assert required | {"img_dir"} <= set(validate._STAND_INS)
    assert {"family", "output_dir", "sets", "img_dir", "pretrained_model_name_or_path"} <= set(
        validate._HOW_TO_ADD
    )
