"""Draws of held-out losses and previews: of validation.seed, and for every sample and prompt other ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from tests.contract.runs import Case, Workshop
from trainer.engine.caching.fill import fill_cache
from trainer.engine.results.pictures import read_png
from trainer.engine.training import held_out
from trainer.families.draws import draw_samples
from trainer.families.values import Batch, Draw

FLUX = Case(family="flux1_dev", method="lora")
HELD_OUT, DRAWS = 3, 4


def measured(workshop: Workshop, folder: Path, *options: str) -> tuple[list[Draw], held_out.HeldOut, Any]:
    """The draws of one round, sample after sample, what is held out, and the settings of training draws."""
    job = workshop.job(
        FLUX,
        folder,
        f"validation.held_out={HELD_OUT}",
        "validation.prompts=[]",
        *options,
    )
    seen: list[Draw] = []

    def predict(model: object, batch: Batch, draw: Draw, settings: object) -> torch.Tensor:
        seen.append(draw)
        return torch.zeros_like(draw.noise)

    kept = held_out.held_out_entries(job.context, job.samples.held_out)
    assert kept is not None
    fill_cache(job.context, kept.entries)
    family = dataclasses.replace(job.context.family, predict=predict)
    held_out.measure(dataclasses.replace(job.context, family=family), torch.nn.Identity(), kept, step=1)
    return seen, kept, job.context.settings


def first_values(draws: list[Draw]) -> list[float]:
    return [draw.noise.reshape(-1)[0].item() for draw in draws]


def test_losses_of_latents_that_tiles_make_are_others(workshop: Workshop, tmp_path: Path) -> None:
    """`data` tells which losses compare: in tiles the VAE gives other latents."""
    for case, alike in ((FLUX, False), (Case(family="llama", method="lora"), True)):
        job = workshop.job(case, tmp_path / case.family, "validation.held_out=2")
        found = []
        for tiling in (False, True):
            plan = dataclasses.replace(job.context.plan, vae_tiling=tiling)
            context = dataclasses.replace(job.context, plan=plan)
            kept = held_out.held_out_entries(context, job.samples.held_out)
            assert kept is not None
            found.append(kept.data)
        assert (found[0] == found[1]) is alike


def test_draws_are_even_and_of_the_seed_of_validation(workshop: Workshop, tmp_path: Path) -> None:
    draws, kept, settings = measured(workshop, tmp_path / "a", "validation.seed=5", "train.seed=5")
    noise = first_values(draws)
    assert len(set(noise)) == len(draws) == HELD_OUT * DRAWS
    levels = len(settings.sigmas)
    places = [int((settings.sigmas == draw.sigma).nonzero().item()) for draw in draws]
    for sample in range(HELD_OUT):
        quarters = [place * DRAWS // levels for place in places[sample * DRAWS : (sample + 1) * DRAWS]]
        assert sorted(quarters) == [0, 1, 2, 3]
    assert len(set(places)) == len(places)
    # of the same seed, and still no noise that is trained with
    trained = draw_samples(settings, range(50), tuple(draws[0].noise.shape[1:])).noise
    assert not set(noise) & set(trained[:, 0, 0, 0].tolist())
    again, same, _ = measured(workshop, tmp_path / "b", "validation.seed=5", "train.seed=6")
    assert first_values(again) == noise and same.data == kept.data


def test_losses_of_other_noise_levels_do_not_compare(workshop: Workshop, tmp_path: Path) -> None:
    options = ("flow.shift=auto", "flow.shift=2", "flow.weighting_scheme=logit_normal")
    found = {measured(workshop, tmp_path / one, one)[1].data for one in options}
    assert len(found) == len(options)


def test_losses_of_another_seed_do_not_compare(workshop: Workshop, tmp_path: Path) -> None:
    one, other = (workshop.job(FLUX, tmp_path / str(n), f"validation.seed={n}") for n in (0, 1))
    records = one.samples.held_out
    kept = [held_out.held_out_entries(job.context, records) for job in (one, one, other)]
    first, again, with_other = (None if found is None else found.data for found in kept)
    assert first is not None and first == again != with_other


def test_other_samples_are_held_out_with_another_seed(workshop: Workshop, tmp_path: Path) -> None:
    picked = set()
    for seed in range(6):
        options = (f"validation.held_out={HELD_OUT}", f"validation.seed={seed}")
        job = workshop.job(FLUX, tmp_path / str(seed), *options)
        picked.add(tuple(record.identifier for record in job.samples.held_out))
    assert len(picked) > 1


def test_equal_prompts_are_drawn_with_seeds_of_their_own(workshop: Workshop, tmp_path: Path) -> None:
    options = ("validation.prompts=[a cat, a cat]", "validation.held_out=0", "train.max_train_steps=1")
    job = workshop.job(FLUX, tmp_path, *options)
    job.train()
    first, second = (read_png(job.folder / f"samples/step-000000/{name}.png")[0] for name in ("00", "01"))
    assert first.tobytes() != second.tobytes()
