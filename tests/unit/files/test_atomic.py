"""Files that are whole or absent, and full disks."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests import killed
from trainer.errors import ExitCode, NoSpaceError, StorageError
from trainer.files import atomic


@pytest.mark.parametrize("sync", [True, False])
def test_the_new_content_replaces_the_old_and_leaves_nothing_else(tmp_path: Path, sync: bool) -> None:
    path = tmp_path / "file.json"
    path.write_text("old")
    atomic.write_text(path, "new ü", sync=sync)
    assert path.read_text() == "new ü"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_content_stays_until_the_block_ends_and_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), atomic.writing(path) as file:
        file.write(b"half of the n")
        file.flush()
        assert path.read_bytes() == b"old"
        raise RuntimeError
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_two_containers_do_not_share_a_temporary_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of processes and threads are equal in two PID namespaces."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    monkeypatch.setattr("threading.get_native_id", lambda: 7)
    path = tmp_path / "file"
    with atomic.writing(path) as first:
        first.write(b"first")
        atomic.write_text(path, "second")
    assert path.read_text() == "first"


@pytest.mark.parametrize("sync", [True, False])
def test_all_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    """After a power cut a name without its bytes would be an empty file in the place of the old one."""
    path = tmp_path / "file"
    events: list[tuple[str, int]] = []
    real, rename = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        status = os.fstat(descriptor)
        folder = stat.S_ISDIR(status.st_mode)
        events.append(("folder", 0) if folder else ("bytes", status.st_size))
        real(descriptor)

    def renamed(source: Path, target: Path) -> Path:
        events.append(("name", source.stat().st_size))
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    atomic.write_text(path, "text", sync=sync)
    assert events == ([("bytes", 4), ("name", 4), ("folder", 0)] if sync else [("name", 4)])
    events.clear()
    atomic.copy_file(path, tmp_path / "copy")
    assert events == [("bytes", 4)]
    (tmp_path / ".model.old").mkdir()
    events.clear()
    assert atomic.put_back(tmp_path / "model") and events == [("folder", 0)]
    assert not atomic.put_back(tmp_path / "model")


def test_new_files_have_the_usual_mode(tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    atomic.write_text(tmp_path / "file", "")
    assert (tmp_path / "file").stat().st_mode == usual.stat().st_mode


def test_a_full_disk_is_told_with_its_exit_code_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "adapter.safetensors"
    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 29)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    path.write_bytes(b"old")
    with (
        pytest.raises(NoSpaceError, match="No space left on device") as caught,
        atomic.writing(path) as file,
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        file.write(b"new")
        full.write(b"new")
    assert caught.value.exit_code is ExitCode.NO_SPACE
    assert caught.value.problems[0].where == str(path)
    assert "(0.5 GiB free)" in caught.value.problems[0].what
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_other_errors_keep_their_type(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        atomic.write_text(tmp_path / "absent" / "file", "text")
    with pytest.raises(FileExistsError), atomic.no_space_told(tmp_path):
        tmp_path.mkdir()


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EIO, "the kernel's log"),
        (errno.EROFS, "takes no more writes"),
        (errno.EFBIG, "ulimit -f"),
        (errno.EACCES, "let this user write there"),
        (errno.EPERM, "let this user write there"),
        (errno.ESTALE, "mount the folder again"),
    ],
)
def test_a_disk_that_fails_or_refuses_is_told_with_file_and_remedy(
    tmp_path: Path, code: int, advice: str
) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(StorageError) as caught, atomic.writing(path):
        raise OSError(code, os.strerror(code))
    assert not isinstance(caught.value, NoSpaceError)
    assert caught.value.exit_code is ExitCode.NO_SPACE
    (problem,) = caught.value.problems
    assert problem.where == str(path)
    assert os.strerror(code) in problem.what
    assert advice in problem.remedy
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="while reading it") as caught, atomic.reading_told(path):
        raise OSError(code, os.strerror(code))
    advice = "let this user read it" if code in {errno.EACCES, errno.EPERM} else advice
    assert advice in caught.value.problems[0].remedy


def test_what_stands_in_the_way_is_told_and_stays(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(StorageError, match="a folder stands where this file belongs"):
        atomic.write_text(tmp_path / "folder", "text")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="a file stands where a folder belongs"):
        atomic.write_text(tmp_path / "file" / "new", "text")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO, errno.EROFS])
def test_a_file_system_that_syncs_no_folders_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Some of networks answer EINVAL, and ended every run with a traceback. A disk that fails is told."""
    real = os.fsync

    def no_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    told = contextlib.nullcontext() if code == errno.EINVAL else pytest.raises(StorageError)
    with told:
        atomic.write_text(tmp_path / "file", "text")
    with told:
        fill(tmp_path / "model", "new")
    assert names(tmp_path) == (["file", "model"] if code == errno.EINVAL else ["file"])


