"""The LoRA files: what diffusers and ComfyUI make of them, and that a wrong one is found out."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tests.contract.comfyui import unknown_keys
from tests.contract.conftest import Finished
from tests.contract.loaders import adapter_config, changes_of_comfyui, changes_of_file, lora_file, own
from tests.contract.runs import FULL_CASES, LORA_CASES, SHORT_STEPS, Case, Workshop
from trainer import families
from trainer.config.reading.load import Loaded
from trainer.engine import run
from trainer.engine.building.base_load_check import check_loadable
from trainer.engine.building.build import build, load_base
from trainer.engine.context import Context
from trainer.engine.records import checkpoint
from trainer.engine.results import full, proof
from trainer.engine.results.file_check import check_file
from trainer.engine.results.full import export_full, prove_full
from trainer.errors import ConfigError, DataError, DivergedError, ExitCode, NoSpaceError
from trainer.modeling.adapter import lora
from trainer.modeling.adapter.lora import linear_names
from trainer.modeling.base.source import resolve_source
from trainer.planning.base_check import check_base
from trainer.planning.shapes.geometry import TABLES, linear_weights, read_table
from trainer.planning.shapes.run_shapes import roles

COMFYUI_CASES = tuple(case for case in LORA_CASES if families.get(case.family).comfyui is not None)
_OF_PICTURES = [case for case in LORA_CASES if families.get(case.family).sample_kind == "image"]
Change = Callable[[dict[str, torch.Tensor]], None]


@pytest.fixture(params=LORA_CASES, ids=str)
def lora_case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(params=FULL_CASES, ids=str)
def full_case(request: pytest.FixtureRequest) -> Case:
    return request.param


def comfyui_file(path: Path) -> Path:
    return path.with_suffix(".comfyui.safetensors")


def test_the_real_loader_takes_the_lora_and_comfyui_changes_the_weights_alike(
    lora_case: Case, finished: Callable[[Case], Finished]
) -> None:
    done = finished(lora_case)
    component, file = done.job.context.family.trained_component, lora_file(done)
    loaded = own(done.job)
    base = {name: value.clone() for name, value in loaded.model.state_dict().items()}
    without = loaded.output()
    loaded.load(file)
    assert not torch.equal(loaded.output(), without)
    loaded.fuse()
    changes = changes_of_file(file, component)
    changed = {
        name for name, value in loaded.model.state_dict().items() if not torch.equal(value, base[name])
    }
    # a layer whose output the model does not use learns nothing
    assert changed == {f"{module}.weight" for module, change in changes.items() if change.any()}
    for module, change in changes.items():
        by_loader = loaded.model.state_dict()[f"{module}.weight"] - base[f"{module}.weight"]
        assert torch.allclose(by_loader, change, rtol=1e-4, atol=1e-6), module
    assert comfyui_file(file).exists() == (done.job.context.family.comfyui is not None)


# what LoraConfig of peft 0.13 (2024) takes, but for what is of training alone
_KNOWN_IN_2024 = {
    *("peft_type", "task_type", "inference_mode", "r", "lora_alpha", "target_modules", "rank_pattern"),
    *(
        "alpha_pattern",
        "use_dora",
        "use_rslora",
        "lora_dropout",
        "bias",
        "fan_in_fan_out",
        "init_lora_weights",
    ),
}


@pytest.mark.parametrize("case", _OF_PICTURES, ids=str)
def test_a_peft_that_is_years_older_takes_the_metadata(
    case: Case, finished: Callable[[Case], Finished]
) -> None:
    """diffusers hands it whole to the LoraConfig that is there, which ends at a key that it does not know.

    peft itself reads those of language models, and passes over what it does not know.
    """
    said = adapter_config(lora_file(finished(case)))
    assert said.keys() <= _KNOWN_IN_2024 and None not in said.values()
    assert {"r", "lora_alpha", "target_modules", "rank_pattern", "alpha_pattern"} <= said.keys()


def test_both_files_say_the_same_alpha_and_rank(
    lora_case: Case, finished: Callable[[Case], Finished]
) -> None:
    done = finished(lora_case)
    config, component = done.job.context.config, done.job.context.family.trained_component
    path = lora_file(done)
    metadata = adapter_config(path)
    assert config.lora.alpha != config.lora.rank
    assert (metadata["r"], metadata["lora_alpha"]) == (config.lora.rank, config.lora.alpha)
    ours = changes_of_file(path, component)
    assert len(ours) == len(load_file(path)) // 2
    if done.job.context.family.comfyui is None:
        return
    theirs = load_file(comfyui_file(path))
    alphas = {value.item() for name, value in theirs.items() if name.endswith(".alpha")}
    assert alphas == {config.lora.alpha}
    changes = changes_of_comfyui(comfyui_file(path), component)
    assert changes.keys() == ours.keys()
    assert all(torch.equal(changes[module], ours[module]) for module in ours)


@pytest.mark.parametrize("lora_case", COMFYUI_CASES, ids=str, indirect=True)
def test_comfyui_knows_every_key_of_every_preset(lora_case: Case, workshop: Workshop, tmp_path: Path) -> None:
    family = workshop.job(lora_case, tmp_path).context.family
    for preset in family.lora_targets:
        job = workshop.job(lora_case, tmp_path / preset, f"lora.target_modules={preset}")
        folder = job.context.run_dir / "lora"
        folder.mkdir(parents=True)
        comfyui = proof.write_twin(job.context, build(job.context).model, folder)
        assert comfyui is not None
        keys = set(load_file(comfyui))
        assert keys
        assert not unknown_keys(lora_case.family, keys)


@pytest.mark.parametrize("lora_case", COMFYUI_CASES, ids=str, indirect=True)
def test_a_target_that_comfyui_does_not_know_is_found_by_this_table(lora_case: Case) -> None:
    assert unknown_keys(lora_case.family, {"transformer.nowhere.lora_A.weight"})


def test_verify_lora_repeats_the_proof_on_a_fresh_base(
    lora_case: Case, finished: Callable[[Case], Finished]
) -> None:
    done = finished(lora_case)
    said: list[str] = []
    spec = dataclasses.replace(done.job.spec, mode="verify", lora_file=str(lora_file(done)))
    run.verify_file(dataclasses.replace(done.job.context, say=said.append), spec)
    told = json.loads(lora_file(done).with_suffix(".proof.json").read_text())
    assert told["step"] == done.job.context.config.train.max_train_steps
    assert said[-1].startswith("verified: ")
    assert f"changes the model's output by {100 * told['effect']:.3g} %" in said[-1]


Trained = Callable[[Case, Path], tuple[Context, Any]]


@pytest.fixture(scope="module")
def trained(
    workshop: Workshop, finished: Callable[[Case], Finished], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    """Give context and model of a finished run, both copies, in a folder where files may be spoilt."""
    made: dict[Case, tuple[Context, Any]] = {}

    def copied(case: Case, folder: Path) -> tuple[Context, Any]:
        if case not in made:
            context = workshop.job(case, tmp_path_factory.mktemp("trained")).context
            built = build(context)
            last = finished(case).folder / "checkpoints" / f"step-{SHORT_STEPS:06d}"
            weights, state = (checkpoint.read_group(last, group, "cpu") for group in ("weights", "optimizer"))
            built.updater.load(weights, state, SHORT_STEPS)
            made[case] = context, built.model
        context, model = made[case]
        config = context.config.model_copy(update={"output_dir": folder / "run"})
        return dataclasses.replace(context, config=config), copy.deepcopy(model)

    return copied


def spoil(path: Path, change: Change) -> None:
    """Rewrite a safetensors file validly with other values."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


