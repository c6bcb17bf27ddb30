"""Deterministic safetensors files and the two LoRA exports."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.errors import DataError, NoSpaceError, StorageError
from trainer.files.weight_files import read_header
from trainer.modeling import tensor_file as tensorfile
from trainer.modeling.adapter.comfyui import write_comfyui


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "b.weight": torch.randn(3, 5, generator=generator),
        "a.weight": torch.randn(4, generator=generator).bfloat16(),
        "c": torch.tensor(2, dtype=torch.int64),
        "empty": torch.zeros(0, 3),
        "view": torch.randn(4, 4, generator=generator).t(),
    }


def test_written_tensors_read_back_bit_for_bit_with_the_library(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensorfile.write_tensors(path, tensors(), {"format": "pt"}, None)
    loaded = load_file(path)
    assert set(loaded) == set(tensors())
    for name, tensor in tensors().items():
        assert torch.equal(loaded[name], tensor), name
        assert loaded[name].dtype == tensor.dtype


@pytest.mark.parametrize("name", tensorfile.DTYPES)
def test_every_type_of_the_format_is_written_as_the_library_writes_it(tmp_path: Path, name: str) -> None:
    """`trainer merge` copies whatever a base keeps its tensors in, fp8 among it."""
    bits = torch.arange(64, dtype=torch.uint8) % (2 if name == "BOOL" else 200)
    tensor = bits.view(tensorfile.DTYPES[name]).reshape(2, -1)
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    tensorfile.write_tensors(ours, {"a": tensor}, {"format": "pt"}, None)
    save_file({"a": tensor}, theirs, {"format": "pt"})
    (entry,) = read_header(ours).tensors.values()
    assert entry == read_header(theirs).tensors["a"]
    assert entry["dtype"] == name
    assert ours.read_bytes()[-64:] == theirs.read_bytes()[-64:] == bytes(bits.tolist())


def test_bytes_do_not_depend_on_the_order_of_tensors_or_metadata(tmp_path: Path) -> None:
    first, second = tmp_path / "1", tmp_path / "2"
    tensorfile.write_tensors(first, tensors(), {"a": "1", "b": "2"}, None)
    tensorfile.write_tensors(second, dict(reversed(tensors().items())), {"b": "2", "a": "1"}, None)
    assert first.read_bytes() == second.read_bytes()


def test_rewriting_a_library_file_keeps_content_and_fixes_bytes(tmp_path: Path) -> None:
    contents = []
    for number in range(4):  # the library's header order changes from call to call
        path = tmp_path / f"{number}.safetensors"
        save_file({k: v.contiguous() for k, v in tensors().items()}, path, {"format": "pt", "k": "v"})
        tensorfile.rewrite_sorted(path, {"added": "1"})
        contents.append(path.read_bytes())
    assert len(set(contents)) == 1
    assert torch.equal(load_file(tmp_path / "0.safetensors")["b.weight"], tensors()["b.weight"])


def test_shards_keep_to_the_limit_and_lose_nothing() -> None:
    many = {f"{i:02d}": torch.zeros(10) for i in range(7)}  # 40 bytes each
    shards = tensorfile.split_shards(many, 100)
    assert [len(shard) for shard in shards] == [2, 2, 2, 1]
    assert sorted(name for shard in shards for name in shard) == sorted(many)
    assert [len(shard) for shard in tensorfile.split_shards(many, 10)] == [1] * 7


def test_a_full_disk_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError, match=r"x\.safetensors"):
        tensorfile.write_tensors(tmp_path / "x.safetensors", tensors(), {}, None)


def test_bytes_that_the_disk_does_not_take_are_told(tmp_path: Path) -> None:
    """In the middle of a file, which syncs without an error afterwards."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large"):
            tensorfile.write_tensors(tmp_path / "x", {"a": torch.ones(50_000)}, {}, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list(tmp_path.iterdir())


def parts(count: int, device: str = "cpu") -> list[dict[str, torch.Tensor]]:
    """Tensors of several files, of many sizes."""
    generator = torch.Generator(device).manual_seed(0)
    return [
        {f"{n}": torch.randn(1 + 311 * n * (file + 1), generator=generator, device=device) for n in range(9)}
        for file in range(count)
    ]


def test_files_that_are_written_side_by_side_are_those_of_one_after_the_other(tmp_path: Path) -> None:
    files = {tmp_path / f"{number}": part for number, part in enumerate(parts(6))}
    told: list[int] = []
    digests = tensorfile.write_files(files, {"format": "pt"}, lambda: told.append(1))
    for path, part in files.items():
        found = load_file(path)
        assert found.keys() == part.keys()
        assert all(torch.equal(found[name], part[name]) for name in part)
        assert digests[path] == hashlib.sha256(path.read_bytes()).hexdigest()
        alone = tensorfile.write_tensors(tmp_path / "alone", part, {"format": "pt"}, None)
        assert alone == digests[path]
    assert len(told) == 6 * 9


def test_ranks_make_tensors_in_the_order_in_which_one_of_them_writes(tmp_path: Path) -> None:
    """A gather of one tensor beside that of another would give wrong bytes, or none ever."""
    made: list[str] = []

    def later(name: str, value: torch.Tensor) -> tensorfile.Later:
        def make() -> torch.Tensor:
            made.append(name)
            return value

        return tensorfile.Later(dtype=value.dtype, shape=tuple(value.shape), make=make)

    shards = [
        {f"{n}": later(f"{file}/{n}", one[f"{n}"]) for n in range(9)} for file, one in enumerate(parts(6))
    ]
    tensorfile.write_files({tmp_path / f"{n}": one for n, one in enumerate(shards)}, {}, None)
    written, made[:] = list(made), []
    tensorfile.take_part(shards)
    assert made == written
    assert len(set(made)) == 6 * 9
    assert max(len({name[0] for name in made[i : i + 4]}) for i in range(9 * 4)) == 4, "four side by side"


def test_a_disk_that_is_full_beside_other_files_leaves_none_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = os.fsync, [2]

    def full(descriptor: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpaceError, match=r"No space left"):
        tensorfile.write_files({tmp_path / f"{n}": one for n, one in enumerate(parts(3))}, {}, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_tensors_of_a_gpu_pass_through_the_same_host_memory_to_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorfile, "_MOST_BEHIND_BYTES", 20_000)
    files = {tmp_path / f"{number}": part for number, part in enumerate(parts(6, "cuda"))}
    tensorfile.write_files(files, {}, None)
    for path, part in files.items():
        assert all(torch.equal(one, part[name].cpu()) for name, one in load_file(path).items())


def adapter(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    state = {}
    for module in ("transformer_blocks.0.attn.to_q", "single_transformer_blocks.3.proj_mlp"):
        state[f"{module}.lora_A.weight"] = torch.randn(rank, 8, generator=generator)
        state[f"{module}.lora_B.weight"] = torch.randn(6, rank, generator=generator)
    return state


def test_comfyui_file_has_its_keys_and_one_alpha_a_layer(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    config = {"r": 4, "lora_alpha": 2.0, "rank_pattern": {}, "alpha_pattern": {"proj_mlp": 3.0}}
    write_comfyui(
        adapter(4),
        path,
        {},
        config=config,
        key_of=lambda module: f"transformer.{module}",
        weight_of=no_weight,
    )
    loaded = load_file(path)
    assert sorted(loaded) == [
        f"transformer.{module}.{part}"
        for module in ("single_transformer_blocks.3.proj_mlp", "transformer_blocks.0.attn.to_q")
        for part in ("alpha", "lora_A.weight", "lora_B.weight")
    ]
    assert loaded["transformer.transformer_blocks.0.attn.to_q.alpha"].item() == 2.0
    assert loaded["transformer.single_transformer_blocks.3.proj_mlp.alpha"].item() == 3.0


def test_a_dora_on_a_layer_that_comfyui_keeps_the_other_way_round_changes_it_by_as_much(
    tmp_path: Path,
) -> None:
    """ComfyUI's formula, comfy/weight_adapter/base.py, on rows in its order: their halves are swapped."""
    generator = torch.Generator().manual_seed(3)
    down, up, base, magnitude = (
        torch.randn(shape, generator=generator) for shape in ((4, 8), (6, 4), (6, 8), (6,))
    )
    state = {"norm_out.linear.lora_A.weight": down, "norm_out.linear.lora_B.weight": up}
    state["norm_out.linear.lora_magnitude_vector"] = magnitude
    config = {"r": 4, "lora_alpha": 2.0, "rank_pattern": {}, "alpha_pattern": {}}
    for swapped in ((), ("norm_out.linear",)):
        write_comfyui(
            state,
            tmp_path / "x.safetensors",
            {},
            config=config,
            key_of=lambda module: module,
            weight_of=lambda module: base,
            swapped=swapped,
        )
        found = load_file(tmp_path / "x.safetensors")
        change = found["norm_out.linear.lora_B.weight"] @ found["norm_out.linear.lora_A.weight"]
        change = change * found["norm_out.linear.alpha"] / 4
        whole = base + up @ down / 2
        wanted = whole * (magnitude / whole.norm(dim=1))[:, None]
        # the weight and the change in ComfyUI's order, not the file's scale
        order = [3, 4, 5, 0, 1, 2] if swapped else list(range(6))
        theirs = base[order] + change[order]
        theirs = theirs * found["norm_out.linear.dora_scale"] / base[order].norm(dim=1, keepdim=True)
        assert torch.allclose(theirs, wanted[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "alpha"), [(16, 8.0), (12, 8.0), (10, 1.0)])
def test_a_lokr_changes_weights_by_as_much_in_comfyui(
    tmp_path: Path, dtype: torch.dtype, rank: int, alpha: float
) -> None:
    """Its scale is in one factor, which was rounded to bf16 again."""
    generator = torch.Generator().manual_seed(0)
    w1, w2_a, w2_b = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((8, 8), (16, rank), (rank, 16))
    )
    config = {"r": rank, "alpha": alpha, "rank_pattern": {}, "alpha_pattern": {}}
    write_comfyui(
        {"l.lokr_w1": w1, "l.lokr_w2_a": w2_a, "l.lokr_w2_b": w2_b},
        tmp_path / "x.safetensors",
        {},
        config=config,
        key_of=lambda module: module,
        weight_of=no_weight,
    )
    found = {name: tensor.float() for name, tensor in load_file(tmp_path / "x.safetensors").items()}
    theirs = torch.kron(found["l.lokr_w1"], found["l.lokr_w2_a"] @ found["l.lokr_w2_b"])
    ours = alpha / rank * torch.kron(w1.float(), w2_a.float() @ w2_b.float())
    assert (theirs - ours).norm() / ours.norm() < 1e-6


def no_weight(module: str) -> torch.Tensor:
    raise AssertionError(f"a plain LoRA needs no weight of {module}")


def test_a_layer_that_comfyui_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"transformer_blocks\.0\.attn\.to_q"):
        write_comfyui(adapter(4), tmp_path / "x", {}, config={}, key_of=lambda _: None, weight_of=no_weight)
