"""Previews of steps that a run draws again."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.engine.training.preview import drop_previews_after
from trainer.errors import StorageError


@pytest.fixture
def context(tmp_path: Path) -> Any:
    for step in (2, 4):
        (tmp_path / f"samples/step-{step:06d}").mkdir(parents=True)
        (tmp_path / f"samples/step-{step:06d}/0.png").write_bytes(b"a picture")
        (tmp_path / f"samples/step-{step:06d}.png").write_bytes(b"a row")
    return SimpleNamespace(run_dir=tmp_path)


def test_later_ones_are_removed(context: Any, tmp_path: Path) -> None:
    drop_previews_after(context, 2)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [
        "step-000002",
        "step-000002.png",
    ]


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EACCES])
def test_a_picture_that_somebody_has_open_stays_and_ends_no_run(
    context: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """A network's file system keeps it in the folder; what cannot be removed at all is told."""

    def rmtree(path: Path) -> None:
        raise OSError(code, os.strerror(code), str(path))

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    if code == errno.ENOTEMPTY:
        drop_previews_after(context, 2)
        assert not (tmp_path / "samples/step-000004.png").exists()
    else:
        with pytest.raises(StorageError):
            drop_previews_after(context, 2)
