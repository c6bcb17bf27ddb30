"""Rows as text: columns for a terminal, and Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence

_LEAST_WRAPPED = 40


def aligned(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), width: int | None = None
) -> list[str]:
    """Lines whose columns are as wide as their widest cell, with two spaces between them.

    Cells of the columns `right` stand on the right. With `width` characters to a line the last column is
    wrapped, and takes 40 at least.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(most) if index in right else cell.ljust(most)
            for index, (cell, most) in enumerate(zip(row, widths, strict=True))
        ]
        start = "".join(f"{cell}  " for cell in cells[:-1])
        last = [cells[-1]]
        if width is not None:
            last = textwrap.wrap(row[-1], max(_LEAST_WRAPPED, width - len(start)), break_long_words=False)
        first, *more = last or [""]
        lines += [f"{start}{first}".rstrip(), *(" " * len(start) + line for line in more)]
    return lines


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with a newline at its end; a | in a cell is text."""
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
