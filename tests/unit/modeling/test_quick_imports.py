"""Libraries are imported without work that nobody asks for, and are what they are otherwise."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trainer.config import environment
from trainer.config.interpreter import python
from trainer.modeling import quick_imports

PROGRAM = """
import sys
import transformers
from transformers.utils import import_utils
scan = import_utils.create_import_structure_from_path
from trainer.modeling.quiet import quiet_libraries
quiet_libraries()
import torch
assert torch.compile.__module__ == "torch"
import transformers.models
asked = scan.cache_info().misses
from peft import LoraConfig
from diffusers import FluxTransformer2DModel
# the classes of one folder at most were looked for, not those of all
assert scan.cache_info().misses - asked < 100, scan.cache_info()
assert "torch._inductor.compile_fx" not in sys.modules
file = transformers.models.__file__
ours = import_utils.define_import_structure(file)
import_utils.create_import_structure_from_path = scan
import_utils.define_import_structure.cache_clear()
scan.cache_clear()
assert import_utils.define_import_structure(file) == ours and len(ours) > 1
"""


def test_a_run_that_compiles_nothing_imports_no_code_generator_and_knows_all_classes() -> None:
    done = subprocess.run(python("-c", PROGRAM), env=environment.snapshot(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_function_is_compiled_when_it_is_called_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiling(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        asked.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compiling)

    @quick_imports._compile_when_called
    def double(number: int) -> int:
        return 2 * number

    @quick_imports._compile_when_called(dynamic=False)
    def triple(number: int) -> int:
        return 3 * number

    assert double.__name__ == "double" and not asked
    assert [double(1), double(2), triple(3)] == [2, 4, 9]
    assert asked == [{}, {"dynamic": False}]
