"""Settings that are suggested where a run does not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from tests.unit.planning.test_resolve import Config
from trainer.config.schema import DataSet, RunConfig, changed
from trainer.planning.choose.fastest_fit import DoesNotFitError
from trainer.planning.choose.suggestions import nearest_fits, sentence


def needs(asked: RunConfig, **wanted: Any) -> Any:
    """A planner for which a run fits where these keys have these values; `__` parts section and name."""

    def peak_of(changes: Mapping[str, Any]) -> str:
        values = changed(asked, changes).model_dump()
        for key, value in wanted.items():
            section, _, name = key.partition("__")
            if (values[section][name] if name else values[section]) != value:
                raise DoesNotFitError("too large")
        return "1.0 GiB"

    return peak_of


def test_a_sum_leaves_out_what_is_not_needed(config: Config) -> None:
    asked = config(method="full", features__memory_budget="8GiB", data__resolution=1024)
    found = sentence(nearest_fits(asked, needs(asked, method="lora", features__memory_budget="auto")))
    assert found == "fits with features.memory_budget: auto and method: lora (1.0 GiB)"


def test_a_sum_keeps_what_is_needed(config: Config) -> None:
    asked = config(method="full", features__memory_budget="8GiB", data__resolution=1024)
    found = sentence(nearest_fits(asked, needs(asked, method="lora", data__resolution=512)))
    assert found == "fits with data.resolution: 512 and method: lora (1.0 GiB)"


@pytest.mark.parametrize(("length", "wanted"), [(4096, 2048), (2048, 1024)])
def test_conversations_have_a_length_and_no_resolution(config: Config, length: int, wanted: int) -> None:
    asked = config(data__max_sequence_length=length)
    data = asked.data.model_copy(update={"sets": (DataSet(chat_file="chat.jsonl"),)})
    asked = asked.model_copy(update={"data": data})
    found = sentence(nearest_fits(asked, needs(asked, data__max_sequence_length=wanted)))
    assert found == f"fits with data.max_sequence_length: {wanted} (1.0 GiB)"
