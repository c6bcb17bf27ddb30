"""Cache entries: same tensors, same bytes; whole or not there; damage is found and removed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from trainer.data.entry_file import DamagedFileError, read_header, write_safetensors
from trainer.engine.caching import store
from trainer.engine.caching.store import Cache, DamagedEntryError, entry_key, prune
from trainer.errors import ConfigError, ExitCode, NoSpaceError, StorageError

KEY = entry_key("text", {"caption": "a cat"})


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "prompt_embeds": torch.randn(7, 5, generator=generator).to(torch.bfloat16),
        "pooled": torch.randn(5, generator=generator),
        "scalar": torch.tensor(3.0),
        "turned": torch.randn(4, 6, generator=generator).T,
    }


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache", "flux1_dev")


def test_what_is_written_is_read(cache: Cache) -> None:
    assert not cache.has("text", KEY)
    cache.write("text", KEY, tensors())
    assert cache.has("text", KEY)
    read = cache.read("text", KEY)
    assert read.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)


def test_the_layout_on_disk(cache: Cache, tmp_path: Path) -> None:
    cache.write("text", KEY, tensors())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [tmp_path / "cache" / "flux1_dev" / "text" / KEY[:2] / f"{KEY}.safetensors"]


def test_the_file_is_plain_safetensors(cache: Cache) -> None:
    from safetensors.torch import load_file

    cache.write("text", KEY, tensors())
    assert torch.equal(load_file(cache.path("text", KEY))["pooled"], tensors()["pooled"])


def test_equal_tensors_give_equal_bytes(tmp_path: Path) -> None:
    contents = set()
    for index in range(8):  # the library's own order changes from call to call
        path = tmp_path / str(index)
        names = sorted(tensors(), reverse=bool(index % 2))
        metadata = {name: name.upper() for name in names}
        write_safetensors(path, {name: tensors()[name] for name in names}, metadata)
        contents.add(path.read_bytes())
    assert len(contents) == 1


def test_the_header_gives_shapes_without_torch(cache: Cache) -> None:
    cache.write("text", KEY, tensors())
    code = f"""
        import sys
        from pathlib import Path
        from trainer.engine.caching.store import Cache
        shapes = Cache(Path({str(cache.directory)!r}), "flux1_dev").header("text", {KEY!r})
        assert "torch" not in sys.modules
        print(shapes)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    expected = {name: tuple(tensor.shape) for name, tensor in sorted(tensors().items())}
    assert done.stdout.strip() == str(expected)


def test_keys_depend_on_every_part_and_not_on_their_order() -> None:
    base = {"caption": "a", "encoder": "b"}
    keys = {
        entry_key("text", base),
        entry_key("latents", base),
        entry_key("text", {**base, "caption": "ab", "encoder": ""}),
        entry_key("text", {**base, "encoder": "c"}),
        entry_key("text", {"caption": "a"}),
    }
    assert len(keys) == 5
    assert entry_key("text", {"encoder": "b", "caption": "a"}) == entry_key("text", base)


def test_every_cut_is_found_by_the_quick_check(cache: Cache) -> None:
    cache.write("text", KEY, tensors())
    path = cache.path("text", KEY)
    whole = path.read_bytes()
    for size in range(0, len(whole)):
        path.write_bytes(whole[:size])
        assert not cache.has("text", KEY)
    path.write_bytes(whole + b"\0")
    assert not cache.has("text", KEY)


def test_every_changed_byte_is_found_on_reading(cache: Cache) -> None:
    cache.write("text", KEY, tensors())
    path = cache.path("text", KEY)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert cache.damage("text", KEY, thorough=True) is not None, f"byte {place} of {len(whole)}"


