"""The known word that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word most like `word`, without regard to case, hyphens and underscores.

    Two words are alike by `cutoff`, from 0 for any to 1 for equal letters.
    """
    import difflib  # only a mistake needs it

    plain = {_letters(name): name for name in known}
    found = difflib.get_close_matches(_letters(word), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The question with the closest known word and a space behind it; empty where none is close."""
    near = closest(word, known)
    return f"did you mean `{near}`? " if near else ""


def _letters(word: str) -> str:
    return "".join(character for character in word.lower() if character.isalnum())
