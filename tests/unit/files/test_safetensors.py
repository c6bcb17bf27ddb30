"""Headers of safetensors files: read and made as the library does it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save

from trainer.files import safetensors
from trainer.files.safetensors import HeaderCutOffError, HeaderError

METADATA = {"format": "pt", "rank": "16"}


def saved(name: str) -> bytes:
    return save({name: torch.arange(6.0).reshape(2, 3), "b": torch.tensor([True])}, METADATA)


@pytest.mark.parametrize("length", range(1, 17))
def test_a_header_is_as_long_as_the_librarys_and_read_by_it(tmp_path: Path, length: int) -> None:
    """Tensors begin at a multiple of eight bytes, whatever the names' lengths are."""
    theirs = safetensors.read_header(io.BytesIO(saved("a" * length)))
    rows = [("a" * length, "torch.float32", (2, 3), 24), ("b", "torch.bool", (1,), 1)]
    ours = safetensors.head(safetensors.entries(rows), METADATA)
    assert len(ours) == theirs.start and len(ours) % 8 == 0
    path = tmp_path / "file"
    path.write_bytes(ours + saved("a" * length)[theirs.start :])
    with safe_open(path, "pt") as file:
        assert file.metadata() == theirs.metadata == safetensors.read_header(path).metadata == METADATA
        assert torch.equal(file.get_tensor("a" * length), torch.arange(6.0).reshape(2, 3))
    assert theirs.shapes == {"a" * length: (2, 3), "b": (1,)}
    assert theirs.end == len(saved("a" * length))


def test_a_file_without_tensors_ends_with_its_header() -> None:
    header = safetensors.read_header(io.BytesIO(save({})))
    assert header.end == header.start == len(save({}))
    assert not header.metadata


def test_a_header_that_is_cut_off_anywhere_is_told_as_such() -> None:
    """The caller makes such a file anew; one without any header may be somebody else's."""
    whole = saved("a")
    start = safetensors.read_header(io.BytesIO(whole)).start
    for length in range(start):
        with pytest.raises(SafetensorError):
            load(whole[:length])
        with pytest.raises(HeaderCutOffError):
            safetensors.read_header(io.BytesIO(whole[:length]))
    assert safetensors.read_header(io.BytesIO(whole[:start])).end == len(whole)


class Counted(io.BytesIO):
    """A stream that may be asked for the library's most bytes of a header, and for no more."""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None and 0 <= size <= 100_000_000
        return super().read(size)


def test_no_memory_is_asked_for_at_the_word_of_another_files_bytes() -> None:
    page = b"<!DOCTYPE html>" + b" " * 100
    with pytest.raises(SafetensorError, match=r"(?i)header ?too ?large"):
        load(page)
    with pytest.raises(HeaderCutOffError, match=f"header of {int.from_bytes(page[:8], 'little')} bytes"):
        safetensors.read_header(Counted(page))


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "1", '{"a": 1}', '{"a": {"shape": 1, "data_offsets": [0, 4]}}', '{"a": {"shape": []}}',
        '{"a": {"shape": [], "data_offsets": [0]}}', '{"a": {"shape": [], "data_offsets": [0, 1e999]}}',
        '{"__metadata__": 1}', "[" * 100_000, "\udcff",
    ],
    ids=range(12),
)  # fmt: skip
def test_what_is_no_header_is_told_as_such(text: str) -> None:
    raw = text.encode(errors="surrogateescape")
    raw = len(raw).to_bytes(8, "little") + raw
    with pytest.raises(SafetensorError):
        load(raw)
    with pytest.raises(HeaderError) as caught:
        safetensors.read_header(io.BytesIO(raw))
    assert not isinstance(caught.value, HeaderCutOffError)
