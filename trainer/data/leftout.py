"""Files that cannot be used: one list of problems, or one of the files that are left out."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer.data.records import LeftOut
from trainer.errors import DataError, Problem, one_line
from trainer.files import atomic
from trainer.words.plurals import numbered

MAX_PROBLEMS_SHOWN = 50
LEFT_OUT_NAME = "left_out.jsonl"
_log = logging.getLogger(__name__)


def capped(problems: Sequence[Problem]) -> list[Problem]:
    """The first problems, and how many more there are."""
    shown = list(problems[:MAX_PROBLEMS_SHOWN])
    hidden = len(problems) - len(shown)
    if hidden:
        remedy = "correct those above, then run again to see the rest"
        shown.append(Problem(what=f"... and {numbered(hidden, 'more problem')}", remedy=remedy))
    return shown


def list_left_out(problems: Sequence[Problem], samples: Mapping[str, Iterable[str]]) -> tuple[LeftOut, ...]:
    """One row for each file that is left out, with all reasons.

    `samples` are the samples that a place spoils: the image of a caption, of a line of metadata, of a mask.
    """
    reasons: dict[str, list[str]] = {}
    for problem in problems:
        for file in samples.get(problem.where) or [problem.where]:
            # a mask and a control have the image's name, in a folder of their own
            place = Path(problem.where)
            other = problem.where if place.name == Path(file).name else place.name
            named = problem.what if file == problem.where else f"{other}: {problem.what}"
            told = reasons.setdefault(file, [])
            if named not in told:
                told.append(named)
    return tuple((file, "; ".join(told)) for file, told in reasons.items())


def nothing_left(problems: Sequence[Problem]) -> DataError:
    """The error where every sample would be left out."""
    remedy = "correct some of these"
    return DataError([Problem(what="no sample is left", where="data.sets", remedy=remedy), *capped(problems)])


def report_left_out(left_out: Sequence[LeftOut], folder: Path | None) -> None:
    """Tell what was left out in the log and, where there is a run folder, all of it in `left_out.jsonl`.

    A file of that name of an earlier start goes, so that it is never another data set's.
    """
    if not left_out:
        if folder is not None:
            (folder / LEFT_OUT_NAME).unlink(missing_ok=True)
        return
    if folder is not None:
        write_left_out(left_out, folder)
    where = f", all listed in {folder / LEFT_OUT_NAME}" if folder is not None else ""
    _log.warning(
        "data.on_bad_file is skip: %d file%s left out%s\n%s",
        len(left_out), " is" if len(left_out) == 1 else "s are", where,
        first_lines([f"{file}: {why}" for file, why in left_out], MAX_PROBLEMS_SHOWN),
    )  # fmt: skip


def write_left_out(left_out: Sequence[LeftOut], folder: Path) -> None:
    """Write all that is left out into `left_out.jsonl` of a run folder."""
    rows = [json.dumps({"file": file, "reason": why}, ensure_ascii=False) for file, why in left_out]
    atomic.write_text(folder / LEFT_OUT_NAME, "\n".join(rows) + "\n")


def first_lines(texts: Sequence[str], most: int) -> str:
    """Each of the first texts on one line, and how many more there are."""
    hidden = len(texts) - most
    return "\n".join([*map(one_line, texts[:most]), *([f"... and {hidden} more"] if hidden > 0 else [])])
