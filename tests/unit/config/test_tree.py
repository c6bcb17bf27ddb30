"""Errors that name a key alone are told with the place where it was written."""

from __future__ import annotations

import pytest

from trainer.config.tree import placing
from trainer.errors import ConfigError, Problem

SOURCES = {"flow.shift": "c.yaml:7", "data.resolution": "family llama"}


def test_a_key_that_the_user_wrote_gets_its_place() -> None:
    wheres = ["flow.shift", "data.resolution", "train.seed", "c.yaml:9", ""]
    with pytest.raises(ConfigError) as caught, placing(SOURCES):
        raise ConfigError([Problem(what="wrong", where=where) for where in wheres])
    assert [one.where for one in caught.value.problems] == ["c.yaml:7: flow.shift", *wheres[1:]]
    assert "c.yaml:7: flow.shift: wrong" in str(caught.value)


def test_an_option_that_names_its_key_is_its_place() -> None:
    with pytest.raises(ConfigError) as caught, placing({"flow.shift": "--set flow.shift"}):
        raise ConfigError("wrong", where="flow.shift")
    assert caught.value.problems[0].where == "--set flow.shift"
