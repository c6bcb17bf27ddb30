"""`trainer export` and `trainer merge`: equal changes of the weights, equal outputs."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.contract.loaders import changes_of_comfyui, changes_of_file
from tests.contract.runs import LORA_CASES, Case, Job, Workshop, mostly_slow
from trainer import families
from trainer.cli import main
from trainer.engine.building.build import build, load_base
from trainer.engine.results import proof
from trainer.engine.results.export import export
from trainer.errors import ConfigError, DataError, ExitCode, NoSpaceError, TrainerError
from trainer.files import atomic
from trainer.modeling.adapter.adapter_file import merged_weight, read_adapter
from trainer.modeling.base.source import resolve_source
from trainer.modeling.tensor_file import split_shards

COMFYUI_CASES = tuple(case for case in LORA_CASES if families.get(case.family).comfyui is not None)
FLUX = Case(family="flux1_dev", method="lora")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained:
    """A job, its model with an adapter that changes something, and the adapter's files."""

    job: Job
    model: Any
    file: Path
    comfyui: Path | None


def trained(case: Case, workshop: Workshop, folder: Path, *overrides: str) -> Trained:
    """A trained model without a training run: random values stand in for the learned ones."""
    job = workshop.job(case, folder, *overrides)
    model = build(job.context).model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B" in name or ".lokr_w1" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    files = job.context.run_dir / "lora"
    files.mkdir(parents=True)
    file = proof.write_lora(job.context, model, files)
    comfyui = proof.write_twin(job.context, model, files)
    return Trained(job=job, model=model, file=file, comfyui=comfyui)


def test_layers_with_names_of_comfyui_s_own_come_back_by_the_model_s(
    workshop: Workshop, tmp_path: Path
) -> None:
    targets = "lora.target_modules=[to_q, single_stream_modulation.linear, timestep_embedder.linear_1]"
    done = trained(Case(family="flux2_dev", method="lora"), workshop, tmp_path, targets)
    assert done.comfyui is not None
    theirs = {key.partition(".lora_")[0] for key in load_file(done.comfyui) if ".lora_" in key}
    assert {"diffusion_model.single_stream_modulation.lin", "diffusion_model.time_in.in_layer"} < theirs
    back = export(done.comfyui, "diffusers", tmp_path / "back.safetensors", None)
    ours, old = load_file(back), load_file(done.file)
    assert ours.keys() == old.keys() and all(torch.equal(ours[name], old[name]) for name in old)


@pytest.fixture(params=COMFYUI_CASES, ids=str)
def comfyui_case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_both_ways_change_the_weights_alike(comfyui_case: Case, workshop: Workshop, tmp_path: Path) -> None:
    done = trained(comfyui_case, workshop, tmp_path)
    component = done.job.context.family.trained_component
    expected = changes_of_file(done.file, component)
    assert expected and all(change.any() for change in expected.values())
    comfyui = export(done.file, "comfyui", tmp_path / "new.comfyui.safetensors", None)
    changes = changes_of_comfyui(comfyui, component)
    assert changes.keys() == expected.keys()
    assert all(torch.equal(changes[name], expected[name]) for name in expected)
    assert done.comfyui is not None and comfyui.read_bytes() == done.comfyui.read_bytes()

    back = export(comfyui, "diffusers", tmp_path / "back.safetensors", None)
    changes = changes_of_file(back, component)
    assert changes.keys() == expected.keys()
    assert all(torch.equal(changes[name], expected[name]) for name in expected)
    with safe_open(back, framework="pt") as new, safe_open(done.file, framework="pt") as old:
        kept = {key: value for key, value in old.metadata().items() if key != "lora_adapter_metadata"}
        assert kept.items() <= new.metadata().items()
    # the real loader takes it, and the model does the same
    with_adapter = proof.fixed_outputs(done.job.context, done.model)
    model = load_base(done.job.context).module
    proof.load_lora(done.job.context, model, back)
    assert proof.relative_difference(proof.fixed_outputs(done.job.context, model), with_adapter) < 1e-5


