"""`trainer export` and `trainer merge` judge what they read before they write, and what they wrote after."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.contract.runs import Case, Workshop
from tests.contract.test_convert import FLUX, Trained, merge, read_metadata, renamed, trained
from trainer.engine.building.build import load_base
from trainer.engine.results import export as exporting
from trainer.engine.results import merge as merging
from trainer.engine.results import proof
from trainer.engine.results.export import export
from trainer.errors import ConfigError, DataError
from trainer.modeling import tensor_file
from trainer.modeling.adapter import comfyui

LLAMA = Case(family="llama", method="lora")


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_layers_by_names_of_other_programs_are_not_exported(
    form: str, workshop: Workshop, tmp_path: Path
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    file = done.comfyui if form == "diffusers" else done.file
    assert file is not None
    path = renamed(
        file,
        tmp_path / "native.safetensors",
        lambda name: name.replace("transformer_blocks", "double_blocks"),
        read_metadata(file),
    )
    with pytest.raises(DataError, match=r"layers are none of FLUX.1.* known here, first double_blocks\.0\."):
        export(path, form, tmp_path / "never.safetensors", None)
    assert not (tmp_path / "never.safetensors").exists()


def test_more_blocks_than_the_published_model_has_are_exported(workshop: Workshop, tmp_path: Path) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert done.comfyui is not None
    wide = renamed(
        done.comfyui,
        tmp_path / "wide.safetensors",
        lambda name: name.replace("transformer_blocks.0.", "transformer_blocks.900."),
        read_metadata(done.comfyui),
    )
    assert export(wide, "diffusers", tmp_path / "back.safetensors", None).is_file()


def test_a_file_without_peft_s_configuration_is_told_what_makes_one(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    older = renamed(done.file, tmp_path / "older.safetensors", str, {"family": "flux1_dev"})
    assert merge(done, tmp_path / "never", "--lora", str(older)) == 78
    told = capsys.readouterr().err
    assert "it has no `lora_adapter_metadata`, so that it does not say how it was trained" in told
    assert "or was saved again without it" in told
    assert "`trainer export FILE --format diffusers`" in told
    with pytest.raises(ConfigError, match="has diffusers' names and no `lora_adapter_metadata`") as caught:
        export(older, "comfyui", tmp_path / "never.safetensors", None)
    assert "`--format diffusers` makes a file that says so" in caught.value.problems[0].remedy
    # which is so
    new = export(older, "diffusers", tmp_path / "new.safetensors", None)
    assert merge(done, tmp_path / "merged", "--lora", str(new)) == 0
    # with the change that diffusers reads in the file without its alphas
    twin = export(new, "comfyui", tmp_path / "twin.safetensors", None)
    ranks = {name: tensor.shape[0] for name, tensor in load_file(twin).items() if ".lora_A." in name}
    alphas = {name: value.item() for name, value in load_file(twin).items() if name.endswith(".alpha")}
    assert {name.replace(".lora_A.weight", ".alpha"): rank for name, rank in ranks.items()} == alphas
    assert done.comfyui is not None
    for theirs in (twin, done.comfyui):
        with pytest.raises(ConfigError, match="laid out for comfyui already"):
            export(theirs, "comfyui", tmp_path / "never.safetensors", None)


def spoil(path: Path) -> None:
    """Change one bit at the end of a file, as a failing disk does."""
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))


@pytest.fixture
def failing_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each file differ by a bit from what was written."""
    real = tensor_file.write_tensors

    def write(path: Path, *rest: Any) -> str:
        digest = real(path, *rest)
        spoil(path)
        return digest

    for module in (tensor_file, comfyui, merging):
        monkeypatch.setattr(module, "write_tensors", write)


