"""Links in a run's folder lead nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.errors import ConfigError
from trainer.telemetry.rundir import require_no_links


@pytest.mark.parametrize(
    "name",
    [
        ".lock",
        "log.jsonl",
        "metrics.jsonl",
        "checkpoints",
        "samples",
        "best",
        "checkpoints/step-000004",
        "samples/step-000004.png",
    ],
)
def test_a_link_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    precious, run_dir = tmp_path / "precious", tmp_path / "run"
    precious.write_text("mine")
    link = run_dir / name
    link.parent.mkdir(parents=True)
    link.symlink_to(precious)
    with pytest.raises(ConfigError, match="does not follow links") as caught:
        require_no_links(run_dir)
    assert caught.value.problems[0].where == str(link)
    assert str(precious) in caught.value.problems[0].what


def test_other_names_and_the_folder_itself_may_be_links(tmp_path: Path) -> None:
    folder = tmp_path / "disk" / "run"
    (folder / "checkpoints" / "step-000001").mkdir(parents=True)
    (folder / "notes").symlink_to("/etc")
    (folder / "checkpoints" / "kept").symlink_to("/etc")
    (tmp_path / "run").symlink_to(folder)
    require_no_links(tmp_path / "run")
    require_no_links(tmp_path / "absent")
