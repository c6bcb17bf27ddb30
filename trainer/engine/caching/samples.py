"""The samples that a run trains on, is measured on and edits. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer.config.schema import RunConfig
from trainer.data.leftout import MAX_PROBLEMS_SHOWN
from trainer.data.pictures.opened import measure_controls
from trainer.data.pictures.variants import with_variants
from trainer.data.records import Control, ImageRecord, LeftOut, Record, Scan
from trainer.data.sampler import held_out_split
from trainer.data.sets.held_out import held_out_sets
from trainer.errors import ConfigError, DataError, Problem
from trainer.families.family import Family
from trainer.words.plurals import numbered


@dataclass(frozen=True, kw_only=True)
class Samples:
    """All samples of a run; no file of `held_out` has the content of one in `training`."""

    training: tuple[Record, ...] = ()
    held_out: tuple[Record, ...] = ()
    prompt_controls: tuple[tuple[Control, ...], ...] = ()
    """Images that each validation prompt edits; none where the family takes none."""
    left_out: tuple[LeftOut, ...] = ()
    """Files and conversations that are passed over because of `data.on_bad_file` or `data.on_long`."""

    @property
    def all(self) -> tuple[Record, ...]:
        """Everything that has to be encoded."""
        return (*self.training, *self.held_out)


def scan_samples(
    family: Family, config: RunConfig, progress: Callable[[str, int, int], None] | None = None
) -> Samples:
    """Scan the training sets and `validation.img_dir`, or hold `validation.held_out` images back.

    `progress(what, done, total)` runs once per image and may raise to stop. Raises one DataError with all
    problems of all folders.
    """
    noun = f"{family.sample_kind}s"
    validation, separate = config.validation, held_out_sets(config.validation)
    scans = {f"checking {noun}": (config, separate)}
    if separate:
        # captions, sizes and trigger word as in training
        data = config.data.model_copy(update={"sets": separate})
        held_out_config = config.model_copy(update={"data": data})
        scans[f"checking held-out {noun}"] = (held_out_config, config.data.sets)
    found: list[Scan] = []
    problems: list[Problem] = []
    for what, (scanned, beside) in scans.items():
        try:
            found.append(family.scan(scanned, progress and functools.partial(progress, what), beside))
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)
    if separate:
        training, held_out = (tuple(one.records) for one in found)
        _require_untrained(training, held_out)
    else:
        training, held_out = _held_out(found[0].records, validation.held_out, validation.seed)
    return Samples(
        # only training images get views: a held-out image is measured as it is
        training=with_variants(training, config.data.sets),
        held_out=held_out,
        prompt_controls=prompt_controls(family, config, (*held_out, *training)),
        left_out=tuple(row for one in found for row in one.left_out),
    )


def _held_out(
    records: Sequence[Record], count: int, seed: int
) -> tuple[tuple[Record, ...], tuple[Record, ...]]:
    """Split into (train, held out): regularisation sets train only, and the held-out loss has no weights."""
    regularising = {one.content_sha256 for one in records if isinstance(one, ImageRecord) and one.is_reg}
    others = [record for record in records if record.content_sha256 not in regularising]
    # sets of regularisation alone have nothing to split
    splits = bool(others or count or not regularising)
    training, held_out = held_out_split(others, count, seed) if splits else ((), ())
    if regularising:
        kept = {record.identifier for record in held_out}
        training = tuple(record for record in records if record.identifier not in kept)
    return training, tuple(
        dataclasses.replace(record, loss_weight=1.0) if isinstance(record, ImageRecord) else record
        for record in held_out
    )


def prompt_controls(
    family: Family, config: RunConfig, records: Sequence[Record]
) -> tuple[tuple[Control, ...], ...]:
    """The images that each validation prompt edits: the named ones, else the controls of the first records.

    Empty where the family takes none. Raises ConfigError where they cannot be told, DataError for images that
    cannot be read.
    """
    validation, (least, most) = config.validation, family.control_counts
    if not validation.prompts or most == 0:
        return ()
    named = [one if isinstance(one, tuple) else (one,) for one in validation.control_images]
    if named and len(named) != len(validation.prompts):
        raise ConfigError(
            f"{numbered(len(named), 'control image')} for {numbered(len(validation.prompts), 'prompt')}",
            where="validation.control_images",
            remedy="name one image, or a list of images, for each of validation.prompts",
        )
    wrong = [paths for paths in named if not least <= len(paths) <= most]
    if wrong or not (named or records):
        raise ConfigError(
            f"{family.title} edits {numbered(least, 'image')} at least and {most} at most",
            where="validation.control_images",
            remedy="name that many for each of validation.prompts: --set 'validation.control_images=[IMAGE]'",
        )
    if named:
        return tuple(measure_controls(paths) for paths in named)
    return tuple(records[number % len(records)].controls for number in range(len(validation.prompts)))


def _require_untrained(training: Sequence[Record], held_out: Sequence[Record]) -> None:
    """Raise DataError with every held-out image that is trained on too, by its content."""
    trained = {record.content_sha256: record.path for record in training}
    problems = [
        Problem(
            what=f"this held-out sample is also trained on: {trained[record.content_sha256]}",
            where=str(record.path),
            remedy="remove it from one of the two",
        )
        for record in held_out
        if record.content_sha256 in trained
    ]
    hidden = len(problems) - MAX_PROBLEMS_SHOWN
    if hidden > 0:
        problems[MAX_PROBLEMS_SHOWN:] = [
            Problem(what=f"... and {hidden} more", remedy="does validation name other samples?")
        ]
    if problems:
        raise DataError(problems)
