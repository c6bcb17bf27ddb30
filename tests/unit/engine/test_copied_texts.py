"""Texts of the base beside a result: a file of the base that cannot be read is named, not the result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.engine.results import chat_files, full, merge
from trainer.errors import StorageError
from trainer.families import get
from trainer.files import atomic

NAMES = ("LICENSE", "tokenizer_config.json")


def of_a_full_fine_tune(source: Any, target: Path) -> None:
    full._write_others(SimpleNamespace(source=source, family=get("flux1_dev")), target)  # type: ignore[arg-type]


def of_a_merged_model(source: Any, target: Path) -> None:
    merge._copy(source.folder, target)


@pytest.mark.parametrize("write", [of_a_full_fine_tune, of_a_merged_model, chat_files.write_chat_files])
def test_a_text_that_cannot_be_read_is_named(write: Callable[[Any, Path], None], tmp_path: Path) -> None:
    base, target = tmp_path / "base", tmp_path / "model"
    for folder in (base, target):
        folder.mkdir()
    for name in NAMES:
        (base / name).symlink_to("/proc/self/mem")  # its first byte gives EIO
    source = SimpleNamespace(folder=base, chat_template="{{ messages }}")
    with pytest.raises(StorageError, match="while reading it") as caught, atomic.no_space_told(target):
        write(source, target)
    assert caught.value.problems[0].where in [str(base / name) for name in NAMES]
