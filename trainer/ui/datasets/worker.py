"""The process in which pictures are decoded, so that none can harm the studio.

It is started by `python -m`, with a task as JSON on its input.

Tasks are `look` (at a data set), `judge` (uploaded files) and `preview` (one picture, as WebP on the output).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.config.interpreter import python
from trainer.data.caption_text import read_sidecar
from trainer.data.pictures.buckets import buckets
from trainer.data.pictures.formats import FORMATS_TEXT, SUFFIXES
from trainer.data.pictures.images import claimed_pixels, read_bytes, read_image
from trainer.data.pictures.opened import open_all
from trainer.data.sets.look import look
from trainer.data.sets.metadata_files import METADATA_NAMES, read_metadata
from trainer.data.sets.scan import open_images
from trainer.errors import DataError, TrainerError
from trainer.files import atomic
from trainer.telemetry.locks import is_held
from trainer.ui.datasets import edits, snapshot
from trainer.ui.datasets.places import Place, opened
from trainer.ui.datasets.snapshot import Opened, Progress, Settings, Snapshot
from trainer.ui.opened import MOST_PIXELS, as_webp

THUMBNAIL_PIXELS = 256
PREVIEW_PIXELS = 1024
_LOCK_NAME, _ASKED_NAME = "look.lock", "asked"
_TELL_PICTURES = 8
_DAY_SECONDS = 24 * 3600
_LONGEST_SECONDS = 600
Task = dict[str, Any]


def ask_for_look(place: Place) -> None:
    """Have the data set looked at, now or once more after the look that goes on."""
    note_request(place)
    if is_looking(place):
        return  # it sees the new request when it is done
    started = subprocess.Popen(_command(), stdin=subprocess.PIPE)
    assert started.stdin is not None
    with started.stdin as pipe:
        pipe.write(json.dumps(_task("look", place)).encode())
    threading.Thread(target=started.wait, daemon=True).start()  # or it would stay as a zombie


def note_request(place: Place) -> None:
    """Write down that the data set is to be looked at."""
    place.state.mkdir(parents=True, exist_ok=True)
    # later than the one before, also where the clock was set back since: else the last look answers it
    asked = max(time.time_ns(), last_request(place) + 1)
    atomic.write_text(place.state / _ASKED_NAME, str(asked), sync=False)


def last_request(place: Place) -> int:
    """When a look was asked for last, in Unix nanoseconds; 0 where none was."""
    try:
        return int((place.state / _ASKED_NAME).read_text())
    except FileNotFoundError:
        return 0


def is_looking(place: Place) -> bool:
    """True while a worker looks at the data set."""
    return is_held(place.state / _LOCK_NAME) is True


def ask(name: str, place: Place, path: str) -> bytes:
    """Output of a task about one path, which is waited for; the caller limits how many are at work.

    Raises DataError where the worker fails.
    """
    task = json.dumps(_task(name, place) | {"path": path}).encode()
    try:
        done = subprocess.run(_command(), input=task, capture_output=True, timeout=_LONGEST_SECONDS)
    except subprocess.TimeoutExpired as error:
        what = f"decoding took longer than {_LONGEST_SECONDS} s"
        raise DataError(what, where=path, remedy="remove what was added last") from error
    if done.returncode:
        what = done.stderr.decode(errors="replace").strip() or f"ended with {done.returncode}"
        raise DataError(f"the picture could not be decoded: {what[-500:]}", remedy="remove it")
    return done.stdout


def thumbnail_path(studio: Path, sha256: str) -> Path:
    """The file of a picture's thumbnail."""
    return studio / "thumbnails" / sha256[:2] / f"{sha256}.webp"


def look_at(place: Place) -> None:
    """Look at a data set until no newer request is there, and write its snapshot."""
    (place.state / _LOCK_NAME).touch()
    done = -1
    while (asked := last_request(place)) > done:
        with (place.state / _LOCK_NAME).open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = snapshot.read_snapshot(place)
            if before is None or before.asked < asked:
                _tidy(place)
                _look(place, snapshot.read_settings(place), asked, before is None)
        done = asked


