"""Uploads: files of a form, streamed into a hidden folder of the data set, judged, and given their names."""

from __future__ import annotations

import contextlib
import dataclasses
import filecmp
import functools
import json
import os
import re
import shutil
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from python_multipart.multipart import MultipartParser, parse_options_header

from trainer.data.pictures.formats import SUFFIXES
from trainer.data.sets.metadata_files import METADATA_NAMES, one_form, read_metadata
from trainer.errors import DataError
from trainer.files import atomic
from trainer.ui.datasets import edits, worker
from trainer.ui.datasets.places import Place, require_writable, writing_to
from trainer.words.plurals import numbered
from trainer.words.sizes import GIB, gib

MOST_FILE_BYTES = 64 * 1024**2
MOST_SET_BYTES = 20 * GIB
MOST_FILES = 20_000
RESERVE_BYTES = GIB
"""Space that uploads leave free on the disk."""
_LOOK_BYTES = 16 * 1024**2
_MOST_FIELD_BYTES = 1024
_MOST_NAME_BYTES = 160
"""Of a name without its suffix; systems take 255 with it, and a number is added to some."""
_DISPOSITION = b"content-disposition"
_THERE = "a file of this name, or a picture of its stem, is there already: left out"
_NOT_ALLOWED = re.compile(r"[^\w .,()@+=~-]+")


@dataclass(frozen=True, kw_only=True)
class Told:
    """One file of an upload, and what became of it."""

    name: str
    """Name that the browser gave."""
    stored: str = ""
    """Name in the data set; empty where it was not stored."""
    problem: str = ""


def stored_name(given: str) -> str:
    """A file's name in the data set, of a name that a browser gave: the last part of its path, of letters,
    digits and some signs, not hidden; empty where nothing is left.
    """
    path = PurePosixPath(_NOT_ALLOWED.sub("_", _last_part(given)).strip(" ."))
    stem = path.stem.encode()[:_MOST_NAME_BYTES].decode(errors="ignore").rstrip(" .")
    return stem + path.suffix[:10] if stem else ""


def _last_part(given: str) -> str:
    return re.split(r"[/\\]", unicodedata.normalize("NFC", given))[-1]