def zero_ups(tensors: dict[str, torch.Tensor]) -> None:
    for name in tensors:
        if ".lora_B" in name:
            tensors[name].zero_()


def put_nan(tensors: dict[str, torch.Tensor]) -> None:
    next(iter(tensors.values())).view(-1)[0] = float("nan")


def change_one_value(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if ".lora_B" in name)
    tensors[name].view(-1)[0] += 0.1


def drop_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if ".lora_B" in name)
    del tensors[name], tensors[name.replace(".lora_B", ".lora_A")]


def drop_one_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in sorted(tensors) if ".lora_A" in name)]


def move_a_layer(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in sorted(tensors) if ".lora_B" in name)
    for half in (name, name.replace(".lora_B", ".lora_A")):
        tensors[half.replace(".lora_", "_moved.lora_")] = tensors.pop(half)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_a_layer, "2 of its [0-9]+ tensors fit no layer of this model|does not fit the model"),
        (zero_ups, "every lora_B is zero"),
        (put_nan, "is not finite"),
        (change_one_value, "gives other outputs"),
        (drop_a_layer, "gives other outputs|does not fit the model"),
        (drop_one_half, "has no partner lora_A"),
    ],
)
def test_a_spoilt_lora_file_fails_the_proof(
    change: Change,
    words: str,
    lora_case: Case,
    trained: Trained,
    finished: Callable[[Case], Finished],
    tmp_path: Path,
) -> None:
    context, model = trained(lora_case, tmp_path)
    folder = context.run_dir / "lora"
    folder.mkdir(parents=True, exist_ok=True)
    path = proof.write_lora(context, model, folder)
    assert path.read_bytes() == lora_file(finished(lora_case)).read_bytes()
    spoil(path, change)
    with pytest.raises(DataError, match=words) as caught:
        proof.prove_lora(context, model, path)
    assert caught.value.exit_code is ExitCode.BAD_DATA
    assert str(path) in str(caught.value)


