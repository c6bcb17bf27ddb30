"""S14: files of other projects are theirs to the byte, and nothing else is loaded."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from trainer.ui.page import STATIC, TEMPLATES

VENDOR = STATIC / "vendor"
LINES = [line.split() for line in (VENDOR / "VENDOR").read_text().splitlines() if line and line[0] != "#"]
FILES = {words[1]: words[2] for words in LINES if words[0] == "file"}
PACKAGES = [words[1:] for words in LINES if words[0] == "package"]


@pytest.mark.parametrize("name", FILES)
def test_a_vendored_file_has_its_hash(name: str) -> None:
    digest = hashlib.sha512((VENDOR / name).read_bytes()).digest()
    assert f"sha512-{base64.b64encode(digest).decode()}" == FILES[name]


def test_every_vendored_file_is_listed_and_every_package_brings_its_licence() -> None:
    assert {path.name for path in VENDOR.iterdir()} == {*FILES, "VENDOR"}
    assert [(name, version, licence) for name, version, licence, _ in PACKAGES] == [
        ("htmx.org", "4.0.1", "0BSD"),
        ("uplot", "1.6.32", "MIT"),
    ]
    for words in PACKAGES:
        assert re.fullmatch(r"sha512-[A-Za-z0-9+/]{86}==", words[3])
    assert "Zero-Clause BSD" in (VENDOR / "htmx-LICENSE.txt").read_text()
    assert "MIT License" in (VENDOR / "uPlot-LICENSE.txt").read_text()


def test_no_template_and_no_script_names_another_address() -> None:
    own = [*TEMPLATES.iterdir(), *(path for path in STATIC.iterdir() if path.is_file())]
    assert len(own) > 8
    for path in own:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.findall(r"https?://|url\(|@import|\bsrc=\"//", text), path.name


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
