"""The help of every key, for editors and templates: the string under its field in schema.py.

pydantic would read them too, at every start, and take as long for it as for all the rest of the schema.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path

from trainer.config import schema


@cache
def helps() -> Mapping[str, Mapping[str, str]]:
    """Help by the section's class name and the field's name."""
    found: dict[str, dict[str, str]] = {}
    for section in ast.parse(Path(schema.__file__).read_text(encoding="utf-8")).body:
        if isinstance(section, ast.ClassDef):
            found[section.name] = {
                field.target.id: inspect.cleandoc(str(below.value.value))
                for field, below in pairwise(section.body)
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
                if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            }
    return found
