"""The plan's row on the data set, how many samples there are and how often the run sees each, and the whole
plan, in which it stands.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

from trainer import families
from trainer.config.reading.load import Loaded
from trainer.config.reading.paths import MODEL, paths_of
from trainer.config.schema import RunConfig
from trainer.config.tree import by_user
from trainer.data.conversations.dataset_info import read_entry
from trainer.errors import ConfigError, DataError, Problem
from trainer.families.family import Family
from trainer.machine.facts import Facts
from trainer.modeling.base.base import local_folder
from trainer.modeling.base.tokenizer_files import fitting_templates, lacks_template, split_marks
from trainer.planning.epochs import Counted, count, with_epochs
from trainer.planning.kept_decisions import continued
from trainer.planning.plan import Decision, Plan
from trainer.planning.planning import plan_run
from trainer.planning.scoring_row import with_scoring
from trainer.ways import chat_templates
from trainer.words.plurals import numbered


def whole_plan(loaded: Loaded, facts: Facts, requested_profile: str = "auto") -> tuple[Loaded, Plan]:
    """The configuration as it is planned, and its plan with all rows, as `trainer plan` shows it.

    A run that has begun keeps its decisions, and a length in epochs is one in steps. Samples that are not
    there are warnings. Raises as `plan_run` and `require_template`.
    """
    loaded = with_epochs(continued(loaded))
    plan = plan_run(loaded, facts, requested_profile)
    require_template(loaded)
    told = (
        f"{one.where}: {one.what}, and `trainer train` refuses that: {one.remedy}" for one in absent(loaded)
    )
    plan = dataclasses.replace(plan, warnings=(*plan.warnings, *told))
    return loaded, with_scoring(with_data(plan, loaded.config), loaded)


def with_data(plan: Plan, config: RunConfig) -> Plan:
    """The plan with a row on the data, where all sets are on this disk and are counted at once; without the
    counts a row only where the run's length is written in epochs.
    """
    found, epochs, steps = count(config), config.train.num_train_epochs, config.train.max_train_steps
    if found is None and epochs is None:
        return plan
    if found is None:
        assert epochs is not None, "returned above"
        planned = numbered(steps, "step")
        reason = f"the run counts the steps of {numbered(epochs, 'epoch')}; this plan is for {planned}"
        row = Decision("data", "not counted", "facts", reason)
    else:
        row = _row(found, config)
    return dataclasses.replace(plan, decisions=(*plan.decisions, row))


def _row(found: Counted, config: RunConfig) -> Decision:
    epochs, steps = config.train.num_train_epochs, config.train.max_train_steps
    if found.tokens:
        kind, how, about = "conversation", "by their rows, tokens by four bytes each", "about "
    else:
        kind, how, about = "image", "by their names", "" if found.exact else "about "
    if epochs is not None:
        verb = "is" if epochs == 1 else "are"
        what = f"{numbered(epochs, 'epoch')} of {found.in_epoch} {verb} {about}{numbered(steps, 'step')}"
    elif found.tokens:
        what = (
            f"{numbered(steps, 'step is', 'steps are')} about {found.epochs(config, steps):.1f} epochs"
            f" of {found.in_epoch}"
        )
    else:
        seen = steps * config.train.train_batch_size * config.train.gradient_accumulation_steps
        what = (
            f"{numbered(steps, 'step sees', 'steps see')} {numbered(seen, 'sample')}:"
            f" {about}{found.epochs(config, steps):.1f} epochs"
            f" of {found.in_epoch}"
        )
    held_out = f", {found.held_out} held out" if found.held_out else ""
    return Decision("data", numbered(found.samples, kind), "facts", f"{how}; {what}{held_out}")


_OF_SAMPLES = (
    "data.sets.", "validation.img_dir", "validation.chat_file", "validation.dataset_info",
    "validation.control_",
)  # fmt: skip
_REMEDY = "check its name, and in a container that the folder is mounted and readable for its user"
_FOLDERS = ("img_dir", "control_dir", "mask_dir")
_ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".7z", ".rar")


def absent(loaded: Loaded) -> list[Problem]:
    """Every folder and file of samples that is not there, or is the other of the two, by the key that names
    it, and every entry of a dataset_info.json that cannot be read.
    """
    named = [(key, path) for key, path in paths_of(loaded.config) if key.startswith(_OF_SAMPLES)]
    missing = [
        Problem(what=f"`{key}`: {path} does not exist", where=loaded.sources.get(key, ""), remedy=_REMEDY)
        for key, path in named
        if not os.path.exists(path)  # noqa: PTH110
    ]
    missing += [
        Problem(what=f"`{key}`: {path} {what}", where=loaded.sources.get(key, ""), remedy=remedy)
        for key, path in named
        for what, remedy in _of_another_kind(key.rpartition(".")[2], path)
    ]
    data, validation = loaded.config.data, loaded.config.validation
    lists = [(one.dataset_info, one.name) for one in data.sets]
    for path, name in (*lists, (validation.dataset_info, validation.name)):
        if path is not None and name is not None and os.path.exists(path):  # noqa: PTH110
            try:
                read_entry(path, name)
            except DataError as error:
                missing += error.problems
    return missing


def _of_another_kind(key: str, path: Path) -> Iterator[tuple[str, str]]:
    """Words on a file in the place of a folder, or a folder in that of a file, and what to do."""
    if key in _FOLDERS and os.path.isfile(path):  # noqa: PTH113
        remedy = "name a folder of pictures; conversations are read from .jsonl, .json and .parquet files"
        if path.name.lower().endswith(_ARCHIVES):
            remedy = "unpack it, and name the folder"
        yield "is a file, not a folder", remedy
    elif key == "chat_file" and os.path.isdir(path):  # noqa: PTH112
        yield "is a folder, not a file", "name a file in it; each file is a set of its own"


def require_present(loaded: Loaded) -> None:
    """Raise DataError with every folder and file of samples that is not there, as `absent` finds them."""
    if missing := absent(loaded):
        raise DataError(missing)


def require_data(loaded: Loaded) -> None:
    """Raise DataError as `require_present` and, of pictures, with all that their names and captions show the
    run to refuse. Pictures and conversations are read by the run alone.
    """
    require_present(loaded)
    family = families.get(loaded.config.family)
    if family.sample_kind == "image":
        _require_captions(loaded.config, family)


def require_template(loaded: Loaded) -> None:
    """Raise ConfigError where the files of a language model's tokenizer show that conversations cannot be
    written: by a shipped template whose marks it splits, or by its own where it has none.

    Nothing is said of a base that is not on this disk, nor of a template of the user's.
    """
    name, folder = loaded.config.data.chat_template, local_folder(loaded.config)
    if families.get(loaded.config.family).sample_kind != "conversation" or folder is None:
        return
    if name == chat_templates.AUTO and lacks_template(folder):
        what = "the base model's tokenizer has no chat template"
        remedy = (
            f"write {chat_templates.KEY}: {{taken}}, or FILE.jinja; or use a model that was made for chats"
        )
    elif name in chat_templates.names() and (split := split_marks(folder, name)):
        what = f"{name}: the base's tokenizer does not have {', '.join(split)} as tokens, and splits them"
        remedy = "templates whose marks it has: {taken}; or name a base that has these tokens"
    else:
        return
    where = loaded.sources.get(chat_templates.KEY, "")
    if not by_user(where):
        where = loaded.sources.get(MODEL, where)
    raise ConfigError(what, where=where, remedy=remedy.format(taken=", ".join(fitting_templates(folder))))


def _require_captions(config: RunConfig, family: Family) -> None:
    """Raise DataError where the run's scan of its pictures would, before it opens one."""
    from trainer.data.sets.held_out import held_out_sets
    from trainer.data.sets.scan import find_images, usable

    training, held_out, problems = config.data.sets, held_out_sets(config.validation), list[Problem]()
    for sets, beside in ((training, held_out), *([(held_out, training)] if held_out else [])):
        try:
            usable(find_images(sets, family.control_counts, beside=beside), config.data.on_bad_file)
        except DataError as error:
            problems += error.problems
    if problems:
        raise DataError(problems)


def require_dataset(path: Path | None) -> None:
    """Raise DataError where what `--dataset` names is not there; what is in it is checked by the run."""
    # pathlib's exists() raises for a folder above it that may not be entered
    if path is not None and not os.path.exists(path):  # noqa: PTH110
        raise DataError(
            f"{path} does not exist",
            where="--dataset",
            remedy=_REMEDY,
        )
