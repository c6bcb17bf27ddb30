"""Text of documentation that lies on every machine that trains: docstrings of installed packages, as chats.

No torch, and none of the packages is imported: their files are parsed.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from trainer.errors import AccessError

PACKAGES = ("numpy", "torch", "diffusers")
PIECE_BYTES = 1600
"""The longest answer: with its question and marks it fits a row of 2,048 bytes."""
_SHORTEST = 200
_HELD_OUT_MODULES = 40
"""One module in so many is held out, by its name's hash."""


@dataclass(frozen=True, kw_only=True)
class Texts:
    """Two files of conversations, and where their text comes from."""

    chat_file: Path
    held_out_file: Path
    source: str
    """For people: packages with their versions, and the size."""


def write_texts(
    folder: Path, *, most_bytes: int, packages: Sequence[str] = PACKAGES, held_out: int = 32
) -> Texts:
    """Write chats of at most so many bytes of text, and `held_out` others of modules that are not among them.

    The same packages give the same bytes. Raises AccessError where a package is not installed.
    """
    trained: list[str] = []
    apart: list[str] = []
    size = 0
    for module, number, piece in _pieces(packages):
        line = _conversation(module, number, piece)
        if is_held_out(module):
            apart.append(line)
        elif size < most_bytes:
            trained.append(line)
            size += len(piece.encode())
        if size >= most_bytes and len(apart) >= held_out:
            break
    folder.mkdir(parents=True, exist_ok=True)
    chats, others = folder / "chats.jsonl", folder / "held_out.jsonl"
    chats.write_text("".join(trained), encoding="utf-8")
    others.write_text("".join(apart[:held_out]), encoding="utf-8")
    named = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    source = f"{size / 1e6:.1f} MB of docstrings of {named}, in {len(trained):,} conversations"
    return Texts(chat_file=chats, held_out_file=others, source=source)


def is_held_out(module: str) -> bool:
    """True for one module in forty, the same ones everywhere."""
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % _HELD_OUT_MODULES == 0


def split_text(text: str, most_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """The text in pieces of whole lines; a line that is longer than a piece is left out."""
    lines: list[str] = []
    size = 0
    for line in text.splitlines():
        length = len(line.encode()) + 1
        if length > most_bytes:
            continue
        if size + length > most_bytes:
            yield "\n".join(lines).strip()
            lines, size = [], 0
        lines.append(line)
        size += length
    yield "\n".join(lines).strip()


def docstrings(source: bytes) -> list[str]:
    """The docstrings of a module, its classes and functions, in order; none of a file that is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    owners = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, owners))
    return [text for text in found if text]


def _pieces(packages: Iterable[str]) -> Iterator[tuple[str, int, str]]:
    """(module, number, text) of all pieces; a docstring that came before is passed over."""
    seen: set[str] = set()
    for package in packages:
        root = _folder(package)
        for file in sorted(root.rglob("*.py")):
            module = ".".join([package, *file.relative_to(root).with_suffix("").parts])
            if "test" in module:
                continue
            new = [text for text in docstrings(file.read_bytes()) if text not in seen]
            seen.update(new)
            pieces = (one for one in split_text("\n\n".join(new)) if len(one) >= _SHORTEST)
            for number, piece in enumerate(pieces, start=1):
                yield module, number, piece


def _folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise AccessError(
            f"the package {package}, whose docstrings are the text, is not installed",
            where="bench/texts.py",
            remedy="install what pyproject.toml asks for: make setup",
        )
    return Path(found.submodule_search_locations[0])


def _conversation(module: str, number: int, piece: str) -> str:
    messages = [
        {"role": "user", "content": f"Document {module}, part {number}."},
        {"role": "assistant", "content": piece},
    ]
    return json.dumps({"messages": messages}, ensure_ascii=False) + "\n"
