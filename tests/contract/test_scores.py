"""Metrics of a run's previews: of the files that it saved, and the same whether it was interrupted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.contract.runs import LORA_CASES, KilledError, Workshop, draws, dying_after, numbers
from tests.scoring_models import write_clip, write_dinov2
from trainer.config.reading.load import load
from trainer.errors import ConfigError, DataError
from trainer.telemetry.sinks.events import EventLog
from trainer.telemetry.sinks.metrics import METRICS_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics

CASE = next(case for case in LORA_CASES if draws(case.family))
PROMPTS = ("an apple", "a red car", "an apple")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Overrides that measure previews by tiny models."""
    folder = tmp_path_factory.mktemp("models")
    return (
        f"validation.prompts=[{', '.join(PROMPTS)}]",
        "validation.metrics=[clip_t, dinov2, nearest_train, diversity]",
        f"validation.clip_model={write_clip(folder / 'clip', steps=20)}",
        f"validation.dinov2_model={write_dinov2(folder / 'dinov2')}",
    )


def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run_dir / METRICS_LOG) if "score_data" in row]


def by_transformers(run_dir: Path, step: int, overrides: tuple[str, ...], training: Path) -> dict[str, float]:
    """The metrics from the files of previews and training pictures, by transformers' own calls alone."""
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, Dinov2Model

    clip_folder, dinov2_folder = (text.partition("=")[2] for text in overrides[2:])
    previews = [
        Image.open(path).convert("RGB")
        for path in sorted((run_dir / "samples" / f"step-{step:06d}").iterdir())
    ]
    trained = [Image.open(path).convert("RGB") for path in sorted(training.glob("*.png"))]
    with torch.no_grad():
        clip = CLIPModel.from_pretrained(clip_folder).eval()
        pixels = AutoImageProcessor.from_pretrained(clip_folder)(images=previews, return_tensors="pt")
        texts = AutoTokenizer.from_pretrained(clip_folder)(list(PROMPTS), padding=True, return_tensors="pt")
        said = clip(
            input_ids=texts["input_ids"],
            attention_mask=texts["attention_mask"],
            pixel_values=pixels["pixel_values"],
        )
        dinov2 = Dinov2Model.from_pretrained(dinov2_folder).eval()
        processor = AutoImageProcessor.from_pretrained(dinov2_folder)
        own, others = (
            dinov2(processor(images=images, return_tensors="pt")["pixel_values"]).last_hidden_state[:, 0]
            for images in (previews, trained)
        )
    table = torch.nn.functional.cosine_similarity(own[:, None], others[None], dim=2)
    return {
        "clip_t": float((said.logits_per_image.diagonal() / clip.logit_scale.detach().exp()).mean()),
        "dinov2": float(table.mean()),
        "nearest_train": float(table.max()),
        "diversity": 1 - float(torch.nn.functional.cosine_similarity(own[0], own[2], dim=0)),
    }


def test_every_round_is_measured_from_its_files_and_told_everywhere(
    workshop: Workshop, scored: tuple[str, ...], tmp_path: Path
) -> None:
    job = workshop.job(CASE, tmp_path, *scored, "validation.held_out=0", "validation.copy_threshold=0.01")
    job.train()
    rows = rows_of(job.folder)
    assert [row["step"] for row in rows] == [0, 4, 6]
    assert len({row["score_data"] for row in rows}) == 1
    for row in rows:
        expected = by_transformers(job.folder, row["step"], scored, workshop.samples / "pictures")
        assert {name: row[name] for name in expected} == pytest.approx(expected, abs=2e-5)
        assert row["pictures"] == row["copied"] == 3
    # the last round is of the LoRA loaded from its file
    assert any("Proved: " in line for line in job.said)
    told = [line for line in job.said if line.startswith("metrics of the 3 previews of step 6: clip_t ")]
    assert len(told) == 1
    assert sum(line.startswith("warning: preview step-000006/") for line in job.said) == 3
    published = (tmp_path / "runtime" / METRICS_FILE).read_text()
    assert f'trainer_validation_score{{metric="clip_t"}} {rows[-1]["clip_t"]!r}' in published
    # the same command again measures the same, and writes no second line of it
    workshop.job(CASE, tmp_path, *scored, "validation.held_out=0", "validation.copy_threshold=0.01").train()
    assert rows_of(job.folder) == rows


@pytest.mark.slow
def test_a_kill_and_a_resume_measure_every_round_once(
    workshop: Workshop, scored: tuple[str, ...], tmp_path: Path
) -> None:
    straight = workshop.job(CASE, tmp_path / "straight", *scored)
    straight.train()
    again = tmp_path / "again"
    with pytest.raises(KilledError):
        workshop.job(CASE, again, *scored, status=dying_after(again, 5)).train()
    job = workshop.job(CASE, again, *scored)
    job.train()
    assert rows_of(job.folder) == rows_of(straight.folder)
    assert numbers(job.folder) == numbers(straight.folder)