def test_a_base_that_is_not_as_it_was_before_the_file_fails_the_proof(
    trained: Trained, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    """`verify-lora` compares with a fresh base: an adapter that leaves something behind is found out."""
    case = LORA_CASES[0]
    context, model = trained(case, tmp_path)
    path = lora_file(finished(case))
    proof.prove_lora(context, model, path)
    lora.remove_lora(model)
    untouched = proof.fixed_outputs(context, model)
    proof.load_lora(context, model, path)
    proof.prove_lora(context, model, path, untouched=untouched)
    with pytest.raises(DataError, match="gives other outputs"):
        proof.prove_lora(context, model, path, untouched=[1.01 * one for one in untouched])


def test_a_lora_that_learned_nan_is_never_called_proved(
    lora_case: Case, trained: Trained, tmp_path: Path
) -> None:
    context, model = trained(lora_case, tmp_path)
    with torch.no_grad():
        next(one for one in model.parameters() if one.requires_grad).view(-1)[0] = float("nan")
    with pytest.raises(DivergedError):
        proof.export_lora(context, model, 3)
    assert not list(context.run_dir.glob("lora/*.proof.json"))


def test_a_proved_lora_stays_whatever_becomes_of_its_twin(
    trained: Trained,
    finished: Callable[[Case], Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = LORA_CASES[0]
    context, model = trained(case, tmp_path)

    def full(*_: object, **__: object) -> None:
        raise NoSpaceError("no space left", where="lora")

    old = context.run_dir / "lora" / f"{context.run_dir.name}.comfyui.safetensors"
    old.parent.mkdir(parents=True, exist_ok=True)
    old.write_bytes(b"of another LoRA")
    with monkeypatch.context() as patch:
        patch.setattr(proof, "write_comfyui", full)
        with pytest.raises(NoSpaceError):
            proof.export_lora(context, model, 3)
    path = old.with_name(f"{context.run_dir.name}.safetensors")
    assert path.read_bytes() == lora_file(finished(case)).read_bytes()
    assert path.with_name(f"{path.name.removesuffix('.safetensors')}.proof.json").exists()
    assert not old.exists() and not (context.run_dir / "lora.tmp").exists()
    said: list[str] = []
    nameless = dataclasses.replace(context.family, comfyui_keys=lambda module: None)
    told = dataclasses.replace(context, family=nameless, say=said.append)
    _, twin, _ = proof.export_lora(told, model, 3)
    assert twin is None and path.exists() and not old.exists()
    assert any(one.startswith("no file for ComfyUI: it has no name for") for one in said)


@pytest.mark.parametrize("name", [one for one in families.names() if families.get(one).comfyui is not None])
def test_comfyui_has_a_name_for_every_layer_that_can_have_an_adapter(name: str) -> None:
    """Every layer has a name, so that no plan has to report a nameless one, and no two layers share one."""
    family = families.get(name)
    linears = linear_weights(read_table(TABLES / f"{name}.json")[family.trained_component])
    keys = [family.comfyui_keys(linear) for linear in linears]
    assert None not in keys and len(set(keys)) == len(keys)


def test_a_run_that_was_renamed_and_trained_on_has_one_lora(workshop: Workshop, tmp_path: Path) -> None:
    short = ("train.max_train_steps=1", "validation.prompts=[]", "validation.held_out=0")
    first = workshop.job(LORA_CASES[0], tmp_path, *short)
    first.train()
    folder = first.context.run_dir / "lora"
    other = folder / "other.safetensors"  # of another run, by its metadata
    save_file(load_file(folder / "run.safetensors"), other, {"family": "flux1_dev", "seed": "77"})
    other.with_suffix(".proof.json").write_text("{}")
    renamed = first.context.run_dir.rename(tmp_path / "renamed")
    more = (*short, "train.max_train_steps=2", f"output_dir={renamed}")
    again = workshop.job(LORA_CASES[0], tmp_path, *more)
    again.train()
    assert {path.name for path in (renamed / "lora").glob("*.safetensors")} == {
        "renamed.safetensors", "renamed.comfyui.safetensors", "other.safetensors",
    }  # fmt: skip
    assert not (renamed / "lora" / "run.proof.json").exists()
    assert any("renamed.safetensors replaces run.safetensors" in line for line in again.said)


def test_a_copy_of_the_lora_beside_it_stays_when_the_run_trains_on(
    workshop: Workshop, tmp_path: Path
) -> None:
    short = ("validation.prompts=[]", "validation.held_out=0")
    first = workshop.job(LORA_CASES[0], tmp_path, *short, "train.max_train_steps=1")
    first.train()
    folder = first.context.run_dir / "lora"
    for kind in ("safetensors", "proof.json"):
        shutil.copy(folder / f"run.{kind}", folder / f"after-1.{kind}")
    kept = (folder / "after-1.safetensors").read_bytes()
    workshop.job(LORA_CASES[0], tmp_path, *short, "train.max_train_steps=2").train()
    assert (folder / "after-1.safetensors").read_bytes() == kept
    assert (folder / "run.safetensors").read_bytes() != kept
    assert (folder / "after-1.proof.json").is_file()
    renamed = first.context.run_dir.rename(tmp_path / "renamed")
    more = ("train.max_train_steps=3", f"output_dir={renamed}")
    workshop.job(LORA_CASES[0], tmp_path, *short, *more).train()
    # two are of this run, and which one it wrote itself is not known
    for name in ("after-1", "run", "renamed"):
        assert (renamed / "lora" / f"{name}.safetensors").is_file(), name


def test_an_untrained_lora_is_no_result(lora_case: Case, workshop: Workshop, tmp_path: Path) -> None:
    context = workshop.job(lora_case, tmp_path).context
    with pytest.raises(DivergedError, match="the trained LoRA is zero") as caught:
        proof.export_lora(context, build(context).model, 3)
    assert caught.value.exit_code is ExitCode.DIVERGED
    assert "train more steps" in caught.value.problems[0].remedy


def test_a_file_that_was_cut_off_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"\x40\x00")
    with pytest.raises(DataError, match="cannot be read as safetensors") as caught:
        check_file(path)
    assert caught.value.problems[0].remedy.startswith("copy or download it again")


@pytest.mark.parametrize(
    ("names", "metadata", "words"),
    [
        (("x.lora_down.weight", "x.lora_up.weight"), {}, "laid out as other trainers do"),
        *(
            (
                ("transformer.x.lora_A.weight", "transformer.x.lora_B.weight"),
                {"lora_adapter_metadata": '{"transformer.r": 2, "transformer.lora_alpha": 2, '
                 f'"transformer.alpha_pattern": {{"{pattern}": 2}}}}'},
                f"'{re.escape(pattern)}' among its patterns, which is no regular expression",
            )
            for pattern in ("(", "(?i)to_q")
        ),
    ],
)  # fmt: skip
def test_a_file_that_no_loader_takes_is_told_before_one_is_asked(
    names: tuple[str, ...], metadata: dict[str, str], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.safetensors"
    save_file({name: torch.ones(2, 2) for name in names}, path, metadata)
    with pytest.raises(DataError, match=words) as caught:
        check_file(path)
    assert caught.value.problems[0].remedy


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"x.lora_A.weight": (2, 4), "x.lora_B.weight": (4, 3)}, r"are not of one rank"),
        ({"x.lora_A.weight": (2, 4)}, r"x.lora_A.weight has no partner lora_B"),
        ({"x.lora_B.weight": (4, 2)}, r"x.lora_B.weight has no partner lora_A"),
        ({"x.lokr_w2_b": (2, 4), "x.lokr_w2_a": (2, 2)}, r"x.lokr_w2_[ab] has no partner lokr_w1"),
        ({"x.lokr_w1_a": (2, 2), "x.lokr_w2": (2, 4)}, r"x.lokr_w1_a has no partner lokr_w1_b"),
    ],
)
def test_factors_that_are_alone_or_do_not_fit_are_named(
    changed: dict[str, tuple[int, int]], words: str, tmp_path: Path
) -> None:
    shapes = {"y.lora_A.weight": (2, 4), "y.lora_B.weight": (4, 2), **changed}
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, tmp_path / "a.safetensors")
    with pytest.raises(DataError, match=words):
        check_file(tmp_path / "a.safetensors")


