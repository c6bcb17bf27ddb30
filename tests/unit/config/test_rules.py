"""The table of rules and its runner: rows name keys that exist, and rows of other rooms run by it too."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from trainer.config import fields
from trainer.config.judging.rule import Context, Rule, check
from trainer.config.judging.rules import RULES
from trainer.config.schema import FlowSection, RunConfig

KEYS = {*fields.dotted_keys(), *RunConfig.model_fields}


@dataclass(frozen=True, kw_only=True)
class OnMachine(Context):
    """A context of another room, which knows more."""

    free_gib: int


def context(**features: object) -> OnMachine:
    config = RunConfig.model_validate(
        {
            "family": "x",
            "model": {"pretrained_model_name_or_path": "m"},
            "data": {"sets": [{"img_dir": "i"}]},
            "features": features,
            "output_dir": "o",
        }
    )
    sources = {"features.compile": "c.yaml:3", "features.tf32": "preset fast", "lora.rank": "c.yaml:4"}
    return OnMachine(config=config, sources=sources, environ={}, lora_presets={}, free_gib=8)


@pytest.mark.parametrize(
    ("scheme", "scale", "refused"),
    [
        *[("mode", scale, False) for scale in (-1.0, 1.29, 1.75)],
        *[("mode", scale, True) for scale in (-1.01, 1.76)],
        *[(scheme, scale, False) for scheme in ("none", "cosmap") for scale in (-2.0, 2.0)],
    ],
)
def test_a_mode_has_bounds_where_it_is_drawn_by(scheme: str, scale: float, refused: bool) -> None:
    """A value that somebody recorded and nothing draws by is no reason to refuse a run."""
    flow = FlowSection(weighting_scheme=scheme, mode_scale=scale)  # type: ignore[arg-type]
    plain = context()
    found = check(RULES, replace(plain, config=plain.config.model_copy(update={"flow": flow})))
    assert any("noise levels" in problem.what for problem in found) is refused


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.what)
def test_rows_name_keys_that_exist(rule: Rule[Context]) -> None:
    assert {*rule.keys, *rule.at} <= KEYS | {"data.sets.0.is_reg"}
    named = re.findall(r"\{[@=]?([\w.]+)\}", rule.what + rule.remedy)
    assert {key for key in named if "." in key} <= KEYS


def test_a_row_of_another_room_fills_in_values_sources_and_its_own_words() -> None:
    row = Rule[OnMachine](
        ("features.tf32", "features.compile"),
        lambda at: [{"free": str(at.free_gib)}] if at.free_gib < 10 else [],
        "{=features.compile} wants more than {free} GiB, and `lora.rank` is {lora.rank} ({@lora.rank})",
        "write {to_q: 8}",
    )
    (problem,) = check((row,), context(compile=True))
    assert problem.where == "c.yaml:3", "the first key that the user wrote"
    assert problem.what == (
        "`features.compile: true` (c.yaml:3) wants more than 8 GiB, and `lora.rank` is 16 (c.yaml:4)"
    )
    assert problem.remedy == "write {to_q: 8}"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ({}, "default"),
        ({"key": "lora.rank"}, "c.yaml:4"),
        ({"key": "lora.rank", "where": "--set x"}, "--set x"),
    ],
)
def test_the_place_of_a_problem(words: dict[str, str], place: str) -> None:
    row = Rule[Context](("features.compile", "method"), lambda at: [words], "no", "yes", at=("method",))
    assert [problem.where for problem in check((row,), context())] == [place]


@pytest.mark.parametrize("bad", ["features.compile", "features"])
def test_a_row_that_looks_at_a_bad_key_is_left_out(bad: str) -> None:
    row = Rule[Context](("features.compile",), lambda at: True, "no", "yes")
    assert check((row,), context()) and not check((row,), context(), frozenset({bad}))
