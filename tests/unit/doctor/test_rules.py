"""Every rule finds its line, is silent on what is right, and says what the golden file has."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor_cases import DOCUMENTS, GOLDEN, RULES, asked, outcomes, sides
from trainer import families
from trainer.config import fields
from trainer.doctor import judge, rules
from trainer.doctor.reading import of_text
from trainer.doctor.rules import SEVERITIES

CASES = sorted(RULES.glob("*.txt"), key=lambda path: path.stem)


def test_every_rule_has_a_case() -> None:
    ids = [rule.id for rule in rules.rules()]
    assert len(ids) == len(set(ids)) >= 40
    assert sorted(ids) == [path.stem for path in CASES]


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_a_rule_finds_its_line_and_is_silent_on_what_is_right(path: Path, tmp_path: Path) -> None:
    case = sides(path)
    wrong = asked(case["wrong"], tmp_path / "wrong")
    assert not wrong.problems
    found = [f"{Path(one.place).name}:{one.line}" for one in wrong.findings if one.rule == path.stem]
    assert found == case["wrong"].expected and found
    for name, side in case.items():
        report = asked(side, tmp_path / name)
        assert not report.problems
        if name.startswith("right"):
            assert not report.findings, name
        elif name.startswith("other"):
            assert path.stem not in {one.rule for one in report.findings}, name
    assert "right" in case


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_no_condition_of_a_rule_is_idle(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of its conditions a rule would speak about one of the sides on which it is silent."""
    rule = next(rule for rule in rules.rules() if rule.id == path.stem)
    quiet = [(name, side) for name, side in sides(path).items() if name != "wrong"]
    for place in range(1, len(rule.when)):
        less = replace(rule, when=rule.when[:place] + rule.when[place + 1 :])
        monkeypatch.setattr(rules, "rules", lambda less=less: (less,))
        speaks = [name for name, side in quiet if asked(side, tmp_path / name).findings]
        assert speaks, f"{path.stem}: nothing shows what its condition {place} is for: {rule.when[place]}"


def test_what_is_said_is_the_golden_file(tmp_path: Path) -> None:
    committed: dict[str, Any] = json.loads(GOLDEN.read_text())
    found = outcomes(tmp_path)
    assert sorted(found) == sorted(committed)
    for name, report in found.items():
        assert report == committed[name], f"{name}: run `make golden` and read the diff"


def test_a_key_below_one_with_a_name_is_not_told_as_another_programs() -> None:
    text = '{"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 4}'
    (document,) = of_text(Path("ds.json"), text).documents
    told = {one.key: one.ours for one in judge.called([document])}
    assert told == {"zero_optimization": "", "train_micro_batch_size_per_gpu": "train.train_batch_size"}


def rules_found(name: str, folder: Path) -> dict[str, str]:
    """Severity by rule, of one side of the document's files."""
    report = asked(sides(DOCUMENTS / "fp8-document.txt")[name], folder)
    return {one.rule: one.severity for one in report.findings}


def test_the_documents_seven_errors_are_judged_as_they_are(tmp_path: Path) -> None:
    broken = rules_found("broken", tmp_path)
    assert broken["ds-fp8-section"] == "unused"  # 1, right
    assert broken["ds-fp32-sums"] == "note"  # 2, a cost
    assert broken["ds-fp32-messages"] == "note"  # 3, on several GPUs only
    assert rules_found("eight", tmp_path) == {"ds-fp32-messages-several": "slow"}
    assert (broken["lf-fp8-eager"], broken["lf-backend-auto"]) == ("slow", "note")  # 4, right
    assert not {"env-one-connection", "env-fp8-allreduce"} & set(broken)  # 5 and 6, wrong: nothing is missing
    report = asked(sides(DOCUMENTS / "fp8-document.txt")["broken"], tmp_path)
    (row,) = report.decided  # 7
    assert row.wish == "FP8" and row.winner.endswith("train_fp8.sh:12 fp8: true")
    assert "ds_z1_fp8_config.json:9 fp8.enabled: true (nothing reads it)" in row.losers[0]


def test_its_corrected_files_are_silent_where_they_are_right(tmp_path: Path) -> None:
    assert rules_found("corrected", tmp_path) == {
        "ds-no-precision": "slow",
        "env-one-connection": "slow",
        "env-layer-scaling": "unused",
        "env-attention-default": "note",
        "env-fp8-allreduce": "unused",
        "sh-continuation": "error",
    }


def test_a_whole_stack_that_is_right(tmp_path: Path) -> None:
    report = asked(sides(DOCUMENTS / "stacks.txt")["right"], tmp_path)
    kinds = {one.kind for one in report.documents}
    assert kinds == {"deepspeed", "llamafactory", "script", "packages"}
    assert not report.findings and not report.decided


def test_every_row_is_whole() -> None:
    for rule in rules.rules():
        assert rule.what and rule.why and rule.here and rule.source, rule.id
        assert rule.severity in SEVERITIES
        assert not rule.machine or rule.severity == "error"


def test_keys_of_ours_that_rules_name_exist() -> None:
    sections = {key.partition(".")[0] for key in fields.dotted_keys() if "." in key}
    keys = {*fields.dotted_keys(), *sections}
    for rule in (*rules.rules(), *rules.wishes()):
        for key in re.findall(r"\b[a-z]+\.[a-z_]+\b", rule.here):
            if key.partition(".")[0] in sections and not key.endswith((".md", ".yaml")):
                assert key in keys, f"{key} is no key of ours"


def test_keys_of_axolotl_in_this_trainers_words() -> None:
    text = """base_model: a
datasets: [{path: a.jsonl}]
adapter: qlora
lora_target_linear: true
lora_modules_to_save: [embed_tokens, lm_head]
neftune_noise_alpha: 5
special_tokens: {pad_token: x}
optimizer: paged_adamw_8bit
learning_rate: 1e-4
report_to: wandb
compile: true
"""
    (document,) = of_text(Path("ax.yaml"), text).documents
    told = {one.key: (one.ours, one.note) for one in judge.called([document])}
    assert told["adapter"][0] == "method" and "`features.weights: nf4`" in told["adapter"][1]
    assert told["lora_target_linear"] == ("lora.target_modules", "write all-linear")
    none = {"lora_modules_to_save": "method: full", "neftune_noise_alpha": "NEFTune", "special_tokens": "pad"}
    assert all(told[key][0] == "" and word in told[key][1] for key, word in none.items())
    assert "pad_token" not in told and told["learning_rate"] == ("train.learning_rate", "the same name here")
    assert told["report_to"][1] == told["compile"][1] == "the same name here"
    assert told["optimizer"][0] == "train.optimizer" and "adamw_8bit or prodigy" in told["optimizer"][1]


def test_what_the_table_of_names_promises_is_a_value_here() -> None:
    assert "nf4" in fields.choices(("features", "weights"))
    assert {"lora", "full"} <= set(fields.choices(("method",)))
    assert all("all-linear" in family.lora_targets for family in map(families.get, families.names()))