def test_what_is_not_finite_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({f"x.lora_{part}.weight": torch.full((2, 2), torch.inf) for part in "AB"}, path)
    with pytest.raises(DataError, match="is not finite") as caught:
        check_file(path)
    assert [bool(one.remedy) for one in caught.value.problems] == [True, False]


@pytest.mark.parametrize(
    ("effect", "words", "remedy"),
    [(0.0, "nothing came of it", "train more"), (float("nan"), "not finite", "lower train.learning")],
)
def test_a_result_without_effect_says_what_to_do(effect: float, words: str, remedy: str) -> None:
    with pytest.raises(DivergedError, match=words) as caught:
        proof.require_effect(effect, "nothing came of it", "runs/a")
    assert remedy in caught.value.problems[0].remedy and caught.value.problems[0].where == "runs/a"
    proof.require_effect(1e-9, "nothing came of it", "runs/a")


@pytest.fixture(scope="module")
def exported(
    trained: Trained, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Case], tuple[Context, Any, Path]]:
    """Give context and model of a finished full fine-tune with its folder. Put back what is changed there."""
    made: dict[Case, tuple[Context, Any, Path]] = {}

    def export(case: Case) -> tuple[Context, Any, Path]:
        if case not in made:
            context, model = trained(case, tmp_path_factory.mktemp("exported"))
            made[case] = context, model, export_full(context, model)[0]
        return made[case]

    return export


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (put_nan, DivergedError, "is not finite"),
        (lambda t: next(iter(t.values())).view(-1)[0].add_(1e-3), DataError, "is not what was trained"),
        (lambda t: t.pop(next(iter(t))), DataError, "1 tensor is missing"),
        (lambda t: t.update(extra=torch.zeros(1)), DataError, "extra on disk is not what was trained"),
    ],
    ids=["nan", "changed", "missing", "extra"],
)
def test_a_spoilt_model_fails_the_proof(
    change: Change,
    error: type[Exception],
    words: str,
    full_case: Case,
    exported: Callable[[Case], tuple[Context, Any, Path]],
) -> None:
    context, model, folder = exported(full_case)
    file = next((folder / context.family.trained_component).glob("*.safetensors"))
    whole = file.read_bytes()
    spoil(file, change)
    try:
        with pytest.raises(error, match=words):
            prove_full(context, model, folder)
    finally:
        file.write_bytes(whole)
    assert prove_full(context, model, folder) > 0


