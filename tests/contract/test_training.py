"""Training itself: what learns, what a resume and another batch shape must not change."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.contract.conftest import Finished
from tests.contract.runs import (
    CASES,
    LORA_CASES,
    SHORT_CHECKPOINT,
    SHORT_STEPS,
    Case,
    KilledError,
    ToldStatus,
    Workshop,
    different,
    draws,
    dying_after,
    fewer,
    files,
    held_out_options,
    mostly_slow,
    numbers,
    products,
    record_samples,
    require_near,
    small_samples,
    steps_saved,
)
from trainer.engine.building.build import build
from trainer.engine.caching.batches import to_device
from trainer.engine.caching.entries import list_entries
from trainer.engine.caching.fill import fill_cache
from trainer.engine.training.feed import feed
from trainer.errors import ExitCode, StoppedError
from trainer.telemetry.sinks.metrics import METRICS_FILE
from trainer.telemetry.sinks.records import METRICS_LOG, read_metrics
from trainer.telemetry.status import Phase

ACCUMULATION = 2
PREVIEWED = (0, 4, 6)
QUIET = ("validation.prompts=[]", "validation.held_out=0")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_cached_batch_gives_finite_losses_and_gradients_where_they_belong(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    job = workshop.job(case, tmp_path, "train.train_batch_size=2")
    context = job.context
    entries = list_entries(context, job.records, job.samples.prompt_controls)
    fill_cache(context, entries)
    settings = context.family.settings(context.source, context.config)
    built = build(context)
    fed = max(next(feed(context, entries, settings, 0, 1)), key=lambda fed: fed.batch.size)
    batch, draw = to_device(fed.batch, fed.draw, context.device, context.dtype)
    losses = context.family.loss(built.model, batch, draw, settings)
    assert fed.batch.size >= 2
    assert losses.shape == (fed.batch.size,)
    assert losses.dtype == torch.float32
    assert torch.isfinite(losses).all()
    losses.mean().backward()
    with_gradient = {name for name, value in built.model.named_parameters() if value.grad is not None}
    intended = {
        name
        for name, _ in built.model.named_parameters()
        if case.method == "full" or name.endswith((".lora_A.default.weight", ".lora_B.default.weight"))
    }
    assert with_gradient <= intended == set(built.updater.parameters)
    # some models do not use the text that their last block puts out
    last = max(map(int, re.findall(r"blocks\.(\d+)\.", " ".join(intended))), default=None)
    assert all(f"blocks.{last}." in name for name in intended - with_gradient)
    assert len(intended - with_gradient) < len(intended) / 4
    assert any(value.grad.any() for value in built.model.parameters() if value.grad is not None)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_leaves_what_it_promises(case: Case, finished: Callable[[Case], Finished]) -> None:
    done = finished(case)
    for name in ("config.resolved.yaml", "plan.json", "metrics.jsonl"):
        assert (done.folder / name).stat().st_size > 0
    assert steps_saved(done.folder) == ["step-000003", "step-000006"]
    pictures = sorted(path.name for path in (done.folder / "samples").glob("*.png"))
    assert pictures == [*(f"step-{n:06d}.png" for n in PREVIEWED), "strip.png"]
    singles = sorted(done.folder.glob("samples/step-*/*"))
    kinds = (".png",) if draws(case.family) else (".png", ".txt")
    assert [path.relative_to(done.folder / "samples") for path in singles] == [
        Path(f"step-{n:06d}") / f"{name}{kind}" for n in PREVIEWED for name in ("00", "01") for kind in kinds
    ]
    with Image.open(singles[len(kinds)]) as picture:
        assert picture.size == (64, 64) or not draws(case.family)
        assert (picture.info["prompt"], picture.info["seed"]) == ("a red car", "1")
    with Image.open(done.folder / "before_after.png") as picture:
        assert picture.width > 2 * 192
    assert list((done.folder / "tensorboard").iterdir())
    rows = numbers(done.folder)
    assert [row["step"] for row in rows] == [0, 2, 4, 6]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert [row["step"] for row in rows if "validation_loss" in row] == [*PREVIEWED]
    said = "\n".join(done.job.said)
    assert "Proved: " in said
    first, last = rows[0]["validation_loss"], rows[-1]["validation_loss"]
    assert f"held-out loss {first:.3g} -> {last:.3g} (" in said
    assert f"before and after: {done.folder / 'before_after.png'}" in said
    before, after = ((done.folder / "samples" / pictures[n]).read_bytes() for n in (0, 2))
    assert before != after


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_a_kill_and_a_resume_equal_six(
    case: Case,
    workshop: Workshop,
    finished: Callable[[Case], Finished],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    straight = finished(case)
    taken = record_samples(monkeypatch)
    with pytest.raises(KilledError):  # two steps later than the checkpoint
        workshop.job(case, tmp_path, status=dying_after(tmp_path, SHORT_CHECKPOINT + 2)).train()
    assert steps_saved(tmp_path / "run") == ["step-000003"]
    assert (tmp_path / "run" / "samples" / "step-000004.png").exists()
    before = taken[:SHORT_CHECKPOINT]
    taken.clear()
    published: list[str] = []

    def read_published(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done:
            published.append((tmp_path / "runtime" / METRICS_FILE).read_text())

    job = workshop.job(case, tmp_path, status=ToldStatus(tmp_path, read_published))
    job.train()
    assert "resumed from step-000003" in job.said
    # before the first save of this process
    assert f"trainer_checkpoint_step {SHORT_CHECKPOINT}.0" in published[0]
    assert before + taken == straight.samples
    # the log's line after the resume is about the steps that this process made; a row of a language model
    # holds as many conversations as fit
    timed = [row for row in read_metrics(tmp_path / "run" / METRICS_LOG) if "seconds_per_step" in row]
    samples = {round(row["samples_per_second"] * row["seconds_per_step"], 6) for row in timed}
    per_step = ACCUMULATION * job.context.config.train.train_batch_size
    assert samples == {float(per_step)} or not draws(case.family)
    assert len(straight.samples) == SHORT_STEPS
    assert all(len(step) == ACCUMULATION for step in straight.samples)
    dropped = any(sample.dropped for step in straight.samples for micro in step for sample in micro)
    assert dropped == draws(case.family)
    assert numbers(job.folder) == numbers(straight.folder)
    assert not different(products(job.folder), products(straight.folder))
    assert not different(files(job.folder, "checkpoints/*/*"), files(straight.folder, "checkpoints/*/*"))


@pytest.mark.parametrize("case", fewer(LORA_CASES), ids=str)
def test_kills_before_the_first_checkpoint_leave_one_loss_before_training(
    case: Case, workshop: Workshop, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    """Killed after the row of step 0, then between that and the checkpoint, then after the checkpoint."""

    def in_preview(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.PREVIEW:
            raise KilledError

    deaths = (ToldStatus(tmp_path, in_preview), dying_after(tmp_path, 2), dying_after(tmp_path, 5))
    for status in deaths:
        with pytest.raises(KilledError):
            workshop.job(case, tmp_path, status=status).train()
        assert numbers(tmp_path / "run")[0]["step"] == 0
    job = workshop.job(case, tmp_path)
    job.train()
    assert "resumed from step-000003" in job.said
    straight = finished(case)
    assert numbers(job.folder) == numbers(straight.folder)
    assert [line for line in job.said if line.startswith("held-out")] == [
        line for line in straight.job.said if line.startswith("held-out loss") and "->" in line
    ]
    events = EventAccumulator(str(job.folder / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("validation/loss")] == [*PREVIEWED]


@pytest.mark.parametrize("case", fewer(LORA_CASES), ids=str)
def test_prompts_that_changed_before_a_resume_have_no_before(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    quick = ("train.max_train_steps=4", "validation.every_steps=100", "validation.held_out=0")
    with pytest.raises(KilledError):
        workshop.job(case, tmp_path, *quick, status=dying_after(tmp_path, 4)).train()
    (tmp_path / "run" / "before_after.png").write_bytes(b"of an earlier end")
    job = workshop.job(case, tmp_path, *quick, "validation.prompts=[an apple, a blue car]")
    job.train()
    reason = "shows another prompt, or was drawn with other settings"
    assert f"no before_after.png: samples/step-000000/01.png {reason}" in job.said
    assert not (job.folder / "before_after.png").exists()
    shutil.rmtree(job.folder / "samples" / "step-000000")
    again = workshop.job(case, tmp_path, *quick)
    again.train()
    assert "no before_after.png: samples/step-000000/00.png is missing" in again.said


@pytest.mark.parametrize("case", mostly_slow(LORA_CASES), ids=str)
def test_a_folder_is_held_out_and_may_change_between_stop_and_resume(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    for name, chosen in {"train": range(4), "first": range(4, 5), "second": range(5, 7)}.items():
        small_samples(tmp_path / name, chosen)
    off = ("validation.prompts=[]", "validation.held_out=0", "validation.every_steps=2")
    quiet = (*off, *held_out_options(case.family, tmp_path / "first"))
    straight = workshop.job(case, tmp_path / "a", *quiet, samples=tmp_path / "train")
    straight.train()
    first, last = (numbers(straight.folder)[n]["validation_loss"] for n in (0, -1))
    assert any(line.startswith(f"held-out loss {first:.3g} -> {last:.3g} (") for line in straight.said)
    with pytest.raises(KilledError):
        workshop.job(
            case, tmp_path / "b", *quiet, samples=tmp_path / "train", status=dying_after(tmp_path / "b", 5)
        ).train()
    changed = (*off, *held_out_options(case.family, tmp_path / "second"))
    job = workshop.job(case, tmp_path / "b", *changed, samples=tmp_path / "train")
    job.train()
    assert "resumed from step-000003" in job.said
    assert any("does not compare with that of step 2 and before" in line for line in job.said)
    assert any(line.startswith("held-out loss") and " since step 4" in line for line in job.said)
    assert not different(files(job.folder, "lora/*"), files(straight.folder, "lora/*"))


@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_a_stop_in_the_validation_before_the_first_step_leaves_nothing(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    def on_beat(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.FIRST_STEP:
            os.kill(os.getpid(), signal.SIGTERM)

    job = workshop.job(case, tmp_path, status=ToldStatus(tmp_path, on_beat))
    job.context.stop.install()
    with pytest.raises(StoppedError):
        job.train()
    assert not steps_saved(job.folder)
    assert numbers(job.folder) == []
    assert not list((job.folder / "samples").glob("*"))


@pytest.mark.parametrize(
    ("case", "moment"),
    [
        *(pytest.param(*one.values, "preview", marks=one.marks) for one in fewer(LORA_CASES)),
        *((LORA_CASES[0], moment) for moment in ("validation", "micro-batch")),
    ],
    ids=str,
)
def test_a_stop_at_a_step_that_previews_and_validates_loses_neither(
    moment: str, case: Case, workshop: Workshop, finished: Callable[[Case], Finished], tmp_path: Path
) -> None:
    """Step 4 draws previews, validates and logs; the stop comes in between."""
    begins = {
        "preview": lambda phase, step, item_done: phase is Phase.PREVIEW,
        "validation": lambda phase, step, item_done: item_done and step == 4,
        "micro-batch": lambda phase, step, item_done: phase is Phase.TRAIN and not item_done and step == 4,
    }
    reached: list[int] = []

    def on_beat(phase: Phase, step: int | None, item_done: bool) -> None:
        if phase is Phase.TRAIN and item_done and step == 4:
            reached.append(step)
        if reached and begins[moment](phase, step, item_done):
            os.kill(os.getpid(), signal.SIGTERM)

    job = workshop.job(case, tmp_path, status=ToldStatus(tmp_path, on_beat))
    job.context.stop.install()
    with pytest.raises(StoppedError) as caught:
        job.train()
    assert caught.value.exit_code is ExitCode.STOPPED
    assert steps_saved(job.folder) == ["step-000003", "step-000004"]
    again = workshop.job(case, tmp_path)
    again.train()
    assert "resumed from step-000004" in again.said
    straight = finished(case)
    assert numbers(job.folder) == numbers(straight.folder)
    assert not different(products(job.folder), products(straight.folder))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_previews_and_validation_change_nothing_and_bytes_repeat(
    case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    short = "train.max_train_steps=3"
    looks = ("validation.held_out=0", "validation.every_steps=2")
    looking = workshop.job(case, tmp_path / "a", *looks, short)
    looking.train()
    blind = workshop.job(case, tmp_path / "b", *QUIET, short)
    blind.train()
    assert len(list(looking.folder.glob("samples/step-*.png"))) == 3, "before, between and after the steps"
    assert not (blind.folder / "samples").exists()
    made = files(looking.folder, "lora/*", "model/**/*")
    assert made
    assert not different(made, files(blind.folder, "lora/*", "model/**/*"))
    assert numbers(looking.folder)[-1]["step"] == numbers(blind.folder)[-1]["step"] == 3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_of_four_equals_four_batches_of_one(
    case: Case, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step learns from the same samples of unequal shapes; sums in another order differ by rounding."""
    common = (*QUIET, "train.max_train_steps=3", "train.log_every_steps=1", "train.learning_rate=1e-4")
    taken = record_samples(monkeypatch)
    seen, losses, weights = [], [], []
    for batch_size, accumulation in ((4, 1), (1, 4)):
        shape = (
            f"train.train_batch_size={batch_size}",
            f"train.gradient_accumulation_steps={accumulation}",
        )
        job = workshop.job(case, tmp_path / f"{batch_size}x{accumulation}", *common, *shape)
        job.train()
        seen.append([{sample for micro in step for sample in micro} for step in taken])
        taken.clear()
        losses.append([row["loss"] for row in numbers(job.folder)])
        folder = job.folder / "checkpoints" / "step-000003"
        weights.append(load_file(next(folder.glob("weights-*"))))
    assert len(seen[0]) == 3
    assert seen[0] == seen[1]
    # seven pictures, none of them twice in a step
    assert all(len({sample.record for sample in step}) == 4 for step in seen[0]) or not draws(case.family)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    require_near(*weights, rate=1e-4)


@pytest.mark.parametrize("weights", ["int8", "nf4"])
@pytest.mark.parametrize("case", LORA_CASES, ids=str)
def test_a_quantised_base_trains_and_its_lora_is_proved(
    weights: str, case: Case, workshop: Workshop, tmp_path: Path
) -> None:
    job = workshop.job(case, tmp_path, *QUIET, f"features.weights={weights}", "train.max_train_steps=2")
    assert job.context.plan.weights == weights
    job.train()
    text = "\n".join(job.said)
    assert f"{weights} base: " in text
    assert "Proved: " in text
    proof = json.loads(next(job.folder.glob("lora/*.proof.json")).read_text())
    assert proof["effect"] > 100 * proof["reload_error"]
    assert all(math.isfinite(row["loss"]) for row in numbers(job.folder))