def test_a_damaged_entry_is_named_and_removed(cache: Cache) -> None:
    cache.write("text", KEY, tensors())
    path = cache.path("text", KEY)
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    assert cache.has("text", KEY)
    with pytest.raises(DamagedEntryError) as caught:
        cache.read("text", KEY)
    assert caught.value.exit_code == ExitCode.BAD_DATA
    problem = caught.value.problems[0]
    assert problem.where == str(path) and "checksum" in problem.what and problem.remedy
    assert not path.exists()
    with pytest.raises(DamagedEntryError, match="is gone: it was removed while the run used it") as caught:
        cache.read("text", KEY)
    remedy = caught.value.problems[0].remedy
    assert "the same command again, which encodes it anew" in remedy and "disk" not in remedy
    assert caught.value.exit_code == ExitCode.BAD_DATA


def test_entries_are_kept_as_long_as_there_is_room(cache: Cache) -> None:
    keys = [entry_key("text", {"caption": str(number)}) for number in range(3)]
    for key in keys:
        cache.write("text", key, tensors())
    one = 2048 + sum(tensor.nbytes for tensor in tensors().values())
    keeping = Cache(cache.directory, "flux1_dev", keep_bytes=2 * one + 1)
    first = [keeping.read("text", key) for key in keys]
    for key in keys:
        cache.path("text", key).unlink()
    assert keeping.read("text", keys[0]) is first[0] and keeping.read("text", keys[1]) is first[1]
    with pytest.raises(DamagedEntryError, match="is gone"):
        keeping.read("text", keys[2])


def test_an_entry_under_another_name_is_damaged(cache: Cache) -> None:
    cache.write("text", KEY, tensors())
    other = cache.path("text", "f" * 64)
    other.parent.mkdir()
    cache.path("text", KEY).rename(other)
    assert cache.damage("text", "f" * 64, thorough=False) == "it belongs to another entry"


