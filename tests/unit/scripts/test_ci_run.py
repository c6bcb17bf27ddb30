"""The last line of .ci/run, and container tests that cannot run."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.container import conftest
from tests.container.engine import NoEngineError

RUN = Path(__file__).resolve().parents[3] / ".ci" / "run"
LOGS = {
    "test": "1200 passed, 3 skipped, 2 warnings in 300.00s",
    "slow": "12 passed in 2.00s",
    "browser": "40 skipped in 0.10s",
    "container": "1 passed, 5 skipped, 1 warning in 9.99s",
}


def ending(folder: Path, logs: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """The last part of the script, which counts what the steps before it said."""
    for name, text in logs.items():
        (folder / f"{name}.log").write_text(f"...\n{text}\n")
    last = RUN.read_text().partition("# Only reached when nothing failed")[2].partition("\n")[2]
    assert "all checks passed" in last
    script = f"set -euo pipefail\nlogs={folder}\n{last}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


def test_the_last_line_counts_what_was_skipped(tmp_path: Path) -> None:
    found = ending(tmp_path, LOGS)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "1213 passed, 0 failed, 48 skipped"
    found = ending(tmp_path, dict.fromkeys(LOGS, "2 passed in 1.00s"))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "8 passed, 0 failed, 0 skipped"


@pytest.mark.parametrize(("user", "expected"), [(0, NoEngineError), (1000, pytest.skip.Exception)])
def test_root_skips_no_test_of_images(
    user: int, expected: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: Any) -> Any:
        raise NoEngineError("no debootstrap")

    monkeypatch.setattr(conftest, "find_source", lacking)
    monkeypatch.setattr(conftest.os, "geteuid", lambda: user)
    engine: Any = None
    with pytest.raises((NoEngineError, pytest.skip.Exception), match="no debootstrap") as caught:
        conftest.source_of(engine)
    assert caught.type is expected
