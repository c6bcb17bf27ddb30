"""S14: files of other projects are theirs to the byte, and nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from trainer.ui.page import STATIC, TEMPLATES

FOLDERS = (STATIC / "vendor", Path(__file__).resolve().parents[2] / "browser/vendor")


def listed(folder: Path, word: str) -> list[list[str]]:
    lines = (
        line.split() for line in (folder / "VENDOR").read_text().splitlines() if line[:1] not in ("", "#")
    )
    return [words[1:] for words in lines if words[0] == word]


FILES = [(folder / name, digest) for folder in FOLDERS for name, digest, _ in listed(folder, "file")]
PACKAGES = [words for folder in FOLDERS for words in listed(folder, "package")]


@pytest.mark.parametrize(("path", "wanted"), FILES, ids=[path.name for path, _ in FILES])
def test_a_vendored_file_has_its_hash(path: Path, wanted: str) -> None:
    digest = hashlib.sha512(path.read_bytes()).digest()
    assert f"sha512-{base64.b64encode(digest).decode()}" == wanted


def test_every_vendored_file_is_listed_and_every_package_brings_its_licence() -> None:
    found = {path for folder in FOLDERS for path in folder.iterdir() if path.name != "VENDOR"}
    assert found == {path for path, _ in FILES}
    assert [tuple(words[:3]) for words in PACKAGES] == [
        ("htmx.org", "4.0.1", "0BSD"),
        ("uplot", "1.6.32", "MIT"),
        ("axe-core", "4.14.1", "MPL-2.0"),
    ]
    assert all(re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", words[3]) for words in PACKAGES)
    texts = {path.name: path.read_text() for path, _ in FILES if "LICENSE" in path.name}
    assert "Zero-Clause BSD" in texts["htmx-LICENSE.txt"]
    assert "MIT License" in texts["uPlot-LICENSE.txt"]
    assert "Mozilla Public License" in texts["axe-LICENSE.txt"]


def test_no_template_and_no_script_names_another_address() -> None:
    own = [*TEMPLATES.iterdir(), *(path for path in STATIC.iterdir() if path.is_file())]
    assert len(own) > 8
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://|url\((?!#)|@import|\bsrc=\"//", text), path.name


FORBIDDEN = (
    r"\|\s*safe\b",
    r"Markup",
    r"autoescape\s+false",
    r"\shx-on",
    r"\son[a-z]+=",
    r"\sstyle=",
    r"[\"' ]js:",
)
"""Unescaped values, and what the content security policy forbids: code and style inside of a page."""


@pytest.mark.parametrize("path", sorted(TEMPLATES.iterdir()), ids=lambda path: path.name)
def test_templates_escape_everything_and_hold_no_code(path: Path) -> None:
    found = [rule for rule in FORBIDDEN if re.search(rule, path.read_text())]
    assert not found
    for script in re.findall(r"<script[^>]*>(.*?)</script>", path.read_text(), re.DOTALL):
        assert not script
