"""Kernels in Triton's interpreter, beside plain torch. torch's CPU builds come without Triton."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from trainer.config.interpreter import python, with_safe_path

FILES = ("interpreted_fp8_kernels.py", "interpreted_split_adamw.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton beside this torch")
@pytest.mark.parametrize("file", FILES)
def test_kernels_in_the_interpreter(file: str) -> None:
    environment = with_safe_path(dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES=""))
    command = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(Path(__file__).with_name(file))
    )
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert re.search(r"^\d+ passed", done.stdout, re.MULTILINE) and "skipped" not in done.stdout
