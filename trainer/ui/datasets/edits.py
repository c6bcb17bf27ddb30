"""Changes of a data set's files, each with a way back: captions, and files that go to the trash."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from trainer.data.caption_text import MAX_CAPTION_BYTES, TextError, clean_caption
from trainer.data.leftout import capped
from trainer.data.sets.look import Picture, look
from trainer.errors import DataError, Problem
from trainer.files import atomic, codec
from trainer.ui.datasets.places import Place, held, opened, writing_to
from trainer.ui.datasets.snapshot import listed, pictures_by_id, read_settings

TRASH_DAYS = 7
_MOST_CHANGES = 200
_MOST_BYTES = 1 << 20
STAGING_PREFIX = ".upload-"
"""Beginning of the names of hidden folders in which uploads come in."""
NO_FILE = "none"
"""ETag of a caption that is not written yet."""
_METADATA_ROW = re.compile(r"metadata\.(jsonl|csv):\d")


@dataclass(frozen=True, kw_only=True)
class Caption:
    """A caption as its file says it now."""

    text: str
    etag: str
    """Hash of the file's bytes, by which a change by others is seen."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """A caption file before and after a change; its name is relative to the root."""

    name: str
    before: str | None
    """Bytes as Latin-1, which any are; None where there was no file."""
    after: str
    """ETag."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One step that can be undone."""

    what: str
    captions: tuple[Written, ...] = ()
    added: tuple[str, ...] = ()
    moved: tuple[tuple[str, str], ...] = ()
    """Names of files, and where in the trash each went."""


class ConflictError(DataError):
    """Captions were changed on the disk since they were shown: by name, what they are now."""

    def __init__(self, now: Mapping[str, Caption]) -> None:
        what, remedy = "the caption was changed on the disk meanwhile", "look at it, and change it again"
        super().__init__(capped([Problem(what=what, where=name, remedy=remedy) for name in now]))
        self.now = now


def caption_file(picture: Picture) -> str:
    """Name of the .txt of a picture's caption, whether it is there or not. Raises DataError where the caption
    is a row of metadata.
    """
    if picture.caption_from and not picture.in_file:
        what, remedy = f"the caption is in {picture.caption_from}", "turn the captions into .txt files first"
        raise DataError(what, where=picture.name, remedy=remedy)
    return picture.caption_from or _beside(picture)


def _beside(picture: Picture) -> str:
    """Name of the .txt of a picture's name."""
    return PurePosixPath(picture.name).with_suffix(".txt").as_posix()


def _files_of(picture: Picture) -> list[str]:
    """Names of the files that belong to a picture."""
    return [name for name in (picture.caption_from, picture.mask, *picture.controls) if name]


def caption_now(place: Place, name: str) -> Caption:
    """A caption file as it is on the disk; without text where there is none."""
    return _caption(_bytes(place, name))


def write_captions(place: Place, texts: Mapping[str, tuple[str, str]], what: str) -> None:
    """Write all captions, or none: by the name of their .txt, each the new text and the ETag that was shown.

    Raises ConflictError where a file changed since, DataError where a text cannot be a caption, StorageError.
    """
    with writing_to(place):
        _write_captions(place, texts, what)


def replaced(
    place: Place, pictures: Iterable[Picture], find: str, replace: str
) -> dict[str, tuple[str, str, str]]:
    """Captions in which `find` stands, by the name of their .txt: text now, text then, ETag."""
    found = {}
    for picture in pictures:
        if find and find in picture.caption and picture.in_file:
            now = caption_now(place, picture.caption_from)
            then = " ".join(now.text.replace(find, replace).split())
            if then != now.text:
                found[picture.caption_from] = (now.text, then, now.etag)
    return found


