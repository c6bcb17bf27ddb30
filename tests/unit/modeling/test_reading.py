"""Shards read in every way are what safetensors reads; damaged files are told; memory is bounded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from tests.unit.modeling.test_load import LLAMA, shards, source
from trainer.errors import AccessError
from trainer.modeling import tensor_file as tensorfile
from trainer.modeling.base import load as loading
from trainer.modeling.base import reading
from trainer.modeling.base.load import build_structure, fill_structure
from trainer.modeling.base.reading import Choice, Method, ShardReader, choose
from trainer.modeling.base.ring import RingSize
from trainer.modeling.base.structure import Structure

SMALL = RingSize(piece_bytes=64 * 1024, pieces=4, threads=3)
WAYS = [
    Choice(method="safetensors", reason="test"),
    Choice(method="fastsafetensors", reason="test"),
    Choice(method="parallel", reason="test"),
    Choice(method="parallel", direct=True, reason="test"),
]
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def reader(choice: Choice, size: RingSize = SMALL, device: str = "cpu") -> ShardReader:
    return ShardReader(device, choice=lambda path: choice, size=size)


def read(path: Path, choice: Choice) -> dict[str, torch.Tensor]:
    with reader(choice) as ways, ways.open(path) as file:
        return {name: file.get_tensor(name) for name in file.ends}


def raw(tensor: torch.Tensor) -> bytes:
    """fp8 has no comparison, NaN is not itself."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: dict[str, torch.Tensor], path: Path) -> None:
    expected = load_file(path)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert raw(found[name]) == raw(tensor), name


def write_raw(path: Path, parts: Sequence[tuple[str, str, list[int], bytes]]) -> None:
    """A file in exactly this order: name, type, shape, bytes."""
    header, offset = {}, 0
    for name, dtype, shape, data in parts:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, _, _, data in parts:
            file.write(data)


