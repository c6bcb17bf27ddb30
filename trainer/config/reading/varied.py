"""Several values of a key on the command line: one set of overrides for each run."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.errors import ConfigError


def overrides_of_each(given: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of each run from the texts of `--vary`, KEY=V1,V2; several keys change together.

    Commas in brackets belong to a value. Raises ConfigError for a text that is not understood, and where keys
    have unequal numbers of values.
    """
    columns: list[list[str]] = []
    for text in given:
        key, equals, values = text.partition("=")
        found = _split(values)
        if not equals or len(found) < 2 or not all(found):
            remedy = "write KEY=V1,V2: --vary features.compute=bf16,fp8"
            raise ConfigError(f'"{text}" names no two values of a key', where="--vary", remedy=remedy)
        columns.append([f"{key}={value}" for value in found])
    if len({len(column) for column in columns}) > 1:
        remedy = "give as many values of each: the first of all are of one run"
        raise ConfigError("the keys have unequal numbers of values", where="--vary", remedy=remedy)
    return list(zip(*columns, strict=True))


def _split(values: str) -> list[str]:
    """Parts of a text between its commas, but for those in brackets."""
    parts, depth = [""], 0
    for character in values:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