class Upload:
    """One form as it comes in: `write` takes its bytes, `finish` stores what is good; then `close` it.

    Opening it raises DataError where it is no form with files, where the data set is read-only, and where
    the disk cannot take `coming_bytes`.
    """

    def __init__(self, place: Place, content_type: str, coming_bytes: int = 0) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise DataError("the request is no form with files", where="Content-Type")
        require_writable(place)
        self._place = place
        self._files, self._bytes = _size(place.folder)
        self._require_space(coming_bytes)
        self._staging = Path(tempfile.mkdtemp(prefix=edits.STAGING_PREFIX, dir=place.folder))
        self._told: list[Told] = []
        self._fields: dict[str, str] = {}
        self._part: dict[bytes, bytes] = {}
        self._file: BinaryIO | None = None
        self._header = self._value = b""
        self._size = self._unlooked = 0
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._part_begin,
                "on_header_field": self._header_bytes,
                "on_header_value": self._header_bytes,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
            },
        )

    def write(self, data: bytes) -> None:
        """Take the next bytes of the form. Raises FormParserError for what is none, NoSpaceError."""
        with atomic.no_space_told(self._staging):
            self._parser.write(data)

    def finish(self) -> list[Told]:
        """Judge the files in the worker and move the good ones to their names; each is told, in order."""
        self._parser.finalize()
        problems = json.loads(worker.ask("judge", self._place, str(self._staging)))
        problems |= self._named_otherwise([name for name, problem in problems.items() if not problem])
        good = [one.stored for one in self._told if one.stored and not problems[one.stored]]
        within = PurePosixPath(self._place.name)
        with writing_to(self._place):
            existing = self._fields.get("existing", "keep")
            names = _sent_again(self._staging, good, self._place.folder, may_be_numbered=existing == "keep")
            new = [name for name in good if name not in names]
            apart = _stems_apart(self._staging, new, self._place.folder)
            names |= _final_names(self._place.folder, new, existing, apart)
            moved = {
                self._staging / name: str(within / target)
                for name, (target, _) in names.items()
                if target and name in new
            }
            trash = dict.fromkeys(str(within / name) for _, replaced in names.values() for name in replaced)
            if moved:
                edits.add(self._place, moved, list(trash), f"{numbered(len(moved), 'file')} added")
        told = []
        for one in self._told:
            stored, _ = names.get(one.stored, ("", []))
            problem = one.problem or problems[one.stored] or ("" if stored else _THERE)
            told.append(dataclasses.replace(one, stored=stored, problem=problem))
        return told

    def _named_otherwise(self, good: Sequence[str]) -> dict[str, str]:
        """A problem for each picture that metadata has under a name which cannot be kept: its row would name
        nothing, and the picture would have no caption.
        """
        rows = _rows_of(self._staging, good, self._place.folder)
        why = "metadata has a row for it, and its name would become"
        remedy = "rename it in both, without signs such as ' # & [ ]"
        return {
            one.stored: f"{why} {one.stored}: {remedy}"
            for one in self._told
            if one.stored in good and one.stored != (last := _last_part(one.name)) and one_form(last) in rows
        }

    def close(self) -> None:
        """Remove what was not stored."""
        if self._file is not None:
            self._file.close()
        shutil.rmtree(self._staging)

    def _require_space(self, coming_bytes: int) -> None:
        free = shutil.disk_usage(self._place.folder).free
        if free - coming_bytes < RESERVE_BYTES:
            what = f"the disk has {gib(free)} free, of which uploads leave {gib(RESERVE_BYTES)}"
            raise DataError(what, where=str(self._place.folder), remedy="free some space")

    def _part_begin(self) -> None:
        self._part, self._value, self._size, self._header = {}, b"", 0, b""

    def _header_bytes(self, data: bytes, start: int, end: int) -> None:
        """Take bytes of a header's name, then of its value."""
        self._header += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower().startswith(_DISPOSITION):
            self._part = parse_options_header(self._header[len(_DISPOSITION) :])[1]
        self._header = b""

    def _headers_finished(self) -> None:
        given = self._part.get(b"filename", b"").decode(errors="replace")
        if not given:
            return
        name, problem = stored_name(given), ""
        if self._files >= MOST_FILES:
            problem = f"the data set has {MOST_FILES} files, which is all that it may have"
        elif not name or name.startswith("."):
            problem = "the name is hidden, or has no letters"
        elif (self._staging / name).exists():
            problem = "the upload has two files of this name"
        self._told.append(Told(name=given, stored="" if problem else name, problem=problem))
        if not problem:
            self._files += 1
            self._file = (self._staging / name).open("xb")

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        self._size += end - start
        if b"filename" not in self._part:
            self._value = (self._value + data[start:end])[:_MOST_FIELD_BYTES]
        elif self._file is not None:
            self._bytes, self._unlooked = self._bytes + end - start, self._unlooked + end - start
            if self._size > MOST_FILE_BYTES:
                self._refuse(f"the file has more than {MOST_FILE_BYTES // 1024**2} MiB")
            elif self._bytes > MOST_SET_BYTES:
                self._refuse(f"the data set would have more than {gib(MOST_SET_BYTES)}")
            else:
                self._file.write(data[start:end])
            if self._unlooked > _LOOK_BYTES:
                self._require_space(0)
                self._unlooked = 0

    def _refuse(self, problem: str) -> None:
        """Drop the file that is coming in; the rest of it is passed over."""
        assert self._file is not None
        self._file.close()
        self._file, one = None, self._told[-1]
        (self._staging / one.stored).unlink()
        self._bytes -= self._size
        self._told[-1] = dataclasses.replace(one, stored="", problem=problem)

    def _part_end(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        elif b"filename" not in self._part:
            name = self._part.get(b"name", b"").decode(errors="replace")
            self._fields[name] = self._value.decode(errors="replace")


def _size(folder: Path) -> tuple[int, int]:
    """Number of files below a folder, and their bytes."""
    found = []
    for inside, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # others may work in the folder too
                found.append((Path(inside) / name).lstat().st_size)
    return len(found), sum(found)


def _sent_again(
    staging: Path, names: Sequence[str], folder: Path, *, may_be_numbered: bool
) -> dict[str, tuple[str, list[str]]]:
    """Files that lie in `folder` already, byte for byte, with all others of their stem, as those of a part
    whose answer was lost: their names there, or where they `may_be_numbered` with a number behind.
    """
    others: defaultdict[str, set[str]] = defaultdict(set)
    for path in folder.iterdir() if may_be_numbered else ():
        others[re.sub(r"-\d+$", "", path.stem)].add(path.stem)
    stems: defaultdict[str, list[str]] = defaultdict(list)
    for name in names:
        stems[PurePosixPath(name).stem].append(name)
    found: dict[str, tuple[str, list[str]]] = {}
    for stem, group in stems.items():
        for other in sorted({stem} | others[stem], key=lambda one: (len(one), one)):
            there = {name: other + PurePosixPath(name).suffix for name in group}
            if all(_is_same(staging / name, folder / one) for name, one in there.items()):
                found |= {name: (one, []) for name, one in there.items()}
                break
    return found


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and not other.is_symlink() and filecmp.cmp(one, other, shallow=False)


def _stems_apart(staging: Path, names: Sequence[str], folder: Path) -> Set[str]:
    """Stems of which every picture, of the upload and of `folder`, has a row in metadata that names it whole:
    in the upload's own, else in that of the folder.
    """
    rows = _rows_of(staging, names, folder)
    every = [*map(PurePosixPath, names), *folder.iterdir()]
    pictures = [path for path in every if path.suffix.lower() in SUFFIXES]
    others = {path.stem for path in pictures if one_form(path.name) not in rows}
    return {path.stem for path in pictures} - others


def _rows_of(staging: Path, names: Sequence[str], folder: Path) -> Set[str]:
    """Names in the metadata of an upload, else in that of the folder."""
    came = [staging / name for name in names if name in METADATA_NAMES]
    there = [path for name in METADATA_NAMES if (path := folder / name).is_file()]
    return {name for file in came or there for name in read_metadata([file], file.parent)[0].named}


def _final_names(
    folder: Path, names: list[str], existing: str, apart: Set[str]
) -> dict[str, tuple[str, list[str]]]:
    """For each file its name in `folder`, empty where it is left out, and the files that it replaces.

    A picture and its caption keep a common stem; a second picture of the upload that has it gets another, and
    never replaces the first. Those whose stem is in `apart` go by their whole names.
    """
    sort = functools.partial(_sort, apart)
    taken: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for path in folder.iterdir():
        taken[sort(path.name)].append(path.name)
    stems = {stem for stem, _ in taken} | {PurePosixPath(name).stem for name in names}
    seen: Counter[tuple[str, str]] = Counter()
    groups: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for name in names:
        groups[PurePosixPath(name).stem, seen[sort(name)]].append(name)
        seen[sort(name)] += 1
    final: dict[str, tuple[str, list[str]]] = {}
    for (stem, before), group in groups.items():
        in_way = {name: sorted(taken.get(sort(name), ())) for name in group}
        target = stem
        if existing == "keep" and (before or any(in_way.values())):
            # a caption alone would be no picture's under another name, metadata would not be read
            has_picture = any(Path(name).suffix.lower() in SUFFIXES for name in group)
            target = _free_stem(stem, stems) if has_picture else ""
        for name in group:
            left_out = not target or (existing != "keep" and before) or (existing == "skip" and in_way[name])
            stored = "" if left_out else target + PurePosixPath(name).suffix
            final[name] = (stored, in_way[name] if existing == "replace" and stored else [])
    return final


def _sort(apart: Set[str], name: str) -> tuple[str, str]:
    """Stem and kind of a file: of one sort there may be one file in a folder."""
    path = PurePosixPath(name)
    suffix = path.suffix.lower()
    if name in METADATA_NAMES:
        return "metadata", "metadata"
    return path.stem, "picture" if suffix in SUFFIXES and path.stem not in apart else suffix


def _free_stem(stem: str, stems: set[str]) -> str:
    """The stem with the first number that no file has."""
    number = 2
    while f"{stem}-{number}" in stems:
        number += 1
    stems.add(f"{stem}-{number}")
    return f"{stem}-{number}"