def fill(target: Path, text: str) -> None:
    with atomic.whole_folder(target) as folder:
        (folder / "file").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    for text in ("old", "new"):
        fill(tmp_path / "model", text)
    assert (tmp_path / "model" / "file").read_text() == "new"
    assert names(tmp_path) == ["model"]


def test_the_old_folder_is_kept_until_the_new_one_is_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    fill(target, "old")

    def refused(path: Path, target: Path) -> None:
        assert any((one / "file").read_text() == "old" for one in tmp_path.iterdir() if one != path)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "replace", refused)
    with pytest.raises(StorageError, match="while writing it"):
        fill(target, "new")
    assert (target / "file").read_text() == "old"
    assert names(tmp_path) == ["model"]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_folder_that_an_interrupted_call_left_aside_comes_back(tmp_path: Path, replaced: bool) -> None:
    target, aside = tmp_path / "model", tmp_path / ".model.old"
    fill(target, "old")
    target.rename(aside)
    if replaced:
        fill(tmp_path / "other", "new")
        (tmp_path / "other").rename(target)
    with pytest.raises(RuntimeError), atomic.whole_folder(target):
        raise RuntimeError
    assert (target / "file").read_text() == ("new" if replaced else "old")
    assert names(tmp_path) == ["model"]


def test_a_kill_at_any_moment_leaves_the_old_folder_or_the_new_one(tmp_path: Path) -> None:
    """The old one waits aside for a moment, where `put_back` finds it without knowing its name."""
    seen = set()
    for folder in killed.at_each_change(
        lambda folder: fill(folder / "model", "new"), lambda folder: fill(folder / "model", "old"), tmp_path
    ):
        waiting = list(atomic.kept_aside(folder))
        assert waiting in ([], [folder / "model"])
        absent = not (folder / "model").exists()
        assert not absent or waiting
        assert [atomic.put_back(target) for target in waiting] == [absent] * len(waiting)
        assert set(names(folder)) - {"model.tmp"} == {"model"}
        text = (folder / "model" / "file").read_text()
        seen.add((text, absent))
    assert seen == {("old", False), ("old", True), ("new", False)}


def test_a_new_folder_is_on_the_disk_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut a model's copied files were empty, and the older model was gone."""
    source, target = tmp_path / "config.json", tmp_path / "model"
    source.write_text("{}")
    fill(target, "old")
    synced: set[str] = set()
    real, remove = os.fsync, shutil.rmtree

    def recorded(descriptor: int) -> None:
        synced.add(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        real(descriptor)

    def removed(path: Path, **options: bool) -> None:
        assert not path.exists() or synced == {
            "config.json",
            "deep",
            "transformer",
            "model.tmp",
            tmp_path.name,
        }
        remove(path, **options)

    monkeypatch.setattr(os, "fsync", recorded)
    monkeypatch.setattr(shutil, "rmtree", removed)
    with atomic.whole_folder(target) as folder:
        (folder / "transformer" / "deep").mkdir(parents=True)
        atomic.copy_file(source, folder / "transformer" / "config.json")
    assert names(tmp_path) == ["config.json", "model"]


def test_what_cannot_be_removed_is_told_before_work(tmp_path: Path) -> None:
    (tmp_path / "model.tmp").write_text("mine")
    with (
        pytest.raises(StorageError, match="cannot be removed") as caught,
        atomic.whole_folder(tmp_path / "model"),
    ):
        raise AssertionError("no work is done")
    assert caught.value.problems[0].where == str(tmp_path / "model.tmp")
    assert names(tmp_path) == ["model.tmp"]


@pytest.mark.parametrize("code", [errno.ENOTEMPTY, errno.EBUSY])
def test_a_folder_that_is_in_use_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """NFS keeps a file that a process has open, under another name, and its folder with it."""
    target = tmp_path / "model"
    fill(target, "old")

    def refused(path: str, **options: int) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", refused)
        fill(target, "new")
        assert (target / "file").read_text() == "new" and names(tmp_path) == [".model.old", "model"]
        with pytest.raises(StorageError, match="cannot be removed") as caught, atomic.whole_folder(target):
            raise AssertionError("work whose result would have no place")
        assert caught.value.problems[0].where == str(tmp_path / ".model.old")
    assert (target / "file").read_text() == "new"
    assert atomic.put_back(target) is False
    assert names(tmp_path) == ["model"]
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="Input/output error"):
        code = errno.EIO
        patch.setattr(os, "rmdir", refused)
        atomic.remove_folder(target)