@pytest.mark.parametrize("form", ["diffusers", "comfyui"])
def test_an_export_is_read_back(
    form: str, workshop: Workshop, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert done.comfyui is not None
    request.getfixturevalue("failing_disk")
    (tmp_path / "new").mkdir()
    with pytest.raises(DataError, match="read back from disk is not what was written"):
        export(done.file if form == "comfyui" else done.comfyui, form, tmp_path / "new" / "x", None)
    assert not list((tmp_path / "new").iterdir())


def test_a_merge_is_read_back(
    workshop: Workshop,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    request.getfixturevalue("failing_disk")
    assert merge(done, tmp_path / "merged") == 65
    assert "read back from disk is not what was written" in capsys.readouterr().err
    assert not list(tmp_path.glob("merged*"))


def test_a_file_for_diffusers_that_the_library_spoilt_gets_no_name(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert done.comfyui is not None
    real = exporting.save_adapter

    def empty(family: Any, state: dict[str, torch.Tensor], *rest: Any) -> Path:
        zeros = {name: tensor * (0.0 if ".lora_B" in name else 1.0) for name, tensor in state.items()}
        return real(family, zeros, *rest)

    monkeypatch.setattr(exporting, "save_adapter", empty)
    (tmp_path / "new").mkdir()
    with pytest.raises(DataError, match="every lora_B is zero"):
        export(done.comfyui, "diffusers", tmp_path / "new" / "x.safetensors", None)
    assert not list((tmp_path / "new").iterdir())


def in_fp16(folder: Path, target: Path) -> Path:
    """A base whose transformer is stored in fp16."""
    shutil.copytree(folder, target)
    for file in (target / "transformer").glob("*.safetensors"):
        save_file({name: one.half() for name, one in load_file(file).items()}, file, {"format": "pt"})
    return target


def test_a_merged_weight_that_its_type_has_no_numbers_for_is_named(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    base = in_fp16(done.job.context.source.folder, tmp_path / "base")
    named = ("--set", f"model.pretrained_model_name_or_path={base}")
    tensors = load_file(done.file)
    loud = max(name for name in tensors if name.endswith(".lora_B.weight"))
    path = tmp_path / "loud.safetensors"
    save_file({**tensors, loud: tensors[loud] * 1e7}, path, read_metadata(done.file))
    layer = loud.removeprefix("transformer.").removesuffix(".lora_B.weight")
    assert merge(done, tmp_path / "never", *named, "--lora", str(path)) == 65
    assert f"{layer}, merged, is not finite in float16" in capsys.readouterr().err
    assert not list(tmp_path.glob("never*"))
    assert merge(done, tmp_path / "merged", *named) == 0


@pytest.fixture
def nothing_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a merge begins to write."""

    def copied(*_: Any) -> None:
        raise AssertionError("the merge began to write")

    monkeypatch.setattr(merging.atomic, "copy_file", copied)
    monkeypatch.setattr(merging, "write_tensors", copied)


@pytest.mark.usefixtures("nothing_copied")
def test_the_base_s_headers_are_judged_before_anything_is_written(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    said, tensors = read_metadata(done.file), load_file(done.file)
    other = renamed(
        done.file, tmp_path / "other.safetensors", lambda name: name.replace("blocks.0", "blocks.77"), said
    )
    assert merge(done, tmp_path / "never", "--lora", str(other)) == 65
    assert "layers of the adapter are not in the base, first" in capsys.readouterr().err
    wide, path = min(name for name in tensors if ".lora_A" in name), tmp_path / "wide.safetensors"
    save_file({**tensors, wide: torch.ones(tensors[wide].shape[0], 77)}, path, said)
    assert merge(done, tmp_path / "never", "--lora", str(path)) == 65
    assert "77), the base's is (" in capsys.readouterr().err
    base = tmp_path / "stored"
    shutil.copytree(done.job.context.source.folder, base)
    for file in (base / "transformer").glob("*.safetensors"):
        save_file({name: one.to(torch.float8_e4m3fn) for name, one in load_file(file).items()}, file)
    named = ("--set", f"model.pretrained_model_name_or_path={base}")
    assert merge(done, tmp_path / "never", *named) == 78
    assert "is stored quantised (F8_E4M3)" in capsys.readouterr().err


@pytest.mark.usefixtures("nothing_copied")
def test_an_adapter_of_a_head_that_is_the_embedding_is_told_in_words(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = tmp_path / "tied"
    shutil.copytree(workshop.base(LLAMA.family), base)
    (base / "config.json").write_text(
        json.dumps({**json.loads((base / "config.json").read_text()), "tie_word_embeddings": True})
    )
    (file,) = base.glob("*.safetensors")
    save_file(
        {name: one for name, one in load_file(file).items() if name != "lm_head.weight"},
        file,
        {"format": "pt"},
    )
    named = f"model.pretrained_model_name_or_path={base}"
    done: Trained = trained(LLAMA, workshop, tmp_path, named, "lora.target_modules=[q_proj, lm_head]")
    assert merge(done, tmp_path / "never", "--set", named) == 65
    told = capsys.readouterr().err
    assert "lm_head shares its weight with the embedding" in told and "use the LoRA as it is" in told


def test_a_file_of_comfyui_s_layout_is_named_where_diffusers_is_loaded(
    workshop: Workshop, tmp_path: Path
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert done.comfyui is not None
    model = load_base(done.job.context).module
    with pytest.raises(DataError) as caught:
        proof.load_lora(done.job.context, model, done.comfyui)
    (problem,) = caught.value.problems
    assert problem.what.startswith("it has ComfyUI's layout: ")
    assert "tensors fit no layer of this model" in problem.what
    base = done.job.context.source.identity
    said = "flux1_dev" if base == "flux1_dev" else f"flux1_dev, {base}"
    assert problem.what.endswith(f"; the file says that it is for {said}")
    assert "`trainer export FILE --format diffusers` makes one that is loaded here" in problem.remedy
    same = renamed(
        done.comfyui, tmp_path / "same.safetensors", str, {"family": "flux1_dev", "base_model": "flux1_dev"}
    )
    with pytest.raises(DataError, match="says that it is for flux1_dev\n"):
        proof.load_lora(done.job.context, model, same)
