"""Files and folders as documents. A file that cannot be read is a problem, and no other file suffers."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath

from trainer.doctor import json_text, manifests, recognise, scripts, yaml_text
from trainer.doctor.entries import MOST_BYTES, Document, Entry, with_repeats
from trainer.doctor.json_text import JsonError, TooLargeError
from trainer.doctor.surroundings import machine_document, plain_name
from trainer.errors import ConfigError, Problem
from trainer.machine.facts import Facts
from trainer.machine.reading import recorded

MOST_FILES = 500
"""Most files of a folder."""
_IN_FOLDERS = re.compile(
    r".*\.(?:ya?ml|json|sh|bash|slurm|sbatch|env|dockerfile)|\.env.*|(?:docker|container)file.*"
    r"|requirements.*\.txt|.*freeze.*\.txt|constraints.*\.txt",
    re.IGNORECASE,
)
"""Names of files that are looked at in a folder."""
_OF_DATA = (b"PAR1", b"PK\x03\x04", b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ")
"""Beginnings of Parquet's files and of packed ones, which may be too short for a byte of zero."""
_OF_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_FIRST_BYTES = 8192
_NO_FOLDERS = frozenset(("node_modules", "site-packages", "__pycache__"))
_ASSIGNED = re.compile(r"""\s*([\w-]+)\s*=\s*(["'])(.*?)\2""")
_PACKAGE = re.compile(r"\s*([A-Za-z0-9][\w.-]*)(?:\[[\w,. -]*\])?\s*(?:==\s*([^\s;#]+)|@\s*([^\s;#]+))")


@dataclass(frozen=True, kw_only=True)
class Read:
    """Everything that was found in some files."""

    documents: tuple[Document, ...] = ()
    problems: tuple[Problem, ...] = ()
    facts: Facts | None = None
    """The machine, where one of the files is a recorded one."""
    has_signs: bool = True
    """False for a file that cannot be read and has no key by which a kind is told."""


def read(paths: Iterable[Path], environment: Path | None = None) -> Read:
    """Documents of files, and of the files in folders; never raises for anything that a file can be.

    `environment` is a file of the variables that the trainer itself would have.
    """
    documents: list[Document] = []
    problems: list[Problem] = []
    facts: Facts | None = None
    files: dict[Path, tuple[Path, bool, bool]] = {}
    for path, is_named in _files(paths, problems):
        first, was_named, _ = files.get(path.absolute(), (path, False, False))
        files[path.absolute()] = (first, is_named or was_named, False)
    for path, is_named, is_ours in [*files.values(), *([(environment, True, True)] if environment else [])]:
        one = _file(path, is_ours=is_ours)
        # in a folder nobody named this file: one that is not known is none of the doctor's
        documents += [part for part in one.documents if is_named or part.kind != "unknown"]
        problems += one.problems if is_named or one.has_signs else ()
        facts = one.facts or facts
    return Read(documents=tuple(documents), problems=tuple(problems), facts=facts)


def _files(paths: Iterable[Path], problems: list[Problem]) -> Iterator[tuple[Path, bool]]:
    """Each file, and whether it was named itself."""
    for path in paths:
        if not os.path.isdir(path):  # noqa: PTH112  `_file` tells of one that nobody may ask
            yield path, True
            continue
        found = sorted(_in_folder(path))
        for one in found[:MOST_FILES]:
            yield one, False
        if len(found) > MOST_FILES:
            what = f"the folder has {len(found)} files to look at, the first {MOST_FILES} were read"
            problems.append(Problem(what=what, where=str(path), remedy="name a smaller folder, or files"))


def _in_folder(folder: Path) -> Iterator[Path]:
    """Files below a folder whose names promise a kind that is known; hidden folders and virtual environments
    are passed over.
    """
    for root, folders, names in os.walk(folder):
        if "pyvenv.cfg" in names:
            folders.clear()
            continue
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _NO_FOLDERS]
        found = (Path(root, name) for name in names if _IN_FOLDERS.fullmatch(name))
        yield from (one for one in found if os.path.isfile(one) and not one.is_symlink())  # noqa: PTH113


def _file(path: Path, *, is_ours: bool) -> Read:
    """One file's documents."""

    def refused(what: str, remedy: str, where: str = str(path)) -> Read:
        return Read(problems=(Problem(what=what, where=where, remedy=remedy),))

    try:
        if path.exists() and not path.is_file():
            return refused("neither a file nor a folder", "name a file; save what a pipe gives first")
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return refused("no such file", "check the path (in a container: is the folder mounted?)")
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        return refused(f"cannot be read: {reason}", "check the path, its owner and permissions")
    if not is_ours and _is_of_data(path, raw):
        return _unknown(path)
    if len(raw) > MOST_BYTES:
        if data := _records(path, raw[:MOST_BYTES].decode("utf-8-sig", errors="ignore"), whole=False):
            return data
        large = refused("too large for a configuration (over 1 MiB)", "give the configuration itself")
        return replace(large, has_signs=False)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        what = f"byte 0x{raw[error.start]:02x} is not UTF-8"
        return refused(what, "save the file as UTF-8", f"{path}:{line}")
    if is_ours:
        return Read(documents=(replace(scripts.variables(text, str(path)), is_ours=True),))
    return of_text(path, text)