def captions_to_files(place: Place) -> None:
    """Write every caption of metadata, as it is now, into a .txt of its own; the metadata goes to the trash.

    Raises DataError where a picture's row cannot become one: it is no caption, has a .txt beside it, or names
    control images.
    """
    settings = read_settings(place)
    with writing_to(place):
        pictures, _ = look(listed(place, settings), place.root, ())
        if bad := [one for one in pictures if _METADATA_ROW.search(one.problem)]:
            raise DataError(capped([Problem(what=one.problem, where=one.name) for one in bad]))
        if any(one.controls for one in pictures) and not settings.controls:
            what = "the metadata names the control images as well"
            raise DataError(what, where=str(place.folder), remedy="edit the captions there")
        rows = [one for one in pictures if one.caption and not one.in_file]
        texts = {_beside(one): (one.caption, NO_FILE) for one in rows}
        counts, remedy = Counter(map(_beside, rows)), "give each picture a name of its own"
        if shared := [name for name, count in counts.items() if count > 1]:
            what = "the captions of several pictures would be this file"
            raise DataError(capped([Problem(what=what, where=name, remedy=remedy) for name in shared]))
        files = sorted({one.caption_from.rpartition(":")[0] for one in rows})
        _write_captions(place, texts, "captions into .txt files", to_trash=files)


def delete(place: Place, pictures: Sequence[Picture]) -> None:
    """Move pictures to the trash, from where they go for good after TRASH_DAYS. Their .txt files, masks and
    control images go along, but those that another picture has or whose folder is read-only.

    Raises DataError where a caption is a row of metadata, which would be left without its picture.
    """
    for one in pictures:
        caption_file(one)
    names = [one.name for one in pictures]
    others = [one for one in pictures_by_id(place).values() if one.name not in names]
    kept = {name for one in others for name in (one.name, *_files_of(one))}
    names += [
        name
        for name in dict.fromkeys(name for one in pictures for name in _files_of(one))
        if name not in (*kept, *names) and os.access((place.root / name).parent, os.W_OK | os.X_OK)
    ]
    what = f"{PurePosixPath(names[0]).name} deleted" if len(pictures) == 1 else f"{len(pictures)} deleted"
    with writing_to(place):
        names = [name for name in names if _is_there(place, name)]
        if not names:  # another tab was first, or the same click came twice
            return
        trash = _trash(place, names)
        _remember(place, Change(what=what, moved=trash))
        _move_all(place, trash)


def add(place: Place, staged: Mapping[Path, str], to_trash: Sequence[str], what: str) -> None:
    """Move uploaded files to their names, after the files that they replace went to the trash.

    The caller holds the lock. Raises DataError, before anything is moved, where a name is another file's.
    """
    for name in staged.values():
        if name not in to_trash and _is_there(place, name):
            raise DataError("a file of this name is there", where=name, remedy="upload it once more")
    assert len(set(staged.values())) == len(staged), "two files of one name"
    trash = _trash(place, to_trash)
    _remember(place, Change(what=what, added=tuple(staged.values()), moved=trash))
    _move_all(place, trash)
    for source, name in staged.items():
        with held(place, name) as path, atomic.no_space_told(path):
            source.rename(path)


def last_change(place: Place) -> tuple[str, str] | None:
    """Id of the change that the next undo would take back, and words for it; None where there is none."""
    files = _changes(place)
    return (files[-1].stem, _read(files[-1]).what) if files else None


def undo(place: Place, shown: str = "") -> list[str]:
    """Take the last change back; gives the files that others have changed since, which stay as they are.

    Raises DataError where `shown`, the id of the change that somebody wants to take back, is no longer the
    last.
    """
    with writing_to(place):
        files = _changes(place)
        if shown and [shown] != [file.stem for file in files[-1:]]:
            what = "something else was changed or taken back since: nothing was done"
            raise DataError(what, where=place.folder.name, remedy="open the set again, and look what is last")
        if not files:
            return []
        change = _read(files[-1])
        kept = [one.name for one in change.captions if not _restored(place, one)]
        _move_all(place, _trash(place, [name for name in change.added if _is_there(place, name)]))
        for name, trash in change.moved:
            if not _has_folder(place, name):
                kept.append(name)
                continue
            with held(place, name) as path:
                if os.path.lexists(path) or not Path(trash).exists():
                    kept.append(name)
                else:
                    shutil.move(trash, path)
        files[-1].unlink()
        return kept