def test_an_older_model_stays_where_the_new_one_fails_its_proof(
    full_case: Case,
    exported: Callable[[Case], tuple[Context, Any, Path]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context, model, folder = exported(full_case)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    write = full.write_files

    def spoilt(files: dict[Path, Any], *others: Any) -> None:
        write(files, *others)
        spoil(next(iter(files)), lambda t: next(iter(t.values())).view(-1)[0].add_(1e-3))

    monkeypatch.setattr(full, "write_files", spoilt)
    with pytest.raises(DataError, match="is not what was trained") as caught:
        export_full(context, model)
    [problem] = caught.value.problems
    assert problem.where in {str(path) for path in before} and "an older model stays" in problem.remedy
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    assert [path.name for path in folder.parent.glob("*model*")] == ["model"]


def test_the_real_pipeline_loads_the_trained_model(
    full_case: Case, finished: Callable[[Case], Finished]
) -> None:
    done = finished(full_case)
    context = done.job.context
    component = context.family.trained_component
    model_class: Any = context.family.model_class(context.source)
    model = model_class.from_pretrained(done.folder / "model" / component)
    weights = checkpoint.read_group(done.folder / "checkpoints" / f"step-{SHORT_STEPS:06d}", "weights", "cpu")
    assert all(torch.equal(value, weights[name]) for name, value in model.named_parameters())
    assert {value.dtype for value in model.parameters()} == {context.dtype}
    loaded = own(done.job)
    before = loaded.output()
    loaded.replace(model.eval())
    assert not torch.equal(loaded.output(), before)


def test_the_trained_model_is_a_base_for_everything(
    full_case: Case, finished: Callable[[Case], Finished]
) -> None:
    """diffusers and transformers load the folder as a whole, and so do our own commands."""
    from diffusers import DiffusionPipeline

    done = finished(full_case)
    context = done.job.context
    folder, names = done.folder / "model", families.components(context.family)
    model = context.config.model.model_copy(update={"pretrained_model_name_or_path": str(folder)})
    config = context.config.model_copy(update={"model": model})
    source = resolve_source(config, names, trained=context.family.trained_component)
    check_base(context.family, Loaded(config=config, sources={}), folder)
    check_loadable(context.family, source)
    links = [file for file in folder.rglob("*") if file.is_symlink()]
    if not context.family.trained_component:
        assert not links
        return
    assert {file.parent.name for file in links} == {*roles(context.family)} - {
        context.family.trained_component
    }, "what was not trained takes no room"
    assert {file.suffix for file in links} == {".safetensors"}
    pipeline = DiffusionPipeline.from_pretrained(folder)
    trained = getattr(pipeline, context.family.trained_component)
    weights = checkpoint.read_group(done.folder / "checkpoints" / f"step-{SHORT_STEPS:06d}", "weights", "cpu")
    assert all(torch.equal(value, weights[name].float()) for name, value in trained.named_parameters())


def test_an_unknown_preset_fails_and_lists_the_known(
    lora_case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        workshop.job(lora_case, tmp_path, "lora.target_modules=zzz")
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert "--set lora.target_modules" in str(caught.value)
    assert all(name in str(caught.value) for name in families.get(lora_case.family).lora_targets)


def test_unknown_modules_fail_and_list_the_known(lora_case: Case, workshop: Workshop, tmp_path: Path) -> None:
    known = {name.rpartition(".")[2] for name in linear_names(build_model(lora_case, workshop, tmp_path))}
    known = {name for name in known if not name.isdigit()}
    typo = f"{min(known)}q"
    with pytest.raises(ConfigError) as caught:  # by the plan: before any caption is encoded
        workshop.job(lora_case, tmp_path, f'lora.target_modules=["{typo}", "{max(known)}"]')
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    text = str(caught.value)
    assert len(caught.value.problems) == 1
    assert f"--set lora.target_modules: `lora.target_modules`: no linear layer is called '{typo}'" in text
    assert f"did you mean '{min(known)}'" in text
    assert all(name in text for name in known)


def build_model(case: Case, workshop: Workshop, folder: Path) -> Any:
    return load_base(workshop.job(case, folder).context).module
