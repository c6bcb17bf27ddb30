"""Imports of libraries without work that no run asks for: a fifth of the start of a process that trains.

peft imports bitsandbytes wherever it is installed, which hands functions to `torch.compile` at once: that
imports the code generator, also for runs that compile nothing. transformers reads all its files to know its
classes, and does so again for `transformers.models`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any


@functools.cache
def shorten_imports() -> None:
    """Take the short way through both libraries; call it once transformers is imported, before peft is."""
    import torch
    from transformers.utils import import_utils

    scan = import_utils.create_import_structure_from_path

    def scan_once(path: str | Path) -> Any:
        """Ask as `import transformers` did, whose answer is kept: by the folder's path."""
        asked = Path(path)
        return scan(asked.parent if asked.is_file() else asked)

    import_utils.create_import_structure_from_path = scan_once  # type: ignore[assignment]
    if importlib.util.find_spec("bitsandbytes") is None:
        return
    compile_now = torch.compile
    torch.compile = _compile_when_called  # type: ignore[assignment]
    try:
        with contextlib.suppress(Exception):  # who needs it is told by its own import
            import bitsandbytes  # noqa: F401
    finally:
        torch.compile = compile_now


def _compile_when_called(function: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
    """Stand for `torch.compile`, which is asked at the first call of what this returns."""
    if function is None:
        return functools.partial(_compile_when_called, **options)
    import torch

    compiled = functools.cache(lambda: torch.compile(function, **options))

    @functools.wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return compiled()(*given, **named)

    return call
