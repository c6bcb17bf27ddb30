"""The tiny base is a real base model to diffusers: layout, classes, and tokenizers that fit the encoders."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import random_bases


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def pipeline(tiny_flux1_dev: Path) -> Iterator[Any]:
    from diffusers import FluxPipeline

    yield FluxPipeline.from_pretrained(tiny_flux1_dev, local_files_only=True)


def test_pipeline_loads_and_draws(pipeline: Any) -> None:
    def draw(prompt: str) -> Any:
        return pipeline(
            prompt,
            width=32,
            height=32,
            num_inference_steps=1,
            max_sequence_length=16,
            output_type="pt",
            generator=torch.Generator().manual_seed(0),
        ).images

    cat, dog = draw("a red cat"), draw("a blue dog")
    assert cat.shape == (1, 3, 32, 32)
    assert torch.isfinite(cat).all()
    assert not torch.equal(cat, dog), "the caption must reach the picture"


def test_clip_pools_the_end_of_text(pipeline: Any) -> None:
    tokenizer, encoder = pipeline.tokenizer, pipeline.text_encoder
    assert tokenizer.model_max_length == 77
    ids = tokenizer("a red cat", padding="max_length", return_tensors="pt").input_ids
    assert ids.shape == (1, 77)
    end = int((ids[0] == tokenizer.eos_token_id).nonzero()[0, 0])
    with torch.no_grad():
        output = encoder(ids)
    assert torch.equal(output.pooler_output[0], output.last_hidden_state[0, end])
    # the published base model's config relies on the highest id
    assert tokenizer.eos_token_id == max(tokenizer.get_vocab().values())


@pytest.mark.parametrize("text", ["a red cat", "Zebra-Quartz #9!", "naïve café", "日本 🚀", ""])
def test_any_caption_stays_inside_the_vocabularies(pipeline: Any, text: str) -> None:
    clip, t5 = pipeline.tokenizer, pipeline.tokenizer_2
    clip_ids, t5_ids = clip(text).input_ids, t5(text).input_ids
    assert max(clip_ids) < pipeline.text_encoder.config.vocab_size
    assert max(t5_ids) < pipeline.text_encoder_2.config.vocab_size
    # CLIP's unknown token is its end token, which would cut the caption short
    assert clip_ids.count(clip.eos_token_id) == 1
    assert t5_ids[-1] == t5.eos_token_id


def test_words_of_the_corpus_are_one_t5_piece(pipeline: Any) -> None:
    assert pipeline.tokenizer_2.tokenize("a red cat") == ["▁a", "▁red", "▁cat"]


@pytest.mark.slow
def test_bytes_are_equal_across_processes(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/random_base.py", "flux1_dev", "--output", str(tmp_path / "base")]
    # another hash seed: nothing may depend on the order of a set
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "7"})
    assert digests(tmp_path / "base") == digests(tiny_flux1_dev)
    assert sum(path.stat().st_size for path in tiny_flux1_dev.rglob("*") if path.is_file()) < 25e6


def test_the_seed_changes_every_model(tiny_flux1_dev: Path, tmp_path: Path) -> None:
    random_bases.build("flux1_dev", "tiny", tmp_path / "other", seed=1)
    ours, other = digests(tiny_flux1_dev), digests(tmp_path / "other")
    assert {name for name in ours if ours[name] != other[name]} == {
        name for name in ours if name.endswith(".safetensors")
    }


def test_full_size_has_the_real_widths_and_no_weights(tmp_path: Path) -> None:
    random_bases.build("flux1_dev", "full", tmp_path / "full", weights=False)
    files = set(digests(tmp_path / "full"))
    assert not [name for name in files if name.endswith(".safetensors")]
    transformer = json.loads((tmp_path / "full/transformer/config.json").read_text())
    assert transformer["num_attention_heads"] * transformer["attention_head_dim"] == 3072
    index = json.loads((tmp_path / "full/model_index.json").read_text())
    for name, (_, class_name) in ((key, value) for key, value in index.items() if not key.startswith("_")):
        assert any(file.startswith(f"{name}/") for file in files), f"{name} ({class_name}) has no file"


def test_full_size_with_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--no-weights"):
        random_bases.build("flux1_dev", "full", tmp_path / "full")


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(FileExistsError, match="not empty"):
        random_bases.build("flux1_dev", "tiny", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
