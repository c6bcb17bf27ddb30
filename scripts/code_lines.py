"""Lines with code in Python files: without blank lines, comments and docstrings.

python scripts/code_lines.py trainer scripts bench
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
    tokenize.ENCODING,
}  # fmt: skip


def code_lines(text: str) -> int:
    """Lines of Python source that hold more than a comment or a string that stands alone."""
    alone = {
        line
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(lines - alone)


def main() -> None:
    """Print one line a folder below the given ones, and a sum for each of these."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    for folder in parser.parse_args().folders:
        counts: dict[Path, int] = {}
        for path in sorted(folder.rglob("*.py")):
            below = path.relative_to(folder).parts
            room = folder / below[0] if len(below) > 1 else folder
            counts[room] = counts.get(room, 0) + code_lines(path.read_text())
        for room, count in counts.items():
            print(f"{count:7,} {room}")
        print(f"{sum(counts.values()):7,} {folder} in all")


if __name__ == "__main__":
    main()