@pytest.mark.parametrize(
    "header", [b"[]", b"{}", b'{"__metadata__": 1}', b'{"__metadata__": {}, "a": 1}', b"\xff"]
)
def test_a_strange_header_is_damage(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(DamagedFileError):
        read_header(path)


def test_a_full_disk_leaves_earlier_entries(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("text", KEY, tensors())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(NoSpaceError) as caught:
            cache.write("text", "0" * 64, tensors())
    assert caught.value.exit_code == ExitCode.NO_SPACE
    assert cache.has("text", KEY) and not cache.has("text", "0" * 64)
    assert not list(cache.directory.rglob("*.tmp"))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "flux1_dev").write_text("a file")
    # below /proc a folder that cannot be made is said not to exist
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    folders = (tmp_path, tmp_path / "itself", Path("/proc/nowhere"))
    for cache in (Cache(folder, "flux1_dev") for folder in folders):
        assert not cache.has("text", KEY)
        with pytest.raises(ConfigError, match=r"data\.cache_dir"):
            cache.write("text", KEY, tensors())


def test_a_temporary_file_that_is_removed_meanwhile_is_not_told_as_a_folder_that_refuses(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(descriptor: int) -> None:
        for path in cache.directory.rglob("*.tmp"):
            path.unlink()

    monkeypatch.setattr(os, "fsync", removed)
    with pytest.raises(StorageError, match="was removed while it was written"):
        cache.write("text", KEY, tensors())


def test_a_folder_in_an_entrys_place_is_told(cache: Cache) -> None:
    cache.path("text", KEY).mkdir(parents=True)
    assert not cache.has("text", KEY)
    with pytest.raises(ConfigError, match="a folder stands where this entry of the cache belongs"):
        cache.write("text", KEY, tensors())


def test_bytes_that_the_disk_cannot_read_are_damage(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write("text", KEY, tensors())

    def failing(path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", failing)
        assert cache.damage("text", KEY, thorough=True) == "the disk cannot read it"
        with pytest.raises(DamagedEntryError, match="is damaged: the disk cannot read it"):
            cache.read("text", KEY)
    assert not cache.has("text", KEY)


def test_damaged_and_missing_entries_are_found_together(cache: Cache) -> None:
    keys = [letter * 64 for letter in "0123"]
    for key in keys[:3]:
        cache.write("text", key, tensors())
    path = cache.path("text", keys[1])
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    errors = cache.remove_damaged([("text", key) for key in keys], lambda: None)
    assert [error.problems[0].where for error in errors] == [
        str(cache.path("text", key)) for key in (keys[1], keys[3])
    ]
    assert [cache.has("text", key) for key in keys] == [True, False, True, False]


def run_killed(code: str) -> None:
    """Run a program that kills itself with SIGKILL."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_killed_inside_a_write_leaves_no_entry(cache: Cache, call: str) -> None:
    cache.write("text", KEY, tensors())
    run_killed(f"""
        import os, signal, torch
        from pathlib import Path
        from trainer.engine.caching.store import Cache
        def die(*arguments):
            os.kill(os.getpid(), signal.SIGKILL)
        if {call!r} == "fsync":
            os.fsync = die
        else:
            Path.replace = die
        cache = Cache(Path({str(cache.directory)!r}), "flux1_dev")
        cache.write("text", "0" * 64, {{"a": torch.ones(1000)}})
    """)
    assert cache.has("text", KEY)
    assert not cache.has("text", "0" * 64)
    (left,) = cache.directory.rglob("*.tmp")
    assert prune(cache.directory, {KEY}) == (0, 0)  # young: it may belong to a run that is writing
    os.utime(left, (time.time() - 7200, time.time() - 7200))
    size = left.stat().st_size
    assert prune(cache.directory, {KEY}) == (1, size)
    assert cache.has("text", KEY)


def test_killed_at_any_moment_every_entry_is_whole(cache: Cache) -> None:
    code = f"""
        import torch
        from pathlib import Path
        from trainer.engine.caching.store import Cache, entry_key
        cache = Cache(Path({str(cache.directory)!r}), "flux1_dev")
        print("ready", flush=True)
        for number in range(100000):
            key = entry_key("text", {{"n": str(number)}})
            cache.write("text", key, {{"a": torch.full((50000,), number)}})
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    while len(list(cache.directory.rglob("*.safetensors"))) < 20:
        time.sleep(0.005)
    child.kill()
    child.wait()
    child.stdout.close()
    entries = [path.stem for path in cache.directory.rglob("*.safetensors") if not path.name.startswith(".")]
    assert len(entries) >= 20
    assert all(cache.damage("text", key, thorough=True) is None for key in entries)


def test_prune_keeps_what_is_used_and_what_is_not_its_own(cache: Cache) -> None:
    other = entry_key("text", {"caption": "a dog"})
    for key in (KEY, other):
        cache.write("text", key, tensors())
    size = cache.path("text", other).stat().st_size
    strangers = [
        cache.directory / "model.safetensors",
        cache.directory / "notes.txt",
        cache.directory / "x.tmp",
    ]
    for stranger in strangers:
        stranger.write_text("not an entry")
        os.utime(stranger, (0, 0))
    assert prune(cache.directory, {KEY}) == (1, size)
    assert cache.has("text", KEY) and not cache.has("text", other)
    assert all(stranger.exists() for stranger in strangers)


def test_prune_of_no_folder_is_nothing(tmp_path: Path) -> None:
    assert prune(tmp_path / "none", set()) == (0, 0)


def test_a_damaged_entry_that_may_not_be_removed_is_told(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had ended the thread that reads ahead with a plain OSError."""
    cache.write("text", KEY, tensors())
    path = cache.path("text", KEY)
    path.write_bytes(path.read_bytes()[:-1] + b"x")

    def refused(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(DamagedEntryError, match="its checksum is wrong") as caught:
        cache.read("text", KEY)
    assert "remove it, which this user may not" in caught.value.problems[0].remedy
    assert path.is_file()


def test_a_header_that_the_disk_does_not_give_is_damage(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("text", KEY, tensors())
    codes = iter((errno.EIO, errno.EACCES))

    def failing(path: Path) -> None:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(store, "read_header", failing)
    with pytest.raises(DamagedEntryError, match="the disk cannot read it"):
        cache.header("text", KEY)
    with pytest.raises(StorageError, match="while reading it"):
        cache.header("text", KEY)
