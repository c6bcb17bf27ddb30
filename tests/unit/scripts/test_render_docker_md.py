"""The tables of DOCKER.md come from the code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import render_docker_md
from scripts.render_docker_md import DOCKER_MD, TABLES, rendered
from trainer.cli.config import variables_markdown
from trainer.container.appliance import VOLUMES
from trainer.errors import MEANING

PAGE = "".join(
    f"## {name}\n<!-- {name} -->\noutdated {name}\n<!-- /{name} -->\nafter {name}\n" for name in TABLES
)


def test_docker_md_is_up_to_date() -> None:
    text = DOCKER_MD.read_text()
    assert rendered(text) == text, "run make docs"


def test_tables_take_the_place_of_what_was_between_the_markers() -> None:
    page = rendered(PAGE)
    assert "outdated" not in page and variables_markdown() in page
    assert all(f"after {name}\n" in page and f"## {name}\n" in page for name in TABLES)
    assert all(
        f"| `{volume.path}` | {'read-only' if volume.access == 'ro' else 'read and'}" in page
        for volume in VOLUMES
    )
    assert all(f"| {code.value} | {meaning} |\n" in page for code, meaning in MEANING.items())
    assert rendered(page) == page


@pytest.mark.parametrize(
    ("page", "said"),
    [
        (PAGE.replace("<!-- volumes -->", ""), "it needs one line <!-- volumes -->"),
        (PAGE.replace("<!-- /exit codes -->", ""), "below, one <!-- /exit codes -->"),
        (PAGE + PAGE, "it needs one line <!-- variables -->"),
        (
            PAGE.replace("<!-- /volumes -->", "").replace(
                "<!-- volumes -->", "<!-- /volumes -->\n<!-- volumes -->"
            ),
            "is above",
        ),
    ],
)
def test_markers_that_are_not_there_once(page: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rendered(page)


def test_the_script_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "DOCKER.md"
    monkeypatch.setattr(sys, "argv", ["render_docker_md", str(page)])
    assert render_docker_md.main() == 1
    assert str(page) in capsys.readouterr().err
    page.write_text(PAGE)
    assert render_docker_md.main() == 0
    assert page.read_text() == rendered(PAGE)
