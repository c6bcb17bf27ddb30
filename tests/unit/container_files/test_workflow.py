"""The workflow that builds, tests, scans and pushes images may do no more than it must."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import yaml

from tests.unit.house.sources import ROOT

WORKFLOW = ROOT / ".github/workflows/docker.yml"


def workflow() -> dict[str, Any]:
    loaded = yaml.safe_load(WORKFLOW.read_text())
    assert isinstance(loaded, dict)
    return loaded


def test_actions_are_pinned_to_commits_and_say_which_version() -> None:
    uses = re.findall(r"uses: (.+)$", WORKFLOW.read_text(), re.MULTILINE)
    assert uses
    for action in uses:
        assert re.fullmatch(r"[\w-]+/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action


def test_the_workflow_may_do_no_more_than_it_must() -> None:
    found = workflow()
    assert found["permissions"] == {"contents": "read"}
    for name, job in found["jobs"].items():
        assert "timeout-minutes" in job, name
        more = {key for key, value in job.get("permissions", {}).items() if value == "write"}
        assert more <= {"packages"}, name
        assert not more or "startsWith(github.ref, 'refs/tags/" in job["if"], name
        checkouts = [step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")]
        assert all(step["with"]["persist-credentials"] is False for step in checkouts), name
    secrets = set(re.findall(r"secrets\.(\w+)", WORKFLOW.read_text()))
    assert secrets <= {"GITHUB_TOKEN"}


def test_no_value_from_outside_is_pasted_into_a_script() -> None:
    scripts = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    assert scripts
    assert [script for script in scripts if "${{" in script] == []


def test_the_workflow_runs_make_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"run: (?:sudo \S+ )?make ([a-z][a-z-]*)$", WORKFLOW.read_text(), re.MULTILINE))
    assert {"lint", "type", "pins", "test", "test-container"} <= named <= targets


def test_scripts_are_shell() -> None:
    scripts = [step["run"] for job in workflow()["jobs"].values() for step in job["steps"] if "run" in step]
    for script in scripts:
        assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0, script
