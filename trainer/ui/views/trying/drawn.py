"""Tries of a run: how far each is, and its pictures."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.errors import DataError, StorageError
from trainer.queue.launcher import State
from trainer.queue.local import users_queue
from trainer.queue.overview import Entry, overview
from trainer.queue.scheduler import is_scheduled
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import FOLDER, RECORD, Try
from trainer.ui.opened import open_below, tail
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.runs import name_of, run_folder
from trainer.ui.views.state import KINDS, StateView

_ANSWER_BYTES, _LAST_LINES, _MOST_LISTED = 1 << 16, 20, 24


@dataclass(frozen=True, kw_only=True)
class TryRow:
    """One try in the list of a run's."""

    number: int
    prompt: str
    """The first one."""
    count: int
    """Prompts."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A picture or an answer of one prompt; neither where it is not drawn yet."""

    is_drawn: bool
    answer: str


@dataclass(frozen=True, kw_only=True)
class TryView:
    """One try."""

    run: str
    """Id of its run."""
    name: str
    number: int
    one: Try
    columns: tuple[str, ...]
    """Names of the columns: `without`, then each LoRA's time in the run; its file where nobody noted it."""
    rows: tuple[tuple[Cell, ...], ...]
    """Cells by prompt."""
    state: StateView
    follows: bool
    """Whether it is still drawn, or waits for that."""
    stands_still: bool
    """Whether it waits and nothing starts it."""
    lines: tuple[str, ...]
    """The last lines of its output, where it failed."""

    @property
    def answers(self) -> bool:
        """True where a language model answered."""
        return any(cell.answer for row in self.rows for cell in row)


def numbers(folder: Path) -> list[int]:
    """Numbers of the tries in a run's folder of them, damaged ones among them."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 10]


def tries_of(studio: Studio, run: str) -> tuple[TryRow, ...]:
    """The last tries of a run, the newest first; damaged ones are left out."""
    folder, found = run_folder(studio, run), []
    for number in sorted(numbers(folder / FOLDER), reverse=True)[:_MOST_LISTED]:
        try:
            one = try_of(studio, run, number)
        except (DataError, UnknownIdError):
            continue
        found.append(TryRow(number=number, prompt=one.prompts[0], count=len(one.prompts)))
    return tuple(found)


def try_of(studio: Studio, run: str, number: int) -> Try:
    """The record of a try. Raises UnknownIdError, DataError for a damaged record."""
    path = try_folder(studio, run, number) / RECORD
    with open_below(studio.runs, path) as file:
        return tries.read_try(file, str(path))


def try_folder(studio: Studio, run: str, number: int) -> Path:
    """The folder of a try, which need not be there. Raises UnknownIdError."""
    return run_folder(studio, run) / FOLDER / str(number)


def try_view(studio: Studio, run: str, number: int) -> TryView:
    """A try now. Raises UnknownIdError, DataError for a damaged record."""
    one, place = try_of(studio, run, number), try_folder(studio, run, number)
    folder, queue = run_folder(studio, run), users_queue()
    rows = tuple(
        tuple(_cell(studio, tries.picture(place, column, row)) for column in range(1 + len(one.loras)))
        for row in range(len(one.prompts))
    )
    try:
        entry = max(  # an older job drew into a folder that was removed
            (entry for entry in overview(queue) if entry.job.run == place),
            key=lambda entry: entry.job.id,
            default=None,
        )
        lines = queue.log(str(entry.job.id)).splitlines() if _failed(entry) and entry else []
    except StorageError as error:
        entry, lines = None, [str(error)]
    state = _state(entry, complete=all(cell.is_drawn for row in rows for cell in row))
    return TryView(
        run=run,
        name=name_of(studio.runs, folder),
        number=number,
        one=one,
        columns=("without", *(one.labels or one.loras)),
        rows=rows,
        state=state,
        follows=state.kind in ("waiting", "running"),
        stands_still=state.kind == "waiting" and not is_scheduled(queue.folder),
        lines=tuple(lines[-_LAST_LINES:]),
    )


def _failed(entry: Entry | None) -> bool:
    return entry is not None and entry.seen.state in (State.FAILED, State.LOST)


def _state(entry: Entry | None, *, complete: bool) -> StateView:
    """The state of a try by its job, where the queue still has one, and by its pictures."""
    if entry is not None and not (complete and entry.seen.state is State.FINISHED):
        return StateView(kind=KINDS[entry.seen.state], word=entry.seen.state.value, detail=entry.note)
    if complete:
        return StateView(kind="good", word="drawn")
    return StateView(kind="bad", word="not drawn", detail="no job of the queue draws it: try it again")


def _cell(studio: Studio, picture: Path) -> Cell:
    text = tail(studio.runs, picture.with_suffix(".txt"), _ANSWER_BYTES)
    return Cell(is_drawn=picture.is_file(), answer="\n".join(text))
