"""Ranks that hold rows of one base: each asks the files for its own, and together they have all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.ranks import Workers
from trainer.engine.ranks import Ranks
from trainer.errors import AccessError
from trainer.modeling.base import load_rows
from trainer.modeling.base.load import build_structure
from trainer.modeling.base.source import ModelSource
from trainer.modeling.blocks.recompute import repeated_blocks

FILE = "transformer/diffusion_pytorch_model.safetensors"
BLOCKS = ("FluxTransformerBlock", "FluxSingleTransformerBlock")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A transformer in one file."""
    from diffusers import FluxTransformer2DModel

    from tests.unit.modeling.test_load import CONFIG

    torch.manual_seed(0)
    FluxTransformer2DModel(**CONFIG).to(torch.bfloat16).save_pretrained(tmp_path / "transformer")
    return tmp_path


def asked(ranks: Ranks, base: Path) -> tuple[int, dict[str, torch.Tensor]]:
    """(values that this rank asked the file for, its rows by name)."""
    from diffusers import FluxTransformer2DModel

    from trainer.modeling.storage.trained_rows import own_rows, parameters

    source = ModelSource(folder=base, identity="x", revision=None, random_components=frozenset(), seed=0)
    structure = build_structure(
        FluxTransformer2DModel, source, "transformer", device="cpu", dtype=torch.bfloat16, replace=None
    )
    read: list[int] = []
    opened = load_rows.safe_open

    class Watched:
        """A part of a file, and of the file what hands out parts."""

        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def __enter__(self) -> Watched:
            return Watched(self._inner.__enter__())

        def __exit__(self, *error: object) -> None:
            self._inner.__exit__(*error)

        def get_slice(self, name: str) -> Watched:
            return Watched(self._inner.get_slice(name))

        def get_tensor(self, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} is read whole")

        def __getitem__(self, rows: slice) -> torch.Tensor:
            found: torch.Tensor = self._inner[rows]
            read.append(found.numel())
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_rows, "safe_open", lambda *given, **named: Watched(opened(*given, **named)))
        blocks = repeated_blocks(structure.module, BLOCKS)
        root = load_rows.fill_rows(structure, blocks, rank=ranks.rank, size=ranks.size)
    return sum(read), {name: own_rows(one).clone() for name, one in parameters(root)}


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_reads_its_rows_and_no_other(pool: Workers, base: Path, size: int) -> None:
    found = pool.call(asked, size, base)
    wanted = load_file(base / FILE)
    for name, whole in wanted.items():
        assert torch.equal(torch.cat([rows[name] for _, rows in found]), whole)
    counts = [count for count, _ in found]
    assert sum(counts) == sum(whole.numel() for whole in wanted.values())
    assert max(counts) < 1.2 * sum(counts) / size


def told(ranks: Ranks, base: Path) -> str:
    try:
        asked(ranks, base)
    except AccessError as error:
        return str(error)
    return ""


NAME = "single_transformer_blocks.0.proj_mlp.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({NAME: None}, f"1 tensor of the model is in none of its files, first {NAME}"),
        ({"other": torch.ones(2)}, "tensor other does not belong to FluxTransformer2DModel"),
        ({NAME: torch.ones(3, 2)}, f"tensor {NAME} is (3, 2), the model's is "),
    ],
)
def test_files_of_another_model_are_refused(
    pool: Workers, base: Path, change: dict[str, torch.Tensor | None], words: str
) -> None:
    tensors = {**load_file(base / FILE), **change}
    held = {name: one for name, one in tensors.items() if one is not None}
    save_file(held, base / FILE)
    assert all(words in answer for answer in pool.call(told, 2, base))
    (base / FILE).write_bytes(b"no tensors")
    assert all("not a readable safetensors file" in answer for answer in pool.call(told, 2, base))


TIED = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True},
}
HEAD, WORDS = "lm_head.weight", "model.embed_tokens.weight"


def rows(ranks: Ranks, folder: Path) -> dict[str, torch.Tensor]:
    """Parameters of a language model in rows: those that this rank has."""
    from transformers import LlamaForCausalLM

    from trainer.modeling.storage.trained_rows import own_rows, parameters

    source = ModelSource(folder=folder, identity="x", revision=None, random_components=frozenset(), seed=0)
    structure = build_structure(LlamaForCausalLM, source, "", device="cpu", dtype=torch.float32, replace=None)
    blocks = repeated_blocks(structure.module, ("LlamaDecoderLayer",))
    root = load_rows.fill_rows(structure, blocks, rank=ranks.rank, size=ranks.size)
    return {name: own_rows(one).clone() for name, one in parameters(root)}


@pytest.mark.parametrize("held", ["words", "both", "differing", "head"])
def test_a_head_is_shared_with_the_words_unless_the_files_hold_other_values_for_it(
    pool: Workers, tmp_path: Path, held: str
) -> None:
    """Names and values are those of the model that transformers loads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    LlamaForCausalLM(LlamaConfig(**TIED)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    values = tensors.pop(WORDS)
    tensors |= {
        "words": {WORDS: values},
        "both": {WORDS: values, HEAD: values.clone()},
        "differing": {WORDS: values, HEAD: values + 1},
        "head": {HEAD: values},  # as the savers of safetensors and accelerate may leave it
    }[held]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = dict(LlamaForCausalLM.from_pretrained(tmp_path).named_parameters())
    assert (HEAD in theirs) == (held == "differing")
    found = pool.call(rows, 2, tmp_path)
    for name, whole in theirs.items():
        assert torch.equal(torch.cat([one[name] for one in found]), whole), name
    assert all(one.keys() == theirs.keys() for one in found)