def write_model(path: Path) -> Path:
    """1.3 MiB of bf16 in 10 tensors: 21 pieces of SMALL, most of which hold parts of two tensors."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        f"layer.{number}": torch.randn(300, 227, generator=generator).to(torch.bfloat16)
        for number in range(10)
    }
    save_file(tensors, path)
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tensors_that_span_pieces_are_read(path: Path, way: Choice) -> None:
    assert_same(read(path, way), path)


@pytest.mark.parametrize("way", [way for way in WAYS if way.method != "fastsafetensors"], ids=str)
def test_every_type_is_read(tmp_path: Path, way: Choice) -> None:
    """fastsafetensors has no fnuz and no complex types."""
    path = tmp_path / "all.safetensors"
    tensors = {str(dtype): torch.arange(77).to(dtype) for dtype in (*INTEGERS, *FLOATS)}
    tensors |= {str(dtype): torch.linspace(-3, 3, 77).to(dtype) for dtype in FP8}
    tensors["bool"] = torch.arange(77) % 3 == 0
    tensors["u64"] = torch.arange(77).to(torch.uint64)
    save_file(tensors, path)
    assert len(tensors) == len(tensorfile.DTYPES)
    assert_same(read(path, way), path)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_types_of_models_are_read(tmp_path: Path, way: Choice) -> None:
    path = tmp_path / "model.safetensors"
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int8, torch.float8_e4m3fn)
    save_file({str(kind): torch.linspace(0, 100, 501).to(kind) for kind in kinds}, path)
    assert_same(read(path, way), path)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_empty_tensors_and_scalars_are_read(tmp_path: Path, way: Choice) -> None:
    path = tmp_path / "model.safetensors"
    save_file(
        {
            "empty": torch.zeros(0, 3),
            "matrix": torch.randn(3, 5),
            "nothing": torch.zeros(4, 0, dtype=torch.bfloat16),
            "scalar": torch.tensor(2.5),
        },
        path,
    )
    assert_same(read(path, way), path)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tensors_at_odd_bytes_are_read_and_aligned(tmp_path: Path, way: Choice) -> None:
    """The format asks for no alignment; kernels do."""
    path = tmp_path / "model.safetensors"
    write_raw(
        path,
        [
            ("z", "U8", [3], b"abc"),
            ("m", "F32", [5], torch.arange(5.0).numpy().tobytes()),
            ("b", "U8", [], b"x"),
            ("a", "BF16", [2, 2], bytes(range(8))),
        ],
    )
    assert json.loads(path.read_bytes()[8:].partition(b"}}")[0] + b"}}")["m"]["data_offsets"][0] % 4 == 3
    found = read(path, way)
    assert list(found) == ["z", "m", "b", "a"]
    assert found["m"].tolist() == [0, 1, 2, 3, 4]
    assert raw(found["a"]) == bytes(range(8)) and raw(found["z"]) == b"abc" and raw(found["b"]) == b"x"
    assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_tensors_may_be_left_out(path: Path, way: Choice) -> None:
    expected = load_file(path)
    with reader(way) as ways, ways.open(path) as file:
        names = list(file.ends)
        found = {name: file.get_tensor(name) for name in (names[1], names[6], names[9])}
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_tensor_outlives_its_shard(path: Path, tmp_path: Path, way: Choice) -> None:
    other = tmp_path / "other.safetensors"
    save_file({"layer.0": torch.zeros(300, 227)}, other)
    with reader(way) as ways:
        with ways.open(path) as file:
            kept = file.get_tensor(next(iter(file.ends)))
        with ways.open(other) as file:
            assert not file.get_tensor("layer.0").any()
    assert torch.equal(kept, load_file(path)[next(iter(file_order(path)))])


def file_order(path: Path) -> list[str]:
    with reader(WAYS[0]) as ways, ways.open(path) as file:
        return list(file.ends)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def lie_about_shape(path: Path) -> None:
    write_raw(path, [("layer.0", "F32", [4], bytes(12))])


def lie_about_offsets(path: Path) -> None:
    header = b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))


def unknown_type(path: Path) -> None:
    write_raw(path, [("layer.0", "F7", [1], b"x")])


def huge_header(path: Path) -> None:
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize("spoil", [cut, lie_about_shape, lie_about_offsets, unknown_type, huge_header])
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_file_that_is_not_what_it_says_is_refused(
    path: Path, way: Choice, spoil: Callable[[Path], None]
) -> None:
    spoil(path)
    with reader(way) as ways, pytest.raises(SafetensorError), ways.open(path):
        pass


@pytest.mark.parametrize(
    ("share", "direct", "reason"),
    [
        (0.02, True, "past the page cache (2% of the file is there)"),
        (0.97, False, "through the page cache (97% of the file is there)"),
        (None, False, "through the page cache (whether it is there cannot be told)"),
    ],
)
def test_auto_reads_from_where_the_bytes_are(
    path: Path, share: float | None, direct: bool, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "page_cache_share", lambda path: share)
    choice = choose(path, "auto", torch.device("cuda:0"))
    assert (choice.method, choice.direct) == ("parallel", direct)
    assert str(choice) == f"parallel reads {reason}"


@pytest.mark.parametrize("loader", ["fastsafetensors", "safetensors"])
@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
def test_what_was_asked_for_is_taken(path: Path, loader: Method, device: str) -> None:
    assert choose(path, loader, torch.device(device)) == Choice(method=loader, reason="as planned")


def test_auto_on_the_cpu_is_safetensors(path: Path) -> None:
    assert choose(path, "auto", torch.device("cpu")).method == "safetensors"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).to(torch.bfloat16).save_pretrained(tmp_path / "llama")
    shards(tmp_path / "llama", 3)
    return tmp_path / "llama"


def structure(folder: Path) -> Structure:
    """The language model before it has values."""
    return build_structure(
        LlamaForCausalLM, source(folder), "", device="cpu", dtype=torch.bfloat16, replace=None
    )


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_model_is_the_same_however_it_is_read(
    llama: Path, way: Choice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "ShardReader", lambda *_, **__: reader(way))
    beats: list[tuple[int, int]] = []
    seen: list[tuple[int, int]] = []
    found = fill_structure(
        structure(llama),
        on_shard=lambda done, total: beats.append((done, total)),
        on_bytes=lambda done, total: seen.append((done, total)),
    )
    expected = LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())
    assert beats == [(1, 3), (2, 3), (3, 3)]
    total = sum(file.stat().st_size for file in llama.glob("*.safetensors"))
    assert seen == sorted(seen) and len(seen) == len(expected)
    assert seen[-1] == (total, total)


def test_how_each_shard_is_read_is_told(llama: Path) -> None:
    told: list[str] = []
    fill_structure(structure(llama), say=told.append)
    assert told[0] == "model-0.safetensors: safetensors (nothing is copied to a GPU)"
    assert len(told) == 3


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_damaged_shard_ends_the_load(llama: Path, way: Choice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "ShardReader", lambda *_, **__: reader(way))
    cut(llama / "model-1.safetensors")
    with pytest.raises(AccessError, match=r"model-1\.safetensors: not a readable safetensors file"):
        fill_structure(structure(llama))


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_gpu_gets_the_same_tensors(path: Path, way: Choice) -> None:
    with reader(way, device="cuda:0") as ways:
        for _ in range(3):
            with ways.open(path) as file:
                found = {name: file.get_tensor(name) for name in file.ends}
            assert all(tensor.device.type == "cuda" for tensor in found.values())
            assert_same(found, path)


@pytest.mark.gpu
def test_the_gpu_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({f"layer.{number}": torch.ones(2048, 2048) for number in range(20)}, path)
    with reader(WAYS[3], device="cuda:0") as ways, ways.open(path) as file:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for name in file.ends:
            assert bool(file.get_tensor(name).all())
        # a tensor of 16 MiB and what `all` needs
        assert torch.cuda.max_memory_allocated() - before < 40 * 2**20