def empty_trash(studio: Path, now: float) -> None:
    """Remove what was deleted more than TRASH_DAYS before `now`, in Unix seconds."""
    for folder in (studio / "trash" / "data").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # the look at another set removes it as well
            if folder.lstat().st_mtime < now - TRASH_DAYS * 24 * 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _write_captions(
    place: Place, texts: Mapping[str, tuple[str, str]], what: str, to_trash: Sequence[str] = ()
) -> None:
    """Write captions as `write_captions` does, and move files to the trash; the caller holds the lock."""
    cleaned = {name: _cleaned(text, name) for name, (text, _) in texts.items()}
    before = {name: _bytes(place, name) for name in texts}
    rows, others = [], {}
    for name, data in before.items():
        now, after = _caption(data), _etag(cleaned[name])
        if now.etag not in (texts[name][1], after):  # one that says it already was sent twice
            others[name] = now
        rows.append(Written(name=name, before=None if data is None else data.decode("latin-1"), after=after))
    if others:
        raise ConflictError(others)
    trash = _trash(place, to_trash)
    _remember(place, Change(what=what, captions=tuple(rows), moved=trash))
    for name, data in cleaned.items():
        _write(place, name, data)
    _move_all(place, trash)


def _caption(data: bytes | None) -> Caption:
    """Caption of a file's bytes, or of no file."""
    if data is None:
        return Caption(text="", etag=NO_FILE)
    # one that is no UTF-8 is told as a problem of its picture, and can be written anew
    return Caption(text=" ".join(data.decode("utf-8-sig", "replace").split()), etag=_etag(data))


def _restored(place: Place, one: Written) -> bool:
    """Write a caption as it was before; False where it is not as the change left it."""
    if not _has_folder(place, one.name):
        return False
    data = _bytes(place, one.name)
    before = None if one.before is None else one.before.encode("latin-1")
    if data == before:
        return True  # the change was cut off before this file
    if data is None or _etag(data) != one.after:
        return False
    if before is None:
        _move_all(place, _trash(place, [one.name]))
    else:
        _write(place, one.name, before)
    return True


def _cleaned(text: str, name: str) -> bytes:
    """The bytes of a caption as it is written. Raises DataError."""
    try:
        data = f"{clean_caption(text)}\n".encode()
    except TextError as error:
        raise DataError(error.what, where=name, remedy=error.remedy) from error
    if len(data) > MAX_CAPTION_BYTES:
        raise DataError(
            f"the caption has more than {MAX_CAPTION_BYTES} bytes", where=name, remedy="shorten it"
        )
    return data


def _etag(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


def _bytes(place: Place, name: str) -> bytes | None:
    """Bytes of a caption file; None where there is none. Raises DataError for one that is far too large."""
    if not _is_there(place, name):
        return None
    with opened(place, name) as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        what, remedy = f"the file has more than {_MOST_BYTES} bytes", "look at it, and shorten it"
        raise DataError(what, where=str(place.root / name), remedy=remedy)
    return data


def _has_folder(place: Place, name: str) -> bool:
    """False for a file whose folder was removed since: it can neither be read nor put back."""
    return (place.root / name).parent.is_dir()


def _is_there(place: Place, name: str) -> bool:
    with held(place, name) as path:
        return os.path.lexists(path)


def _write(place: Place, name: str, data: bytes) -> None:
    with held(place, name) as path, atomic.writing(path) as file:
        file.write(data)
        if path.is_file() and not path.is_symlink():  # whoever may read and write it still may
            os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))


def _trash(place: Place, names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """A place in the trash for each file; two of one name of different folders get one each."""
    if not names:
        return ()
    folder = place.studio / "trash" / "data" / str(time.time_ns())
    folder.mkdir(parents=True)
    return tuple((name, str(folder / f"{index}-{Path(name).name}")) for index, name in enumerate(names))


def _move_all(place: Place, moved: Iterable[tuple[str, str]]) -> None:
    for name, trash in moved:
        with held(place, name) as path, atomic.no_space_told(Path(trash)):
            shutil.move(path, trash)


def _changes(place: Place) -> list[Path]:
    """Files of the changes that can be undone, oldest first."""
    return sorted((place.state / "undo").glob("*.json"))


def _read(file: Path) -> Change:
    return codec.from_json(Change, file.read_text(), str(file))


def _remember(place: Place, change: Change) -> None:
    """Write a change down before it is made, so that one that is cut off can be undone too."""
    (place.state / "undo").mkdir(parents=True, exist_ok=True)
    # behind all before it, also where the clock was set back since
    number = max([time.time_ns(), *(int(file.stem) + 1 for file in _changes(place)[-1:])])
    atomic.write_text(place.state / "undo" / f"{number:020}.json", codec.to_json(change))
    for old in _changes(place)[:-_MOST_CHANGES]:
        old.unlink()
