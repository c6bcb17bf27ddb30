"""The start of a try: its folder with all that it is drawn from, and its job."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Set
from dataclasses import replace
from pathlib import Path

from trainer.errors import ConfigError
from trainer.families.language import ADAPTER_CONFIG
from trainer.files import atomic
from trainer.planning.planning import machine_facts
from trainer.queue.adding import try_request
from trainer.queue.local import Local, users_queue
from trainer.telemetry.run_folder import tries
from trainer.telemetry.run_folder.tries import FOLDER, RECORD, Try
from trainer.ui.opened import folder_below, open_below
from trainer.ui.studio import Studio, UnknownIdError
from trainer.ui.views.runs import run_folder
from trainer.ui.views.trying.choice import GONE, LORAS, ChoiceView, asked, configuration
from trainer.ui.views.trying.drawn import numbers

_LORA = "lora.safetensors"


def start_try(studio: Studio, view: ChoiceView) -> int:
    """Have the queue draw what the form asks for; the number of the try. Nothing is left where that fails.

    Raises as `asked` and `try_request` do, ConfigError and StorageError where its folder cannot be made.
    """
    one, folder = asked(studio, view), run_folder(studio, view.id)
    loaded, queue, is_added = configuration(folder), users_queue(), False
    number = _new(studio, folder, queue)
    place, name = folder / FOLDER / str(number), f"{folder.name}-try-{number}"
    try:
        one = _with_own_files(studio, folder, place, one, answers=not view.draws)
        with atomic.no_space_told(place), folder_below(studio.runs, place / RECORD) as record:
            atomic.write_text(record, tries.to_json(one))
        queue.submit([try_request(loaded, one, place, machine_facts(), queue.gpus(), name=name)])
        is_added = True
    finally:
        if not is_added:
            with folder_below(studio.runs, place) as half:
                shutil.rmtree(half)
    return number


def _new(studio: Studio, folder: Path, queue: Local) -> int:
    """Make the folder of a new try, following no link inside the run's; its number, which no job has."""
    where, known = folder / FOLDER, {job.run for job, _ in queue.jobs()}
    with atomic.no_space_told(where):
        try:
            with folder_below(studio.runs, where) as real:
                real.mkdir(exist_ok=True)
            with folder_below(studio.runs, where / "1") as first:
                return _numbered(first.parent, where, known)
        except (NotADirectoryError, FileExistsError) as error:
            what, remedy = f"no folder can be made there: {error.strerror}", "move what is in its place"
            raise ConfigError(what, where=str(where), remedy=remedy) from error


def _numbered(real: Path, where: Path, known: Set[Path]) -> int:
    """Make the next folder of `real`, which is `where` by its name; its number."""
    for number in itertools.count(1 + max(numbers(real), default=0)):
        if where / str(number) in known:
            continue  # of a try whose folder was removed
        try:
            (real / str(number)).mkdir()
        except FileExistsError:
            continue  # another request's
        return number
    raise AssertionError("numbers do not end")


def _with_own_files(studio: Studio, folder: Path, place: Path, one: Try, *, answers: bool) -> Try:
    """The try with LoRA files below `place`: the run may remove or replace its own before they are drawn.

    Each has a folder, as PEFT's configuration, which a language model's needs (`answers`), lies beside it
    under one name. Raises ConfigError, StorageError.
    """
    own = []
    for number, (name, label) in enumerate(zip(one.loras, one.labels, strict=True), start=1):
        source, target = folder / name, place / f"lora-{number}" / _LORA
        try:
            with atomic.no_space_told(target):
                with folder_below(studio.runs, target.parent) as made:
                    made.mkdir()
                _put(studio, source, target, link=True)
                if answers:
                    _put(studio, source.with_name(ADAPTER_CONFIG), target.with_name(ADAPTER_CONFIG))
        except UnknownIdError as error:
            raise ConfigError([replace(GONE, what=f"{label}: {GONE.what}")]) from error
        except OSError as error:
            what, remedy = f"{label}: it cannot be copied: {error.strerror}", "mark another"
            raise ConfigError(what, where=LORAS, remedy=remedy) from error
        own.append(target.relative_to(folder).as_posix())
    return replace(one, loras=tuple(own))


def _put(studio: Studio, source: Path, target: Path, *, link: bool = False) -> None:
    """Copy a file, or give it a second name where the file system can. Raises UnknownIdError, OSError."""
    with open_below(studio.runs, source) as file, folder_below(studio.runs, target) as real:
        try:
            if link:
                # linked is what was opened, wherever its name leads meanwhile: with a descriptor given,
                # Python follows the link in /proc
                opened = file.fileno()
                os.link(f"/proc/self/fd/{opened}", real, src_dir_fd=opened, follow_symlinks=True)
                return
        except OSError:
            pass  # other file system, or one without hard links: a copy does as well
        with real.open("xb") as copy:
            shutil.copyfileobj(file, copy)
