"""Suggestions of a refusal or an out-of-memory error load when written as `--set`, and are planned."""

from __future__ import annotations

import functools
import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from tests.golden.plans import ROOT
from tests.unit.planning.conftest import machine
from tests.unit.planning.test_out_of_memory import CUDA
from trainer import families
from trainer.config.judging.rule import Rule
from trainer.config.reading.load import Loaded, load
from trainer.errors import ConfigError, HardwareError
from trainer.machine.facts import Facts
from trainer.planning import rules
from trainer.planning.out_of_memory import out_of_memory
from trainer.planning.planning import may_be_planned, plan_run
from trainer.telemetry.status import Phase

MACHINES = ("rtx-4090", "dgx-spark", "a100-80gb", "h200", "cpu")
CONFIGS = ("flux1_dev_lora", "flux2_dev_lora", "qwen_image_lora", "llama_lora", "flux1_dev_full")
ADAPTERS = ("", "lora.type=dora", "lora.type=lokr", "lora.dropout=0.1", "model.dtype=fp16")
FEATURES = (
    "",
    "features.weights=bf16",
    "features.weights=fp32",
    "features.weights=fp8 features.modulation=int8",
    "features.weights=int8 features.memory_budget=9GiB",
    "features.compute=fp8 features.modulation=kept",
    "features.activation_budget=0.6",
    "features.activation_checkpointing=false features.cuda_graphs=true",
    "features.block_swap=0 features.vae_tiling=false features.memory_budget=20GiB",
    "features.compile=false features.memory_budget=16GiB",
)
SUGGESTED = re.compile(r"\b((?:lora|features|data|train|method|model|parallel)[a-z_.]*): ([^\s,;()]+)")


def loaded(name: str, *overrides: str) -> Loaded | None:
    """A shipped configuration as the command line loads it; None where it contradicts itself."""
    defaults = {one: families.get(one).defaults for one in families.names()}
    try:
        return load(
            [ROOT / "train_configs" / f"{name}.yaml"],
            overrides=overrides,
            output=Path("/nowhere/run"),
            family_defaults=defaults,
            environ={},
        )
    except ConfigError:
        return None


def suggestions(remedy: str) -> list[list[str]]:
    """Each of the alternatives as values of `--set`."""
    found = [
        [f"{key}={value}" for key, value in SUGGESTED.findall(part)] for part in re.split(r",? or ", remedy)
    ]
    return [one for one in found if one]


def check(name: str, overrides: tuple[str, ...], facts: Facts, remedy: str) -> int:
    """Every suggestion is taken at its word."""
    alternatives = suggestions(remedy)
    for settings in alternatives:
        changed = loaded(name, *overrides, *settings)
        assert changed is not None, f"{name} {overrides}: {settings} is refused by the configuration"
        plan_run(changed, facts, find_model=lambda _: None)
    return len(alternatives)


def pairs(computer: str, name: str) -> list[tuple[str, str]]:
    """Adapters and features: each alone, and each feature with one adapter, with another one elsewhere.

    All pairs are met on each machine, and with each configuration.
    """
    shift = MACHINES.index(computer) + CONFIGS.index(name)
    turns = [(ADAPTERS[(number + shift) % len(ADAPTERS)], one) for number, one in enumerate(FEATURES)]
    return list(dict.fromkeys([*((one, "") for one in ADAPTERS), *(("", one) for one in FEATURES), *turns]))


QUICK = {("rtx-4090", "flux1_dev_lora"), ("dgx-spark", "flux1_dev_full"), ("cpu", "llama_lora")}
MATRIX = [
    pytest.param(computer, name, marks=() if (computer, name) in QUICK else pytest.mark.slow)
    for computer, name in itertools.product(MACHINES, CONFIGS)
]


@pytest.mark.parametrize(("computer", "name"), MATRIX)
def test_what_is_suggested_can_be_written(computer: str, name: str) -> None:
    facts, tried = machine(computer), 0
    for adapter, feature in pairs(computer, name):
        overrides = tuple(f"{adapter} {feature}".split())
        asked = loaded(name, *overrides)
        if asked is None:
            continue
        try:
            plan = plan_run(asked, facts, find_model=lambda _: None)
        except HardwareError as error:
            remedies = " or ".join(one.remedy for one in error.problems if "fits with" in one.remedy)
            tried += check(name, overrides, facts, remedies)
            continue
        allowed = functools.partial(may_be_planned, asked.config, facts=facts)
        told = out_of_memory(CUDA, Phase.TRAIN, asked.config, plan, allowed)
        tried += check(name, overrides, facts, told.problems[0].remedy)
    assert tried or computer in ("h200", "cpu")


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_plain_lora_is_proposed_where_the_adapter_is_what_does_not_fit(kind: str) -> None:
    asked = loaded("flux1_dev_lora", f"lora.type={kind}")
    assert asked is not None
    with pytest.raises(HardwareError, match=r"fits with lora\.type: lora \("):
        plan_run(asked, machine("rtx-4090"), find_model=lambda _: None)


@pytest.mark.parametrize("table", ["FAMILY", "MACHINE"])
def test_every_suggestion_is_judged_by_the_rules_of_planning(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = machine("rtx-4090")
    asked = loaded("flux1_dev_lora", "features.weights=bf16", "features.block_swap=0")
    assert asked is not None
    with pytest.raises(HardwareError, match=r"features\.weights: fp8 \("):
        plan_run(asked, facts, find_model=lambda _: None)
    assert may_be_planned(asked.config, {"features.weights": "fp8"}, facts)
    refused = Rule[Any](
        ("features.weights",), lambda at: at.config.features.weights == "fp8", "not fp8", "write another"
    )
    monkeypatch.setattr(rules, table, (*vars(rules)[table], refused))
    with pytest.raises(HardwareError) as caught:
        plan_run(asked, facts, find_model=lambda _: None)
    assert "fits with" in str(caught.value) and "weights: fp8" not in str(caught.value)
    assert not may_be_planned(asked.config, {"features.weights": "fp8"}, facts)
