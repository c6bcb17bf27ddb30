"""Two parsers read configurations, libyaml's and PyYAML's own: nobody can tell by which one."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainer.config.interpreter import python
from trainer.config.reading import strict_yaml
from trainer.config.reading.presets import shipped_folder

SHIPPED = sorted(shipped_folder().rglob("*.yaml"))
LINES = sorted({line for path in SHIPPED for line in path.read_text().splitlines(keepends=True)})
PIECES = (
    *"ab01:-[]{}\"'&*!|>%@`#~,?<.\n\t\r\\\x85\u2028\ufeff",
    *(" ", ": ", "- ", " #", "? ", " ?", "\n  ", "|-\n  ", "---\n"),
    *("...\n", "!!str ", "&a ", "*a", "<<: ", "null", "\\x41", "\r\n", "{a: b}", "[a, b]"),
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES) | st.sampled_from(LINES), max_size=12).map("".join)


def by_pyyaml(text: str) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "__with_libyaml__", False)
        return strict_yaml.parse(text, str)


@pytest.mark.slow
@settings(max_examples=1000)
@example("a:\tb")
@example("[what is this? a dog]")
@example("a: |# a comment\n  b")
@example("a: ! b")
@example("a: [1, 2]\n---\n  \n")
@example("\n\ufeff")
@given(text=TEXTS)
def test_any_text_is_read_alike(text: str) -> None:
    assert strict_yaml.parse(text, str) == by_pyyaml(text)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_files_are_read_by_libyaml_and_alike(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = path.read_text()
    expected = by_pyyaml(text)
    monkeypatch.setattr(strict_yaml, "_PythonLoader", None)
    assert strict_yaml.parse(text, str) == expected


def test_pyyaml_without_libyaml_reads_everything() -> None:
    code = (
        "import sys; sys.modules['yaml._yaml'] = None; import yaml; assert not yaml.__with_libyaml__;"
        "from trainer.config.reading import strict_yaml;"
        "print(strict_yaml.parse('a: [1, ~]\\nb: &x y\\n', str)[1][0]);"
        "print(strict_yaml.parse('a: 1', str)[0].plain())"
    )
    done = subprocess.run(python("-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2: anchors (&) and aliases (*) are not supported")
    assert done.stdout.endswith("{'a': '1'}\n")