def _is_of_data(path: PurePath, raw: bytes) -> bool:
    """True for pictures, tables, weights and archives: no text, under a name that folders pass over.

    A text in UTF-16 or Latin-1 is none of them.
    """
    if _IN_FOLDERS.fullmatch(path.name) or raw.startswith(_OF_UTF16):
        return False
    if not raw.startswith(_OF_DATA) and b"\0" not in raw[:_FIRST_BYTES]:
        return False
    try:
        raw.decode()
    except UnicodeDecodeError:
        return True
    return len(raw) > MOST_BYTES


def of_text(path: PurePath, text: str) -> Read:
    """Documents of a text, by its kind."""
    place, kind = str(path), recognise.of_text(path, text)
    if kind == "script":
        return Read(documents=tuple(scripts.script(text, place)))
    if kind == "dockerfile":
        return Read(documents=(scripts.dockerfile(text, place),))
    if kind == "environment":
        return Read(documents=(scripts.variables(text, place),))
    if kind == "packages":
        return Read(documents=(packages(text, place),))
    if path.suffix == ".json" or text.lstrip()[:1] in ("{", "["):
        return _json(path, text)
    if path.suffix not in (".yaml", ".yml") and not re.search(r"^[\w\"'.-]+:(?:\s|$)", text, re.MULTILINE):
        return _unknown(path, text)
    return _yaml(place, text)


def _unknown(path: PurePath, text: str = "") -> Read:
    """A file of no kind that is known; TOML's keys with a text are kept, for what looks for secrets."""
    lines = enumerate(text.splitlines() if path.suffix == ".toml" else (), 1)
    found = tuple(
        Entry(path=(match[1],), value=match[3], line=number)
        for number, line in lines
        if (match := _ASSIGNED.match(line))
    )
    return Read(documents=(Document(kind="unknown", place=str(path), entries=found),))


def _json(path: PurePath, text: str) -> Read:
    place = str(path)
    if data := _records(path, text, whole=True):
        return data
    try:
        found = json_text.entries(text)
    except JsonError as error:
        if path.suffix in ("", ".yaml", ".yml"):
            return _yaml(place, text)
        if path.suffix != ".json":  # TOML begins with a bracket too
            return _unknown(path, text)
        what = f"not valid JSON: {error}"
        remedy = "correct it: what reads it as JSON stops here (DeepSpeed alone reads Hjson)"
        is_large = isinstance(error, TooLargeError)
        if is_large:
            what, remedy = f"too large for a configuration ({error})", "give the configuration itself"
        problem = Problem(what=what, where=f"{place}:{error.line}", remedy=remedy)
        return Read(problems=(problem,), has_signs=not is_large and recognise.has_signs(text))
    if recognise.is_facts(found):
        try:
            facts = recorded(text, place)
        except ConfigError as error:
            return Read(problems=error.problems)
        return Read(documents=(machine_document(facts, place),), facts=facts)
    return Read(documents=(_tree(place, found),))


def _records(path: PurePath, text: str, *, whole: bool) -> Read | None:
    """A file of conversations; None for what is none."""
    try:
        found = json_text.records(text, recognise.RECORD_KEYS, whole=whole)
    except JsonError as error:
        remedy = "correct it: what reads the file as data stops here, or leaves the record out"
        problem = Problem(what=f"not valid JSON: {error}", where=f"{path}:{error.line}", remedy=remedy)
        return Read(problems=(problem,))
    if not found:
        return None
    return Read(documents=(Document(kind="conversations", place=str(path), entries=tuple(found)),))


def _yaml(place: str, text: str) -> Read:
    parts, problems = yaml_text.entries(text, place)
    documents = tuple(_tree(place, part) for part in parts if part)
    if not documents and not problems:
        documents = (Document(kind="unknown", place=place, entries=()),)
    # a folder has templates of Helm and data beside its configurations
    return Read(documents=documents, problems=tuple(problems), has_signs=recognise.has_signs(text))


def _tree(place: str, entries: Sequence[Entry]) -> Document:
    kind = recognise.of_tree(entries)
    found = with_repeats(entry for entry in entries if entry.path)
    if kind == "compose":
        return Document(kind=kind, place=place, entries=tuple(manifests.compose(found)))
    if kind == "kubernetes":
        return Document(kind=kind, place=place, entries=tuple(manifests.kubernetes(found)))
    return Document(kind=kind, place=place, entries=found)


def packages(text: str, place: str) -> Document:
    """Packages of a `pip freeze`: versions, or addresses of wheels, by their plain names."""
    found = (
        Entry(path=(plain_name(match[1]),), value=match[2] or match[3], line=number)
        for number, line in enumerate(text.splitlines(), 1)
        if (match := _PACKAGE.match(line))
    )
    return Document(kind="packages", place=place, entries=tuple(found))
