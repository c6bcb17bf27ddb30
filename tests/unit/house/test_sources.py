"""Rules that no linter knows: sizes, floors, family names, probing, and what a committed file may say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.tiny import TINY_MODELS
from tests.unit.house.sources import ROOT, modules, name, parse, tracked
from trainer import families
from trainer.families.family import Family

MAX_FILE_LINES = 400
MAX_FAMILY_LINES = 210
MAX_FUNCTION_LINES = 50
TORCH_FREE = (
    *(
        "errors",
        "files",
        "words",
        "ways",
        "config",
        "machine",
        "telemetry",
        "planning",
        "container",
        "doctor",
        "ui",
        "queue",
    ),
)
MOST_MODULES = 14
NO_FAMILY = r"train_configs/\S+\.yaml|LLaMA-Factory|\bllamafactory\b"
"""Words that hold a family's name and name none: shipped configurations, and another trainer."""
MODEL_LIBRARIES = {"torch", "diffusers", "transformers", "peft", "accelerate", "optimum", "safetensors"}


def test_files_are_short() -> None:
    limits = {f"trainer.families.{family}": MAX_FAMILY_LINES for family in families.names()}
    long = []
    for path in modules():
        module = name(path).removesuffix(".py").replace("/", ".")
        lines, limit = len(path.read_text().splitlines()), limits.get(module, MAX_FILE_LINES)
        if lines > limit:
            long.append(f"{name(path)} has {lines} lines, {limit} are allowed: split it by what it answers")
    assert not long


def test_functions_are_short() -> None:
    long = [
        f"{name(path)}:{node.lineno} {node.name} has {length} lines"
        for path in modules()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]
    assert not long


def test_rooms_are_small() -> None:
    """The top level, `cli` (a file a command) and `families` (a file a family) apart."""
    exempt = {ROOT / "trainer", ROOT / "trainer" / "cli", ROOT / "trainer" / "families"}
    rooms = {path.parent for path in modules()} - exempt
    counts = {room: len([path for path in room.glob("*.py") if path.name != "__init__.py"]) for room in rooms}
    assert not {name(room): count for room, count in counts.items() if count > MOST_MODULES}


def test_nothing_is_probed_and_no_error_is_swallowed() -> None:
    found = []
    for path in modules():
        for node in ast.walk(parse(path)):
            match node:
                case (
                    ast.Call(func=ast.Name(id="hasattr"))
                    | ast.Call(func=ast.Name(id="getattr"), args=[_, _, _])
                ):
                    found.append(f"{name(path)}:{node.lineno} asks an object what it has")
                case ast.ExceptHandler(type=None):
                    found.append(f"{name(path)}:{node.lineno} catches everything")
                case ast.ExceptHandler(type=caught) if {"Exception", "BaseException"} & _names(caught):
                    found.append(f"{name(path)}:{node.lineno} catches everything")
    assert not found


def _names(node: ast.AST | None) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} if node else set()


def test_no_other_module_names_a_family() -> None:
    """Only the families' own folder does; help names shipped configurations, the doctor other trainers."""
    # flux1_dev -> flux: classes and titles of the family begin with it too
    stems = "|".join(match[0] for family in _families() if (match := re.match(r"[a-z]+", family.name)))
    found = [
        f"{name(path)}:{number} {line.strip()}"
        for path in modules()
        if not path.is_relative_to(ROOT / "trainer" / "families")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(stems, re.sub(NO_FAMILY, "", line), re.IGNORECASE)
    ]
    assert not found, "ask the `Family` value instead"


def _families() -> list[Family]:
    return [families.get(family) for family in families.names()]


def test_every_family_is_complete() -> None:
    """A family is its file, a row, a configuration and a tiny base model."""
    assert families.names() == TINY_MODELS
    for family in families.names():
        assert families.get(family).name == family
        assert list((ROOT / "train_configs").glob(f"{family}_*.yaml")), (
            f"{family} has no train_configs/*.yaml"
        )


def test_floors_hold() -> None:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert "5 kept, 0 broken" in result.stdout


def test_torch_free_floors_import_no_model_library() -> None:
    """Unlike import-linter, this also sees imports by the libraries that these floors use."""
    names = [
        name(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in modules()
        if path.relative_to(ROOT / "trainer").parts[0].removesuffix(".py") in TORCH_FREE
    ]
    assert {module.split(".")[1] for module in names} == set(TORCH_FREE)
    code = f"import sys, {', '.join(names)}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert not MODEL_LIBRARIES & {module.partition(".")[0] for module in loaded.stdout.split()}


def test_python_is_started_in_one_way() -> None:
    """`interpreter.python`: a child that is started otherwise imports from the working directory."""
    found = [
        f"{name(path)}:{node.lineno}"
        for path in modules()
        if path.is_relative_to(ROOT / "trainer")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    ]
    assert [place.partition(":")[0] for place in found] == ["trainer/config/interpreter.py"], found


def test_no_committed_file_knows_this_machine() -> None:
    # a folder right below / may bear an ordinary word
    here = [f"{place}/" for place in (ROOT, Path.home()) if len(place.parts) > 2]
    assert len(tracked()) > 100
    for path in tracked():
        content = path.read_bytes()
        assert not [place for place in here if place.encode() in content], name(path)


def test_build_files_name_no_address() -> None:
    """Where packages come from is each machine's own setting."""
    build_files = [
        path
        for path in tracked()
        if path.name in ("Makefile", "pyproject.toml", "constraints.txt", ".pre-commit-config.yaml")
        or path.parent.name == ".ci"
        or path.suffix == ".sh"
    ]
    assert len(build_files) >= 5
    for path in build_files:
        assert not re.findall(r"https?://\S+|--(?:extra-)?index-url|--find-links", path.read_text()), name(
            path
        )
