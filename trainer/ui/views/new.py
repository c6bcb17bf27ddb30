"""A new run: what was typed over a configuration to start from, what that configuration is, and its plan."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.config.reading.load import Loaded
from trainer.config.writing.dump import written
from trainer.errors import ConfigError, Problem, TrainerError
from trainer.queue.adding import request
from trainer.queue.database import Job
from trainer.queue.local import users_queue
from trainer.queue.scheduler import is_scheduled
from trainer.ui import forms
from trainer.ui.studio import Studio
from trainer.ui.views.asked import STUDIO, Asked, below_of, count_of, form_of, loaded_of, starts
from trainer.ui.views.paths import folders, root_name, takes_folder
from trainer.ui.views.planned import Planned, of_error, plan_on, this_machine
from trainer.ui.views.queueing.goes_on import Occupied, occupied, require_wanted

_BATCHES = ("2", "3", "4", "8")
_BREATH_SECONDS = 0.05
"""Pause between plans that nobody asked for: pages come first."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A field with everything that stands beside it."""

    field: forms.Field
    typed: str
    below: str
    """The value that it has while nothing is typed."""
    origin: str
    """The place that its value comes from."""
    decided: str
    """The value that the plan chose for `auto`, and its reason; empty for others."""
    reason: str
    problems: tuple[Problem, ...]
    places: tuple[str, ...]
    """Folders that may be meant, by their names below the field's root."""


@dataclass(frozen=True, kw_only=True)
class ShownSection:
    """A section with its fields, those of each data set apart."""

    section: forms.Section
    fields: tuple[Shown, ...]

    @property
    def depths(self) -> str:
        """Depths of its fields, with a space between them."""
        return " ".join(sorted({one.field.depth for one in self.fields}))

    @property
    def groups(self) -> list[tuple[str, list[Shown]]]:
        """Fields by the item of a list that they belong to, in their order."""
        return [
            (key, list(some)) for key, some in itertools.groupby(self.fields, lambda one: one.field.group)
        ]


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """The page."""

    asked: Asked
    loaded: Loaded | None
    """The configuration; None where it is wrong."""
    sections: tuple[ShownSection, ...]
    sets: int
    """Data sets that there are; the form has one more."""
    planned: Planned
    notes: tuple[str, ...]
    yaml: str
    """The configuration as a file; empty where it is wrong."""
    difference: tuple[str, ...]
    """Lines of a unified diff from the configuration to start from, with its presets, to `yaml`."""
    name: str
    """Name of the run's folder; empty where the configuration is wrong."""
    occupied: Occupied | None
    """The run that is in this folder already; None without one, and for another machine."""

    @property
    def file_name(self) -> str:
        """Name of the file that `yaml` is downloaded as."""
        return f"{self.name}.yaml"

    @property
    def fields(self) -> Iterator[Shown]:
        """All fields, in the order of the form."""
        return (one for section in self.sections for one in section.fields)


def new_run(studio: Studio, asked: Asked) -> NewRun:
    """The page for a form; a configuration that is wrong, or does not fit, is shown as well."""
    below, start_text, wrong = below_of(studio, asked)
    loaded, problems = loaded_of(studio, asked)
    final, planned = loaded, of_error(ConfigError(problems)) if problems else None
    if loaded is not None:
        final, planned = plan_on(loaded, asked.facts)
        problems = planned.problems if planned.is_of_fields else ()
    assert planned is not None
    count = count_of(below, asked)
    form = form_of(count)
    sources = {} if below is None else dict(below.sources)
    keys = [one.key for section in form for one in section.fields]
    wrong_by_key: dict[str, list[Problem]] = {}
    for problem in problems or wrong:
        wrong_by_key.setdefault(forms.key_of(problem, keys, sources), []).append(problem)
    names = folders(studio)

    def shown(one: forms.Field) -> Shown:
        bad = tuple(wrong_by_key.get(one.key, ()))
        return _shown(
            one, asked, below, final, planned, bad, names[root_name(one.key)] if takes_folder(one) else ()
        )

    sections = tuple(ShownSection(section=one, fields=tuple(map(shown, one.fields))) for one in form)
    yaml = written(loaded.config, loaded.sources) if loaded is not None else ""
    return NewRun(
        asked=asked,
        loaded=loaded,
        sections=sections,
        sets=count - 1,
        planned=planned,
        notes=() if loaded is None else (*loaded.warnings, *loaded.notes),
        yaml=yaml,
        difference=_difference(start_text, yaml),
        name="" if loaded is None else loaded.config.output_dir.name,
        occupied=None if loaded is None or asked.facts.strip() else occupied(loaded, _steps(loaded, planned)),
    )


def _steps(loaded: Loaded, planned: Planned) -> int:
    """Optimizer steps of the run; without a plan those that are written."""
    return planned.steps or loaded.config.train.max_train_steps


def add_to_queue(view: NewRun) -> str:
    """Add the run behind all others of the queue; the number of its job.

    Raises ConfigError for a form that is wrong, and for a run in its folder unless that is ticked; and the
    errors of `trainer queue add`.
    """
    if view.loaded is None or view.asked.facts.strip():
        remedy = "correct what is marked, and leave the field of another machine empty"
        raise ConfigError("this is no plan of a run on this machine", where="the form", remedy=remedy)
    require_wanted(view.occupied, view.asked.goes_on)
    queue = users_queue()
    (job,) = queue.submit([request(view.loaded, this_machine(), queue.gpus())])
    return job


def added(job: str) -> tuple[Job, bool] | None:
    """The job of this number, and whether something starts the queue's jobs; None where there is none."""
    found = next((one for one, _ in users_queue().jobs() if str(one.id) == job), None) if job else None
    return None if found is None else (found, is_scheduled(users_queue().folder))


def warm(studio: Studio) -> None:
    """Plan each shipped configuration once, and LoRAs with some batch sizes: a family's first plan, and a
    batch's, take up to ten times as long as the next.
    """
    with contextlib.suppress(TrainerError):  # what is wrong with this place the page says
        for name in starts():
            for size in ("", *(_BATCHES if name.endswith("_lora") else ())):
                new_run(studio, Asked(start=name, typed={"train.train_batch_size": size}))
                time.sleep(_BREATH_SECONDS)


def _shown(
    one: forms.Field,
    asked: Asked,
    below: Loaded | None,
    final: Loaded | None,
    planned: Planned,
    problems: tuple[Problem, ...],
    places: tuple[str, ...],
) -> Shown:
    """A field beside the configuration under what was typed, the one that is planned, and its plan."""
    typed, decided = asked.typed.get(one.key, ""), None
    loaded = final or below
    source = "default" if loaded is None else loaded.sources.get(one.key, "default")
    value = None if loaded is None else forms.value_at(loaded.config, one.key)
    if value == "auto":
        decided = planned.decision(one.key.rpartition(".")[2])
    return Shown(
        field=one,
        typed=typed,
        below="" if below is None else forms.value_text(forms.value_at(below.config, one.key)),
        origin="studio" if source == STUDIO else "you" if typed.strip() else forms.origin(source),
        decided="" if decided is None else decided.value,
        reason="" if decided is None else decided.reason,
        problems=problems,
        places=places,
    )


def _difference(old: str, new: str) -> tuple[str, ...]:
    """Lines of a unified diff; none where one of the files is wrong."""
    before, after = old.splitlines(), new.splitlines()
    found = difflib.unified_diff(before, after, "the start", "this run", lineterm="", n=2)
    return tuple(found) if old and new else ()
