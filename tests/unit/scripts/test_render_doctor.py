"""docs/doctor.md comes from the doctor's table of rules."""

from __future__ import annotations

from scripts.render_doctor import PAGE, page
from trainer.doctor import rules


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run make docs"


def test_every_rule_is_on_the_page_with_its_source() -> None:
    rows = [line for line in page().splitlines() if line.startswith("| `")]
    for rule in rules.rules():
        row = next(line for line in rows if line.startswith(f"| `{rule.id}` |"))
        assert row.endswith(f"| {rule.source} |") and f"| {rule.severity}" in row


def test_rules_that_the_text_names_exist() -> None:
    import re

    known = {rule.id for rule in rules.rules()}
    named = set(re.findall(r"`((?:ds|lf|acc|env|sh|pip|docker|k8s)-[a-z0-9-]+)`", page()))
    assert named and named <= known
