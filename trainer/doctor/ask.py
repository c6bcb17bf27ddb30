"""One question to the doctor: files and surroundings in, a report out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.doctor import judge, surroundings
from trainer.doctor.entries import Document
from trainer.doctor.reading import Read, read
from trainer.doctor.report import Report
from trainer.errors import Problem
from trainer.machine.facts import Facts


def about_files(paths: Sequence[Path], facts: Facts | None, environment: Path | None = None) -> Report:
    """Judge files, and folders of files, for the machine of `facts`; one of the files may be a recorded one.

    `environment` is a file of variables that stand for those of the process that will train.
    """
    found = read(paths, environment)
    return _judged(found, found.facts or facts, ())


def about_here(environ: Mapping[str, str], facts: Facts | None, machine: Sequence[Problem]) -> Report:
    """Judge this process's environment, the packages beside it, and the machine by what stops a run."""
    documents = [surroundings.environment_document(environ)]
    if facts is not None:
        documents.append(surroundings.packages_document(facts))
    return _judged(Read(documents=tuple(documents)), facts, machine)


def _judged(found: Read, facts: Facts | None, machine: Sequence[Problem]) -> Report:
    here: tuple[Document, ...] = ()
    if facts is not None and found.facts is None:
        here = (surroundings.machine_document(facts),)
    findings = judge.judge((*found.documents, *here))
    shown = (*found.documents, *(here if machine else ()))
    return Report(
        documents=shown,
        problems=found.problems,
        findings=(*findings, *judge.of_machine(machine)),
        decided=judge.decided(found.documents),
        called=tuple(judge.called(found.documents)),
        fp8="" if facts is None else surroundings.fp8_here(facts),
    )
