"""Whatever stands in a file, a variable or an option: a configuration or a ConfigError, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config import fields
from trainer.config.reading.load import load
from trainer.errors import ConfigError

GOOD = (
    "family: tiny\nmodel: {pretrained_model_name_or_path: m}\ndata: {sets: [{img_dir: a}]}\noutput_dir: out\n"
)
yaml_like = st.text(alphabet="ab01: -[]{}\"'&*!|>%@`#~,?<.\n\t\\\x85\u2028", max_size=40)
values = yaml_like | st.sampled_from(
    ["null", "[]", "{}", "[null]", "[{}]", "{a: b}", "-1", "9" * 5000, "x" * 5000, "\0"]
)
keys = st.sampled_from(
    [
        *fields.dotted_keys(),
        "data",
        "model",
        "train",
        "data.sets.0",
        "data.sets.x",
        "a..b",
        ".",
        "network.linear",
        "steps",
    ]
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "config.yaml"


def survives(file: Path, raw: bytes, overrides: list[str], environ: dict[str, str]) -> None:
    file.unlink(missing_ok=True)  # file systems write one that is cut and filled again to the disk at once
    file.write_bytes(raw)
    try:
        load([file], overrides=overrides, family_defaults={"tiny": {}}, environ=environ)
    except ConfigError as error:
        assert error.problems
        assert all(problem.where and problem.what and problem.remedy for problem in error.problems)


@pytest.mark.slow
@settings(max_examples=1300)
@given(raw=st.binary(max_size=60) | yaml_like.map(str.encode))
def test_any_file(file: Path, raw: bytes) -> None:
    survives(file, raw, [], {})
    survives(file, GOOD.encode() + raw, [], {})


@pytest.mark.slow
@settings(max_examples=700)  # each by three ways in
@given(key=keys, value=values)
def test_any_value(file: Path, key: str, value: str) -> None:
    survives(file, GOOD.encode(), [f"{key}={value}"], {})
    survives(file, GOOD.encode(), [], {"TRAINER__" + key.upper().replace(".", "__"): value})
    section, _, leaf = key.partition(".")
    text = GOOD if section in ("train", "lora", "flow", "features", "validation", "checkpoint") else ""
    survives(file, (text + f"{section}:\n  {leaf}: {value}\n").encode(), [], {})
