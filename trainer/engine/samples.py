"""Floor 6: which images a run trains on and which it is measured on. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.schema import ImageSet, RunConfig
from trainer.data.records import ImageRecord
from trainer.data.sampler import held_out_split
from trainer.data.scan import MAX_PROBLEMS_SHOWN
from trainer.errors import DataError, Problem
from trainer.families.protocol import Family


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a run; no file of `held_out` has the content of one in `training`."""

    training: tuple[ImageRecord, ...] = ()
    held_out: tuple[ImageRecord, ...] = ()

    @property
    def all(self) -> tuple[ImageRecord, ...]:
        """Everything that has to be encoded."""
        return (*self.training, *self.held_out)


def scan_samples(
    family: Family, config: RunConfig, progress: Callable[[str, int, int], None] | None = None
) -> Samples:
    """Scan the training sets and `validation.img_dir`, or hold `validation.held_out` images back.

    `progress(what, done, total)` runs once per image and may raise to stop. Raises one DataError with all
    problems of all folders.
    """
    scans = {"checking images": config}
    if config.validation.img_dir is not None:
        sets = (ImageSet(img_dir=config.validation.img_dir),)
        # captions, sizes and trigger word as in training
        data = config.data.model_copy(update={"sets": sets})
        scans["checking held-out images"] = config.model_copy(update={"data": data})
    found: list[tuple[ImageRecord, ...]] = []
    problems: list[Problem] = []
    for what, scanned in scans.items():
        try:
            found.append(family.scan(scanned, _told(progress, what)))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if config.validation.img_dir is None:
        training, held_out = held_out_split(found[0], config.validation.held_out, config.validation.seed)
    else:
        training, held_out = found
        _require_untrained(training, held_out)
    return Samples(training=training, held_out=held_out)


def _told(progress: Callable[[str, int, int], None] | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(what, done, total)


def _require_untrained(training: Sequence[ImageRecord], held_out: Sequence[ImageRecord]) -> None:
    """Raise DataError listing every held-out image whose content is trained on too."""
    trained = {record.content_sha256: record.path for record in training}
    problems = [
        Problem(
            what=f"this held-out image is also a training image: {trained[record.content_sha256]}",
            where=str(record.path),
            remedy="remove it from one of the two folders",
        )
        for record in held_out
        if record.content_sha256 in trained
    ]
    hidden = len(problems) - MAX_PROBLEMS_SHOWN
    if hidden > 0:
        problems[MAX_PROBLEMS_SHOWN:] = [
            Problem(what=f"... and {hidden} more", remedy="is validation.img_dir a folder of other images?")
        ]
    if problems:
        raise DataError(problems)
