"""Content of adapter files, the loaders that take them, and runs that start from one."""

from __future__ import annotations

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

from tests.contract.conftest import Finished
from tests.contract.loaders import lora_file, own
from tests.contract.runs import (
    ALIKE,
    COUSINS,
    LORA_CASES,
    Case,
    Job,
    Workshop,
    draws,
    numbers,
    without,
)
from trainer.engine.building.build import build, load_base
from trainer.engine.results import proof
from trainer.errors import ConfigError, ExitCode
from trainer.modeling.adapter.adapter_file import read_adapter
from trainer.modeling.adapter.start_from import saved_start

SMALLEST = Case(family="flux1_dev", method="lora")
SLOW = pytest.mark.slow
KINDS: dict[str, tuple[str, ...]] = {
    "patterns": (),  # `patterns` makes them of the family's own layers
    "dora": ("lora.type=dora",),
    "lokr": ("lora.type=lokr",),
}
FILES = [
    pytest.param(kind, case, id=f"{case.family}-{kind}", marks=[] if case == SMALLEST else [SLOW])
    for case in without(LORA_CASES, ALIKE, COUSINS)
    for kind in KINDS
]
LOKR_PIPELINES = ("flux2_dev",)
"""Families whose pipeline loads a LoKr; other pipelines refuse it, and the transformer's loader takes it."""


@pytest.fixture(scope="module")
def made(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Case], Job]:
    """A short run of an option. Read only."""
    known: dict[tuple[str, Case], Job] = {}

    def run(name: str, case: Case) -> Job:
        if (name, case) not in known:
            off = ("validation.prompts=[]", "validation.held_out=0", "train.max_train_steps=3")
            folder = tmp_path_factory.mktemp("option")
            job = workshop.job(case, folder, *off, *overrides(name, case, workshop, folder))
            job.train()
            known[name, case] = job
        return known[name, case]

    return run


def overrides(kind: str, case: Case, workshop: Workshop, folder: Path) -> tuple[str, ...]:
    """Options of a run that makes an adapter of this kind."""
    if kind != "patterns":
        return KINDS.get(kind, ())
    narrow, wide, scaled = changed_ends(workshop.job(case, folder))
    # the small run's rank and alpha once more, for all layers: in a file that key comes first
    ranks, alphas = f'{narrow}: 2, {wide}: 6, ".*": 4', f'{scaled}: 3, ".*": 8'
    return (f"lora.rank_pattern={{{ranks}}}", f"lora.alpha_pattern={{{alphas}}}")


def changed_ends(job: Job) -> list[str]:
    """Names within a block, as "attn.to_q", of three layers of the family: their patterns change them."""
    pattern = job.context.family.lora_targets["attention"]
    layers = [name for name, _ in load_base(job.context).module.named_modules()]
    ends = (re.split(r"\.\d+\.", name, maxsplit=1)[1] for name in layers if re.fullmatch(pattern, name))
    return list(dict.fromkeys(ends))[:3]


@pytest.mark.parametrize(("kind", "case"), FILES)
def test_peft_merges_what_diffusers_or_peft_load_and_comfyui_computes_the_same(
    kind: str, case: Case, made: Callable[[str, Case], Job]
) -> None:
    job = made(kind, case)
    path = lora_file(job)
    model = load_base(job.context).module
    base = {name: value.clone() for name, value in model.state_dict().items()}
    proof.load_lora(job.context, model, path)
    merged = merge(model)
    changed = {name for name, value in merged.items() if not torch.equal(value, base[f"{name}.weight"])}
    assert changed
    comfyui = path.with_suffix(".comfyui.safetensors")
    assert comfyui.exists() == (job.context.family.comfyui is not None)
    if not comfyui.exists():
        return
    tensors = load_file(comfyui)
    for name, weight in merged.items():
        key = job.context.family.comfyui_keys(name)
        assert key is not None
        ours = weight_by_comfyui(tensors, key, base[f"{name}.weight"])
        assert torch.allclose(ours, weight, rtol=1e-5, atol=1e-6), name


def merge(model: Any) -> dict[str, torch.Tensor]:
    """peft's own merge: the weight of every adapted layer by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
            found[name] = module.get_base_layer().weight.detach().clone()
    return found


def weight_by_comfyui(tensors: dict[str, torch.Tensor], key: str, base: torch.Tensor) -> torch.Tensor:
    """A layer's weight under a LoRA at strength 1, as ComfyUI computes it: see tests/contract/comfyui.py."""
    alpha = tensors.get(f"{key}.alpha")
    if f"{key}.lora_A.weight" in tensors:
        down, up = tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"]
        change = up @ down * (1.0 if alpha is None else alpha / down.shape[0])
    else:
        left = tensors[f"{key}.lokr_w1"]
        right = tensors.get(f"{key}.lokr_w2")
        rank = None
        if right is None:
            second = tensors[f"{key}.lokr_w2_b"]
            right, rank = tensors[f"{key}.lokr_w2_a"] @ second, second.shape[0]
        change = torch.kron(left, right) * (1.0 if alpha is None or rank is None else alpha / rank)
    whole = base + change.reshape(base.shape)
    scale = tensors.get(f"{key}.dora_scale")
    if scale is None:
        return whole
    assert scale.shape == (base.shape[0], 1)
    return whole * (scale / (base.norm(dim=1, keepdim=True) + torch.finfo(base.dtype).eps))


def test_every_layer_has_the_rank_and_alpha_of_its_pattern(made: Callable[[str, Case], Job]) -> None:
    job = made("patterns", SMALLEST)
    narrow, wide, scaled = changed_ends(job)
    # the small run's rank is 4, its alpha 8
    changed = {narrow: 8 / 2, wide: 8 / 6, scaled: 3 / 4}
    theirs = load_file(lora_file(job).with_suffix(".comfyui.safetensors"))
    seen = set()
    for key, alpha in theirs.items():
        if key.endswith(".alpha"):
            module = key.removesuffix(".alpha")
            end = next((end for end in changed if module.endswith(f".{end}")), "")
            rank = theirs[f"{module}.lora_A.weight"].shape[0]
            assert alpha.item() / rank == pytest.approx(changed.get(end, 8 / 4)), module
            seen.add(end)
    assert seen == {"", *changed}


def test_an_adapter_of_a_head_brings_no_weight_of_the_base(workshop: Workshop, tmp_path: Path) -> None:
    """peft would add the whole head, which is the base's, and the next run refused the file."""
    case = Case(family="llama", method="lora")
    short = ("validation.prompts=[]", "validation.held_out=0", "train.max_train_steps=2")
    first, second = (
        workshop.job(case, tmp_path / name, *short, "lora.target_modules=[q_proj, lm_head]")
        for name in ("first", "second")
    )
    first.train()
    names = list(load_file(lora_file(first)))
    assert any("lm_head" in name for name in names)
    assert all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in names)
    tensors = load_file(lora_file(first)) | {"base_model.model.lm_head.base_layer.weight": torch.zeros(2, 2)}
    older = tmp_path / "older" / lora_file(first).name  # as an earlier version wrote it
    shutil.copytree(lora_file(first).parent, older.parent)
    save_file(tensors, older, metadata={"format": "pt"})
    for path in (lora_file(first), older):
        adapter = read_adapter(path)
        assert {f"{layer}.{part}" for layer, parts in adapter.layers.items() for part in parts} == {
            name.removeprefix("base_model.model.") for name in names
        }
        assert saved_start(build(second.context).model, path)


@pytest.mark.parametrize(("kind", "case"), FILES)
def test_the_familys_own_loader_takes_the_file(
    kind: str, case: Case, made: Callable[[str, Case], Job]
) -> None:
    """diffusers' pipelines and peft's PeftModel: what they put out is another picture, or other logits."""
    job = made(kind, case)
    loaded, path = own(job), lora_file(job)
    without = loaded.output()
    if kind == "lokr" and draws(case.family) and case.family not in LOKR_PIPELINES:
        with pytest.raises(ValueError, match="LoRA param names"):
            loaded.load(path)
        loaded.model.load_lora_adapter(path.parent, weight_name=path.name, prefix="transformer")
    else:
        loaded.load(path)
    assert not torch.equal(loaded.output(), without)


@pytest.mark.parametrize(
    "kind", ["lora", pytest.param("dora", marks=SLOW), "lokr", pytest.param("patterns", marks=SLOW)]
)
def test_a_run_starts_from_the_file_of_another_and_learns_on(
    kind: str, workshop: Workshop, tmp_path: Path
) -> None:
    same = overrides(kind, SMALLEST, workshop, tmp_path)
    off = ("validation.prompts=[]", "validation.every_steps=2", "train.max_train_steps=2", *same)
    first = workshop.job(SMALLEST, tmp_path / "first", *off, "train.learning_rate=1e-2")
    first.train()
    path = lora_file(first)
    second = workshop.job(SMALLEST, tmp_path / "second", *off, f"lora.init_from={path}")
    second.train()
    began, ended = numbers(second.folder)[0]["validation_loss"], numbers(first.folder)[-1]["validation_loss"]
    assert began == pytest.approx(ended, rel=1e-6) != numbers(first.folder)[0]["validation_loss"]
    assert any(line.startswith(f"the adapter starts from {path}: ") for line in second.said)
    assert any("Proved: " in line for line in second.said)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lora.rank=2"], ("is (4, ", "and (2, ", "and 5 more", "set lora.* as they were")),
        (["lora.alpha=4"], ("has the alpha 8 in the file and 4 in this run",)),
        (["lora.type=dora"], ("lora_magnitude_vector is not in the file",)),
        (["lora.type=lokr"], ("lokr_w1 is not in the file",)),
        (["lora.target_modules=[to_q]"], ("is in the file, and not in this run's adapter",)),
    ],
)
def test_an_adapter_of_another_shape_is_no_start(
    overrides: list[str],
    words: tuple[str, ...],
    finished: Callable[[Case], Finished],
    workshop: Workshop,
    tmp_path: Path,
) -> None:
    path = lora_file(finished(SMALLEST))
    job = workshop.job(SMALLEST, tmp_path, *overrides, f"lora.init_from={path}")
    with pytest.raises(ConfigError) as caught:
        build(job.context)
    text = str(caught.value)
    assert caught.value.exit_code is ExitCode.BAD_CONFIG
    assert text.startswith(f"lora.init_from: {path} is not this run's adapter")
    assert all(word in text for word in words if word != "and 5 more"), text


def test_files_for_comfyui_and_broken_ones_are_no_start(
    finished: Callable[[Case], Finished], workshop: Workshop, tmp_path: Path
) -> None:
    comfyui = lora_file(finished(SMALLEST)).with_suffix(".comfyui.safetensors")
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"no tensors")
    files = [(comfyui, "laid out for ComfyUI"), (broken, "cannot be read")]
    tensors = load_file(lora_file(finished(SMALLEST)))
    for name, text, words in (
        ("damaged", "{", "lora_adapter_metadata is damaged"),
        ("list", "[]", "is not one of PEFT's"),
        ("rooted", '{"transformer.use_rslora": true}', "scaled by the root of their rank"),
    ):
        path = tmp_path / f"{name}.safetensors"
        save_file(tensors, path, {"lora_adapter_metadata": text})
        files.append((path, words))
    for path, words in files:
        job = workshop.job(SMALLEST, tmp_path / "job", f"lora.init_from={path}")
        with pytest.raises(ConfigError, match=words) as caught:
            build(job.context)
        assert caught.value.problems[0].remedy


def test_a_pattern_that_no_layer_has_is_told(workshop: Workshop, tmp_path: Path) -> None:
    wrong = ("lora.rank_pattern={to_qq: 2}", "lora.alpha_pattern={to_q: 2}")
    told = "--set lora.rank_pattern: `lora.rank_pattern`: no layer with an adapter is called 'to_qq'"
    with pytest.raises(ConfigError, match=told) as caught:
        workshop.job(SMALLEST, tmp_path, *wrong)
    assert "attn.to_q" in str(caught.value)


def test_what_nothing_can_be_learned_from_is_told_before_anything_is_encoded(
    finished: Callable[[Case], Finished], workshop: Workshop, tmp_path: Path
) -> None:
    path = lora_file(finished(SMALLEST))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, name = load_file(path), next(iter(load_file(path)))
    pattern = json.loads(metadata["lora_adapter_metadata"]) | {"transformer.alpha_pattern": {"(": 3}}
    damages = {
        "is not finite": ({**tensors, name: tensors[name] * float("nan")}, metadata),
        "every tensor is zero": ({one: value * 0 for one, value in tensors.items()}, metadata),
        "is of int32, which no adapter is": ({one: value.int() for one, value in tensors.items()}, metadata),
        "no regular expression": (tensors, {**metadata, "lora_adapter_metadata": json.dumps(pattern)}),
        "is not this run's adapter": (
            {**tensors, **{f"transformer.x.lora_{one}.weight": torch.ones(4, 4) for one in "AB"}},
            metadata,
        ),
    }
    for words, (damaged, said) in damages.items():
        save_file(damaged, other := tmp_path / "other.safetensors", said)
        cache = tmp_path / "cache"
        job = workshop.job(SMALLEST, tmp_path, f"lora.init_from={other}", cache=cache)
        with pytest.raises(ConfigError, match=words) as caught:
            job.train()
        assert caught.value.problems[0].remedy
        assert not cache.exists() and not (job.folder / "run.json").exists(), words


def test_a_start_from_the_adapter_of_another_base_is_told(
    finished: Callable[[Case], Finished], workshop: Workshop, tmp_path: Path
) -> None:
    path = lora_file(finished(SMALLEST))
    base = tmp_path / "another-base"
    shutil.copytree(workshop.base(SMALLEST.family), base)
    named = f"model.pretrained_model_name_or_path={base}"
    job = workshop.job(SMALLEST, tmp_path, f"lora.init_from={path}", named)
    build(job.context)
    (told,) = (line for line in job.said if line.startswith("the adapter starts from "))
    assert told.endswith(f" tensors, trained on {workshop.base(SMALLEST.family).name}, not on another-base")
