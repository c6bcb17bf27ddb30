"""Another trainer's .pt files become cache entries, or are refused with what does not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.runs import Case, Job, Workshop
from trainer.engine import run
from trainer.engine.caching.entries import list_entries
from trainer.errors import ConfigError, DataError

FLUX = Case(family="flux1_dev", method="lora")


@pytest.fixture
def job(workshop: Workshop, tmp_path: Path) -> Job:
    """A run with a cache of its own, nothing in it."""
    return workshop.job(FLUX, tmp_path / "run", "validation.prompts=[]", cache=tmp_path / "cache")


def saved(job: Job, *, number: int = 0, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors that another trainer would have saved for a picture, the first one by default."""
    record = job.records[number]
    size = (1, 16, record.bucket_height // 8, record.bucket_width // 8)
    config = job.context.source.component_config("transformer")
    whole = {
        "latents": torch.randn(size[0], config["in_channels"] // 4, *size[2:]),
        "prompt_embeds": torch.randn(1, 16, config["joint_attention_dim"]),
        "pooled_prompt_embeds": torch.randn(1, config["pooled_projection_dim"]),
    }
    return whole | changes


def put(job: Job, folder: Path, content: Any, *, number: int = 0) -> Path:
    folder.mkdir(exist_ok=True)
    path = (folder / job.records[number].path.name).with_suffix(".pt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    return path


def take(job: Job, folder: Path) -> None:
    run.cache_only(job.context, job.samples, dataclasses.replace(job.spec, import_folder=str(folder)))


def test_a_file_stands_for_its_image_and_caption(job: Job, tmp_path: Path) -> None:
    content = saved(job)
    put(job, tmp_path / "old", content)
    take(job, tmp_path / "old")
    entries = list_entries(job.context, job.records)
    latents = entries.cache.read("latents", entries.latents[0].key)
    assert torch.equal(latents["mean"], content["latents"][0])
    assert not latents["std"].any()
    text = entries.cache.read("text", entries.texts[0].key)
    assert torch.equal(text["prompt_embeds"], content["prompt_embeds"][0])
    assert torch.equal(text["pooled_prompt_embeds"], content["pooled_prompt_embeds"][0])
    assert entries.cache.read("latents", entries.latents[1].key)["std"].any(), "the others are encoded"
    assert any(line.endswith("old: 2 entries written") for line in job.said)


def test_entries_of_before_stay_and_files_of_no_image_are_told(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(job, tmp_path / "old", saved(job))
    (tmp_path / "old" / "stranger.pt").write_bytes(b"x")
    take(job, tmp_path / "old")
    entries = list_entries(job.context, job.records)
    before = entries.cache.read("latents", entries.latents[0].key)["mean"]
    put(job, tmp_path / "old", saved(job))
    take(job, tmp_path / "old")
    assert torch.equal(entries.cache.read("latents", entries.latents[0].key)["mean"], before)
    assert any("old: 0 entries written, 2 were there before and stay" in line for line in job.said)
    assert f"1 .pt files have the name of no image:\n{tmp_path / 'old' / 'stranger.pt'}" in caplog.text


def test_training_takes_what_was_imported(job: Job, tmp_path: Path) -> None:
    for number in range(len(job.records)):
        put(job, tmp_path / "old", saved(job, number=number), number=number)
    take(job, tmp_path / "old")
    entries = list_entries(job.context, job.records)
    count = len({one.key for one in (*entries.texts, *entries.latents)})
    assert f"cache: {count} entries were there, 1 encoded" in job.said, "the empty caption"
    job.train()
    assert f"cache: {count + 1} entries were there, 0 encoded" in job.said


def test_a_name_of_two_images_is_refused(job: Job, tmp_path: Path) -> None:
    first, second = job.records[:2]
    other = dataclasses.replace(second, identifier=f"1/{first.path.name}")
    samples = dataclasses.replace(job.samples, held_out=(other,))
    path = put(job, tmp_path / "old", saved(job))
    with pytest.raises(DataError, match=f"it may be of {first.path} or of {second.path}") as caught:
        run.cache_only(
            job.context, samples, dataclasses.replace(job.spec, import_folder=str(tmp_path / "old"))
        )
    assert [problem.where for problem in caught.value.problems] == [str(path)]


BAD: dict[str, tuple[Callable[[Job], Any], str]] = {
    "another size": (lambda job: saved(job, latents=torch.zeros(4, 4, 4)), r"`latents` is \(4, 4, 4\), and"),
    "too many tokens": (
        lambda job: saved(job, prompt_embeds=torch.zeros(20, saved(job)["prompt_embeds"].shape[-1])),
        "20 tokens, data.max_sequence_length is 16",
    ),
    "not finite": (
        lambda job: saved(job, latents=saved(job)["latents"] / 0),
        "`latents` has values that are not finite",
    ),
    "whole numbers": (
        lambda job: saved(job, latents=saved(job)["latents"].long()),
        "`latents` is torch.int64, and plain floating point",
    ),
    "sparse": (
        lambda job: saved(job, prompt_embeds=saved(job)["prompt_embeds"].to_sparse()),
        "`prompt_embeds` is torch.float32, and plain",
    ),
    "no tokens": (
        lambda job: saved(job, prompt_embeds=saved(job)["prompt_embeds"][:, :0]),
        "`prompt_embeds` has 0 tokens",
    ),
    "nothing at all": (lambda job: b"", r"not a file of plain tensors \(EOFError\)"),
    "an empty pickle": (lambda job: b"\x80\x02.", "not a file of plain tensors"),
    "other names": (lambda job: {"latent": torch.zeros(3)}, "it holds latent, and latents"),
    "a tensor": (lambda job: torch.zeros(3), "not a dict of tensors"),
    "code": (lambda job: {"latents": Path("x")}, "not a file of plain tensors"),
}


@pytest.mark.parametrize("name", BAD)
def test_files_that_do_not_fit_are_named(name: str, job: Job, tmp_path: Path) -> None:
    content, words = BAD[name]
    path = put(job, tmp_path / "old", content(job))
    with pytest.raises(DataError, match=words) as caught:
        take(job, tmp_path / "old")
    assert [problem.where for problem in caught.value.problems] == [str(path)]
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_cut_file_and_a_folder_of_others(job: Job, tmp_path: Path) -> None:
    path = put(job, tmp_path / "old", saved(job))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="not a file of plain tensors"):
        take(job, tmp_path / "old")
    path.rename(path.with_name("other.pt"))
    with pytest.raises(DataError, match="has the name of an image"):
        take(job, tmp_path / "old")


def test_control_images_are_not_in_such_files(workshop: Workshop, tmp_path: Path) -> None:
    case = Case(family="flux1_kontext", method="lora")
    job = workshop.job(case, tmp_path / "run", cache=tmp_path / "cache")
    (tmp_path / "old").mkdir()
    with pytest.raises(ConfigError, match="the samples have control images"):
        take(job, tmp_path / "old")