def judge(place: Place, folder: Path) -> dict[str, str]:
    """Problems of files that were uploaded into `folder`, by name; an empty text of one that is good."""
    files = sorted(folder.iterdir())
    told = dict.fromkeys((path.name for path in files), "")
    pictures = []
    for path in files:
        try:
            if path.name in METADATA_NAMES:
                told[path.name] = "; ".join(str(one) for one in read_metadata([path], folder)[1][:5])
            elif path.suffix.lower() == ".txt":
                read_sidecar(path)
            elif path.suffix.lower() not in SUFFIXES:
                told[path.name] = f"neither a picture nor a caption; {FORMATS_TEXT}"
            elif (pixels := claimed_pixels(read_bytes(path))) > MOST_PIXELS:
                told[path.name] = f"the picture has {pixels / 1e6:.0f} megapixels, more than 100"
            else:
                pictures.append(path)
        except DataError as error:
            told[path.name] = error.problems[0].what
    for problem in open_all(pictures)[1]:
        told[Path(problem.where).name] = f"{problem.what}; {problem.remedy}"
    return {name: text.replace(f"{folder}/", "") for name, text in told.items()}


def _tidy(place: Place) -> None:
    """Remove what was deleted a week ago, and uploads that were cut off with their studio a day ago."""
    edits.empty_trash(place.studio, time.time())
    for folder in place.folder.glob(f"{edits.STAGING_PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # an upload that ends now
            if not folder.is_symlink() and folder.stat().st_mtime < time.time() - _DAY_SECONDS:
                # what stays is another user's, or on a disk that takes no writes
                shutil.rmtree(folder, ignore_errors=True)


def _look(place: Place, settings: Settings, asked: int, first: bool) -> None:
    changed = place.folder.stat().st_mtime_ns
    found = snapshot.listed(place, settings)
    sizes = buckets(settings.resolution, settings.model.pixel_multiple)
    if first:
        listed = Snapshot(pictures=look(found, place.root, sizes)[0])
        snapshot.keep(place, snapshot.SNAPSHOT_NAME, listed)

    def progress(done: int, total: int) -> None:
        if done % _TELL_PICTURES == 0:
            snapshot.keep(place, snapshot.PROGRESS_NAME, Progress(done=done, total=total))

    masked = {mask for item in found.images for mask in item.masks}
    marks = {str(path): mark for path in set(found.files) if (mark := _mark(path, path in masked))}
    before = snapshot.read_opened(place).files
    known = {Path(name): one for name, (mark, one) in before.items() if marks.get(name) == mark}
    open_images(found, known=known, progress=progress)
    good = {str(path): one for path, one in found.good.items()}
    kept = Opened(files={name: (mark, good[name]) for name, mark in marks.items() if name in good})
    snapshot.keep(place, snapshot.OPENED_NAME, kept)
    for path in (item.path for item in found.images if item.path in found.good):
        _keep_thumbnail(thumbnail_path(place.studio, found.good[path].content_sha256), path)
    pictures, strays = look(found, place.root, sizes)
    result = Snapshot(complete=True, asked=asked, folder_changed=changed, pictures=pictures, strays=strays)
    snapshot.keep(place, snapshot.SNAPSHOT_NAME, result)


def _mark(path: Path, as_mask: bool) -> tuple[int, int, int, bool] | None:
    """Size and times by which a file that changed is known; None where it is gone."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, as_mask


def _keep_thumbnail(target: Path, path: Path) -> None:
    """Make a picture's thumbnail unless it is there; one that has changed meanwhile gets its next time."""
    if not target.exists():
        with contextlib.suppress(DataError):  # the next look tells what is wrong with it
            data = as_webp(read_image(path, content_sha256=target.stem), THUMBNAIL_PIXELS)
            target.parent.mkdir(parents=True, exist_ok=True)
            with atomic.writing(target, sync=False) as file:
                file.write(data)


def _command() -> list[str]:
    return python("-m", "trainer.ui.datasets.worker")


def _task(name: str, place: Place) -> Task:
    return {"task": name, "root": str(place.root), "studio": str(place.studio), "name": place.name}


def main() -> int:
    """Carry out the task on standard input; 65 with a message where a file cannot be used."""
    task = json.load(sys.stdin)
    place = Place(root=Path(task["root"]), studio=Path(task["studio"]), name=task["name"])
    try:
        match task["task"]:
            case "look":
                look_at(place)
            case "judge":
                print(json.dumps(judge(place, Path(task["path"]))))
            case "preview":
                with opened(place, task["path"]) as file:
                    picture = read_image(Path(f"/proc/self/fd/{file.fileno()}"))
                sys.stdout.buffer.write(as_webp(picture, PREVIEW_PIXELS))
    except TrainerError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
