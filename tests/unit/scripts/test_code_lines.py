"""Counting lines with code."""

from __future__ import annotations

from scripts.code_lines import code_lines

SOURCE = '''"""A module."""

# a comment
VALUE = """text
of two lines"""


def function(
    first: int,  # why
) -> int:
    """A sentence.

    Another.
    """
    return first
'''


def test_blanks_comments_and_docstrings_do_not_count() -> None:
    assert code_lines(SOURCE) == 6