def test_a_folder_that_somebody_else_removes_as_well_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "model", "old")
    real = os.unlink

    def faster(path: str, **options: int) -> None:
        real(path, **options)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    monkeypatch.setattr(os, "unlink", faster)
    assert atomic.remove_folder(tmp_path / "model")
    assert atomic.remove_folder(tmp_path / "model")
    assert names(tmp_path) == []


def test_a_folder_that_is_filled_while_it_is_removed_stays_for_a_later_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"
    fill(target, "old")
    real = os.unlink

    def refilled(path: str, *, dir_fd: int | None = None) -> None:
        real(path, dir_fd=dir_fd)
        fill(target / "more", "again")
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refilled)
        assert atomic.remove_folder(target) is False
    assert names(tmp_path) == ["model"]
    assert atomic.remove_folder(target) and names(tmp_path) == []


def test_what_is_kept_aside_has_the_first_free_number(tmp_path: Path) -> None:
    path, found = tmp_path / "file", []
    for _ in range(4):
        found.append(atomic.unused_name(path))
        found[-1].symlink_to("nothing")
    assert [one.name for one in found] == ["file", "file-2", "file-3", "file-4"]


def test_a_folder_that_a_user_calls_old_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "model.old").mkdir()
    fill(tmp_path / "model", "new")
    assert names(tmp_path) == ["model", "model.old"]


UNREADABLE = Path("/proc/self/mem")
"""A file whose first byte cannot be read: EIO."""


def test_a_copy_names_the_file_whose_disk_failed(tmp_path: Path) -> None:
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.write_bytes(b"bytes" * 1000)
    atomic.copy_file(source, copy)
    assert copy.read_bytes() == source.read_bytes()
    with pytest.raises(StorageError, match="while reading it") as caught:
        atomic.copy_file(UNREADABLE, copy)
    assert caught.value.problems[0].where == str(UNREADABLE)
    with pytest.raises(NoSpaceError, match="while writing it") as caught:
        atomic.copy_file(source, Path("/dev/full"))
    assert caught.value.problems[0].where == "/dev/full"


def test_a_folder_that_was_moved_and_linked_is_replaced_and_what_it_leads_to_stays(tmp_path: Path) -> None:
    """Somebody whose disk gets full does so."""
    larger = tmp_path / "larger"
    fill(larger, "old")
    target = tmp_path / "run" / "model"
    target.parent.mkdir()
    target.symlink_to(larger)
    fill(target, "new")
    assert (target / "file").read_text() == "new" and not target.is_symlink()
    assert (larger / "file").read_text() == "old" and names(target.parent) == ["model"]
    link = tmp_path / "run" / "step-1"
    link.symlink_to(larger)
    assert atomic.remove_folder(link) and names(target.parent) == ["model"]
    (target.parent / ".model.old").symlink_to(larger)  # as an older version left it
    assert atomic.put_back(target) is False
    (target.parent / "model.tmp").symlink_to(larger)
    fill(target, "newer")
    assert (larger / "file").read_text() == "old" and names(target.parent) == ["model"]