def test_ranks_and_alphas_by_layer_survive(workshop: Workshop, tmp_path: Path) -> None:
    patterns = ("lora.rank_pattern={to_q: 2}", "lora.alpha_pattern={to_k: 3}")
    done = trained(FLUX, workshop, tmp_path, *patterns)
    back = export(
        export(done.file, "comfyui", tmp_path / "c.safetensors", None),
        "diffusers",
        tmp_path / "d.safetensors",
        None,
    )
    one, other = read_adapter(done.file), read_adapter(back)
    assert one.layers.keys() == other.layers.keys()
    zero = torch.zeros(())
    for module, parts in one.layers.items():
        shape = (parts["lora_B.weight"].shape[0], parts["lora_A.weight"].shape[1])
        weight = zero.expand(shape)
        assert torch.equal(
            merged_weight(weight, parts, one.config, module),
            merged_weight(weight, other.layers[module], other.config, module),
        )
    with_adapter = proof.fixed_outputs(done.job.context, done.model)
    model = load_base(done.job.context).module
    proof.load_lora(done.job.context, model, back)
    assert proof.relative_difference(proof.fixed_outputs(done.job.context, model), with_adapter) < 1e-5


def test_export_by_command(workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert (
        main(["export", str(done.file), "--format", "comfyui", "--to", str(tmp_path / "x.safetensors")]) == 0
    )
    assert capsys.readouterr().out == f"LoRA for comfyui: {tmp_path / 'x.safetensors'}\n"
    # the run wrote that file itself, and nothing is written over it
    assert main(["export", str(done.file), "--format", "comfyui"]) == 78
    assert f"{done.comfyui} exists" in capsys.readouterr().err


@pytest.mark.parametrize("form", ["comfyui", "diffusers"])
def test_a_full_disk_leaves_no_half_of_a_file(
    form: str, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    assert done.comfyui is not None

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr("trainer.files.atomic.os.fsync", full)
    (tmp_path / "new").mkdir()
    with pytest.raises(NoSpaceError):
        export(done.file if form == "comfyui" else done.comfyui, form, tmp_path / "new" / "x", None)
    assert not list((tmp_path / "new").iterdir())


def test_places_that_take_no_file(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    below_a_file = str(done.file / "x")
    assert main(["export", str(done.file), "--format", "comfyui", "--to", below_a_file]) == 78
    assert f"--to {below_a_file}: a file stands where" in capsys.readouterr().err
    assert merge(done, done.file / "x") == 78
    assert f"--to {below_a_file}: a file stands where" in capsys.readouterr().err
    inside = done.job.context.source.folder / "vae" / "merged"
    assert merge(done, inside) == 78
    assert "is in the base model's folder" in capsys.readouterr().err
    assert not inside.exists()


def renamed(file: Path, target: Path, change: Callable[[str], str], metadata: dict[str, str]) -> Path:
    save_file({change(name): value for name, value in load_file(file).items()}, target, metadata)
    return target


def test_damaged_files_say_so(workshop: Workshop, tmp_path: Path) -> None:
    done = trained(FLUX, workshop, tmp_path)
    said, tensors = read_metadata(done.file), load_file(done.file)
    config = json.loads(said["lora_adapter_metadata"])
    half = {name: value for name, value in tensors.items() if name != min(tensors)}
    without = {key: value for key, value in config.items() if not key.endswith("lora_alpha")}
    path = tmp_path / "damaged.safetensors"
    last = max(tensors)
    cases = [
        ({**tensors, last: tensors[last] * float("inf")}, config, "is not finite"),
        (
            tensors,
            {**config, "transformer.rank_pattern": {"(": 2}},
            "no reg",
        ),
        (half, config, "has only one of lora_A and lora_B"),
        (tensors, without, "not both rank and alpha"),
        (tensors, {}, "not both rank and alpha"),
    ]
    for state, written, words in cases:
        save_file(state, path, {**said, "lora_adapter_metadata": json.dumps(written)})
        with pytest.raises(DataError, match=words):
            export(path, "comfyui", tmp_path / "never.safetensors", None)
    # an older PEFT wrote no patterns
    plain = {key: value for key, value in config.items() if not key.endswith("_pattern")}
    save_file(tensors, path, {**said, "lora_adapter_metadata": json.dumps(plain)})
    assert export(path, "comfyui", tmp_path / "old.safetensors", None).is_file()


def test_what_is_not_converted_says_why(workshop: Workshop, tmp_path: Path) -> None:
    done = trained(FLUX, workshop, tmp_path)
    kohya = renamed(
        done.file, tmp_path / "k.safetensors", lambda name: name.replace("lora_A", "lora_down"), {}
    )
    other = renamed(done.file, tmp_path / "o.safetensors", lambda name: name.replace("lora_", "x_"), {})
    assert done.comfyui is not None
    nameless = renamed(done.comfyui, tmp_path / "n.safetensors", str, {})
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    cases: list[tuple[Path, str, str | None, type[TrainerError], str]] = [
        (done.file, "diffusers", None, ConfigError, "laid out for diffusers already"),
        (kohya, "diffusers", None, DataError, "as other trainers do"),
        (other, "diffusers", None, DataError, "is no tensor of an adapter"),
        (nameless, "diffusers", None, ConfigError, "give --family NAME"),
        (nameless, "diffusers", "flux9", ConfigError, 'unknown family "flux9"'),
        (done.file, "comfyui", "qwen_image", ConfigError, "is a LoRA of flux1_dev"),
        (tmp_path / "broken.safetensors", "comfyui", None, DataError, "cannot be read as safetensors"),
    ]
    for path, form, family, error, words in cases:
        with pytest.raises(error, match=words):
            export(path, form, tmp_path / "never.safetensors", family)
    with pytest.raises(DataError) as caught:
        export(tmp_path / "broken.safetensors", "comfyui", tmp_path / "never.safetensors", None)
    assert caught.value.problems[0].remedy.startswith("copy or download it again")
    assert not (tmp_path / "never.safetensors").exists()
    assert export(nameless, "diffusers", tmp_path / "named.safetensors", "flux1_dev").is_file()


def test_a_dora_and_a_lokr_are_converted_only_where_nothing_is_lost(
    workshop: Workshop, tmp_path: Path
) -> None:
    dora = trained(FLUX, workshop, tmp_path / "dora", "lora.type=dora")
    with pytest.raises(ConfigError, match="a dora needs the weights of its base"):
        export(dora.file, "comfyui", tmp_path / "never.safetensors", None)
    lokr = trained(FLUX, workshop, tmp_path / "lokr", "lora.type=lokr")
    assert lokr.comfyui is not None
    written = export(lokr.file, "comfyui", tmp_path / "lokr.comfyui.safetensors", None)
    assert written.read_bytes() == lokr.comfyui.read_bytes()
    with pytest.raises(ConfigError, match="a lokr needs scales"):
        export(lokr.comfyui, "diffusers", tmp_path / "never.safetensors", None)


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_a_base_that_is_stored_as_bytes_takes_a_lora_alone(
    kind: str, workshop: Workshop, tmp_path: Path
) -> None:
    """peft reads a weight's bytes as its values for the others, and says nothing."""
    done = trained(FLUX, workshop, tmp_path / kind, f"lora.type={kind}")
    plain = trained(FLUX, workshop, tmp_path / "lora")
    context = workshop.job(FLUX, tmp_path / "stored", "features.weights=int8").context
    model = load_base(context).module
    with pytest.raises(DataError, match=f"it is a {kind}, .* they are stored in int8"):
        proof.load_lora(context, model, done.file)
    proof.load_lora(context, model, plain.file)


def merge(done: Trained, target: Path, *arguments: str) -> int:
    config = done.job.context.run_dir.parent / "config.yaml"
    return main(["merge", str(config), "--lora", str(done.file), "--to", str(target), *arguments])


def outputs_of(done: Trained, folder: Path) -> list[torch.Tensor]:
    """Outputs of the model in `folder`, without an adapter."""
    context = done.job.context
    model = context.config.model.model_copy(update={"pretrained_model_name_or_path": str(folder)})
    config = context.config.model_copy(update={"model": model})
    source = resolve_source(
        config, families.components(context.family), trained=context.family.trained_component
    )
    other = dataclasses.replace(context, source=source, config=config)
    return proof.fixed_outputs(other, load_base(other).module)


@pytest.mark.parametrize("case", mostly_slow(LORA_CASES), ids=str)
def test_a_merged_model_does_what_base_and_adapter_do(
    case: Case, workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(case, workshop, tmp_path)
    base = outputs_of(done, done.job.context.source.folder)
    with_adapter = proof.fixed_outputs(done.job.context, done.model)
    assert proof.relative_difference(with_adapter, base) > 0.01
    assert merge(done, tmp_path / "merged") == 0
    assert "layers of" in capsys.readouterr().out
    merged = outputs_of(done, tmp_path / "merged")
    assert proof.relative_difference(merged, with_adapter) < 1e-3
    # every file of the base is there, of the same size but for headers
    here = {file.relative_to(tmp_path / "merged") for file in (tmp_path / "merged").rglob("*.safetensors")}
    folder = done.job.context.source.folder
    assert here == {file.relative_to(folder) for file in folder.rglob("*.safetensors")}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_other_kinds_of_adapters_merge_too(kind: str, workshop: Workshop, tmp_path: Path) -> None:
    done = trained(FLUX, workshop, tmp_path, f"lora.type={kind}", "lora.rank_pattern={to_q: 2}")
    with_adapter = proof.fixed_outputs(done.job.context, done.model)
    base = outputs_of(done, done.job.context.source.folder)
    assert proof.relative_difference(with_adapter, base) > 1e-3
    assert merge(done, tmp_path / "merged") == 0
    assert proof.relative_difference(outputs_of(done, tmp_path / "merged"), with_adapter) < 1e-3


def test_a_lora_of_another_family_or_base_is_told(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Llama and Mistral have layers of the same names and sizes here."""
    done = trained(Case(family="llama", method="lora"), workshop, tmp_path)
    other = workshop.write_config(Case(family="mistral", method="lora"), tmp_path / "mistral")
    words = ["--lora", str(done.file), "--to", str(tmp_path / "merged")]
    assert main(["merge", str(other), *words]) == ExitCode.BAD_DATA
    assert "says that it is a LoRA of llama, and the configuration is of mistral" in capsys.readouterr().err
    assert not (tmp_path / "merged").exists()
    assert merge(done, tmp_path / "same") == 0
    assert "note:" not in capsys.readouterr().err
    base = Path(shutil.copytree(done.job.context.source.folder, tmp_path / "copied"))
    assert merge(done, tmp_path / "named", "--set", f"model.pretrained_model_name_or_path={base}") == 0
    name = done.job.context.source.identity
    assert f"note: the LoRA was trained on {name}, and this base is copied" in capsys.readouterr().err


def sharded(folder: Path, target: Path, limit: int) -> Path:
    """A copy of a base whose transformer is in several files."""
    shutil.copytree(folder, target)
    (file,) = (target / "transformer").glob("*.safetensors")
    shards = split_shards(load_file(file), limit)
    file.unlink()
    weight_map = {}
    for number, shard in enumerate(shards):
        name = f"{file.stem}-{number}.safetensors"
        save_file(shard, target / "transformer" / name)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {}, "weight_map": weight_map}
    (target / "transformer" / f"{file.name}.index.json").write_text(json.dumps(index))
    assert len(shards) > 2
    return target


def test_memory_is_that_of_one_shard(
    workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    base = sharded(done.job.context.source.folder, tmp_path / "base", limit := 100_000)
    written: list[int] = []
    from trainer.engine.results import merge as module

    whole = module.write_tensors

    def write(path: Path, tensors: Any, *rest: Any) -> str:
        written.append(sum(tensor.nbytes for tensor in tensors.values()))
        return whole(path, tensors, *rest)

    monkeypatch.setattr(module, "write_tensors", write)
    arguments = ("--set", f"model.pretrained_model_name_or_path={base}")
    assert merge(done, tmp_path / "merged", *arguments) == 0
    assert len(written) > 2 and max(written) <= limit < sum(written)
    with_adapter = proof.fixed_outputs(done.job.context, done.model)
    assert proof.relative_difference(outputs_of(done, tmp_path / "merged"), with_adapter) < 1e-3


def test_merging_is_refused_where_it_would_lose_something(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    stored = tmp_path / "stored"
    shutil.copytree(done.job.context.source.folder, stored)
    config = stored / "transformer" / "config.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps({**values, "quantization_config": {"quant_method": "bitsandbytes"}}))
    other = tmp_path / "other.safetensors"
    renamed(done.file, other, lambda name: name.replace("blocks.0", "blocks.77"), read_metadata(done.file))
    wild, last = load_file(done.file), max(load_file(done.file))
    save_file(
        {**wild, last: wild[last] * float("nan")}, tmp_path / "nan.safetensors", read_metadata(done.file)
    )
    (tmp_path / "there").mkdir()
    # somebody's own folders, which the merge would have taken for its remains and removed
    for name in ("mine.tmp", ".ours.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "precious").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    assert done.comfyui is not None
    name = "model.pretrained_model_name_or_path"
    cases = [
        (("--set", f"{name}={stored}"), 78, f"--set {name}: stored is stored quantised"),
        (
            ("--set", "features.weights=int8"),
            78,
            "as it loads, and merging is into its files\n    -> add `--set features.weights=auto`",
        ),
        (("--lora", str(done.comfyui)), 78, "it is laid out for ComfyUI"),
        (("--lora", str(other)), 65, "layers of the adapter are not in the base"),
        (("--lora", str(tmp_path / "nan.safetensors")), 65, "is not finite\n    -> name the file of another"),
        (("--to", str(tmp_path / "there")), 78, "there exists"),
        (("--to", str(tmp_path / "mine")), 78, "mine.tmp exists"),
        (("--to", str(tmp_path / "ours")), 78, ".ours.old exists"),
        (("--to", str(tmp_path / "link")), 78, "link exists"),
    ]
    for arguments, code, words in cases:
        assert merge(done, tmp_path / "never", *arguments) == code, words
        assert words in capsys.readouterr().err
    assert not list(tmp_path.glob("never*"))
    assert all((tmp_path / name / "precious").exists() for name in ("mine.tmp", ".ours.old"))
    # of a LoRA that was trained over int8, whose configuration says so
    whole = ("--set", "features.weights=int8", "--set", "features.weights=auto")
    assert merge(done, tmp_path / "whole", *whole) == 0


def test_a_merge_removes_what_a_killed_one_left_and_no_folder_without_its_mark(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trained(FLUX, workshop, tmp_path)
    left, mark = tmp_path / "merged.tmp", tmp_path / "merged.tmp" / ".merging"
    killed = multiprocessing.get_context("fork").Process(target=_killed_in_merge, args=(done, tmp_path))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and mark.is_file() and not (tmp_path / "merged").exists()
    with mark.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a merge that still writes there
        assert merge(done, tmp_path / "merged") == 78
    assert "wait for the merge that writes there" in capsys.readouterr().err and mark.exists()
    text = mark.read_text()
    mark.write_text("somebody's own")
    assert merge(done, tmp_path / "merged") == 78
    assert "merged.tmp exists" in capsys.readouterr().err and mark.exists()
    mark.write_text(text)
    assert merge(done, tmp_path / "merged") == 0
    assert "left by a merge that was killed, removed" in capsys.readouterr().err
    assert not left.exists() and not (tmp_path / "merged" / ".merging").exists()


def _killed_in_merge(done: Trained, folder: Path) -> None:
    """Merge into `merged` in a process that is killed before the first file is copied."""

    def kill(source: Path, target: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(atomic, "copy_file", kill)
        merge(done, folder / "merged")


def read_metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())
