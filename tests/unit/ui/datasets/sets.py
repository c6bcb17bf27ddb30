"""Small data sets of a studio, for the tests of the Data set page."""

from __future__ import annotations

from pathlib import Path

from tests.unit.data.pictures import write_pair
from trainer.ui.datasets import worker
from trainer.ui.datasets.places import Place, places
from trainer.ui.datasets.snapshot import Snapshot, pictures_by_id, read_snapshot
from trainer.ui.studio import Studio


def make(studio: Studio, name: str = "cats", **captions: str) -> Place:
    """A data set with a picture and a caption for each keyword; of `a` the file is a.png."""
    folder = studio.data / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, (stem, caption) in enumerate(captions.items()):
        write_pair(folder, f"{stem}.png", caption, seed=number)
    (place,) = [one for one in places(studio) if one.name == name]
    return place


def looked(place: Place) -> Snapshot:
    """The data set after a look in this process."""
    worker.note_request(place)
    worker.look_at(place)
    found = read_snapshot(place)
    assert found is not None
    return found


def key_of(place: Place, name: str) -> str:
    """Id of a picture by its name below the root."""
    (key,) = [key for key, one in pictures_by_id(place).items() if one.name == name]
    return key


def tree(folder: Path) -> dict[str, bytes]:
    """Bytes of every file below a folder, by name."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }
