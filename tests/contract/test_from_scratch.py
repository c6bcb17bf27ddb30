"""`model.weights: random`: what trains starts from nothing, what the base has learned is used."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch

from tests.contract.runs import CASES, FULL_CASES, Case, Job, Workshop, draws, fewer
from trainer import families
from trainer.engine.building.build import load_base
from trainer.engine.caching.entries import Entries, list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.modeling.base.source import resolve_source
from trainer.planning.render import plan_text

RANDOM = "model.weights=random"
QUIET = ("validation.prompts=[]", "validation.held_out=0")


def without(component: str, job: Job, folder: Path) -> Job:
    """The job on a copy of its base that lacks one component's weights."""
    context = job.context
    base = shutil.copytree(context.source.folder, folder)
    for path in (base / component).glob("*.safetensors"):
        path.unlink()
    model = context.config.model.model_copy(update={"pretrained_model_name_or_path": str(base)})
    source = resolve_source(
        context.config.model_copy(update={"model": model}),
        families.components(context.family),
        trained=context.family.trained_component,
    )
    return dataclasses.replace(job, context=dataclasses.replace(context, source=source))


def encoded(job: Job) -> Entries:
    entries = list_entries(job.context, job.records, job.samples.prompt_controls)
    fill_cache(job.context, entries)
    return entries


def tensors(entries: Entries) -> list[torch.Tensor]:
    """Values of the first sample's latents and text."""
    latents, text = entries.latents[0], entries.texts[0]
    found = {**entries.cache.read("latents", latents.key), **entries.cache.read("text", text.key)}
    return [found[name] for name in sorted(found)]


@pytest.mark.parametrize("case", [case for case in CASES if draws(case.family)], ids=str)
def test_encoders_are_the_learned_ones_and_what_trains_is_not(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    pretrained = workshop.job(case, tmp_path / "pretrained")
    scratch = workshop.job(case, tmp_path / "scratch", RANDOM)
    (vae,) = scratch.context.family.encoder_components["latents"]
    drawn = without(vae, scratch, tmp_path / "base")
    before, after, drawn_anew = encoded(pretrained), encoded(scratch), encoded(drawn)
    assert all(map(torch.equal, tensors(before), tensors(after)))
    assert not all(map(torch.equal, tensors(after), tensors(drawn_anew)))
    keys, others = ({entry.key for entry in one.all()} for one in (after, drawn_anew))
    assert not keys & others
    models = [load_base(job.context).module.state_dict() for job in (pretrained, scratch, drawn)]
    assert not all(torch.equal(models[0][name], models[1][name]) for name in models[0])
    assert all(torch.equal(models[1][name], models[2][name]) for name in models[1])


@pytest.mark.slow
@pytest.mark.parametrize("case", fewer(FULL_CASES), ids=str)
def test_a_run_from_nothing_needs_no_weights_of_what_trains(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINER_CACHE_DIR", str(tmp_path / "cache"))
    base = Path(shutil.copytree(workshop.base(case.family), tmp_path / "base"))
    trained = families.get(case.family).trained_component
    for path in (base / trained).glob("*.safetensors"):
        path.unlink()
    bare = dataclasses.replace(workshop, base=lambda family: base)
    once = ("train.max_train_steps=1", "train.gradient_accumulation_steps=1")
    job = bare.job(case, tmp_path, *QUIET, RANDOM, *once)
    assert "meta device" in plan_text(job.context.plan)
    job.train()
    assert "Proved: " in "\n".join(job.said)
    assert job.context.source.random_components == {trained}