@pytest.mark.slow
def test_a_resume_that_begins_to_measure_draws_the_round_of_its_checkpoint_anew(
    workshop: Workshop, scored: tuple[str, ...], tmp_path: Path
) -> None:
    """Its previews show other prompts, and one less."""
    steps = ("validation.every_steps=3", "validation.prompts=[a dog, a cat]")
    with pytest.raises(KilledError):
        workshop.job(CASE, tmp_path, *steps, status=dying_after(tmp_path, 5)).train()
    job = workshop.job(CASE, tmp_path, steps[0], *scored)
    job.train()
    assert "resumed from step-000003" in job.said
    rows = rows_of(job.folder)
    assert [row["step"] for row in rows] == [3, 6]
    expected = by_transformers(job.folder, 3, scored, workshop.samples / "pictures")
    assert rows[0]["clip_t"] == pytest.approx(expected["clip_t"], abs=2e-5)


@pytest.mark.slow
def test_measuring_changes_no_step(workshop: Workshop, scored: tuple[str, ...], tmp_path: Path) -> None:
    losses = []
    for name, options in (("with", scored), ("without", scored[:1])):
        job = workshop.job(CASE, tmp_path / name, *options)
        job.train()
        losses.append([row["loss"] for row in read_metrics(job.folder / METRICS_LOG) if "loss" in row])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("monitor", ["clip_t", pytest.param("dinov2", marks=pytest.mark.slow)])
def test_a_run_ends_where_its_previews_get_no_better(
    monitor: str, workshop: Workshop, scored: tuple[str, ...], tmp_path: Path
) -> None:
    patience = ("validation.early_stop.patience=2", "validation.early_stop.min_delta=0.05")
    rounds = ("train.max_train_steps=30", "validation.every_steps=1")
    options = (*scored, *rounds, f"validation.early_stop.monitor={monitor}", *patience)
    job = workshop.job(CASE, tmp_path, *options)
    job.train()
    values = {row["step"]: row[monitor] for row in rows_of(job.folder)}
    best_step = end = None
    for step, value in values.items():
        if best_step is None or value > values[best_step] + 0.05:
            best_step = step
        elif sum(best_step < other <= step for other in values) == 2:
            end = step
            break
    assert end is not None and end < 30, "the case is too easy: it never ends early"
    assert max(values) == end
    assert any(line.startswith(f"early stop at step {end}: {monitor} never rose above ") for line in job.said)
    # by which the alert on runs that ended early knows it as finished
    published = (tmp_path / "runtime" / METRICS_FILE).read_text().splitlines()
    assert {f"trainer_step {end}.0", f"trainer_planned_steps {end}.0"} <= set(published)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["validation.prompts=[]", "validation.metrics=[clip_t]"], "`validation.prompts` is empty"),
        (["validation.metrics=[kid]"], "kid means something from 50 pictures on, and a round draws 2"),
        (["validation.metrics=[fid]"], "fid means something from 10,000 pictures on, and a round draws 2"),
        (["validation.metrics=[diversity]"], "diversity compares pictures of one prompt"),
        (
            ["validation.early_stop={}", "validation.held_out=0"],
            "watches validation_loss, and nothing is held",
        ),
        (["validation.early_stop.monitor=kid"], "watches kid, and it is none of validation.metrics"),
        (["validation.clip_model=x/y"], "`validation.clip_model` has no effect without clip_t"),
        (["validation.early_stop.monitor=loss"], "expected validation_loss, clip_t, dinov2, kid"),
    ],
)
def test_what_cannot_be_had_is_refused(
    options: list[str], says: str, workshop: Workshop, tmp_path: Path
) -> None:
    path = workshop.write_config(CASE, tmp_path)
    with pytest.raises(ConfigError) as caught:
        load([path], overrides=options, family_defaults={CASE.family: {}}, environ={})
    assert says in str(caught.value).replace(" or ", ", ")


def test_too_few_training_pictures_are_told_before_anything_is_loaded(
    workshop: Workshop, scored: tuple[str, ...], tmp_path: Path
) -> None:
    prompts = ", ".join(["an apple"] * 50)
    options = (*scored, f"validation.prompts=[{prompts}]", "validation.metrics=[clip_t, kid]")
    job = workshop.job(CASE, tmp_path, *options)
    with pytest.raises(DataError, match=r"kid would mean nothing: 6 training pictures, and 50 are needed"):
        job.train()
    assert not (job.folder / METRICS_LOG).exists()


def test_tensorboard_has_the_metrics(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from trainer.telemetry.sinks.records import ScoreRecord

    log = EventLog(tmp_path)
    log.record(ScoreRecord(step=5, pictures=2, score_data="h", clip_t=0.25, copied=1))
    log.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    assert found.Tags()["scalars"] == ["validation/clip_t", "validation/copied"]
    assert found.Scalars("validation/clip_t")[0].value == 0.25
